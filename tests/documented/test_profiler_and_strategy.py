"""`Profiler`, `ScopedGraphManager` and `NPUStrategy`."""

from __future__ import annotations

import glob
import os

import pytest
import tensorflow as tf

from npu_bridge.npu_init import npu_strategy, profiler, scoped_graph_manager
from npu_bridge.options import TrainingOptions
from npu_bridge.session.profiling import ProfilingHook
from tests.documented.signatures import signature_of

tf1 = tf.compat.v1


def traces(folder):
    return glob.glob(os.path.join(str(folder), "plugins", "profile", "*", "*.xplane.pb"))


@pytest.mark.parametrize("level", ["L0", "L2"])
def test_a_trace_of_what_runs_inside(level, graph, tmp_path):
    product = tf.matmul(tf.ones([8, 8]), tf.ones([8, 8]), name="named_product")
    with tf1.Session() as session:
        session.run(product)
        assert traces(tmp_path) == []
        with profiler.Profiler(level=level, aic_metrics="Memory", output_path=str(tmp_path)) as entered:
            assert isinstance(entered, profiler.Profiler)
            session.run(product)
    (trace,) = traces(tmp_path)
    assert os.path.getsize(trace) > 0


def test_start_and_stop(tmp_path):
    one = profiler.Profiler(output_path=str(tmp_path))
    one.stop()
    one.start()
    one.stop()
    one.stop()
    assert len(traces(tmp_path)) == 1


def test_traces_do_not_nest(tmp_path, monkeypatch):
    one = profiler.Profiler(output_path=str(tmp_path))
    with one:
        for other in (one, profiler.Profiler(output_path=str(tmp_path))):
            with pytest.raises(RuntimeError, match="one trace at a time"):
                other.start()
    hook = ProfilingHook(TrainingOptions({"profiling_options": f'{{"output": "{tmp_path}"}}'}))
    hook.before_run(None)
    try:
        with pytest.raises(RuntimeError, match="profiling_config"), one:
            pass
    finally:
        hook.end(None)
    monkeypatch.setenv("PROFILING_MODE", "true")
    with pytest.raises(RuntimeError, match="PROFILING_MODE"), one:
        pass


@pytest.mark.parametrize(
    "arguments",
    [
        {"level": "L3"},
        {"level": "L1", "aic_metrics": "Other"},
        {"aic_metrics": None},
        {"output_path": "/no/such/folder"},
    ],
)
def test_illegal_arguments(arguments):
    with pytest.raises(ValueError, match=r"Profiler: .*Expected .* got "):
        profiler.Profiler(**arguments)


def test_profiler_takes_keywords_and_reads_metrics_from_level_1_on():
    assert signature_of(profiler.Profiler) == "(*, level='L0', aic_metrics='', output_path='')"
    profiler.Profiler(level="L0", aic_metrics="Other")


def test_scoped_graph_manager_does_nothing(graph):
    variable = tf1.get_variable("variable", [], initializer=tf1.ones_initializer())
    with tf1.Session() as session:
        with scoped_graph_manager.ScopedGraphManager() as entered:
            session.run(tf1.global_variables_initializer())
        assert session.run(variable) == 1.0
    entered.start()
    entered.stop()


def test_strategy_is_one_replica_on_the_cpu(graph):
    strategy = npu_strategy.NPUStrategy()
    assert isinstance(strategy, tf1.distribute.OneDeviceStrategy) and strategy.num_replicas_in_sync == 1
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(3))
    element = tf1.data.make_one_shot_iterator(dataset).get_next()
    with strategy.scope():
        variable = tf1.get_variable("variable", [], initializer=tf1.ones_initializer())
    with tf1.Session() as session:
        session.run(variable.initializer)
        assert [session.run(element) for _ in range(3)] == [0, 1, 2] and session.run(variable) == 1.0


@pytest.mark.parametrize("device", ["/gpu:0", "/cpu:1", None])
def test_strategy_has_one_device(device):
    with pytest.raises(ValueError, match="NPUStrategy: device"):
        npu_strategy.NPUStrategy(device)
