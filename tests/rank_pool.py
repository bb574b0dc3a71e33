"""Real ranks for tests, started once and given one case after the other.

Starting TensorFlow and Horovod takes seconds, a case takes milliseconds. So a pool starts its ranks through the
launcher like any script, and every rank then waits for cases: files that name a function. The result of the function
is pickled back. The cases of one pool run strictly one after the other on all ranks.

Idle ranks are stopped: Horovod looks for work all the time, and four pools of idle ranks would take half of two cores
from the tests that run.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
import traceback

from _pytest.assertion.rewrite import rewrite_asserts

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_TIME_LIMIT_SECS = 300.0
_POLL_SECS = 0.01
# The other ranks may wait for one that failed; those that fail, too, do so within this.
_SECS_AFTER_FAILURE = 30.0


class RankPools:
    """Pools by their number of ranks; a pool that failed is replaced by a new one at the next case."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._pools = {}

    def run(self, rank_count, function, *arguments, time_limit_secs=_TIME_LIMIT_SECS):
        """Calls a module-level function on every rank and returns the results in rank order."""
        pool = self._pools.get(rank_count)
        if pool is None or not pool.is_alive():
            self._folder.mkdir(exist_ok=True)
            folder = self._folder / f"{rank_count}_ranks_{time.monotonic_ns()}"
            pool = self._pools[rank_count] = _Pool(rank_count, folder)
        return pool.run(function, arguments, time_limit_secs)

    def start(self, rank_count):
        """Starts a pool before it is wanted, and waits until its ranks take cases."""
        self.run(rank_count, be_there)

    def close(self):
        """Stops all ranks."""
        for pool in self._pools.values():
            pool.close()


class _Pool:
    def __init__(self, rank_count, folder):
        folder.mkdir()
        self._folder = folder
        self._rank_count = rank_count
        self._cases = 0
        self._log = open(folder / "log.txt", "w")  # noqa: SIM115 - lives as long as the ranks
        command = [sys.executable, "-m", "npu_bridge.run", "-np", str(rank_count), __file__, str(folder)]
        environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), PYTHONUNBUFFERED="1")
        # Messages for a rank can arrive much later if it was stopped in between.
        environment["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "3600"
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=self._log, stderr=subprocess.STDOUT
        )

    def is_alive(self):
        return self._process.poll() is None

    def run(self, function, arguments, time_limit_secs):
        self._signal(signal.SIGCONT)
        try:
            return self._run(function, arguments, time_limit_secs)
        finally:
            if self.is_alive():
                self._signal(signal.SIGSTOP)

    def _signal(self, number):
        """Sends a signal to the launcher and all its processes; the launcher must not see ranks that are stopped."""
        family = _family(self._process.pid)
        for process_id in family if number == signal.SIGSTOP else reversed(family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)

    def _run(self, function, arguments, time_limit_secs):
        number = self._cases
        case = (sys.modules[function.__module__].__file__, function.__qualname__, arguments)
        _write(self._folder / f"case_{number}", case)
        self._cases += 1  # not before: an argument that cannot be sent leaves the number to the next case
        answers = [self._folder / f"answer_{number}_{rank}" for rank in range(self._rank_count)]
        began, limit_secs, known = time.monotonic(), time_limit_secs, set()
        while not all(answer.exists() for answer in answers):
            for answer in answers:
                if answer not in known and answer.exists():
                    known.add(answer)
                    if not pickle.loads(answer.read_bytes())[0]:
                        limit_secs = min(limit_secs, time.monotonic() - began + _SECS_AFTER_FAILURE)
            if not self.is_alive() or time.monotonic() - began > limit_secs:
                self.close()
                raise AssertionError(f"the ranks did not answer within {limit_secs:.0f} s\n{self._tail(answers)}")
            time.sleep(_POLL_SECS)
        outcomes = [pickle.loads(answer.read_bytes()) for answer in answers]
        failures = [f"rank {rank}: {text}" for rank, (is_ok, text) in enumerate(outcomes) if not is_ok]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [value for _, value in outcomes]

    def close(self):
        # Nothing of them is needed any more, and ends in good order have tests of their own.
        if self.is_alive():
            self._signal(signal.SIGKILL)
        self._process.wait(timeout=_TIME_LIMIT_SECS)
        self._log.close()

    def _tail(self, answers):
        texts = [pickle.loads(answer.read_bytes())[1] for answer in answers if answer.exists()]
        return "\n".join([*map(str, texts), (self._folder / "log.txt").read_text()[-6000:]])


def on_each_rank(size, gives=None, by_rank=None):
    """Makes a test of a function that every rank runs; each has to return `gives`, or its own item of `by_rank`.

    The parameters of the function are those of the test; what they stand for is sent to the ranks. The number of ranks
    can be one of them: then `size` is its name.
    """

    def decorate(function):
        def test(on_ranks, **arguments):
            count = arguments[size] if isinstance(size, str) else size
            assert on_ranks(count, test, *arguments.values()) == (by_rank or [gives] * count)

        functools.update_wrapper(test, function).on_rank = function
        signature = inspect.signature(lambda on_ranks: None)
        own = inspect.signature(function).parameters.values()
        test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])
        return test

    return decorate


def be_there():
    """A case that does nothing."""


def _family(process_id):
    """A process and all that descend from it, ancestors first; only the process itself where there is no /proc."""
    children = {}
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    family = [process_id]
    for member in family:
        family.extend(children.get(member, []))
    return family


def _write(path, value):
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(path)


def _function(path, qualname):
    """Loads a test module by its path, once per rank, and finds the function in it."""
    name = "case_module_" + "_".join(pathlib.Path(path).with_suffix("").parts[1:])
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        source = pathlib.Path(path).read_bytes()
        rewrite_asserts(tree := ast.parse(source), source)  # so that they show their values, as beside pytest
        exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    function = getattr(sys.modules[name], qualname)
    return getattr(function, "on_rank", function)


def _serve(folder):
    """Runs every rank: waits for a case, runs it, answers, until it is killed or left alone."""
    import tensorflow as tf

    from npu_bridge import collective
    from npu_bridge.collective import wire_names
    from tests.garbage import seldom_collect
    from tests.once import forget_what_was_said

    rank = collective.current().rank
    launcher, number = os.getppid(), 0
    seldom_collect()
    while os.getppid() == launcher:
        case = folder / f"case_{number}"
        if not case.exists():
            time.sleep(_POLL_SECS)
            continue
        path, qualname, arguments = pickle.loads(case.read_bytes())
        tf.compat.v1.reset_default_graph()
        forget_what_was_said()
        wire_names._numbers.clear()  # perhaps a case has made an optimizer on one rank only
        try:
            outcome = (True, _function(path, qualname)(*arguments))
        except BaseException:
            outcome = (False, traceback.format_exc())
        seldom_collect()  # TensorFlow can take a minute to free old iterators, if several are freed at once
        _write(folder / f"answer_{number}_{rank}", outcome)
        number += 1


if __name__ == "__main__":
    _serve(pathlib.Path(sys.argv[1]))
