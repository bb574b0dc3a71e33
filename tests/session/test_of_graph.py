"""Options travel with the graph, and what a graph was built with is compared with them."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.gradients.stages.all_reduce import wait_for_all_gradients
from npu_bridge.options import of_graph, read_session_config
from tests.session.models import dataset, session_config

tf1 = tf.compat.v1
DIFFER = "True in NPURunConfig and False in NPUOptimizer"


def _options(**values):
    return read_session_config(session_config(**values))


def _optimizer(**values):
    return NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1), **values)


def _model(**values):
    def model_fn(features, labels, mode):
        kernel = tf1.get_variable("kernel", [4, 1])
        loss = tf.reduce_mean(tf.square(tf.matmul(features, kernel) - labels))
        train_op = _optimizer(**values).minimize(loss, tf1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def test_functions_belong_to_the_graph_they_are_built_in(graph):
    of_graph.record_options(_options(debug_dir="here"))
    seen = []
    tf.while_loop(lambda i: i < 2, lambda i: (seen.append(of_graph.options_of_current_graph()), i + 1)[1:], (0,))
    assert {options.debug_dir for options in seen} == {"here"}
    assert not any("npu_bridge" in key for key in graph.get_all_collection_keys()), "meta graphs would hold it"


def test_eager_execution_has_no_options():
    of_graph.record_built_value("is_tailing_optimization", True)
    assert of_graph.options_of_current_graph() is None
    assert tf.function(lambda: of_graph.options_of_current_graph() is None)().numpy()


def test_other_graphs_know_nothing():
    with tf.Graph().as_default():
        of_graph.record_options(_options())
    with tf.Graph().as_default():
        assert of_graph.options_of_current_graph() is None


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("kind", [NPUEstimator, tf.estimator.Estimator])
@pytest.mark.parametrize("configured, built", [(False, True), (True, False), (True, True)])
def test_tailing_of_the_optimizer_counts_and_a_difference_warns_once(tmp_path, kind, configured, built, caplog):
    config = NPURunConfig(model_dir=str(tmp_path), is_tailing_optimization=configured)
    estimator = kind(_model(is_tailing_optimization=built), config=config)
    estimator.train(dataset, steps=2)
    assert estimator.get_variable_value("global_step") == 2
    differs = f"{configured} in NPURunConfig and {built} in NPUOptimizer"
    assert caplog.text.count("in NPURunConfig and") == caplog.text.count(differs) == (configured != built)


@pytest.mark.parametrize("session_comes_first", [False, True])
def test_tailing_of_sessions(session_comes_first, graph, caplog):
    if not session_comes_first:
        _optimizer()
    with tf1.Session(config=session_config(is_tailing_optimization=True)) as session:
        if session_comes_first:
            _optimizer()
        assert session.run(tf.constant(1)) == 1
    assert caplog.text.count(DIFFER) == 1


def test_sessions_without_an_entry_demand_nothing(graph):
    _optimizer(is_tailing_optimization=True)
    with tf1.Session(), tf1.Session(config=tf1.ConfigProto()):
        assert of_graph.options_of_current_graph() is None


def test_holding_back_after_the_graph_was_built_comes_too_late(graph, caplog):
    wait_for_all_gradients([tf.constant(1.0)])
    tf1.Session(config=session_config(hcom_parallel=True)).close()
    assert "built already" not in caplog.text
    tf1.Session(config=session_config(hcom_parallel=False)).close()
    assert "hcom_parallel: the option came after the gradients were built" in caplog.text
