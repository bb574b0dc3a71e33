"""`tf.contrib.lookup`: tables from keys to values."""

from __future__ import annotations

import tensorflow.compat.v1 as tf
from tensorflow.python.ops.lookup_ops import (
    HasherSpec,
    IdTableWithHashBuckets,
    InitializableLookupTableBase,
    KeyValueTensorInitializer,
    StrongHashSpec,
    TableInitializerBase,
    TextFileIdTableInitializer,
    TextFileIndex,
    TextFileInitializer,
    TextFileStringTableInitializer,
    index_to_string_table_from_file,
)

from npu_bridge.base.tf_internals.contrib import lookup_ops

FastHashSpec = lookup_ops().FastHashSpec
LookupInterface = tf.lookup.StaticHashTable.__mro__[-3]
index_table_from_file = lookup_ops().index_table_from_file
MutableHashTable = tf.lookup.experimental.MutableHashTable
MutableDenseHashTable = tf.lookup.experimental.DenseHashTable


class HashTable(lookup_ops().HashTable):
    """A `tf.lookup.StaticHashTable`; tables with equal `shared_name` share their content on a server."""

    def __init__(self, initializer, default_value, shared_name=None, name=None):
        self._given_name = shared_name
        super().__init__(initializer, default_value, name)

    @property
    def _shared_name(self):
        return self._given_name or self._own_name

    @_shared_name.setter
    def _shared_name(self, name):
        self._own_name = name


def index_table_from_tensor(
    mapping=None, num_oov_buckets=0, default_value=-1, hasher_spec=FastHashSpec, dtype=tf.string, name=None,
    vocabulary_list=None,
):  # fmt: skip
    """Returns a table that maps the entries of a vocabulary (1-D) to their positions."""
    vocabulary = vocabulary_list if mapping is None else mapping
    return lookup_ops().index_table_from_tensor(vocabulary, num_oov_buckets, default_value, hasher_spec, dtype, name)


def index_to_string_table_from_tensor(mapping=None, default_value="UNK", name=None, vocabulary_list=None):
    """Returns a table that maps positions (int64) to the entries of a vocabulary."""
    return lookup_ops().index_to_string_table_from_tensor(
        vocabulary_list if mapping is None else mapping, default_value, name
    )


def string_to_index_table_from_file(
    vocabulary_file=None, num_oov_buckets=0, vocab_size=None, default_value=-1, hasher_spec=FastHashSpec, name=None
):
    """Calls `index_table_from_file` for strings."""
    return index_table_from_file(vocabulary_file, num_oov_buckets, vocab_size, default_value, hasher_spec, name=name)


def string_to_index_table_from_tensor(
    mapping, num_oov_buckets=0, default_value=-1, hasher_spec=FastHashSpec, name=None
):
    """Calls `index_table_from_tensor` for strings."""
    return lookup_ops().index_table_from_tensor(mapping, num_oov_buckets, default_value, hasher_spec, tf.string, name)


def index_to_string(tensor, mapping, default_value="UNK", name=None):
    """Returns the vocabulary entry at each position (int64); run `tf.tables_initializer()` before."""
    return lookup_ops().index_to_string_table_from_tensor(mapping, default_value).lookup(tensor, name)


def string_to_index(tensor, mapping, default_value=-1, name=None):
    """Returns the positions of strings in a vocabulary; run `tf.tables_initializer()` first."""
    return lookup_ops().index_table_from_tensor(mapping, default_value=default_value).lookup(tensor, name)
