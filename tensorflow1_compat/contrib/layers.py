"""`tf.contrib.layers`: TF-Slim's layers, and feature columns and embeddings that TF-Slim lacks."""

from __future__ import annotations

import tensorflow.compat.v1 as tf
import tf_slim.layers
from tf_slim.layers import *
from tf_slim.layers import summaries
from tf_slim.layers.initializers import variance_scaling_initializer, xavier_initializer
from tf_slim.layers.initializers import xavier_initializer as xavier_initializer_conv2d
from tf_slim.layers.layers import *
from tf_slim.layers.optimizers import OPTIMIZER_CLS_NAMES, OPTIMIZER_SUMMARIES, optimize_loss
from tf_slim.layers.regularizers import *
from tf_slim.ops.variables import model_variable

from npu_bridge.base.tf_internals.contrib import column_with_ids
from tensorflow1_compat.contrib.slim import patches

feature_column = tf.feature_column
bucketized_column = tf.feature_column.bucketized_column
create_feature_spec_for_parsing = tf.feature_column.make_parse_example_spec
utils = tf_slim.layers.utils


def real_valued_column(column_name, dimension=1, default_value=None, dtype=tf.float32, normalizer=None):
    """Returns a numeric feature column of `dimension` values; rows of variable length (None) become one value."""
    return tf.feature_column.numeric_column(column_name, (dimension or 1,), default_value, dtype, normalizer)


def safe_embedding_lookup_sparse(
    embedding_weights, sparse_ids, sparse_weights=None, combiner=None, default_id=None, name=None,
    partition_strategy="div", max_norm=None,
):  # fmt: skip
    """Calls `tf.nn.safe_embedding_lookup_sparse`; the default combiner is "mean"."""
    return tf.nn.safe_embedding_lookup_sparse(
        embedding_weights,
        sparse_ids,
        sparse_weights,
        combiner or "mean",
        default_id,
        name,
        partition_strategy,
        max_norm,
    )


def sparse_column_with_keys(column_name, keys, default_value=-1, combiner="sum", dtype=tf.string):
    """Returns a categorical feature column with a list of its values."""
    return tf.feature_column.categorical_column_with_vocabulary_list(column_name, keys, dtype, default_value)


def sparse_column_with_vocabulary_file(
    column_name, vocabulary_file, num_oov_buckets=0, vocab_size=None, default_value=-1, combiner="sum", dtype=tf.string
):
    """Returns a categorical feature column whose values are the lines of a file."""
    return tf.feature_column.categorical_column_with_vocabulary_file(
        column_name, vocabulary_file, vocab_size, num_oov_buckets, None if num_oov_buckets else default_value, dtype
    )


def crossed_column(
    columns, hash_bucket_size, combiner="sum", ckpt_to_load_from=None, tensor_name_in_ckpt=None, hash_key=None
):
    """Returns a categorical feature column of hashed combinations of the values of other features."""
    return tf.feature_column.crossed_column(list(columns), hash_bucket_size, hash_key)


def one_hot_column(sparse_id_column):
    """Returns a dense column that counts each value of a categorical column."""
    return tf.feature_column.indicator_column(sparse_id_column)


def embedding_column(
    sparse_id_column, dimension, combiner="mean", initializer=None, ckpt_to_load_from=None, tensor_name_in_ckpt=None,
    max_norm=None, trainable=True,
):  # fmt: skip
    """Returns a dense column of embeddings of a categorical column's values."""
    return tf.feature_column.embedding_column(
        sparse_id_column, dimension, combiner, initializer or _make_embedding_initializer(sparse_id_column),
        ckpt_to_load_from, tensor_name_in_ckpt, max_norm, trainable,
    )  # fmt: skip


def _make_embedding_initializer(column):
    """Makes the default initializer of 1.15, whose deviation depends on the number of ids, not on the dimension."""
    return tf.truncated_normal_initializer(stddev=column.num_buckets**-0.5)


def weighted_sparse_column(sparse_id_column, weight_column_name, dtype=tf.float32):
    """Returns a categorical column that takes the weight of each value from another feature."""
    return tf.feature_column.weighted_categorical_column(sparse_id_column, weight_column_name, dtype)


def shared_embedding_columns(
    sparse_id_columns, dimension, combiner="mean", shared_embedding_name=None, initializer=None, ckpt_to_load_from=None,
    tensor_name_in_ckpt=None, max_norm=None, trainable=True,
):  # fmt: skip
    """Returns embedding columns of several categorical columns, which share one embedding table."""
    return tf.feature_column.shared_embedding_columns(
        sparse_id_columns, dimension, combiner, initializer or _make_embedding_initializer(sparse_id_columns[0]),
        shared_embedding_name, ckpt_to_load_from, tensor_name_in_ckpt, max_norm, trainable,
    )  # fmt: skip


def sparse_column_with_hash_bucket(column_name, hash_bucket_size, combiner="sum", dtype=tf.string, hash_keys=None):
    """Returns a categorical feature column with hashed values: each value once, or once for each pair of `hash_keys`.

    `combiner` has no effect: linear models take sums, and embedding columns have a combiner of their own.
    """
    column = tf.feature_column.categorical_column_with_hash_bucket(column_name, hash_bucket_size, dtype)

    def hash_with_all_keys(features):
        texts = features.values if features.dtype == tf.string else tf.strings.as_string(features.values)
        hashed = [tf.strings.to_hash_bucket_strong(texts, hash_bucket_size, key) for key in hash_keys]
        return tf.sparse.concat(1, [tf.SparseTensor(features.indices, ids, features.dense_shape) for ids in hashed])

    return column_with_ids(column, hash_with_all_keys) if hash_keys else column


def sparse_column_with_integerized_feature(column_name, bucket_size, combiner="sum", dtype=tf.int64):
    """Returns a categorical feature column whose ids are integers modulo `bucket_size`."""
    return column_with_ids(
        tf.feature_column.categorical_column_with_identity(column_name, bucket_size),
        lambda features: tf.SparseTensor(features.indices, features.values % bucket_size, features.dense_shape),
    )


def input_from_feature_columns(
    columns_to_tensors, feature_columns, weight_collections=None, trainable=True, scope=None, cols_to_outs=None
):
    """Returns the concatenated dense features of all columns: a float tensor [batch, sum of widths].

    Args:
      columns_to_tensors: dict of the features by name.
      feature_columns: dense columns, in any order; the result has 1.15's order (`_make_sort_key`).
      cols_to_outs: a dict to which each column's own tensor is added.

    Graph: `<scope>/<column>_embedding/weights` for each embedding.
    """

    def renamed(getter, name, *arguments, **options):
        name = name.replace("/input_layer/", "/").replace("_embedding/embedding_weights", "_embedding/weights")
        return getter(name, *arguments, **options)

    outputs = {} if cols_to_outs is None else cols_to_outs
    with tf.variable_scope(scope, "input_from_feature_columns", custom_getter=renamed):
        tf.feature_column.input_layer(
            columns_to_tensors, feature_columns, weight_collections, trainable, cols_to_output_tensors=outputs
        )
        return tf.concat([outputs[column] for column in sorted(set(feature_columns), key=_make_sort_key)], 1)


# Classes of TensorFlow 2 have the alphabetical order of those of 1.15, except for these.
_SORTED_AS = {"_SharedEmbeddingColumn": "EmbeddingColumn", "VocabularyListCategoricalColumn": "Vocabulary"}


def _make_sort_key(part):
    """Makes the text by which 1.15 sorts a column: its class, then the classes and names of its parts."""
    if isinstance(part, str):
        return repr(part)
    if type(part) is tuple:  # the parts of a crossed column
        return "".join(_make_sort_key(each) for each in sorted(part, key=lambda column: column.name))
    kind = type(part).__name__
    return f"{_SORTED_AS.get(kind, kind)}({_make_sort_key(part[0])}"


def embed_sequence(
    ids, vocab_size=None, embed_dim=None, unique=False, initializer=None, regularizer=None,
    trainable=True, scope=None, reuse=None,
):  # fmt: skip
    """Returns embeddings of integer ids.

    Args:
      ids: int32 or int64 [batch, time].
      vocab_size, embed_dim: size of the embedding table; both None to use an existing table (`reuse=True`).
      unique: looks up each distinct id only once.

    Returns:
      float32 [batch, time, embed_dim].

    Graph: the variable `<scope>/embeddings`.
    """
    if not (reuse or (vocab_size and embed_dim)):
        raise ValueError("embed_sequence: vocab_size and embed_dim are needed for a new table; got "
                         f"{vocab_size} and {embed_dim}.")  # fmt: skip
    with tf.variable_scope(scope, "EmbedSequence", [ids], reuse=reuse):
        shape = [vocab_size, embed_dim] if vocab_size and embed_dim else None
        table = model_variable(
            "embeddings", shape=shape, initializer=initializer, regularizer=regularizer, trainable=trainable
        )
        if unique:
            different, places = tf.unique(tf.reshape(ids, [-1]))
            embedded = tf.gather(tf.nn.embedding_lookup(table, different), places)
            return tf.reshape(embedded, tf.concat([tf.shape(ids), [tf.shape(table)[1]]], 0))
        return tf.nn.embedding_lookup(table, ids)


def embedding_lookup_unique(params, ids, partition_strategy="mod", name=None):
    """Looks up each distinct id only once; returns embeddings of shape `ids.shape + params.shape[1:]`."""
    with tf.name_scope(name, "EmbeddingLookupUnique", [params, ids]):
        ids = tf.convert_to_tensor(ids)
        different, places = tf.unique(tf.reshape(ids, [-1]))
        rows = tf.gather(tf.nn.embedding_lookup(params, different, partition_strategy), places)
        found = tf.reshape(rows, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], 0))
        found.set_shape(ids.shape.concatenate(rows.shape[1:]))
        return found


def bow_encoder(
    ids, vocab_size, embed_dim, sparse_lookup=True, initializer=None, regularizer=None,
    trainable=True, scope=None, reuse=None,
):  # fmt: skip
    """Returns the mean of each document's word embeddings, float32 [batch, embed_dim], of word ids [batch, time].

    With `sparse_lookup`, ids of 0 are padding, which the mean leaves out; a document of nothing else gives row 0.
    """
    with tf.variable_scope(scope, "bow_encoder", [ids], reuse=reuse):
        table = model_variable(
            "embeddings", shape=[vocab_size, embed_dim],
            initializer=initializer, regularizer=regularizer, trainable=trainable,
        )  # fmt: skip
        if sparse_lookup and not isinstance(ids, tf.SparseTensor):
            ids = dense_to_sparse(ids)
        if isinstance(ids, tf.SparseTensor):
            return tf.nn.safe_embedding_lookup_sparse([table], ids, None, combiner="mean", default_id=0)
        return tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1)


patches.add_missing_names()
