"""`tf.contrib.layers`, `slim`, `nn` and `tf.layers`."""

from __future__ import annotations

# fmt: off
# A table: a line for each case, if it fits.
import os
import tempfile

import tensorflow as tf
from common import Run, case, ids, unknown, wrong, x

layers, slim = tf.contrib.layers, tf.contrib.slim


def image():
    return x(2, 4, 4, 3)


def with_updates(result):
    return result, tf.get_collection(tf.GraphKeys.UPDATE_OPS), [
        tf.identity(each) for each in tf.losses.get_regularization_losses()]


def both(name, *arguments, **options):
    """A case for `contrib.layers` and, where it is another function, one for `slim`."""
    key = options.pop("key", ",".join(sorted(options)))
    call = lambda module: with_updates(getattr(module, name)(  # noqa: E731
        *[each() if callable(each) else each for each in arguments], **options))
    case(f"layers.{name} slim.{name}: {key}", lambda: call(layers))
    if hasattr(slim, name):
        case(f"layers.{name} slim.{name}: the same", lambda: getattr(slim, name) is getattr(layers, name))


_norm = {"normalizer_fn": layers.batch_norm, "normalizer_params": {"is_training": True}}
_l2 = layers.l2_regularizer(0.01)
for _name in ("fully_connected", "linear", "relu", "relu6"):
    both(_name, lambda: x(2, 3), 4)
both("elu", lambda: x(2, 3), 4)
both("fully_connected", lambda: x(2, 3), 4, weights_regularizer=_l2, biases_initializer=None, scope="own")
both("fully_connected", lambda: x(2, 2, 3), 4, activation_fn=None, **_norm)
both("fully_connected", lambda: unknown(x(2, 3), None, 3), 4, activation_fn=tf.tanh, reuse=tf.AUTO_REUSE, scope="z",
     variables_collections=["own"], outputs_collections="outs", trainable=False)
for _name in ("conv2d", "convolution2d", "convolution"):
    both(_name, image, 2, [3, 3])
both("conv2d", image, 2, 3, stride=2, padding="VALID", rate=1, activation_fn=None, weights_regularizer=_l2)
both("conv2d", image, 2, [3, 2], rate=2, scope="own", key="rate", **_norm)
both("conv2d", lambda: unknown(image(), None, None, None, 3), 2, [1, 1], biases_initializer=None)
for _name in ("conv1d", "convolution1d"):
    both(_name, lambda: x(2, 5, 3), 2, 3)
for _name in ("conv3d", "convolution3d"):
    both(_name, lambda: x(1, 3, 3, 3, 2), 2, [2, 2, 2])
for _name in ("conv2d_transpose", "convolution2d_transpose"):
    both(_name, image, 2, [3, 3], stride=2)
for _name in ("conv3d_transpose", "convolution3d_transpose"):
    both(_name, lambda: x(1, 2, 2, 2, 2), 2, [2, 2, 2], stride=2, padding="VALID")
for _name in ("conv2d_in_plane", "convolution2d_in_plane"):
    both(_name, image, [1, 3])
for _name in ("separable_conv2d", "separable_convolution2d"):
    both(_name, image, 2, [3, 3], depth_multiplier=2)
both("separable_conv2d", image, None, [3, 3], depth_multiplier=1, stride=2, key="depthwise", **_norm)
for _name in ("avg_pool2d", "max_pool2d"):
    both(_name, image, [2, 2])
    both(_name, image, 3, stride=1, padding="SAME")
for _name in ("avg_pool3d", "max_pool3d"):
    both(_name, lambda: x(1, 4, 4, 4, 2), [2, 2, 2])
for _options in ({}, {"is_training": False}, {"scale": True, "decay": 0.5, "updates_collections": None, "fused": False},
                 {"center": False, "fused": True}, {"scope": "own", "zero_debias_moving_mean": True},
                 {"renorm": True, "fused": False}, {"activation_fn": tf.nn.relu, "epsilon": 0.1, "trainable": False},
                 {"batch_weights": tf.constant([0.5, 2.0]) if False else None, "reuse": None}):
    both("batch_norm", image, **_options)
both("batch_norm", lambda: x(4, 3), scale=True)
both("batch_norm", lambda: x(2, 3, 4, 4), data_format="NCHW", fused=False)
both("layer_norm", lambda: x(2, 3, 4))
both("layer_norm", lambda: x(2, 3, 4), begin_norm_axis=2, begin_params_axis=1, center=False, activation_fn=tf.tanh)
both("layer_norm", lambda: unknown(x(2, 3), None, 3), scale=False, scope="own")
both("instance_norm", image)
both("instance_norm", lambda: x(2, 3, 4, 4), data_format="NCHW", center=False)
both("group_norm", lambda: x(2, 4, 4, 4), groups=2)
both("group_norm", lambda: x(2, 4, 3), groups=2, channels_axis=-2, reduction_axes=(-1,), scale=False)
for _name in ("gdn", "GDN"):
    case(f"layers.{_name} slim.{_name}", lambda n=_name: layers.gdn(image()) if n == "gdn" else layers.GDN()(image()))
both("bias_add", lambda: x(2, 3), activation_fn=tf.nn.relu)
both("dropout", lambda: x(2, 3), is_training=False)
case("layers.dropout: training", lambda: layers.dropout(x(2, 3), 0.5, seed=3), values=False)
both("flatten", image)
both("flatten", lambda: unknown(image(), None, 4, 4, 3))
both("maxout", lambda: x(2, 6), 3)
both("one_hot_encoding", lambda: ids(2, 3), 4)
both("one_hot_encoding", lambda: ids(2), 4, on_value=2.0, off_value=-1.0)
both("repeat", lambda: x(2, 3), 2, lambda: layers.fully_connected, 4)
both("stack", lambda: x(2, 3), lambda: layers.fully_connected, [4, 2], scope="own")
both("softmax", lambda: x(2, 3, 4))
both("unit_norm", lambda: x(2, 3), 1)
both("spatial_softmax", image)
both("spatial_softmax", image, temperature=0.5, trainable=False)
both("legacy_fully_connected", lambda: x(2, 3), 4)
both("legacy_linear", lambda: x(2, 3), 4)
both("legacy_relu", lambda: x(2, 3), 4)
both("images_to_sequence", image)
both("sequence_to_images", lambda: x(4, 8, 3), 4)
both("dense_to_sparse", lambda: ids(2, 3, below=3))
both("scale_gradient", lambda: x(2, 3), 0.3)
both("conv2d", image, 4, 3, data_format="NHWC", weights_initializer=tf.ones_initializer())
both("conv2d", image, 64 / 16, 3, key="whole floats")
for _name in ("l1_regularizer", "l2_regularizer", "l1_l2_regularizer"):
    case(f"layers.{_name} slim.{_name}", lambda n=_name: getattr(layers, n)(0.3)(x(2, 3)))
    wrong(f"layers.{_name} slim.{_name}", lambda n=_name: getattr(layers, n)(-1.0))
    wrong(f"layers.{_name} slim.{_name}: whole", lambda n=_name: getattr(layers, n)(1))
case("layers.sum_regularizer slim.sum_regularizer", lambda: layers.sum_regularizer([_l2,
    layers.l1_regularizer(0.1)])(x(2, 3)))
case("layers.apply_regularization slim.apply_regularization", lambda: [layers.apply_regularization(_l2, [x(2), x(3)])])
wrong("layers.apply_regularization", lambda: layers.apply_regularization(_l2, []))
for _name, _options in (("xavier_initializer", {}), ("xavier_initializer", {"uniform": False}),
                        ("xavier_initializer_conv2d", {}), ("variance_scaling_initializer", {}),
                        ("variance_scaling_initializer", {"uniform": True, "mode": "FAN_AVG", "factor": 1.0})):
    case(f"layers.{_name} slim.{_name}: {sorted(_options)}", lambda n=_name, o=_options: facts(
        getattr(layers, n)(seed=3, **o)([40, 60])))


def facts(tensor):
    """Mean, deviation and bound of a random tensor, to one digit."""
    return [tf.round(10 * tf.reduce_mean(tensor)), tf.round(100 * tf.sqrt(tf.reduce_mean(tensor**2))),
            tf.round(10 * tf.reduce_max(tensor))]


for _name in ("fully_connected", "conv2d", "batch_norm", "layer_norm", "dropout", "max_pool2d", "flatten"):
    case("slim.arg_scope framework.arg_scope: " + _name, lambda n=_name: slim.has_arg_scope(getattr(slim, n)))
wrong("layers.conv2d", lambda: layers.conv2d(x(2, 3), 2, 3))
wrong("layers.conv2d: format", lambda: layers.conv2d(image(), 2, 3, data_format="x"))
wrong("layers.fully_connected", lambda: layers.fully_connected(x(2, 3), "x"))
wrong("layers.batch_norm", lambda: layers.batch_norm(image(), data_format="x"))
wrong("layers.layer_norm", lambda: layers.layer_norm(tf.placeholder(tf.float32)))
wrong("layers.flatten", lambda: layers.flatten(x(3)))
wrong("layers.max_pool2d", lambda: layers.max_pool2d(image(), 2, data_format="x"))
wrong("layers.instance_norm", lambda: layers.instance_norm(x(3)))
wrong("layers.group_norm", lambda: layers.group_norm(image(), groups=7))
wrong("layers.unit_norm", lambda: layers.unit_norm(x(2, 3), 2))
wrong("layers.embed_sequence", lambda: layers.embed_sequence(ids(2, 3)))
wrong("layers.maxout", lambda: layers.maxout(x(2, 5), 3))

# Embeddings.
both("embed_sequence", lambda: ids(2, 3), 4, 5)
both("embed_sequence", lambda: ids(2, 3), 4, 5, unique=True, scope="own", regularizer=_l2)
case("layers.bow_encoder", lambda: layers.bow_encoder(ids(2, 3), 4, 5))
case("layers.bow_encoder: padding", lambda: layers.bow_encoder(tf.constant([[0, 0], [1, 2]]), 4, 5))
case("layers.embed_sequence layers.bow_encoder: initializer", lambda: [
    encode(ids(2, 3), 4, 5, scope=f"own{number}")
    for number, encode in enumerate((layers.embed_sequence, layers.bow_encoder))
    for _ in [tf.get_variable_scope().set_initializer(tf.constant_initializer(0.25))]])
case("layers.bow_encoder: dense", lambda: layers.bow_encoder(ids(2, 3), 4, 5, sparse_lookup=False, scope="own"))
case("layers.bow_encoder: sparse", lambda: layers.bow_encoder(layers.dense_to_sparse(ids(2, 3)), 4, 5))
case("layers.embedding_lookup_unique", lambda: layers.embedding_lookup_unique(x(4, 3), ids(2, 3)))
case("layers.embedding_lookup_unique: parts", lambda: layers.embedding_lookup_unique([x(2, 3), x(2, 3)], ids(2, 3)))
for _options in ({}, {"combiner": "sum", "default_id": 1}, {"combiner": "sqrtn", "max_norm": 0.5}):
    case(f"layers.safe_embedding_lookup_sparse: {sorted(_options)}",
         lambda o=_options: layers.safe_embedding_lookup_sparse(
             [x(2, 3), x(2, 3)], tf.SparseTensor([[0, 0], [0, 1], [2, 0]], tf.constant([1, 3, -1], tf.int64), [4, 2]),
             **o))

# Reversible blocks and recomputed gradients.
case("layers.rev_block slim.rev_block", lambda: layers.rev_block(
    x(2, 3), x(2, 3, seed=1), inside("f"), inside("g"), num_layers=1))
case("layers.RevBlock slim.RevBlock", lambda: layers.RevBlock(inside("f"), inside("g"), num_layers=2).forward(
    x(2, 3), x(2, 3, seed=1)))
case("layers.recompute_grad slim.recompute_grad", lambda: recomputed())


def recomputed():
    with tf.variable_scope("", use_resource=True):
        return layers.recompute_grad(inside("f"))(x(2, 3))


def inside(name):
    return lambda tensor: tf.layers.dense(tensor, 3, name=name, activation=tf.tanh, reuse=tf.AUTO_REUSE)


# Training.
def optimized(**options):
    w = tf.get_variable("w", [3])
    loss = tf.reduce_sum(tf.square(w))
    tf.train.create_global_step()
    options.setdefault("learning_rate", 0.1)
    return layers.optimize_loss(loss, tf.train.get_global_step(), **options).op, 3, tf.identity(w)


for _name in ("SGD", "Momentum", "Adam", "RMSProp", "Ftrl", "Adagrad"):
    _options = {"optimizer": _name} if _name != "Momentum" else {"optimizer": lambda rate: tf.train.MomentumOptimizer(
        rate, 0.9)}
    case("layers.optimize_loss slim.optimize_loss layers.OPTIMIZER_CLS_NAMES: " + _name,
         lambda o=_options: Run(*optimized(**o)))
case("layers.optimize_loss: decay", lambda: Run(*optimized(
    optimizer="SGD", clip_gradients=0.5, learning_rate_decay_fn=lambda rate, step: tf.train.exponential_decay(
        rate, step, 2, 0.5), gradient_multipliers=None, name="own")))
case("layers.OPTIMIZER_SUMMARIES slim.OPTIMIZER_SUMMARIES", lambda: layers.OPTIMIZER_SUMMARIES)
case("layers.OPTIMIZER_CLS_NAMES slim.OPTIMIZER_CLS_NAMES", lambda: sorted(layers.OPTIMIZER_CLS_NAMES))
wrong("layers.optimize_loss", lambda: optimized(optimizer="x"))
wrong("layers.optimize_loss: summaries", lambda: optimized(optimizer="SGD", summaries=["x"]))


# Summaries: how many, and their tags.
def tags(call):
    call()
    return sorted(op.op.name for op in tf.get_collection(tf.GraphKeys.SUMMARIES))


case("layers.summarize_tensor slim.summarize_tensor", lambda: tags(lambda: layers.summarize_tensor(x(2, 3), "t")))
case("layers.summarize_tensors slim.summarize_tensors", lambda: tags(lambda: layers.summarize_tensors([x(2), x(3)])))
case("layers.summarize_activation slim.summarize_activation",
     lambda: tags(lambda: layers.summarize_activation(tf.nn.relu(x(2, 3)))))
for _name in ("summarize_activations", "summarize_collection"):
    case(f"layers.{_name} slim.{_name}", lambda n=_name: tags(lambda: (
        tf.add_to_collection(tf.GraphKeys.ACTIVATIONS, tf.nn.relu(x(2, 3))),
        getattr(layers, n)(*([tf.GraphKeys.ACTIVATIONS] if n == "summarize_collection" else [])))))

case("slim.summarize_variables slim.summarize_weights slim.summarize_biases", lambda: [tags(lambda n=each: (
    layers.fully_connected(x(2, 3), 4), getattr(slim, n)())) for each in (
        "summarize_variables", "summarize_weights", "summarize_biases")])
case("slim.pool", lambda: [slim.pool(image(), [2, 2], "MAX", stride=2), slim.pool(image(), 2, "AVG", padding="SAME")])
case("slim.adaptive_clipping_fn", lambda: slim.adaptive_clipping_fn(decay=0.9, epsilon=0.1)(
    [(x(2, 3), tf.get_variable("w", [2, 3]))])[0][0])
case("slim.arg_scope_func_key", lambda: "fully_connected" in str(slim.arg_scope_func_key(slim.fully_connected)))


# Feature columns.
def features():
    def sparse(places, values, shape):
        return tf.SparseTensor(places, values, shape)

    return {"price": tf.constant([[1.0], [5.0]]), "pair": x(2, 2), "weight": sparse(
        [[0, 0], [1, 0], [1, 1]], [0.5, 1.5, 2.0], [2, 2]), "word": sparse(
            [[0, 0], [1, 0], [1, 1]], ["a", "b", "c"], [2, 2]), "other": sparse(
                [[0, 0], [1, 0]], ["x", "y"], [2, 1]), "id": sparse(
                    [[0, 0], [1, 0]], tf.constant([1, 3], tf.int64), [2, 1])}


def word():
    return layers.sparse_column_with_keys("word", ["a", "b"])


def words_of_a_file():
    path = os.path.join(tempfile.mkdtemp(), "words")
    with open(path, "w") as file:
        file.write("b\na\n")
    return layers.sparse_column_with_vocabulary_file("word", path, vocab_size=2)


for _name, _columns in (
    ("real_valued_column", lambda: [layers.real_valued_column("price", normalizer=lambda each: each * 2),
                                    layers.real_valued_column("pair", 2)]),
    ("bucketized_column", lambda: [layers.bucketized_column(layers.real_valued_column("price"), [2.0, 4.0])]),
    ("sparse_column_with_keys layers.one_hot_column", lambda: [layers.one_hot_column(word())]),
    ("sparse_column_with_vocabulary_file", lambda: [layers.one_hot_column(words_of_a_file())]),
    ("sparse_column_with_hash_bucket layers.embedding_column", lambda: [layers.embedding_column(
        layers.sparse_column_with_hash_bucket("word", 5), 3)]),
    ("sparse_column_with_integerized_feature layers.input_from_feature_columns", lambda: [layers.embedding_column(
        layers.sparse_column_with_integerized_feature("id", 5), 3, combiner="sum")]),
    ("sparse_column_with_hash_bucket: keys", lambda: [layers.one_hot_column(
        layers.sparse_column_with_hash_bucket("word", 5, hash_keys=[[1, 2], [3, 4]]))]),
    ("sparse_column_with_hash_bucket: integers with keys", lambda: [layers.embedding_column(
        layers.sparse_column_with_hash_bucket("id", 5, dtype=tf.int64, hash_keys=[[1, 2], [3, 4]]), 3)]),
    ("sparse_column_with_integerized_feature: ids out of range", lambda: [layers.one_hot_column(
        layers.sparse_column_with_integerized_feature("id", 2))]),
    ("weighted_sparse_column", lambda: [layers.embedding_column(layers.weighted_sparse_column(
        layers.sparse_column_with_hash_bucket("word", 5), "weight"), 3)]),
    ("crossed_column", lambda: [layers.embedding_column(layers.crossed_column(
        [word(), layers.sparse_column_with_keys("other", ["x", "y"])], 7), 3)]),
    ("shared_embedding_columns", lambda: layers.shared_embedding_columns(
        [word(), layers.sparse_column_with_keys("other", ["a", "b"])], 3)),
):
    case("layers." + _name, lambda c=_columns: layers.input_from_feature_columns(features(), c()))
case("layers.input_from_feature_columns: order", lambda: ordered_columns())
case("layers.create_feature_spec_for_parsing", lambda: [[key, type(each).__name__, each.dtype] for key, each in sorted(
    layers.create_feature_spec_for_parsing([layers.real_valued_column("price"), word()]).items())])


def ordered_columns():
    """Columns of all classes; by their names alone, they would have another order."""
    other = layers.sparse_column_with_keys("other", ["x", "y"])
    columns = [layers.real_valued_column("pair", 2), layers.one_hot_column(other), layers.bucketized_column(
        layers.real_valued_column("price"), [2.0]), layers.embedding_column(
            layers.sparse_column_with_hash_bucket("word", 5), 3), layers.embedding_column(
                layers.sparse_column_with_integerized_feature("id", 5), 2), layers.one_hot_column(words_of_a_file())]
    outputs = {}
    found = layers.input_from_feature_columns(features(), columns, cols_to_outs=outputs)
    return found, [outputs[each] for each in columns]


# tf.nn's neighbours.
nn = tf.contrib.nn
case("nn.alpha_dropout", lambda: nn.alpha_dropout(x(2, 3), 1.0))
case("nn.alpha_dropout: drops", lambda: [nn.alpha_dropout(x(20, 3, dtype=dtype), 0.3, seed=1)
                                         for dtype in (tf.float32, tf.float64, tf.float16)])
case("nn.alpha_dropout: of whole rows", lambda: nn.alpha_dropout(x(20, 3), tf.constant(0.7), tf.constant([20, 1]), 2))
case("nn.scaled_softplus", lambda: [nn.scaled_softplus(x(2, 3), 0.5), nn.scaled_softplus(x(2, 3), x(3, low=0.5,
    high=1), 0.7)])
for _name, _labels in (("softmax", lambda: tf.nn.softmax(x(2, 3, seed=1))), ("sparse_softmax", lambda: ids(2, below=3)),
                       ("sigmoid", lambda: x(2, 3, low=0, high=1))):
    _name = f"deprecated_flipped_{_name}_cross_entropy_with_logits"
    case("nn." + _name, lambda n=_name, make=_labels: getattr(nn, n)(x(2, 3), make()))
case("nn.conv1d_transpose", lambda: nn.conv1d_transpose(x(2, 3, 2), x(3, 4, 2), [2, 6, 4], 2))

# tf.layers.
for _name, _options in (
    ("dense", {"units": 4}), ("dense", {"units": 4, "use_bias": False, "activation": tf.tanh, "name": "own"}),
    ("dense", {"units": 4, "kernel_regularizer": _l2, "bias_initializer": tf.ones_initializer()}), ("flatten", {}),
    ("conv2d", {"filters": 2, "kernel_size": 3}), ("conv2d", {"filters": 2, "kernel_size": [2, 3], "strides": (2, 1),
                                                             "padding": "same", "dilation_rate": 1}),
    ("conv2d_transpose", {"filters": 2, "kernel_size": 3, "strides": 2, "padding": "same"}),
    ("separable_conv2d", {"filters": 2, "kernel_size": 3}), ("average_pooling2d", {"pool_size": 2, "strides": 2}),
    ("max_pooling2d", {"pool_size": 2, "strides": 1, "padding": "same"}), ("batch_normalization", {}),
    ("batch_normalization", {"training": True, "momentum": 0.5}), ("batch_normalization", {
        "training": True, "fused": False, "renorm": True, "name": "own"}), ("dropout", {"rate": 0.5}),
):
    case(f"layers.{_name}: tf.layers {sorted(_options)}", lambda n=_name, o=_options: with_updates(
        getattr(tf.layers, n)(image(), **o)))
for _name, _options in (
    ("conv1d", {"filters": 2, "kernel_size": 3}), ("separable_conv1d", {"filters": 2, "kernel_size": 3}),
    ("average_pooling1d", {"pool_size": 2, "strides": 2}), ("max_pooling1d", {"pool_size": 2, "strides": 1}),
):
    case(f"layers.{_name}: tf.layers", lambda n=_name, o=_options: getattr(tf.layers, n)(x(2, 5, 3), **o))
for _name, _options in (
    ("conv3d", {"filters": 2, "kernel_size": 2}), ("conv3d_transpose", {"filters": 2, "kernel_size": 2}),
    ("average_pooling3d", {"pool_size": 2, "strides": 2}), ("max_pooling3d", {"pool_size": 2, "strides": 1}),
):
    case(f"layers.{_name}: tf.layers", lambda n=_name, o=_options: getattr(tf.layers, n)(x(1, 3, 3, 3, 2), **o))
case("layers.dense: whole floats", lambda: tf.layers.dense(x(2, 3), 8 / 2))
case("reshape: whole floats", lambda: [tf.get_variable("v", [3, 8 / 2]), tf.TensorShape([3, 8 / 2]),
                                        tf.placeholder_with_default(x(3, 4), [3, 8 / 2])])
case("layers.Dense: reuse", lambda: [tf.layers.dense(x(2, 3), 4, name="a"), tf.layers.dense(x(2, 3), 4, name="a",
    reuse=True)])
wrong("layers.dense", lambda: tf.layers.dense(tf.placeholder(tf.float32), 4))
wrong("layers.dense: twice", lambda: [tf.layers.dense(x(2, 3), 4, name="a") for _ in range(2)])
