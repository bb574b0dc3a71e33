"""Python that has loaded TensorFlow already: scripts run in processes forked from it, which saves four seconds each.

For tests of what scripts do. Tests of how they start (the order of imports, variables that TensorFlow reads when it is
loaded, launchers) start Python anew.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import traceback

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


class WarmPython:
    """Runs scripts one after the other, as `python script.py arguments...` would.

    Args:
      folder: for what they print.
    """

    def __init__(self, folder: pathlib.Path):
        self._printed = [folder / "stdout.txt", folder / "stderr.txt"]
        self._server = None

    def run(self, arguments, cwd, env=None, timeout=600):
        """Runs a script to its end, with the repository on its path; gives a `subprocess.CompletedProcess` of texts.

        Args:
          arguments: path of the script and what follows it.
          cwd, env, timeout: as of `subprocess.run`.
        """
        if self._server is None or self._server.poll() is not None:
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(
                [sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, cwd=REPOSITORY
            )
        arguments, printed = list(map(str, arguments)), list(map(str, self._printed))
        request = {"arguments": arguments, "cwd": str(cwd), "env": dict(env or os.environ), "printed": printed}
        self._server.stdin.write(json.dumps({**request, "timeout": timeout}) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, *(path.read_text() for path in self._printed))

    def close(self):
        """Ends the server."""
        if self._server is not None:
            self._server.communicate()


def _serve():
    if importlib.util.find_spec("tf_keras") is not None:
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # as `import npu_bridge` does
    import tensorflow as tf

    with contextlib.suppress(ModuleNotFoundError):  # it is for TensorFlow 2.15
        import tensorflow_addons  # noqa: F401

    # They are loaded when asked for; from TensorFlow 2.16 on a script's `import npu_bridge` brings the first.
    assert tf.keras.optimizers.legacy.Adam and (not hasattr(tf, "estimator") or tf.estimator.Estimator)
    gc.collect()
    gc.freeze()  # children look for garbage among what is theirs, and copy no page for that
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(_run_script(**request))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run_script(arguments, cwd, env, printed, timeout):
    signal.alarm(int(timeout))
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    sys.path.insert(1, str(REPOSITORY))
    code = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve()
