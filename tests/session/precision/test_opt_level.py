"""The levels O0 to O3: what they stand for, which kernels they really run, and what they refuse."""

from __future__ import annotations

import pytest
import tensorflow as tf

from npu_bridge.estimator.npu import npu_loss_scale_manager
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.options import read_run_config
from npu_bridge.session.precision import OpLists, from_opt_level
from npu_bridge.session.precision.levels import BATCH_NORM_TYPES
from tests.refusing import refuses
from tests.session.precision.small_models import dtypes_of, nodes_of_step, precision_of, tf1

DYNAMIC = {
    "init_loss_scale": 65536.0,
    "incr_every_n_steps": 2000,
    "decr_every_n_nan_or_inf": 1,
    "incr_ratio": 2,
    "decr_ratio": 0.5,
}


class Convolution:
    """A convolution, a batch normalisation and a loss, trained."""

    def __init__(self):
        with tf.Graph().as_default() as self.graph:
            ones = tf1.ones_initializer()
            image = tf1.get_variable("image", [2, 8, 8, 3], initializer=tf1.random_normal_initializer(seed=1))
            layer = tf.nn.conv2d(image, tf1.get_variable("kernel", [3, 3, 3, 4], initializer=ones), 1, "SAME")
            scale, offset = (tf1.get_variable(name, [4], initializer=ones) for name in ("scale", "offset"))
            layer = tf1.nn.fused_batch_norm(layer, scale, offset)[0]
            self.loss = tf.reduce_mean(tf.square(tf.nn.relu(layer)))
            self.train_op = tf1.train.GradientDescentOptimizer(0.1).minimize(self.loss)
            self.init = tf1.global_variables_initializer()

    def batch(self, number):
        return {}


def executed(options):
    nodes = nodes_of_step(precision_of(**options), Convolution())
    return [dtypes_of(nodes, *words) for words in (("Conv2D",), ("FusedBatchNorm",), ("Square",), ("ResourceApply",))]


@pytest.mark.parametrize(
    "level, overrides, conv, norm, square",
    [
        ("O1", {"half_types": ["Square"]}, "float16", "float32", "float16"),
        ("O1", {"float_types": ["Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput"]}, "float32", *["float32"] * 2),
        ("O2", {}, "float16", "float32", "float16"),
        ("O2", {"keep_batchnorm_fp32": "False"}, "float16", "float16", "float16"),
        ("O3", {"keep_batchnorm_fp32": True}, "float16", "float32", "float16"),
    ],
    ids=str,
)
def test_kernels(level, overrides, conv, norm, square, tmp_path):
    options = from_opt_level(level, **overrides).options(str(tmp_path / "new"))
    counts = executed(options)
    assert [set(count) for count in counts] == [{conv}, {norm}, {square}, {"float32"}]


def test_bfloat16_under_o1(tmp_path, bfloat16):
    options = from_opt_level("O1", low_dtype="bfloat16").options(str(tmp_path))
    assert [set(count) for count in executed(options)[:2]] == [{"bfloat16"}, {"float32"}]


def test_lists_may_go_with_the_graph_instead_of_a_file():
    model, level = Convolution(), from_opt_level("O2")
    level.op_lists.register(model.graph)
    nodes = nodes_of_step(precision_of(**level.options()), model)
    assert [set(dtypes_of(nodes, word)) for word in ("Conv2D", "FusedBatchNorm")] == [{"float16"}, {"float32"}]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_npu_run_config_takes_them(level, tmp_path):
    given = from_opt_level(level).options(str(tmp_path))
    options = read_run_config(NPURunConfig(model_dir=str(tmp_path), **given))
    assert {name: options[name] for name in given} == given


def test_what_the_levels_say():
    kept = OpLists(floats=frozenset(BATCH_NORM_TYPES))
    said = {name: tuple(from_opt_level(name))[1:] for name in ("O0", "O1", "O2", "O3")}
    dynamic, none = ("ExponentialUpdateLossScaleManager", DYNAMIC), (None, {})
    assert said == {
        "O0": ("origin", OpLists(), none),
        "O1": ("mixed_float16", kept, dynamic),
        "O2": ("fp16", kept, dynamic),
        "O3": ("fp16", OpLists(), none),
    }


@pytest.mark.parametrize(
    "level, asked, manager, arguments",
    [
        ("O1", 128.0, "FixedLossScaleManager", {"loss_scale": 128.0}),
        ("O2", "128", "FixedLossScaleManager", {"loss_scale": 128.0}),
        ("O3", "dynamic", "ExponentialUpdateLossScaleManager", DYNAMIC),
        ("O1", 1, None, {}),
    ],
)
def test_loss_scale(level, asked, manager, arguments):
    scale = from_opt_level(level, loss_scale=asked).loss_scale
    assert scale == (manager, arguments)
    if manager:
        with tf.Graph().as_default():
            made = getattr(npu_loss_scale_manager, manager)(**arguments)
            assert isinstance(made, npu_loss_scale_manager.LossScaleManager)


@refuses(
    ("o1", {}, ValueError, "Did you mean 'O1'"),
    ("O1", {"loss_scal": 1}, TypeError, "Did you mean 'loss_scale'"),
    ("O0", {"low_dtype": "float16"}, ValueError, "does not fit O0"),
    ("O2", {"half_types": ["Square"]}, ValueError, "contradicts O2"),
    ("O1", {"half_types": "Square"}, TypeError, "not a list"),
    ("O1", {"half_types": ["Squar"]}, ValueError, "Did you mean 'Square'"),
    ("O1", {"half_types": ["Square"], "float_types": ["Square"]}, ValueError, "half_types and float_types"),
    says=["Expected", "got"],
)
def test_what_does_not_go(level, overrides):
    from_opt_level(level, **overrides)
