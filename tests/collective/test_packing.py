"""Tensors of any dtypes as one vector of words, and back, bit for bit."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from npu_bridge.gradients.checkpoints.packing import pack_tensors, unpack_tensors

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int64", "bool")
SHAPES = ((), (3,), (0, 2), (2, 1, 5))


def test_what_is_packed_is_unpacked_bit_for_bit():
    random = np.random.RandomState(3)
    lists = [
        [tf.cast(random.randn(*shape) * 9, dtype) for dtype in DTYPES for shape in SHAPES[:count]]
        for count in (4, 0, 1)
    ]
    words = [pack_tensors(each) for each in lists]
    assert all(each.dtype == tf.int64 for each in words)
    assert [len(each) for each in words] == [
        -(-sum(t.dtype.size * int(tf.size(t)) for t in each) // 8) for each in lists
    ]
    specs = [[tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in each] for each in lists]
    for sent, arrived in zip(lists, unpack_tensors(tf.concat(words, axis=0), specs)):
        assert [(t.dtype, t.shape) for t in arrived] == [(t.dtype, t.shape) for t in sent]
        assert [t.numpy().tobytes() for t in arrived] == [t.numpy().tobytes() for t in sent]
