"""`tf.contrib.data`: transformations for `Dataset.apply`, most of which moved to `tf.data.experimental`."""

from __future__ import annotations

import tensorflow.compat.v1 as tf
from tensorflow.compat.v1.data import Dataset, Iterator, TFRecordDataset
from tensorflow.compat.v1.data.experimental import (
    Counter,
    CsvDataset,
    RandomDataset,
    Reducer,
    SqlDataset,
    TFRecordWriter,
    bucket_by_sequence_length,
    choose_from_datasets,
    copy_to_device,
    dense_to_sparse_batch,
    enumerate_dataset,
    get_next_as_optional,
    get_single_element,
    group_by_reducer,
    group_by_window,
    ignore_errors,
    make_batched_features_dataset,
    make_csv_dataset,
    make_saveable_from_iterator,
    map_and_batch,
    parallel_interleave,
    parse_example_dataset,
    prefetch_to_device,
    rejection_resample,
    sample_from_datasets,
    scan,
    shuffle_and_repeat,
    snapshot,
    unbatch,
    unique,
)

if hasattr(tf.data.experimental, "CheckpointInputPipelineHook"):  # until TensorFlow 2.15
    CheckpointInputPipelineHook = tf.data.experimental.CheckpointInputPipelineHook

from npu_bridge.base.tf_internals.contrib import flatten_element, pack_element

AUTOTUNE = tf.data.experimental.AUTOTUNE
Optional = tf.data.experimental.Optional
FixedLengthRecordDataset = tf.data.FixedLengthRecordDataset
TextLineDataset = tf.data.TextLineDataset


def sloppy_interleave(map_func, cycle_length, block_length=1):
    """Interleaves datasets like `parallel_interleave`, but in the order in which elements become ready."""
    return parallel_interleave(map_func, cycle_length, block_length, sloppy=True)


def batch_and_drop_remainder(batch_size):
    """Makes batches of exactly `batch_size` elements; drops the remainder."""
    return lambda dataset: dataset.batch(batch_size, drop_remainder=True)


def padded_batch_and_drop_remainder(batch_size, padded_shapes, padding_values=None):
    """Makes padded batches of exactly `batch_size` elements; drops the remainder."""
    return lambda dataset: dataset.padded_batch(batch_size, padded_shapes, padding_values, drop_remainder=True)


def assert_element_shape(expected_shapes):
    """Checks the shapes of elements: raises while the pipeline is built, or when a wrong element is read."""

    def with_asserted_shape(tensor, shape):
        shape = tf.TensorShape(shape)
        with tf.control_dependencies(
            [
                tf.assert_equal(tf.shape(tensor)[axis], size)
                for axis, size in enumerate(shape.as_list() if shape.rank is not None else [])
                if size is not None
            ]
        ):
            tensor = tf.identity(tensor)
        tensor.set_shape(shape)
        return tensor

    def apply(dataset):
        def check(*element):
            element = element[0] if len(element) == 1 else element
            flat = zip(flatten_element(element), flatten_element(expected_shapes))
            return pack_element(element, [with_asserted_shape(tensor, shape) for tensor, shape in flat])

        return dataset.map(check)

    return apply


def read_batch_features(
    file_pattern, batch_size, features, reader=tf.data.TFRecordDataset, reader_args=None,
    randomize_input=True, num_epochs=None, capacity=10000,
):  # fmt: skip
    """Returns a batch of parsed tf.Examples for a session: a dict from feature names to tensors."""
    dataset = make_batched_features_dataset(
        file_pattern, batch_size, features, reader, reader_args=reader_args,
        num_epochs=num_epochs, shuffle=randomize_input, shuffle_buffer_size=capacity,
    )  # fmt: skip
    return tf.data.make_one_shot_iterator(dataset).get_next()


def reduce_dataset(dataset, reducer):
    """Combines all elements of a dataset by a `Reducer`; as in 1.15, its `finalize_func` is not called."""
    return dataset.reduce(reducer.init_func(tf.constant(0, tf.int64)), reducer.reduce_func)


def sliding_window_batch(window_size, stride=None, window_shift=None, window_stride=1):
    """Makes overlapping batches of `window_size` elements.

    Args:
      window_size: number of elements in a batch.
      stride, window_shift: distance between the first elements of successive batches, by default 1; two names of one
        argument.
      window_stride: distance between successive elements of a batch.

    Raises:
      ValueError: `stride` and `window_shift` are both given.
    """
    if None not in (stride, window_shift):
        raise ValueError("sliding_window_batch: expected stride or window_shift; got both. Leave stride out.")
    shift = next((each for each in (stride, window_shift) if each is not None), 1)

    def zip_batches(*window):
        window = window[0] if len(window) == 1 else window
        return Dataset.zip(pack_element(window, [each.batch(window_size) for each in flatten_element(window)]))

    return lambda dataset: dataset.window(window_size, shift, window_stride, drop_remainder=True).flat_map(zip_batches)
