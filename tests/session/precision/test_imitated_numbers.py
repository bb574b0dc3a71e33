"""Imitated bfloat16 in numbers: for each operator type that mixed precision allows, against TensorFlow's kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.session.precision import rewriter
from npu_bridge.session.precision.modes import BFLOAT16
from npu_bridge.session.precision.type_lists import type_lists_for
from tests.session.precision.small_models import kernels_of, precision_of, run_with_graph, session_of, tf1

RAW = tf.raw_ops


def to_bfloat16(values):
    return np.asarray(values, ml_dtypes.bfloat16)


def units_apart(left, right):
    """Returns the largest distance between two arrays of bfloat16, in representable numbers."""
    ordered = [values.view(np.int16).astype(int) for values in (left, right)]
    ordered = [np.where(bits < 0, -32768 - bits, bits) for bits in ordered]
    return int(np.abs(ordered[0] - ordered[1]).max())


IMAGE, KERNEL, OUTPUT = (2, 6, 5, 3), (3, 2, 3, 4), (2, 4, 4, 4)
VOLUME, KERNEL_3D, OUTPUT_3D = (2, 4, 5, 3, 2), (2, 3, 2, 2, 3), (2, 3, 3, 2, 3)
KERNEL_PER_CHANNEL, OUTPUT_PER_CHANNEL = (3, 2, 3, 2), (2, 4, 4, 6)
ONES, ONES_3D = [1, 1, 1, 1], [1, 1, 1, 1, 1]
CONV = {"strides": ONES, "padding": "VALID"}
CONV_3D = {"strides": ONES_3D, "padding": "VALID"}
PADS = [[0, 0], [1, 1], [1, 1], [0, 0]]


# By operator type: shapes of both inputs, and the operator.
CASES = {
    "MatMul": ((4, 7), (7, 5), lambda a, b: RAW.MatMul(a=a, b=b)),
    "BatchMatMul": ((3, 4, 7), (3, 7, 5), lambda a, b: RAW.BatchMatMul(x=a, y=b)),
    "BatchMatMulV2": ((3, 4, 7), (7, 5), lambda a, b: RAW.BatchMatMulV2(x=a, y=b)),
    "Einsum": ((3, 4, 7), (3, 7, 5), lambda a, b: RAW.Einsum(inputs=[a, b], equation="bij,bjk->bik")),
    "Conv2D": (IMAGE, KERNEL, lambda a, b: RAW.Conv2D(input=a, filter=b, **CONV)),
    "Conv2DBackpropFilter": (
        IMAGE,
        OUTPUT,
        lambda a, b: RAW.Conv2DBackpropFilter(input=a, filter_sizes=KERNEL, out_backprop=b, **CONV),
    ),
    "Conv2DBackpropInput": (
        KERNEL,
        OUTPUT,
        lambda a, b: RAW.Conv2DBackpropInput(input_sizes=IMAGE, filter=a, out_backprop=b, **CONV),
    ),
    "Conv3D": (VOLUME, KERNEL_3D, lambda a, b: RAW.Conv3D(input=a, filter=b, **CONV_3D)),
    "Conv3DBackpropFilterV2": (
        VOLUME,
        OUTPUT_3D,
        lambda a, b: RAW.Conv3DBackpropFilterV2(input=a, filter_sizes=KERNEL_3D, out_backprop=b, **CONV_3D),
    ),
    "Conv3DBackpropInputV2": (
        KERNEL_3D,
        OUTPUT_3D,
        lambda a, b: RAW.Conv3DBackpropInputV2(input_sizes=VOLUME, filter=a, out_backprop=b, **CONV_3D),
    ),
    "DepthwiseConv2dNative": (
        IMAGE,
        KERNEL_PER_CHANNEL,
        lambda a, b: RAW.DepthwiseConv2dNative(input=a, filter=b, **CONV),
    ),
    "DepthwiseConv2dNativeBackpropFilter": (
        IMAGE,
        OUTPUT_PER_CHANNEL,
        lambda a, b: RAW.DepthwiseConv2dNativeBackpropFilter(
            input=a, filter_sizes=KERNEL_PER_CHANNEL, out_backprop=b, **CONV
        ),
    ),
    "DepthwiseConv2dNativeBackpropInput": (
        KERNEL_PER_CHANNEL,
        OUTPUT_PER_CHANNEL,
        lambda a, b: RAW.DepthwiseConv2dNativeBackpropInput(input_sizes=IMAGE, filter=a, out_backprop=b, **CONV),
    ),
    "FusedPadConv2D": (
        IMAGE,
        KERNEL,
        lambda a, b: RAW.FusedPadConv2D(input=a, paddings=PADS, filter=b, mode="REFLECT", **CONV),
    ),
}


def computed(op_type, inputs):
    """The value of an operator in mixed bfloat16, and its executed kernels."""
    with tf.Graph().as_default() as graph:
        fed = [tf1.placeholder(tf.float32, value.shape) for value in inputs]
        result = tf.identity(CASES[op_type][2](*fed)) + 0.0
    with session_of(graph, precision_of(precision_mode_v2="mixed_bfloat16")) as session:
        return run_with_graph(session, result, dict(zip(fed, inputs)))


def test_every_allowed_type_has_a_case():
    assert set(CASES) == type_lists_for(BFLOAT16, {}).allow


@pytest.mark.parametrize("op_type", CASES)
def test_inputs_and_output_are_rounded_and_sums_are_float32(op_type, monkeypatch):
    monkeypatch.setattr(rewriter, "can_lower", lambda dtype: False)
    *shapes, operator = CASES[op_type]
    random = np.random.RandomState(len(op_type))
    inputs = [random.randn(*shape).astype(np.float32) for shape in shapes]
    values, nodes = computed(op_type, inputs)
    assert set(kernels_of(nodes, op_type)) <= {"float32"}
    # Its own float32 kernel, executed eagerly, where nothing is lowered or imitated.
    expected = to_bfloat16(operator(*(to_bfloat16(value).astype(np.float32) for value in inputs)))
    np.testing.assert_array_equal(values, to_bfloat16(values).astype(np.float32))
    assert units_apart(to_bfloat16(values), expected) <= 1
    assert np.any(values != operator(*inputs))


@pytest.mark.parametrize("op_type", CASES)
def test_as_in_tensorflows_own_bfloat16(op_type, monkeypatch):
    if not rewriter.can_lower(BFLOAT16):
        pytest.skip("TensorFlow lowers nothing to bfloat16 on this CPU")
    random = np.random.RandomState(len(op_type))
    inputs = [random.randn(*shape).astype(np.float32) for shape in CASES[op_type][:2]]
    theirs = computed(op_type, inputs)[0]
    monkeypatch.setattr(rewriter, "can_lower", lambda dtype: False)
    assert units_apart(*(to_bfloat16(values) for values in (computed(op_type, inputs)[0], theirs))) <= 1


def test_ties_go_to_even_and_infinities_stay(monkeypatch):
    monkeypatch.setattr(rewriter, "can_lower", lambda dtype: False)
    unit = 2.0**-7
    given = np.float32([1 + unit / 2, 1 + 3 * unit / 2, 1 + 0.51 * unit, -1 - unit / 2, 3.4e38, 1e-40, -np.inf, np.nan])
    values = computed("MatMul", [given[:, None], np.ones([1, 1], np.float32)])[0][:, 0]
    np.testing.assert_array_equal(values[:4], [1, 1 + 2 * unit, 1 + unit, -1])
    assert values[4] == np.inf and abs(values[5]) <= 1e-40 and values[6] == -np.inf and np.isnan(values[7])
