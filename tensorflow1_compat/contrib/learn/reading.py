"""Reads batches of serialised tf.Examples from files."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

_DATASETS = {tf.TFRecordReader: tf.data.TFRecordDataset, tf.TextLineReader: tf.data.TextLineDataset}


def read_batch_examples(
    file_pattern, batch_size, reader=tf.TFRecordReader, randomize_input=True, num_epochs=None, queue_capacity=10000,
    num_threads=1, read_batch_size=1, parse_fn=None, name=None, seed=None,
):  # fmt: skip
    """Returns a batch of records from files, such as serialised tf.Examples: a string tensor [batch]."""
    if reader not in _DATASETS:
        raise ValueError(f"reader: {reader!r} is not supported. Expected tf.TFRecordReader or tf.TextLineReader.")
    files = tf.data.Dataset.list_files(file_pattern, shuffle=randomize_input, seed=seed)
    examples = files.flat_map(_DATASETS[reader])
    if randomize_input:
        examples = examples.shuffle(queue_capacity, seed)
    examples = examples.repeat(num_epochs)
    if parse_fn is not None:
        examples = examples.map(parse_fn)
    return tf.data.make_one_shot_iterator(examples.batch(batch_size)).get_next(name)


def read_batch_features(
    file_pattern, batch_size, features, reader=tf.TFRecordReader, randomize_input=True, num_epochs=None,
    queue_capacity=10000, feature_queue_capacity=100, reader_num_threads=1, num_enqueue_threads=2, parse_fn=None,
    name=None, read_batch_size=None,
):  # fmt: skip
    """Returns a batch of parsed tf.Examples from files: a dict from feature names to tensors."""
    examples = read_batch_examples(
        file_pattern, batch_size, reader, randomize_input, num_epochs, queue_capacity, parse_fn=parse_fn, name=name
    )
    return tf.parse_example(examples, features)
