"""`tf.contrib.image`, `lookup`, `training`, `signal`, `data`, `predictor` and smaller modules."""

from __future__ import annotations

# fmt: off
# A table: a line for each case, if it fits.
import os
import tempfile

import numpy as np
import tensorflow as tf
from common import Run, case, ids, names, wrong, x

image, lookup, data, util = tf.contrib.image, tf.contrib.lookup, tf.contrib.data, tf.contrib.util
training, signal = tf.contrib.training, tf.contrib.signal


# Images.
def picture():
    return x(1, 5, 4, 2)


for _options in ({}, {"interpolation": "BILINEAR"}):
    case(f"image.transform: {len(_options)}", lambda o=_options: image.transform(
        picture(), [1.1, 0.2, -0.4, 0.1, 0.9, 0.3, 0.01, 0.02], output_shape=[4, 6], **o))
    case(f"image.rotate: {len(_options)}", lambda o=_options: image.rotate(picture(), 0.5, **o))
    case(f"image.translate: {len(_options)}", lambda o=_options: image.translate(x(5, 4), [1.0, -0.5], **o))
case("image.rotate: whole numbers", lambda: image.rotate(ids(2, 4, 4, 1, below=255, dtype=tf.uint8), [0.3, -0.3]))
case("image.angles_to_projective_transforms", lambda: image.angles_to_projective_transforms([0.3, 0.7], 5.0, 4.0))
case("image.translations_to_projective_transforms", lambda: image.translations_to_projective_transforms([[1.0, 2.0]]))
case("image.compose_transforms", lambda: image.compose_transforms(*[image.angles_to_projective_transforms(
    each, 5.0, 4.0) for each in (0.3, 0.4)]))
case("image.flat_transforms_to_matrices image.matrices_to_flat_transforms", lambda: image.matrices_to_flat_transforms(
    image.flat_transforms_to_matrices(x(2, 8)) * 2.0))
case("image.bipartite_match", lambda: image.bipartite_match(x(4, 3, low=0, high=1), -1))
case("image.bipartite_match: rows", lambda: image.bipartite_match(x(4, 3, low=0, high=1), [2], top_k=1))
case("image.connected_components", lambda: image.connected_components(ids(5, 6, below=2) > 0))
case("image.connected_components: several", lambda: image.connected_components(ids(2, 4, 5, below=3)))
case("image.dense_image_warp", lambda: image.dense_image_warp(picture(), x(1, 5, 4, 2, seed=1)))
case("image.interpolate_spline", lambda: image.interpolate_spline(x(1, 5, 2), x(1, 5, 1), x(1, 3, 2, seed=2), 2, 0.1))
case("image.sparse_image_warp", lambda: image.sparse_image_warp(picture(), x(1, 4, 2, low=0, high=4), x(
    1, 4, 2, low=0, high=4, seed=1), regularization_weight=0.5))
wrong("image.transform", lambda: image.transform(x(3), [1.0, 0, 0, 0, 1, 0, 0, 0]))
wrong("image.compose_transforms", lambda: image.compose_transforms())
case("resampler.resampler", lambda: tf.contrib.resampler.resampler(picture(), x(1, 3, 2, low=-1, high=4)))

# Tables.
_WORDS = ["a", "b", "c"]
_ASKED = lambda: tf.constant(["b", "x", "c"])  # noqa: E731


def vocabulary():
    path = os.path.join(tempfile.mkdtemp(), "words")
    with open(path, "w") as file:
        file.write("a\nb\nc\n")
    return path


for _name, _make in (
    ("index_table_from_tensor", lambda: lookup.index_table_from_tensor(_WORDS)),
    ("index_table_from_tensor lookup.StrongHashSpec", lambda: lookup.index_table_from_tensor(_WORDS, 2,
        hasher_spec=lookup.StrongHashSpec([1, 2]))),
    ("index_table_from_file", lambda: lookup.index_table_from_file(vocabulary(), default_value=-5)),
    ("index_table_from_file", lambda: lookup.index_table_from_file(vocabulary(), 3)),
    ("string_to_index_table_from_tensor", lambda: lookup.string_to_index_table_from_tensor(_WORDS, 4)),
    ("string_to_index_table_from_file", lambda: lookup.string_to_index_table_from_file(vocabulary())),
    ("HashTable lookup.KeyValueTensorInitializer", lambda: lookup.HashTable(lookup.KeyValueTensorInitializer(
        _WORDS, tf.constant([5, 6, 7], tf.int64)), -1)),
    ("HashTable lookup.TextFileInitializer lookup.TextFileIndex", lambda: lookup.HashTable(lookup.TextFileInitializer(
        vocabulary(), tf.string, lookup.TextFileIndex.WHOLE_LINE, tf.int64, lookup.TextFileIndex.LINE_NUMBER), -1)),
    ("TextFileIdTableInitializer", lambda: lookup.HashTable(lookup.TextFileIdTableInitializer(vocabulary()), -1)),
    ("IdTableWithHashBuckets lookup.FastHashSpec lookup.HasherSpec", lambda: lookup.IdTableWithHashBuckets(
        lookup.HashTable(lookup.TextFileIdTableInitializer(vocabulary()), -1), 3)),
):
    case("lookup." + _name, lambda m=_make: asked(m()))
for _name, _make in (
    ("index_to_string_table_from_tensor", lambda: lookup.index_to_string_table_from_tensor(_WORDS, "?")),
    ("index_to_string_table_from_file", lambda: lookup.index_to_string_table_from_file(vocabulary())),
    ("TextFileStringTableInitializer", lambda: lookup.HashTable(
        lookup.TextFileStringTableInitializer(vocabulary()), "?")),
):
    case("lookup." + _name, lambda m=_make: m().lookup(tf.constant([1, 5, 0], tf.int64)))
case("lookup.index_to_string", lambda: lookup.index_to_string(tf.constant([1, 9], tf.int64), _WORDS))
case("lookup.string_to_index", lambda: lookup.string_to_index(_ASKED(), _WORDS))
case("lookup.LookupInterface lookup.InitializableLookupTableBase lookup.TableInitializerBase", lambda: [
    issubclass(lookup.HashTable, each) for each in (lookup.LookupInterface, lookup.InitializableLookupTableBase)] + [
        issubclass(lookup.KeyValueTensorInitializer, lookup.TableInitializerBase)])
for _name, _options in (("MutableHashTable", {}), ("MutableDenseHashTable", {"empty_key": -1, "deleted_key": -2})):
    case("lookup." + _name, lambda n=_name, o=_options: mutable(getattr(lookup, n)(tf.int64, tf.float32, -1.0, **o)))
wrong("lookup.index_table_from_tensor", lambda: lookup.index_table_from_tensor(None))
wrong("lookup.index_table_from_file", lambda: lookup.index_table_from_file(""))
wrong("lookup.index_to_string_table_from_tensor", lambda: lookup.index_to_string_table_from_tensor(None))


def asked(table):
    return table.lookup(_ASKED()), table.size(), table.key_dtype.name, table.value_dtype.name


def mutable(table):
    with tf.control_dependencies([table.insert(tf.constant([3, 4], tf.int64), [1.5, 2.5])]):
        return table.lookup(tf.constant([4, 7], tf.int64)), table.size()


case("sparsemax.sparsemax sparsemax.sparsemax_loss", lambda: [
    tf.contrib.sparsemax.sparsemax(x(3, 5)), tf.contrib.sparsemax.sparsemax_loss(x(3, 5), (
        tf.contrib.sparsemax.sparsemax(x(3, 5))), tf.one_hot([1, 0, 4], 5))])


# Hyperparameters and placement.
def parameters(text=""):
    made = training.HParams(rate=0.1, steps=10, name="x", flag=True, layers=[1, 2])
    return made.parse(text)


for _text in ("rate=1e-3,steps=5,flag=false,layers=[3,4,5],name=a-b", "rate=2", "layers=[]", "flag=7"):
    case("training.HParams: " + _text, lambda t=_text: sorted(parameters(t).values().items()))
for _text in ("unknown=1", "rate=x", "rate=1,rate=2", "steps=[1]", "layers=3", "steps=1.5", "steps"):
    wrong("training.HParams: " + _text, lambda t=_text: parameters(t))
case("training.HParams: methods", lambda: [
    parameters().to_json(sort_keys=True), parameters().get("rate"), parameters().get("other", 3),
        "rate" in parameters(),
    parameters().override_from_dict({"steps": 7}).steps, parameters().parse_json('{"rate": 2}').rate,
    parameters("steps=3").set_hparam("steps", 4)])
wrong("training.HParams: set", lambda: parameters().set_hparam("steps", 1.5))
wrong("training.HParams: taken", lambda: parameters().add_hparam("rate", 1))
case("training.HParams: text", lambda: [str(parameters()), repr(parameters()), str(
    parameters(str(parameters("rate=3"))))])
case("training.parse_values", lambda: training.parse_values("a=1,b=[2,3],c[1]=5", {"a": float, "b": int, "c": int}))
case("training.RandomStrategy", lambda: [training.RandomStrategy(3, 5)(tf.constant(1).op) for _ in range(3)])
case("training.GreedyLoadBalancingStrategy training.byte_size_load_fn", lambda: placed())
wrong("training.byte_size_load_fn", lambda: training.byte_size_load_fn(tf.placeholder(tf.float32).op))
case("training.get_or_create_eval_step", lambda: training.get_or_create_eval_step())
case("training.evaluate_once training.train training.checkpoints_iterator training.StopAfterNEvalsHook "
     "training.wait_for_new_checkpoint training.evaluate_repeatedly training.SummaryAtEndHook", lambda: evaluated())


def placed():
    strategy = training.GreedyLoadBalancingStrategy(2, training.byte_size_load_fn)
    return [strategy(tf.zeros(shape).op) for shape in ([8], [2], [3], [9], [1])]


def evaluated():
    folder = tempfile.mkdtemp()
    with tf.Graph().as_default():
        w = tf.get_variable("w", initializer=[1.0, 2.0])
        op = training.create_train_op(tf.reduce_sum(w * w), tf.train.GradientDescentOptimizer(0.1))
        training.train(op, folder, hooks=[tf.train.StopAtStepHook(num_steps=3)], save_summaries_steps=None)
    with tf.Graph().as_default():
        w = tf.get_variable("w", [2])
        tf.train.get_or_create_global_step()
        mean, update = tf.metrics.mean(w)
        options = {"eval_ops": [update], "final_ops": [mean, tf.train.get_global_step()]}
        path = next(training.checkpoints_iterator(folder, timeout=0))
        first = training.evaluate_once(path, hooks=[training.StopAfterNEvalsHook(2)], **options)
    with tf.Graph().as_default():
        w = tf.get_variable("w", [2])
        tf.train.get_or_create_global_step()
        tf.summary.scalar("s", w[0])
        hooks = [training.StopAfterNEvalsHook(1), training.SummaryAtEndHook(folder)]
        again = training.evaluate_repeatedly(folder, final_ops=w, eval_ops=[w[0]], hooks=hooks,
            max_number_of_evaluations=1)
    return first, again, training.wait_for_new_checkpoint(folder, None, 0, 0) == path


# Signals, random numbers, small things.
case("signal.frame", lambda: [signal.frame(x(2, 7), 3, 2, pad_end=True, pad_value=1), signal.frame(x(7), 3, 2)])
case("signal.hamming_window signal.hann_window", lambda: [signal.hamming_window(5), signal.hann_window(6,
    periodic=False)])
case("signal.stft signal.inverse_stft signal.inverse_stft_window_fn", lambda: [tf.abs(signal.stft(
    x(16), 8, 4)), signal.inverse_stft(signal.stft(x(16), 8, 4), 8, 4, window_fn=signal.inverse_stft_window_fn(4))])
case("signal.overlap_and_add", lambda: signal.overlap_and_add(x(3, 4), 2))
case("signal.linear_to_mel_weight_matrix", lambda: signal.linear_to_mel_weight_matrix(4, 9))
case("signal.mfccs_from_log_mel_spectrograms", lambda: signal.mfccs_from_log_mel_spectrograms(x(2, 4)))
stateless = tf.contrib.stateless
case("stateless.stateless_random_normal stateless.stateless_random_uniform stateless.stateless_truncated_normal",
    lambda: [
    stateless.stateless_random_normal([4], [1, 2]), stateless.stateless_random_uniform([4], [1, 2]),
    stateless.stateless_truncated_normal([4], [1, 2], 1.0, 2.0)])
case("stateless.stateless_multinomial", lambda: stateless.stateless_multinomial(x(2, 3), 4, [1, 2]))
case("staging.StagingArea", lambda: staged())
case("util.constant_value util.make_ndarray util.make_tensor_proto", lambda: [
    util.constant_value(tf.constant([1, 2]) + 0), util.constant_value(tf.constant([1, 2])),
    util.make_ndarray(util.make_tensor_proto([[1.5, 2.5]]))])
case("util.ops_used_by_graph_def util.stripped_op_list_for_graph", lambda: [tf.tanh(tf.constant(1.0)) is None, sorted(
    util.ops_used_by_graph_def(tf.get_default_graph().as_graph_def())), names(util.stripped_op_list_for_graph(
        tf.get_default_graph().as_graph_def()).op)])
case("checkpoint.Checkpointable checkpoint.List checkpoint.Mapping checkpoint.NoDependency", lambda: tracked())
for _name in ("create_training_graph", "experimental_create_training_graph", "create_eval_graph",
              "experimental_create_eval_graph"):
    case("quantize." + _name, lambda n=_name: quantized(n))
    wrong("quantize." + _name, lambda n=_name: quantized(n, rate=0.1))
case("quantize.experimental_create_training_graph: symmetric", lambda: quantized(
    "experimental_create_training_graph", symmetric=True, weight_bits=4))


def staged():
    area = tf.contrib.staging.StagingArea([tf.float32], [[2]])
    put = area.put([tf.constant([1.0, 2.0])])
    with tf.control_dependencies([put]):
        return area.get()


def tracked():
    made = tf.contrib.checkpoint.Checkpointable()
    made.items = tf.contrib.checkpoint.List([tf.Variable([1.0, 2.0], name="v")])
    made.named = tf.contrib.checkpoint.Mapping(a=tf.Variable(3.0, name="u"))
    made.other = tf.contrib.checkpoint.NoDependency([1])
    checkpoint = tf.train.Checkpoint(root=made)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        path = checkpoint.save(os.path.join(tempfile.mkdtemp(), "c"), session)
    return sorted(name for name, _ in tf.train.list_variables(path))


def quantized(name, rate=None, **options):
    net = tf.contrib.layers.conv2d(x(1, 4, 4, 2), 3, [3, 3], scope="c", normalizer_fn=None)
    net = tf.contrib.layers.fully_connected(tf.contrib.layers.flatten(net), 2, scope="f", activation_fn=None)
    loss = tf.reduce_sum(tf.square(net))
    if rate:
        tf.train.MomentumOptimizer(rate, 0.9).minimize(loss)
    getattr(tf.contrib.quantize, name)(tf.get_default_graph(), **options)
    return Run(loss, 3, [net, [op.type for op in tf.get_default_graph(
        ).get_operations() if op.type.startswith("Fake")]])


# Data.
def elements(dataset, count=8):
    following = tf.data.make_one_shot_iterator(dataset.repeat(2)).get_next()
    return Run(following, count, [])


def count():
    return tf.data.Dataset.range(6)


def ragged():
    return count().map(lambda i: tf.fill([i % 3 + 1], i))


for _name, _make, _count in (
    ("batch_and_drop_remainder", lambda: count().apply(data.batch_and_drop_remainder(4)), 2),
    ("padded_batch_and_drop_remainder", lambda: ragged().apply(data.padded_batch_and_drop_remainder(4, [None])), 2),
    ("map_and_batch", lambda: count().apply(data.map_and_batch(lambda i: i * 2, 3)), 4),
    ("assert_element_shape", lambda: count().apply(data.assert_element_shape(tf.TensorShape([]))), 6),
    ("bucket_by_sequence_length", lambda: ragged().apply(data.bucket_by_sequence_length(tf.size, [2, 3], [2, 2, 2])),
        3),
    ("group_by_window", lambda: count().apply(data.group_by_window(lambda i: i % 2, lambda _, w: w.batch(4), 4)), 2),
    ("group_by_reducer data.Reducer", lambda: count().apply(data.group_by_reducer(lambda i: i % 2, data.Reducer(
        lambda _: np.int64(0), lambda a, b: a + b, lambda a: a))), 2),
    ("sliding_window_batch", lambda: count().apply(data.sliding_window_batch(3, window_shift=2, window_stride=1)), 2),
    ("sliding_window_batch", lambda: count().apply(data.sliding_window_batch(2, 1, window_stride=3)), 3),
    ("sliding_window_batch", lambda: count().apply(data.sliding_window_batch(3)), 2),
    ("enumerate_dataset", lambda: count().apply(data.enumerate_dataset(5)), 6),
    ("parallel_interleave", lambda: count().apply(data.parallel_interleave(
        lambda i: tf.data.Dataset.from_tensors(i).repeat(2), 2)), 12),
    ("sloppy_interleave", lambda: count().apply(data.sloppy_interleave(
        lambda i: tf.data.Dataset.from_tensors(i).repeat(2), 1)), 12),
    ("scan", lambda: count().apply(data.scan(np.int64(0), lambda a, b: (a + b, a))), 6),
    ("unbatch", lambda: count().batch(2).apply(data.unbatch()), 6), ("unique",
        lambda: count().map(lambda i: i // 2).apply(
        data.unique()), 3), ("ignore_errors", lambda: count().map(lambda i: tf.check_numerics(
            1.0 / tf.cast(i, tf.float32), "x")).apply(data.ignore_errors()), 5),
    ("dense_to_sparse_batch", lambda: ragged().apply(data.dense_to_sparse_batch(3, [4])), 2),
    ("choose_from_datasets", lambda: data.choose_from_datasets([count(), count().map(lambda i: i + 10)], count().map(
        lambda i: i % 2)), 6), ("sample_from_datasets", lambda: data.sample_from_datasets([count()], [1.0]), 6),
    ("Counter", lambda: data.Counter(3, 2).take(4), 4), ("copy_to_device", lambda: count().apply(
        data.copy_to_device("/cpu:0")), 6), ("parse_example_dataset", lambda: tf.data.Dataset.from_tensors([
            tf.train.Example(features=tf.train.Features(feature={"a": tf.train.Feature(float_list=tf.train.FloatList(
                value=[1.5, 2.5]))})).SerializeToString()]).apply(data.parse_example_dataset(
                    {"a": tf.FixedLenFeature([2], tf.float32)})), 1),
):
    case(" ".join(each if "." in each else "data." + each for each in _name.split()),
        lambda m=_make, c=_count: elements(m(), c))
case("data.get_single_element data.reduce_dataset", lambda: [
    data.get_single_element(count().take(1)), data.reduce_dataset(count(), data.Reducer(
        lambda _: np.int64(0), lambda a, b: a + b, lambda a: a * 2))])
case("data.get_next_as_optional data.Optional", lambda: data.get_next_as_optional(
    tf.data.make_one_shot_iterator(count())).get_value())
case("data.CsvDataset", lambda: elements(data.CsvDataset(vocabulary(), [tf.string]), 4))
case("data.shuffle_and_repeat data.rejection_resample data.RandomDataset", lambda: [
    tf.data.make_one_shot_iterator(each).get_next() for each in (
        count().apply(data.shuffle_and_repeat(3, 2)), data.RandomDataset(3))], values=False)
case("data.AUTOTUNE", lambda: data.AUTOTUNE)


# Saved models.
def predicted(**options):
    folder = os.path.join(tempfile.mkdtemp(), "m")
    with tf.Graph().as_default(), tf.Session() as session:
        given = tf.placeholder(tf.float32, [2], name="x")
        doubled = tf.multiply(given, tf.get_variable("w", initializer=[3.0, 4.0]), name="y")
        session.run(tf.global_variables_initializer())
        tf.saved_model.simple_save(session, folder, {"x": given}, {"y": doubled})
    run = tf.contrib.predictor.from_saved_model(folder, **options)
    return run({list(options.get("input_names", {"x": 0}))[0]: [1.0,
        2.0]}), sorted(run.feed_tensors), sorted(run.fetch_tensors)


case("predictor.from_saved_model", predicted)
case("predictor.from_saved_model: names", lambda: predicted(input_names={"a": "x:0"}, output_names={"b": "y:0"}))
wrong("predictor.from_saved_model", lambda: predicted(signature_def_key="unknown"))
