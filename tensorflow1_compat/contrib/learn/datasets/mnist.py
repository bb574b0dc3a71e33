"""Handwritten digits: `tensorflow.examples.tutorials.mnist.input_data`."""

from __future__ import annotations

import gzip

import numpy as np
import tensorflow.compat.v1 as tf

from tensorflow1_compat.contrib.learn.datasets import base

DEFAULT_SOURCE_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"
SOURCE_URL = DEFAULT_SOURCE_URL


def _read_uint32(stream):
    return int(np.frombuffer(stream.read(4), np.dtype(">u4"))[0])


def extract_images(f):
    """Reads images from an open gzip file: uint8 [images, rows, columns, 1]."""
    with gzip.GzipFile(fileobj=f) as stream:
        magic = _read_uint32(stream)
        if magic != 2051:
            raise ValueError(f"extract_images: {f.name} is not a file of images: magic number {magic}, expected 2051.")
        count, rows, columns = (_read_uint32(stream) for _ in range(3))
        return np.frombuffer(stream.read(count * rows * columns), np.uint8).reshape(count, rows, columns, 1)


def dense_to_one_hot(labels_dense, num_classes):
    """Converts labels [n] to float64 [n, classes]."""
    return np.eye(num_classes)[np.asarray(labels_dense).ravel()]


def extract_labels(f, one_hot=False, num_classes=10):
    """Reads labels from an open gzip file: uint8 [labels], or one-hot [labels, classes]."""
    with gzip.GzipFile(fileobj=f) as stream:
        magic = _read_uint32(stream)
        if magic != 2049:
            raise ValueError(f"extract_labels: {f.name} is not a file of labels: magic number {magic}, expected 2049.")
        labels = np.frombuffer(stream.read(_read_uint32(stream)), np.uint8)
        return dense_to_one_hot(labels, num_classes) if one_hot else labels


class DataSet:
    """A data set of images and labels that returns batches, and shuffles again for each epoch.

    Args:
      images: uint8 [n, rows, columns, 1]; with `reshape`, batches are [n, rows * columns].
      labels: [n] or [n, classes].
      fake_data: whether to return constant examples instead of the given ones.
      one_hot: whether the labels of fake examples are one-hot.
      dtype: uint8 for values in 0..255, or float32 for values in [0, 1].
      seed: seed for shuffling; default: that of the graph, if it has one. It becomes the seed of `np.random`.
    """

    def __init__(self, images, labels, fake_data=False, one_hot=False, dtype=tf.float32, reshape=True, seed=None):
        of_graph, of_operator = tf.get_seed(seed)
        if of_graph is not None:  # as in 1.15, all data sets share numpy's generator
            np.random.seed(of_graph if seed is None else of_operator)
        dtype = tf.as_dtype(dtype).base_dtype
        if dtype not in (tf.uint8, tf.float32):
            raise TypeError(f"DataSet: dtype must be uint8 or float32; got {dtype.name}.")
        self._is_fake, self._one_hot = fake_data, one_hot
        if fake_data:
            self._num_examples = 10000
        else:
            if len(images) != len(labels):
                raise ValueError(f"DataSet: {len(images)} images, but {len(labels)} labels.")
            self._num_examples = images.shape[0]
            if reshape:
                images = images.reshape(images.shape[0], images.shape[1] * images.shape[2])
            if dtype == tf.float32:
                images = images.astype(np.float32) * np.float32(1.0 / 255.0)
        self._images, self._labels = images, labels
        self._epochs_completed, self._index_in_epoch = 0, 0

    images = property(lambda self: self._images)
    labels = property(lambda self: self._labels)
    num_examples = property(lambda self: self._num_examples)
    epochs_completed = property(lambda self: self._epochs_completed)

    def _shuffle(self):
        order = np.random.permutation(self._num_examples)
        self._images, self._labels = self._images[order], self._labels[order]

    def next_batch(self, batch_size, fake_data=False, shuffle=True):
        """Returns (images, labels) of the next `batch_size` examples; a batch can span two epochs."""
        if fake_data or self._is_fake:
            label = [1] + [0] * 9 if self._one_hot else 0
            return [[1] * 784 for _ in range(batch_size)], [label for _ in range(batch_size)]
        start = self._index_in_epoch
        if self._epochs_completed == 0 and start == 0 and shuffle:
            self._shuffle()
        if start + batch_size <= self._num_examples:
            self._index_in_epoch = start + batch_size
            return self._images[start : start + batch_size], self._labels[start : start + batch_size]
        self._epochs_completed += 1
        rest_images, rest_labels = self._images[start:], self._labels[start:]
        if shuffle:
            self._shuffle()
        self._index_in_epoch = batch_size - len(rest_images)
        end = self._index_in_epoch
        return np.concatenate([rest_images, self._images[:end]]), np.concatenate([rest_labels, self._labels[:end]])


def read_data_sets(
    train_dir, fake_data=False, one_hot=False, dtype=tf.float32, reshape=True, validation_size=5000, seed=None,
    source_url=DEFAULT_SOURCE_URL,
):  # fmt: skip
    """Returns `Datasets(train, validation, test)` from the four MNIST files in a folder; downloads missing files.

    Args:
      train_dir: the folder.
      fake_data: whether to return constant examples without reading files.
      one_hot: whether labels are one-hot, [n, 10].
      validation_size: number of training examples, from the first one on, that become the validation set.
      others: see `DataSet`.
    """
    if fake_data:
        return base.Datasets(*(DataSet([], [], True, one_hot, dtype, seed=seed) for _ in range(3)))
    found = []
    for name, extract in (
        ("train-images-idx3-ubyte.gz", extract_images), ("train-labels-idx1-ubyte.gz", extract_labels),
        ("t10k-images-idx3-ubyte.gz", extract_images), ("t10k-labels-idx1-ubyte.gz", extract_labels),
    ):  # fmt: skip
        path = base.maybe_download(name, train_dir, (source_url or DEFAULT_SOURCE_URL) + name)
        with open(path, "rb") as file:
            found.append(extract(file) if extract is extract_images else extract(file, one_hot=one_hot))
    images, labels, test_images, test_labels = found
    if not 0 <= validation_size <= len(images):
        raise ValueError(f"read_data_sets: validation_size must be 0 to {len(images)}; got {validation_size}.")
    options = {"dtype": dtype, "reshape": reshape, "seed": seed}
    return base.Datasets(
        train=DataSet(images[validation_size:], labels[validation_size:], **options),
        validation=DataSet(images[:validation_size], labels[:validation_size], **options),
        test=DataSet(test_images, test_labels, **options),
    )


def load_mnist(train_dir="MNIST-data"):
    """Calls `read_data_sets`, by default for the folder `MNIST-data`."""
    return read_data_sets(train_dir)
