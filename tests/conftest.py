"""Holds the fixtures of all tests: quiet TensorFlow, fresh graphs, and ranks that stay up between cases."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Like a rank of a 2-rank job on the smallest machine we support; also keeps sums in one order.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TFA_NO_EOL_NOTICE", "1")
# Ranks of a busy machine may come to each other later than Gloo waits by default.
os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", "300")
# Milliseconds between two looks for work, in place of 1. Ranks of several jobs share two cores here, and each look of
# one rank waits for the others: with 1, that takes a quarter of both cores.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "3")
# Float16 kernels, whatever the CPU is faster with, so that what computes in float16 can be counted, on ranks too.
os.environ.setdefault("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_EMULATE_FP16", "0")
# Several hundred processes import this package; it is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import hypothesis  # noqa: E402
import pytest  # noqa: E402

pytest.register_assert_rewrite("tests.rank_pool", "tests.refusing")

from tests.garbage import seldom_collect  # noqa: E402
from tests.once import forget_what_was_said  # noqa: E402
from tests.rank_pool import RankPools  # noqa: E402
from tests.tiers import mark_ranks, mark_slow, register_marks  # noqa: E402
from tests.times import keep_times  # noqa: E402
from tests.warm_python import WarmPython  # noqa: E402
from tests.worker_groups import group_of  # noqa: E402

# The same examples in every run, so that a red run is about the change at hand; `make explore` draws new ones. There is
# no deadline for one, as a busy machine may stand still.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", print_blob=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


_MOST_OF_ID = 200  # characters


def pytest_addoption(parser):
    """`--collectives tensorflow` runs all cases of ranks on TensorFlow's own collective operators."""
    parser.addoption("--collectives", choices=("horovod", "tensorflow"))


def pytest_configure(config):
    """Registers the marks of the two tiers, and keeps times."""
    if config.getoption("--collectives"):
        os.environ["NPU_COLLECTIVES"] = config.getoption("--collectives")
    register_marks(config)
    keep_times(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks slow cases and those of ranks, and keeps cases of one group on one worker (`-n 2 --dist loadgroup`)."""
    mark_slow(items)
    mark_ranks(items)
    if config.getoption("--collectives") == "tensorflow":
        for item in items:
            for mark in item.iter_markers("horovod"):
                item.add_marker(pytest.mark.skip(f"needs Horovod: {mark.args[0]}"))
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))


def pytest_make_parametrize_id(val):
    """Cuts ids of long texts, which are sent between processes and printed several times."""
    return f"{val[:40]!r}... {len(val)}" if isinstance(val, (str, bytes)) and len(val) > _MOST_OF_ID else None


def pytest_collection_finish():
    """Makes collections rare now that all modules are loaded."""
    seldom_collect()


@pytest.fixture(autouse=True)
def nothing_said_before():
    """Lets a process print its once-only lines again, whatever the order of the cases."""
    forget_what_was_said()


@pytest.fixture
def caplog(caplog):
    """Leaves out what TensorFlow says about checkpoints of earlier cases, when Python frees them."""
    caplog.handler.addFilter(lambda record: (record.name, record.funcName) != ("tensorflow", "__del__"))
    return caplog


@pytest.fixture
def graph():
    """The test builds a TF 1 graph of its own; without this fixture it executes eagerly."""
    import tensorflow as tf

    with tf.Graph().as_default() as new_graph:
        yield new_graph


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory):
    """Runs scripts in processes that have loaded TensorFlow already; see `WarmPython`."""
    python = WarmPython(tmp_path_factory.mktemp("warm_python"))
    yield python
    python.close()


@pytest.fixture(scope="session")
def rank_pools(tmp_path_factory):
    """Running Horovod jobs, one for each number of ranks asked for so far.

    Two ranks, which most cases want, are started here, so that their start is no case's time.
    """
    pools = RankPools(tmp_path_factory.mktemp("ranks"))
    pools.start(2)
    yield pools
    pools.close()


@pytest.fixture
def on_ranks(rank_pools):
    """Runs a module-level function on N real ranks: `on_ranks(2, function, *arguments)` gives a list of N results.

    The ranks are started once, through the launcher, and run case after case. A rank that raises fails the test with
    the tracebacks of all ranks.
    """
    return rank_pools.run
