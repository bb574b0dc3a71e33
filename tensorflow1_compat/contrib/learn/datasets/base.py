"""Data sets in memory: `tensorflow.contrib.learn.python.learn.datasets.base`."""

from __future__ import annotations

import collections
import csv
import os
import shutil
import urllib.request

import numpy as np
import tensorflow.compat.v1 as tf

from npu_bridge.base.files import new_file

Dataset = collections.namedtuple("Dataset", ("data", "target"))
Datasets = collections.namedtuple("Datasets", ("train", "validation", "test"))


def load_csv_with_header(filename, target_dtype, features_dtype, target_column=-1):
    """Reads a CSV file of numbers into a `Dataset`; skips its first line."""
    with tf.gfile.Open(filename) as file:
        lines = csv.reader(file)
        next(lines)
        return _read_rows(lines, target_dtype, features_dtype, target_column)


def load_csv_without_header(filename, target_dtype, features_dtype, target_column=-1):
    """Reads a CSV file of numbers without a header line into a `Dataset`."""
    with tf.gfile.Open(filename) as file:
        return _read_rows(csv.reader(file), target_dtype, features_dtype, target_column)


def _read_rows(lines, target_dtype, features_dtype, target_column):
    data, target = [], []
    for row in lines:
        target.append(row.pop(target_column))
        data.append(np.asarray(row, features_dtype))
    return Dataset(np.array(data), np.array(target, target_dtype))


def maybe_download(filename, work_directory, source_url):
    """Returns the path of a file; downloads the file if the folder lacks it."""
    tf.gfile.MakeDirs(work_directory)
    path = os.path.join(work_directory, filename)
    if not tf.gfile.Exists(path):
        with urllib.request.urlopen(source_url) as source, new_file(path, "wb") as file:
            shutil.copyfileobj(source, file)
    return path
