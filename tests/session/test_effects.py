"""The effects of options on session settings; the other settings do not change."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge import session as effects
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.options import read_session_config, with_optimizer_entry
from tests.session.models import dataset, model_fn, session_config

tf1 = tf.compat.v1


def _folded(config):
    """Whether the session computed a product of constants before it ran."""
    with tf.Graph().as_default(), tf1.Session(config=config) as session:
        product = tf.matmul(tf.ones([3, 3]), tf.ones([3, 3]), name="product")
        result = tf.add(product, tf1.placeholder_with_default(tf.zeros([]), []), name="result")
        metadata = tf1.RunMetadata()
        session.run(result, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
        return not any("MatMul" in node.op for graph in metadata.partition_graphs for node in graph.node)


def test_constant_folding_can_be_switched_off():
    assert _folded(None)
    assert _folded(session_config(oo_constant_folding=True))
    assert not _folded(session_config(oo_constant_folding=False))


def test_settings_are_copied_and_other_entries_stay():
    given = tf1.ConfigProto(log_device_placement=True, inter_op_parallelism_threads=3)
    rewrite = given.graph_options.rewrite_options
    rewrite.remapping = rewrite.AGGRESSIVE
    rewrite.custom_optimizers.add(name="Other")
    given = with_optimizer_entry(given, {"debug_dir": "x"})
    before = given.SerializeToString(deterministic=True)
    prepared = effects.prepare_session_config(read_session_config(given), given)
    assert given.SerializeToString(deterministic=True) == before
    assert [entry.name for entry in prepared.graph_options.rewrite_options.custom_optimizers] == ["Other"]
    assert prepared.log_device_placement and prepared.inter_op_parallelism_threads == 3
    assert prepared.graph_options.rewrite_options.remapping == rewrite.AGGRESSIVE
    assert prepared.allow_soft_placement


def test_use_off_line_false_leaves_the_session_alone(tmp_path):
    values = {"use_off_line": False, "oo_constant_folding": False, "enable_dump": True, "dump_path": str(tmp_path)}
    config = session_config(**values)
    options = read_session_config(config)
    prepared = effects.prepare_session_config(options, config)
    assert not prepared.allow_soft_placement and not effects.has_optimizer_entry(prepared)
    assert prepared.graph_options.rewrite_options.constant_folding == 0
    assert effects.hooks_for(options) == []
    with tf.Graph().as_default(), tf1.Session(config=config) as session:
        assert type(session) is tf1.Session
        session.run(tf.constant(1.0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("kind", [NPUEstimator, tf.estimator.Estimator])
@pytest.mark.parametrize("placement, device", [("Host", "/device:CPU:0"), ("Device", "")])
def test_variables_live_where_they_are_told_to(tmp_path, kind, placement, device):
    seen = {}

    def recording_model(features, labels, mode):
        spec = model_fn(features, labels, mode)
        seen.update({variable.op.name: variable.op.device for variable in tf1.global_variables()})
        seen["project"] = tf1.get_default_graph().get_operation_by_name("project").device
        return spec

    config = NPURunConfig(model_dir=str(tmp_path), variable_placement=placement)
    kind(recording_model, config=config).train(dataset, steps=1)
    assert seen.pop("project") == ""
    assert set(seen.values()) == {device} and len(seen) >= 3


def test_a_device_function_places_all_but_the_variables_on_the_host():
    config = NPURunConfig(variable_placement=b"Host", device_fn=lambda op: "/device:CPU:1")
    with tf.Graph().as_default() as graph, graph.device(config.device_fn):
        variable, other = tf1.get_variable("variable", []), tf.constant(1.0)
    assert (variable.op.device, other.device) == ("/device:CPU:0", "/device:CPU:1")


def test_estimators_see_the_entry_only_where_it_is_read(tmp_path):
    given = tf1.ConfigProto(inter_op_parallelism_threads=3)
    config = NPURunConfig(model_dir=str(tmp_path), session_config=given, oo_constant_folding=False)
    assert effects.has_optimizer_entry(config.session_config) and not effects.has_optimizer_entry(given)
    assert config.session_config.inter_op_parallelism_threads == 3
    stock = tf.estimator.Estimator(model_fn, config=config)
    assert effects.has_optimizer_entry(stock._session_config)
    own = NPUEstimator(model_fn, config=config)
    assert not effects.has_optimizer_entry(own._session_config)
    assert own._session_config.graph_options.rewrite_options.constant_folding == 2
    assert NPURunConfig().session_config is None
