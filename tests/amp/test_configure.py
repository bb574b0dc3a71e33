"""`amp.configure` beside its levels: what it refuses, functions registered before, exports, models of all kinds."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import amp
from npu_bridge.npu_init import NPUOptimizer
from npu_bridge.session.precision import OpLists
from npu_bridge.session.precision.batch_norm import BatchNormalizationIn16Bits
from npu_bridge.session.precision.levels import BATCH_NORM_TYPES
from tests.refusing import refuses

layers = tf.keras.layers
tf1 = tf.compat.v1
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "amp.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def nothing_registered():
    yield
    amp.forget_functions()


@refuses(
    ("o2", {}, ValueError, "Did you mean 'O2'"),
    (2, {}, ValueError, "no such level"),
    ("O1", {"keep_batchnorm_fp32": True}, ValueError, ["contradicts O1", "in float32 anyway"]),
    ("O1", {"cast_model_type": "float16"}, ValueError, ["contradicts O1", "stays in float32"]),
    ("O1", {"master_weights": True}, ValueError, ["contradicts O1", "float32 themselves"]),
    ("O2", {"patch_functions": True}, ValueError, ["contradicts O2", "whole model"]),
    ("O0", {"master_weights": True}, ValueError, ["contradicts O0", "float32 themselves"]),
    ("O0", {"keep_batchnorm_fp32": "False"}, ValueError, ["contradicts O0", "nothing is in 16 bits"]),
    ("O2", {"keep_batchnorm_fp32": "yes"}, ValueError, "not a truth value"),
    ("O2", {"cast_model_type": "float8"}, ValueError, "float8"),
    ("O2", {"low_dtype": "bfloat16"}, ValueError, "low_dtype does not fit O2"),
    ("O1", {"loss_scale": 0.5}, ValueError, "loss_scale"),
    ("O1", {"loss_scale": "much"}, ValueError, "much"),
    ("O1", {"loss_scale": True}, TypeError, "not a number"),
    ("O1", {"user_cast_preferred": False}, ValueError, "cast twice"),
    ("O2", {"user_cast_preferred": True}, ValueError, "does not fit O2"),
    says=["Expected", "got"],
)
def test_what_is_refused(level, overrides):
    amp.configure(level, **overrides)


@refuses(
    ValueError,
    ({"combine_ddp": True}, "combine_grad"),
    ({"combine_grad": True, "opt_level": "O3"}, "O3"),
    ({"combine_grad": True, "opt_level": "O2", "master_weights": False}, "master weights"),
)
def test_what_initialize_refuses(arguments):
    amp.initialize(None, tf.keras.optimizers.SGD(), **arguments)


def test_properties_are_read_from_texts():
    texts = amp.configure("O3", keep_batchnorm_fp32="True", master_weights="True", loss_scale="128.0").properties
    assert texts == amp.LEVELS["O3"]._replace(keep_batchnorm_fp32=True, master_weights=True, loss_scale=128.0)
    assert amp.configure("O2", cast_model_type=tf.bfloat16).low_dtype == "bfloat16"
    assert amp.configure("O2", cast_model_type=np.float32).precision_mode == "origin"
    assert amp.configure("O1", patch_functions=False).precision_mode == "origin"
    assert amp.configure("O2", keep_batchnorm_fp32=None).properties == amp.LEVELS["O2"]


def test_the_page_has_the_table():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| `(.+?)` \| `(.+?)` \| `(.+?)` \|$", PAGE, re.MULTILINE)
    said = {name: dict(zip(amp.LEVELS, values)) for name, *values in rows}
    shown = {
        name: {level: re.sub("'", '"', repr(getattr(properties, name))) for level, properties in amp.LEVELS.items()}
        for name in amp.LEVELS["O0"]._fields
    }
    assert said == shown


def test_registered_functions_go_into_the_lists_of_levels_made_after():
    before = amp.configure("O1")
    amp.half_function("Square")
    amp.float_function("Softplus")
    amp.half_function("AddV2")
    amp.promote_function("AddV2")
    kept = frozenset(BATCH_NORM_TYPES)
    expected = OpLists(frozenset({"Square"}), kept | {"Softplus"}, frozenset({"AddV2"}))
    assert amp.configure("O1", user_cast_preferred=True).op_lists == expected
    assert before.op_lists == OpLists(floats=kept)
    assert amp.configure("O0").op_lists == OpLists()


@pytest.mark.parametrize(
    "register, name, blamed",
    [
        (amp.half_function, "MatMull", "Did you mean 'MatMul'"),
        (amp.float_function, "LayerNormalisation", "Did you mean 'LayerNormalization'"),
        (amp.promote_function, "LayerNormalization", "fits nothing that can be cast"),
        (amp.half_function, "NoOp", "fits nothing that can be cast"),
        (amp.half_function, 7, "not a text"),
    ],
)
def test_names_that_are_not_known(register, name, blamed):
    with pytest.raises(TypeError if name == 7 else ValueError, match=blamed):
        register(name)
    assert amp.configure("O1").op_lists == OpLists(floats=frozenset(BATCH_NORM_TYPES))


def test_batch_normalisation_is_not_forced_into_bfloat16():
    amp.half_function("FusedBatchNormV3")
    with pytest.raises(ValueError, match="bfloat16"):
        amp.configure("O1", low_dtype="bfloat16").options()


def network():
    """All that makes rebuilding hard: several inputs and outputs, a model inside, a function, wrappers, integers."""
    pictures, words = tf.keras.Input([6, 6, 3], name="pictures"), tf.keras.Input([], dtype="int32", name="words")
    hidden = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(pictures / 2.0))
    hidden = layers.TimeDistributed(layers.BatchNormalization())(hidden + layers.ReLU()(hidden))
    hidden = layers.Lambda(lambda value: tf.nn.relu(value) * float(np.sqrt(4)))(hidden)
    hidden = layers.Concatenate()([layers.Flatten()(hidden), layers.Embedding(9, 4)(words)])
    inside = tf.keras.Sequential([layers.Dense(8, input_shape=(148,)), layers.BatchNormalization(), layers.PReLU()])
    hidden = layers.LayerNormalization()(inside(hidden))
    sequence = layers.Bidirectional(layers.LSTM(3))(layers.Reshape([4, 2])(hidden))
    return tf.keras.Model([pictures, words], {"a": layers.Dense(3, name="a")(hidden), "b": layers.Dense(1)(sequence)})


@pytest.mark.slow("several models")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_any_functional_model_is_rebuilt_and_exported_again(dtype):
    model = network()
    given = [np.random.RandomState(0).randn(8, 6, 6, 3).astype("float32"), np.arange(8) % 9]
    before = model(given)
    made = amp.configure("O3", model=model, cast_model_type=dtype)
    assert {variable.dtype.name for variable in made.model.weights} == {dtype}
    assert made.model.output_names == model.output_names
    after = made.model(given)
    exported = amp.export_float32(made.model)
    for name in before:
        assert after[name].dtype == tf.float32
        np.testing.assert_allclose(after[name], before[name], atol=0.02 if dtype == "float16" else 0.2)
        np.testing.assert_allclose(exported(given)[name], after[name], atol=0.02 if dtype == "float16" else 0.2)
    assert {variable.dtype.name for variable in exported.weights} == {"float32"}
    assert not any(type(layer).__module__.startswith("npu_bridge") for layer in exported.submodules)
    for one, other in zip(made.model.get_weights(), exported.get_weights()):
        np.testing.assert_array_equal(one.astype("float32"), other)


class OwnModel(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]

    def call(self, inputs, training=None):
        for part in self.parts:
            inputs = part(inputs, training=training) if part is self.parts[1] else part(inputs)
        return inputs


def test_a_model_of_a_class_of_its_own_is_cast_before_it_is_built(tmp_path):
    made = amp.configure("O3", tf.keras.optimizers.SGD(0.01), OwnModel())
    made.model.compile(made.optimizer, "mse")
    made.model.fit(np.ones([8, 3], "float32"), np.ones([8, 1], "float32"), verbose=0)
    assert {variable.dtype.name for variable in made.model.weights} == {"float16"}
    assert made.model(np.ones([1, 3], "float32")).dtype == tf.float32
    with pytest.raises(ValueError, match="has its variables already"):
        amp.configure("O2", model=made.model)
    with pytest.raises(TypeError, match="a Keras model"):
        amp.configure("O2", model="O2")


@pytest.mark.parametrize("shape, axis", [([6, 6, 3], -1), ([5, 3], -1), ([3, 4, 4], 1)], ids=str)
def test_batch_normalisation_in_16_bits_is_that_of_keras(shape, axis):
    given = np.random.RandomState(0).randn(16, *shape).astype("float32") * 2 + 1
    ours = BatchNormalizationIn16Bits(axis=axis, momentum=0.5, dtype="float16")
    stock = layers.BatchNormalization(axis=axis, momentum=0.5)
    for _ in range(3):
        np.testing.assert_allclose(ours(given, training=True), stock(given, training=True), atol=0.02)
    np.testing.assert_allclose(ours(given, training=False), stock(given, training=False), atol=0.03)
    for one, other in zip(ours.get_weights(), stock.get_weights()):
        assert one.dtype == np.float16
        np.testing.assert_allclose(one, other, rtol=0.03, atol=0.01)


def test_a_layer_registered_to_stay_in_float32_does():
    amp.float_function("Dense")
    model = tf.keras.Sequential([layers.Dense(2, input_shape=(3,)), layers.PReLU()])
    first, second = amp.configure("O3", model=model).model.layers[:2]
    assert (first.kernel.dtype, second.alpha.dtype) == (tf.float32, tf.float16)


def test_a_name_of_an_operator_and_of_a_layer_registers_both(caplog):
    amp.float_function("Softmax")
    model = tf.keras.Sequential([layers.Dense(2, input_shape=(3,)), layers.Softmax()])
    dense, softmax = amp.configure("O2", model=model).model.layers[:2]
    assert (dense.compute_dtype, softmax.compute_dtype) == ("float16", "float32")
    assert "Softmax" in amp.configure("O1", model=model).op_lists.floats
    assert "lowers the precision of operators, not of layers" not in caplog.text


def test_a_checkpoint_of_16_bits_is_written_in_float32(tmp_path):
    with tf.Graph().as_default(), amp.configure("O3").building():
        tf1.get_variable("kernel", initializer=[1.5, 2.25])
        tf1.get_variable("words", initializer=["a", "b"])
        tf1.get_variable("count", initializer=3)
        tf1.train.get_or_create_global_step()
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            tf1.train.Saver().save(session, str(tmp_path / "narrow"))
    path = amp.export_float32(str(tmp_path), str(tmp_path / "wide"))
    reader = tf.train.load_checkpoint(path)
    assert reader.get_variable_to_dtype_map() == {
        "kernel": tf.float32,
        "words": tf.string,
        "count": tf.int32,
        "global_step": tf.int64,
    }
    assert reader.get_tensor("kernel").tolist() == [1.5, 2.25]
    with pytest.raises(ValueError, match="no checkpoint"):
        amp.export_float32(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="path is missing, or the same as source"):
        amp.export_float32(path)


def test_a_wrapped_optimizer_scales_each_loss(graph):
    made = amp.configure("O1", tf1.train.GradientDescentOptimizer(0.1), num_losses=2, dynamic_init_scale=64.0)
    assert isinstance(made.optimizer, NPUOptimizer) and len(made.loss_scale_managers) == 2
    scale = made.loss_scale_managers[1].get_loss_scale()
    with tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        assert session.run(scale) == 64.0
    assert amp.initialize("m", "o", enabled=False) == ("m", "o")
