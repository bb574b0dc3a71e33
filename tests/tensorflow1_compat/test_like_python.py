"""A script of TensorFlow 1 under `npu-run` behaves as under `python` in everything but what it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.npu_run.launching import finish, npu_run, start, write_script

# Nothing of it needs TensorFlow, so Python itself can be asked; `--tf1` makes it a script of TensorFlow 1 nevertheless.
BROKEN = """
import numpy as np
import helper

def outer():
    # a comment
    import collections; return helper.inner(
        np.float64(1),
    )

try:
    import broken
except ValueError:
    import traceback; traceback.print_exc()
try:
    import unparsable
except SyntaxError as error:
    traceback.print_exc()
outer()
"""
HELPER = """
import numpy as np

def inner(value):
    import time
    raise KeyError("boom")  # the line that is shown
"""


def test_tracebacks_are_those_of_python(tmp_path):
    write_script(tmp_path, BROKEN)
    write_script(tmp_path, HELPER, "helper.py")
    write_script(tmp_path, "import numpy\nimport deeper_broken\n", "broken.py")
    write_script(tmp_path, "import numpy\n\nraise ValueError('at import')\n", "deeper_broken.py")
    write_script(tmp_path, "import numpy\nx = = 1\n", "unparsable.py")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    plain = subprocess.run([sys.executable, "-u", "train.py"], cwd=tmp_path, timeout=60, **streams)
    code, output = npu_run("--tf1", "train.py", cwd=tmp_path)
    assert code == plain.returncode == 1
    assert output == plain.stdout.replace(f'"{tmp_path}/train.py"', '"train.py"')
    assert "the line that is shown" in output and "deeper_broken" in output


WHOLE = """
import cProfile, inspect, io, multiprocessing, os, pdb, pickle, pstats, runpy, sys
import numpy as np
import time
from tools import Shared, work, version

class Own:
    def __init__(self, value): self.value = value

def child(queue, value):
    import tensorflow as tf
    queue.put((value * 2, np.int(3), tf.__version__, __name__))

def square(value):
    return value * value + np.int(0)

def main():
    assert sys.argv[1:] == ["--flag", "a b"], sys.argv
    assert sys.path[0] == os.path.dirname(os.path.abspath(__file__))
    assert open("data.txt").read() == "here"
    own = pickle.loads(pickle.dumps(Own(np.arange(3))))
    assert type(own) is Own and Own.__module__ == "__main__" and sys.modules["__main__"].Own is Own
    assert type(pickle.loads(pickle.dumps(Shared(1)))) is Shared
    assert pickle.loads(pickle.dumps(work)) is work
    assert "def square" in inspect.getsource(square) and inspect.getsourcelines(square)[1] == 13
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            assert pool.map(square, [1, 2, 3]) == [1, 4, 9]
        if method == "spawn":
            queue = context.Queue()
            process = context.Process(target=child, args=(queue, 21))
            process.start()
            print("child", queue.get())
            process.join()
            assert process.exitcode == 0
    profile = cProfile.Profile()
    profile.runcall(work, 5)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).print_stats()
    assert "tools.py:7(work)" in text.getvalue(), text.getvalue()
    cProfile.run("square(3)", "profile.out")
    debugger_out = io.StringIO()
    commands = io.StringIO("step\\nstep\\nwhere\\np value\\ncontinue\\n")
    debugger = pdb.Pdb(stdin=commands, stdout=debugger_out, nosigint=True, readrc=False)
    debugger.use_rawinput = False
    debugger.runcall(work, 6)
    assert "tools.py(1" in debugger_out.getvalue() and "int(value)" in debugger_out.getvalue(), debugger_out.getvalue()
    assert runpy.run_path("plain_file.py")["ANSWER"] == 42
    assert version() == "1.15.0"
    try:
        sys.exit(3)
    finally:
        print("done")

if __name__ == "__main__":
    main()
"""
TOOLS = """
import numpy as np

class Shared:
    def __init__(self, value): self.value = value


def work(value):
    import time
    value = value + 1
    return np.int(value)

def version():
    import tensorflow as tf
    return tf.__version__
"""


@pytest.mark.slow("starts Python several times")
def test_pickles_processes_profilers_and_debuggers_work(tmp_path):
    write_script(tmp_path, WHOLE.replace("\n", "", 1))
    write_script(tmp_path, TOOLS.replace("\n", "", 1), "tools.py")
    (tmp_path / "plain_file.py").write_text("ANSWER = 42\n")
    (tmp_path / "data.txt").write_text("here")
    arguments = ["--tf1", "train.py", "--flag", "a b"]
    code, output = finish(start(*arguments, cwd=tmp_path, TF_CPP_MIN_LOG_LEVEL="2"), limit_secs=240)
    assert code == 3, output
    assert "child (42, 3, '1.15.0', '__mp_main__')" in output and "done" in output
    assert output.count("numpy.int") == 1
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize("arguments", [[], ["--tf2"]])
def test_a_script_of_tensorflow_2_sees_nothing_of_it(tmp_path, arguments):
    write_script(
        tmp_path,
        """
        import sys
        import numpy as np, importlib
        import helper
        assert type(np).__name__ == "module" and helper.np is np is sys.modules["numpy"]
        assert importlib.import_module("numpy") is np and "__tf1__" not in globals()
        assert not any("npu_bridge" in getattr(hook, "__module__", "") for hook in sys.path_hooks)
        def model():
            import tensorflow as tf
            return tf.function(lambda x: tf.random.set_seed(1))
        """,
    )
    write_script(tmp_path, "import numpy as np\n", "helper.py")
    code, output = npu_run(*arguments, "train.py", cwd=tmp_path)
    assert (code, output) == (0, "")
