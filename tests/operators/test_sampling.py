"""Warping and deformable convolution against loops, plain convolution and tensorflow-addons; decoding to a size."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.image import image_ops
from npu_bridge.npu_cpu import npu_cpu_ops
from npu_bridge.tbe.npu_cube_ops import deformable_conv2d
from tests.operators.computing import close, computed, differentiable

RANDOM = np.random.default_rng(8)


def test_warp_is_that_of_addons():
    addons = pytest.importorskip("tensorflow_addons")
    image = RANDOM.normal(size=[2, 5, 6, 3]).astype(np.float32)
    flow = RANDOM.normal(0, 4, size=[2, 5, 6, 2]).astype(np.float32)  # some of it beyond the border
    close(computed(npu_cpu_ops.dense_image_warp, image, flow), addons.image.dense_image_warp(image, flow))
    assert npu_cpu_ops.dense_image_warp(image.astype(np.float16), flow).dtype == tf.float16


def test_a_warped_image_of_one_integer_keeps_it():
    flow = RANDOM.uniform(-0.4, 0.4, size=[1, 4, 4, 2]).astype(np.float32)
    warped = computed(npu_cpu_ops.dense_image_warp, np.full([1, 4, 4, 3], 255, np.uint8), flow)
    assert (np.asarray(warped) == 255).all()


def test_warp_has_gradients():
    flow = RANDOM.uniform(-0.4, 0.4, size=[1, 3, 3, 2]).astype(np.float32) + np.float32(0.5)
    differentiable(npu_cpu_ops.dense_image_warp, RANDOM.normal(size=[1, 3, 3, 2]).astype(np.float32), flow)


def test_warp_checks_shapes():
    with pytest.raises(ValueError, match="dense_image_warp: a shape does not fit"):
        npu_cpu_ops.dense_image_warp(np.ones([1, 3, 3, 1]), np.ones([1, 3, 3, 3]))


def no_offsets(taps, groups, *size):
    """Offsets of a plain convolution: none, with weights of 1."""
    return np.concatenate([np.zeros([*size, 2 * groups * taps]), np.ones([*size, groups * taps])], -1).astype(
        np.float32
    )


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
@pytest.mark.parametrize("stride, dilation, pads", [(1, 1, (0, 0, 0, 0)), (2, 1, (1, 1, 2, 0)), (1, 2, (2, 2, 2, 2))])
def test_without_offsets_it_is_a_convolution(stride, dilation, pads, data_format):
    x, kernel = RANDOM.normal(size=[2, 7, 8, 4]).astype(np.float32), RANDOM.normal(size=[3, 3, 4, 5]).astype(np.float32)
    padding = [[0, 0], pads[:2], pads[2:], [0, 0]]
    expected = tf.nn.conv2d(x, kernel, [1, stride, stride, 1], padding, dilations=[1, dilation, dilation, 1]).numpy()
    offsets = no_offsets(9, 2, *expected.shape[:3])
    order = [0, 3, 1, 2] if data_format == "NCHW" else [0, 1, 2, 3]
    in_order = {"NHWC": lambda value: [1, value, value, 1], "NCHW": lambda value: [1, 1, value, value]}[data_format]

    def operator(*given):
        options = {"data_format": data_format, "dilations": in_order(dilation), "deformable_groups": 2}
        return deformable_conv2d(*given, in_order(stride), list(pads), **options)

    close(computed(operator, x.transpose(order), kernel, offsets.transpose(order)), expected.transpose(order))


def at(image, row, column):
    """Returns the value between pixels; 0 outside."""
    total = 0.0
    for r, c in itertools.product((math.floor(row), math.floor(row) + 1), (math.floor(column), math.floor(column) + 1)):
        if 0 <= r < image.shape[0] and 0 <= c < image.shape[1]:
            total += (1 - abs(row - r)) * (1 - abs(column - c)) * image[r, c]
    return total


def in_loops(x, kernel, offsets, groups, deformable_groups):
    """Computes a convolution in loops, with stride 1 and no padding."""
    count, height, width, _ = offsets.shape
    kernel_height, kernel_width, inputs, filters = kernel.shape
    per_group, out_per_group = x.shape[3] // deformable_groups, filters // groups
    moved = offsets.reshape(count, height, width, 3, deformable_groups, kernel_height, kernel_width)
    result = np.zeros([count, height, width, filters])
    for n, i, j, f, ki, kj, channel in np.ndindex(count, height, width, filters, kernel_height, kernel_width, inputs):
        source = f // out_per_group * inputs + channel
        right, down, weight = moved[n, i, j, :, source // per_group, ki, kj]
        value = at(x[n, :, :, source], i + ki + down, j + kj + right)
        result[n, i, j, f] += weight * value * kernel[ki, kj, channel, f]
    return result.astype(np.float32)


def deformable_case(groups, deformable_groups):
    x = RANDOM.normal(size=[2, 4, 5, 4]).astype(np.float32)
    kernel = RANDOM.normal(size=[2, 3, 4 // groups, 2]).astype(np.float32)
    offsets = RANDOM.normal(0, 1.5, size=[2, 3, 3, 3 * deformable_groups * 6]).astype(np.float32)
    return x, kernel, offsets


@pytest.mark.parametrize("groups, deformable_groups", [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_deformable_convolution(groups, deformable_groups):
    given = deformable_case(groups, deformable_groups)

    def operator(*given):
        return deformable_conv2d(*given, groups=groups, deformable_groups=deformable_groups)

    close(computed(operator, *given), in_loops(*given, groups, deformable_groups))


def test_deformable_convolution_has_gradients():
    x, kernel, offsets = (value[..., :].astype(np.float64) for value in deformable_case(1, 1))
    differentiable(deformable_conv2d, x[:1, :3, :3], kernel, offsets[:1, :2, :1].round() * 0.5 + 0.3)


WRONG = [("modulated", False), ("data_format", "NDHWC"), ("strides", [1, 1]), ("strides", [1, 2, 2, 1])]
WRONG += [("groups", 3), ("groups", 2), ("deformable_groups", 2)]


@pytest.mark.parametrize("name, value", WRONG)
def test_deformable_convolution_checks_its_arguments(name, value):
    with pytest.raises(ValueError, match="deformable_conv2d: .*Expected .* got "):
        deformable_conv2d(*deformable_case(1, 1), **{name: value})


def test_decoding_to_a_size():
    pixels = np.arange(20 * 30 * 3).reshape(20, 30, 3) % 251
    jpeg = tf.io.encode_jpeg(pixels.astype(np.uint8), quality=100).numpy()
    decoded = tf.io.decode_jpeg(jpeg).numpy().astype(np.float32)
    whole = computed(lambda image: image_ops.decode_and_resize_jpeg(image, [20, 30]), jpeg)
    close(whole, decoded.astype(np.uint8))
    half = computed(lambda image: image_ops.decode_and_resize_jpeg(image, [10, 15]), jpeg)
    means = decoded.reshape(10, 2, 15, 2, 3).mean((1, 3))
    close(half, np.round(means).astype(np.uint8))
    part = computed(lambda image: image_ops.decode_and_crop_and_resize_jpeg(image, [4, 6, 8, 10], [8, 10]), jpeg)
    close(part, tf.io.decode_and_crop_jpeg(jpeg, [4, 6, 8, 10]))
