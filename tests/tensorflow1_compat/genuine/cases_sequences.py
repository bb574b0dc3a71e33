"""`tf.contrib.seq2seq`, `legacy_seq2seq` and `crf`."""

from __future__ import annotations

# fmt: off
# A table: a line for each case, if it fits.
import numpy as np
import tensorflow as tf
from common import case, flat, ids, unknown, wrong, x

s2s, old, crf, rnn = tf.contrib.seq2seq, tf.contrib.legacy_seq2seq, tf.contrib.crf, tf.contrib.rnn


# Decoders.
def decoded(make_helper, cell=None, state=None, layer=None, static=True, **options):
    """A decoder's outputs, final state and lengths; sizes and types of the decoder."""
    cell = cell or rnn.GRUCell(4)
    state = cell.zero_state(2, tf.float32) if state is None else state
    decoder = s2s.BasicDecoder(cell, make_helper(), state, layer and layer())
    result = s2s.dynamic_decode(decoder, **options)
    return result, decoder.output_size, decoder.output_dtype


def table():
    return tf.get_variable("table", [5, 3])


def logits():
    return tf.layers.Dense(5, name="logits")


def training(**options):
    return s2s.TrainingHelper(x(2, 4, 3), [4, 2], **options)


def greedy():
    return s2s.GreedyEmbeddingHelper(table(), tf.constant([1, 2]), 0)


for _options in ({}, {"impute_finished": True}, {"maximum_iterations": 3}, {"output_time_major": True, "scope": "own"},
                 {"impute_finished": True, "maximum_iterations": tf.Dimension(2)}):
    case("seq2seq.TrainingHelper seq2seq.BasicDecoder seq2seq.dynamic_decode seq2seq.BasicDecoderOutput: "
         f"{sorted(_options)}", lambda o=_options: decoded(training, layer=logits, **o))
case("seq2seq.TrainingHelper: unknown sizes", lambda: decoded(lambda: s2s.TrainingHelper(
    unknown(x(2, 4, 3), None, None, 3), unknown(tf.constant([4, 2]), None))))
case("seq2seq.TrainingHelper: time major", lambda: decoded(lambda: s2s.TrainingHelper(
    x(4, 2, 3), tf.constant([3, 2]), time_major=True), cell=rnn.BasicLSTMCell(3)))
case("seq2seq.TrainingHelper: attributes", lambda: [getattr(training(), each) for each in (
    "inputs", "sequence_length", "batch_size", "sample_ids_shape", "sample_ids_dtype")])
case("seq2seq.GreedyEmbeddingHelper", lambda: decoded(greedy, layer=logits, maximum_iterations=4))
case("seq2seq.GreedyEmbeddingHelper: function", lambda: decoded(lambda: s2s.GreedyEmbeddingHelper(
    lambda each: tf.one_hot(each, 3), [1, 2], 2), maximum_iterations=tf.constant(3)))
case("seq2seq.SampleEmbeddingHelper", lambda: decoded(lambda: s2s.SampleEmbeddingHelper(
    table(), [1, 2], 0, softmax_temperature=0.5, seed=3), layer=logits, maximum_iterations=4), values=False)
case("seq2seq.SampleEmbeddingHelper: cold", lambda: decoded(lambda: s2s.SampleEmbeddingHelper(
    table(), [1, 2], 0, softmax_temperature=1e-4), layer=logits, maximum_iterations=4))
for _share in (0.0, 1.0):
    case(f"seq2seq.ScheduledEmbeddingTrainingHelper: {_share}", lambda p=_share: decoded(
        lambda: s2s.ScheduledEmbeddingTrainingHelper(x(2, 4, 3), [4, 2], table(), p), layer=lambda: (
            lambda outputs: tf.one_hot(tf.argmax(outputs, 1), 4) * 1e4)) if not isinstance(p, float) else decoded(
                lambda: s2s.ScheduledEmbeddingTrainingHelper(x(2, 4, 3), [4, 2], table(), p)), values=not _share)
    case(f"seq2seq.ScheduledOutputTrainingHelper: {_share}", lambda p=_share: decoded(
        lambda: s2s.ScheduledOutputTrainingHelper(x(2, 4, 3), [4, 2], p), cell=rnn.GRUCell(3)))
case("seq2seq.ScheduledOutputTrainingHelper: auxiliary", lambda: decoded(
    lambda: s2s.ScheduledOutputTrainingHelper(x(2, 4, 3), [4, 2], 1.0, auxiliary_inputs=x(2, 4, 2)),
    cell=rnn.GRUCell(3)))
case("seq2seq.ScheduledOutputTrainingHelper: layer", lambda: decoded(
    lambda: s2s.ScheduledOutputTrainingHelper(x(2, 4, 3), [4, 2], 1.0, next_inputs_fn=lambda out: out[:, :3])))
case("seq2seq.InferenceHelper", lambda: decoded(lambda: s2s.InferenceHelper(
    lambda out: out[:, :3], [3], tf.float32, x(2, 3), lambda out: out[:, 0] > 0.4), maximum_iterations=4))
case("seq2seq.CustomHelper seq2seq.Helper", lambda: decoded(lambda: s2s.CustomHelper(
    lambda: (tf.fill([2], False), x(2, 3)), lambda time, outputs, state: outputs,
    lambda time, outputs, state, sample_ids: (tf.fill([2], time > 1), outputs[:, :3], state), [4], tf.float32)))
wrong("seq2seq.BasicDecoder", lambda: s2s.BasicDecoder(rnn.GRUCell(4), 3, None))
wrong("seq2seq.BasicDecoder: cell", lambda: s2s.BasicDecoder(3, training(), None))
wrong("seq2seq.dynamic_decode", lambda: s2s.dynamic_decode(3))
wrong("seq2seq.dynamic_decode: maximum", lambda: decoded(training, maximum_iterations=[1, 2]))
wrong("seq2seq.TrainingHelper", lambda: s2s.TrainingHelper(x(2, 4, 3), 3))
wrong("seq2seq.GreedyEmbeddingHelper", lambda: s2s.GreedyEmbeddingHelper(table(), 1, 0))
wrong("seq2seq.GreedyEmbeddingHelper: end", lambda: s2s.GreedyEmbeddingHelper(table(), [1, 2], [0]))


class Counter(s2s.Decoder):
    """A decoder of a user with a nested state."""

    batch_size, output_size, output_dtype = 2, tf.TensorShape([]), tf.float32

    def initialize(self, name=None):
        return tf.fill([2], False), tf.zeros([2]), {"a": tf.zeros([2]), "b": (tf.ones([2, 2]),)}

    def step(self, time, inputs, state, name=None):
        state = {"a": state["a"] + 1, "b": (state["b"][0] * 2,)}
        return inputs, state, inputs + state["a"], tf.stack([time >= 1, time >= 3])


case("seq2seq.Decoder", lambda: s2s.dynamic_decode(Counter(), impute_finished=True))


# Beam search.
def beams(cell=None, width=3, memory=None, parallel=None, lengths=None, end=0, known=(2, 5), **options):
    state = lengths
    cell = cell or rnn.GRUCell(4)
    if memory:
        tiled = s2s.tile_batch(unknown(x(2, 5, 4), *known, 4), width)
        cell = s2s.AttentionWrapper(cell, memory(4, tiled), attention_layer_size=4, alignment_history=True)
        state = cell.zero_state(2 * width, tf.float32)
        with tf.variable_scope("x"):
            start = s2s.tile_batch(rnn.GRUCell(4).zero_state(2, tf.float32) + 0.5, width)
        state = state.clone(cell_state=start)
    state = s2s.tile_batch(cell.zero_state(2, tf.float32), width) if state is None else state
    decoder = s2s.BeamSearchDecoder(
        cell, table(), tf.constant([1, 2]), end, state, width, output_layer=logits(), **options
    )
    result = s2s.dynamic_decode(decoder, maximum_iterations=4)
    result = [tf.stop_gradient(each) for _, each in flat(result)]  # the gradient of a search is useless
    return result, decoder.output_size, decoder.output_dtype


for _options in ({}, {"length_penalty_weight": 0.8}, {"cell": rnn.BasicLSTMCell}, {"width": 1},
                 {"memory": s2s.LuongAttention},
                 *[{"memory": s2s.LuongAttention, "end": 3, "known": each} for each in ((2, 5), (2, None))],
                 {"memory": s2s.LuongAttention, "end": 3, "known": (2, None), "reorder_tensor_arrays": False},
                 {"memory": s2s.LuongAttention, "coverage_penalty_weight": 0.5}):
    case("seq2seq.BeamSearchDecoder seq2seq.BeamSearchDecoderOutput seq2seq.BeamSearchDecoderState "
         f"seq2seq.FinalBeamSearchDecoderOutput seq2seq.tile_batch: {sorted(_options)}",
         lambda o=_options: beams(**{**o, "cell": o["cell"](4) if "cell" in o else None}))
wrong("seq2seq.BeamSearchDecoder", lambda: s2s.BeamSearchDecoder(3, table(), [1], 0, None, 2))
wrong("seq2seq.BeamSearchDecoder: tokens", lambda: s2s.BeamSearchDecoder(
    rnn.GRUCell(4), table(), 1, 0, tf.zeros([2, 4]), 2))
case("seq2seq.tile_batch", lambda: s2s.tile_batch({"a": x(2, 3), "b": unknown(x(2), None)}, 2))
case("seq2seq.gather_tree", lambda: s2s.gather_tree(
    ids(4, 2, 3, below=5), ids(4, 2, 3, below=3, seed=1), tf.constant([4, 3]), 0))



def along_beams(*shape):
    from tensorflow.contrib.seq2seq.python.ops import beam_search_decoder

    return beam_search_decoder.gather_tree_from_array(
        x(*shape), ids(4, 2, 3, below=3), tf.constant([[4, 2, 3], [1, 4, 2]]))


for _shape in ((4, 2, 3), (4, 2, 3, 5), (4, 6, 5)):
    case(f"seq2seq.gather_tree: array {_shape}", lambda s=_shape: along_beams(*s))


# Attention.
def attended(mechanism, lengths=None, cell=None, one=True, **options):
    memory = mechanism if isinstance(mechanism, (list, tuple)) else [mechanism]
    made = [each(lengths) for each in memory]
    cell = s2s.AttentionWrapper(cell or rnn.GRUCell(4), made if len(made) > 1 else made[0], **options)
    with tf.variable_scope("root"):
        start = cell.zero_state(2, tf.float32)
        output, state = cell(x(2, 3), start)
    with tf.variable_scope("root", reuse=True):
        output, state = cell(x(2, 3, seed=1), state)
    return output, state, cell.output_size, [[each.keys, each.values, each.alignments_size] for each in made]


def mechanism(name, **options):
    return lambda lengths: getattr(s2s, name)(4, x(2, 5, 3), lengths, **options)


for _name, _options in (
    ("LuongAttention", {}), ("LuongAttention", {"scale": True}), ("LuongAttention", {"probability_fn": tf.nn.sigmoid}),
    ("BahdanauAttention", {}), ("BahdanauAttention", {"normalize": True}), ("BahdanauAttention",
        {"score_mask_value": -9}),
    ("LuongMonotonicAttention", {}), ("LuongMonotonicAttention", {"mode": "recursive", "scale": True}),
    ("LuongMonotonicAttention", {"mode": "hard", "score_bias_init": -1.0}), ("BahdanauMonotonicAttention", {}),
    ("BahdanauMonotonicAttention", {"mode": "recursive", "normalize": True}),
):
    case(f"seq2seq.{_name} seq2seq.AttentionWrapper seq2seq.AttentionWrapperState: {sorted(_options)}",
         lambda n=_name, o=_options: attended(mechanism(n, **o), [5, 2]))
_luong, _bahdanau = mechanism("LuongAttention"), mechanism("BahdanauAttention")
for _options in ({"attention_layer_size": 2}, {"alignment_history": True, "output_attention": False},
                 {"cell_input_fn": lambda inputs, attention: inputs * 2},
                 {"attention_layer": lambda: tf.layers.Dense(3, name="own_layer")}):
    case(f"seq2seq.AttentionWrapper: {sorted(_options)}", lambda o=_options: attended(
        _luong, **{**o, **({"attention_layer": o["attention_layer"]()} if "attention_layer" in o else {})}))
case("seq2seq.AttentionWrapper: two", lambda: attended(
    [_luong, _bahdanau], [4, 2], attention_layer_size=[2, 3], alignment_history=True))
case("seq2seq.AttentionWrapper: state", lambda: attended(
    _luong, cell=rnn.BasicLSTMCell(4), initial_cell_state=rnn.LSTMStateTuple(x(2, 4), x(2, 4))))
case("seq2seq.AttentionWrapper: decodes", lambda: decoded(training, cell=s2s.AttentionWrapper(
    rnn.GRUCell(4), _luong([3, 5]), attention_layer_size=4), impute_finished=True))
case("seq2seq.AttentionMechanism", lambda: isinstance(_luong(None), s2s.AttentionMechanism))
wrong("seq2seq.LuongAttention", lambda: attended(lambda _: s2s.LuongAttention(3, x(2, 5, 3))))
wrong("seq2seq.LuongAttention: length", lambda: s2s.LuongAttention(3, x(2, 5, 3), [5, 5, 5]))
wrong("seq2seq.AttentionWrapper", lambda: s2s.AttentionWrapper(rnn.GRUCell(4), 3))
wrong("seq2seq.AttentionWrapper: sizes", lambda: attended(_luong, attention_layer_size=[2, 3]))
wrong("seq2seq.AttentionWrapper: state", lambda: s2s.AttentionWrapper(rnn.GRUCell(4), _luong(None))(x(2, 3), x(2, 4)))
wrong("seq2seq.AttentionWrapper: function", lambda: attended(_luong, cell_input_fn=3))
wrong("seq2seq.monotonic_attention", lambda: s2s.monotonic_attention(x(2, 4), x(2, 4), "x"))
for _mode in ("recursive", "parallel", "hard"):
    case("seq2seq.monotonic_attention: " + _mode, lambda m=_mode: s2s.monotonic_attention(
        x(2, 4, low=0.1, high=0.9), x(2, 4, low=0.0, high=0.5, seed=1), m))
case("seq2seq.safe_cumprod", lambda: s2s.safe_cumprod(x(2, 4, low=0.0, high=1.0), axis=1, exclusive=True))
case("seq2seq.hardmax", lambda: [s2s.hardmax(x(2, 4)), s2s.hardmax(unknown(x(2, 4)))])

# Losses over sequences.
for _key, _options in (
    ("average", {}), ("time", {"average_across_batch": False}), ("batch", {"average_across_timesteps": False}),
    ("each", {"average_across_batch": False, "average_across_timesteps": False}),
    ("sums", {"average_across_batch": False, "average_across_timesteps": False, "sum_over_batch": True,
              "sum_over_timesteps": True}),
    ("sum of time", {"average_across_timesteps": False, "average_across_batch": False, "sum_over_timesteps": True}),
    ("own", {"softmax_loss_function": lambda labels, logits: tf.cast(labels, tf.float32) * logits[:, 0]}),
):
    case("seq2seq.sequence_loss: " + _key, lambda o=_options: s2s.sequence_loss(
        x(2, 3, 5), ids(2, 3, below=5), tf.constant([[1.0, 1, 0], [0.5, 0, 0]]), **o))
wrong("seq2seq.sequence_loss", lambda: s2s.sequence_loss(x(2, 3), ids(2, 3), x(2, 3)))
wrong("seq2seq.sequence_loss: both", lambda: s2s.sequence_loss(x(2, 3, 4), ids(2, 3), x(2, 3), sum_over_batch=True))
for _options in ({}, {"average_across_timesteps": False}):
    for _name in ("sequence_loss", "sequence_loss_by_example"):
        case(f"legacy_seq2seq.{_name}: {sorted(_options)}", lambda n=_name, o=_options: getattr(old, n)(
            [x(2, 5), x(2, 5, seed=1)], [ids(2), ids(2, seed=1)], [tf.ones([2]), tf.constant([1.0, 0])], **o))
wrong("legacy_seq2seq.sequence_loss_by_example", lambda: old.sequence_loss_by_example([x(2, 5)], [], []))


# Decoders over lists.
def parts(*shape, **options):
    return [x(*shape, seed=seed) for seed in range(options.get("n", 3))]


def words(n=3):
    return [ids(2, seed=seed) for seed in range(n)]


case("legacy_seq2seq.rnn_decoder", lambda: old.rnn_decoder(parts(2, 3), x(2, 4), rnn.GRUCell(4)))
case("legacy_seq2seq.rnn_decoder: loop", lambda: old.rnn_decoder(
    parts(2, 3), x(2, 4), rnn.GRUCell(4), lambda previous, step: previous[:, :3] * step, scope="own"))
case("legacy_seq2seq.basic_rnn_seq2seq", lambda: old.basic_rnn_seq2seq(parts(2, 3), parts(2, 3, n=2), rnn.GRUCell(4)))
for _options in ({}, {"num_heads": 2, "output_size": 3}, {"initial_state_attention": True}):
    case(f"legacy_seq2seq.attention_decoder: {sorted(_options)}", lambda o=_options: old.attention_decoder(
        parts(2, 3), x(2, 4), x(2, 5, 3), rnn.GRUCell(4), **o))
case("legacy_seq2seq.attention_decoder: tuple", lambda: old.attention_decoder(
    parts(2, 3), rnn.LSTMStateTuple(x(2, 4), x(2, 4)), x(2, 5, 3), rnn.BasicLSTMCell(4)))
for _options in ({}, {"feed_previous": True, "update_embedding_for_previous": False}):
    _options = {**_options, "output_projection": None}
    case(f"legacy_seq2seq.embedding_rnn_decoder: {len(_options)}", lambda o=_options: old.embedding_rnn_decoder(
        words(), x(2, 4), rnn.GRUCell(4), 4, 3, **o))
    case(f"legacy_seq2seq.embedding_attention_decoder: {len(_options)}",
         lambda o=_options: old.embedding_attention_decoder(
             words(), x(2, 4), x(2, 5, 3), rnn.GRUCell(4), 4, 3, **o))
for _options in ({}, {"feed_previous": True}, {"feed_previous": tf.constant}, {"output_projection": True}):
    def whole(name, *sizes, **options):
        if "output_projection" in options:
            options["output_projection"] = (x(4, 5), x(5))
        if callable(options.get("feed_previous")):
            options["feed_previous"] = tf.constant(True)
        return getattr(old, name)(words(), words(2), rnn.GRUCell(4), *sizes, **options)

    for _name, _sizes in (("embedding_rnn_seq2seq", (4, 5, 3)), ("embedding_attention_seq2seq", (4, 5, 3)),
                          ("embedding_tied_rnn_seq2seq", (5, 3))):
        case(f"legacy_seq2seq.{_name}: {sorted(_options)} {_options.get('feed_previous')}"[:60],
             lambda f=whole, n=_name, s=_sizes, o=_options: f(n, *s, **o))
case("legacy_seq2seq.tied_rnn_seq2seq", lambda: old.tied_rnn_seq2seq(parts(2, 4), parts(2, 4, n=2), rnn.GRUCell(4)))
for _each in (False, True):
    case(f"legacy_seq2seq.model_with_buckets: {_each}", lambda e=_each: old.model_with_buckets(
        words(4), words(3), words(3), [tf.ones([2])] * 3, [(2, 2), (4, 3)], lambda source, target: (
            old.embedding_rnn_seq2seq(source, target, rnn.GRUCell(4), 4, 5, 3)), per_example_loss=e))
wrong("legacy_seq2seq.model_with_buckets", lambda: old.model_with_buckets(words(1), [], [], [], [(2, 2)], None))
wrong("legacy_seq2seq.attention_decoder", lambda: old.attention_decoder([], x(2, 4), x(2, 5, 3), rnn.GRUCell(4)))
wrong("legacy_seq2seq.attention_decoder: heads",
      lambda: old.attention_decoder(parts(2, 3), x(2, 4), x(2, 5, 3), rnn.GRUCell(4), num_heads=0))

# Conditional random fields.
for _time in (4, 1):
    for _key, _length in (("both", [_time, 1]), ("empty", np.array([_time, 0], np.int64))):
        _given = lambda t=_time, n=_length: (x(2, t, 3), ids(2, t, below=3), tf.constant(n), x(3, 3))  # noqa: E731
        _end = f": {_time} {_key}"
        case("crf.crf_sequence_score" + _end, lambda g=_given: crf.crf_sequence_score(*g()))
        case("crf.crf_log_likelihood" + _end, lambda g=_given: crf.crf_log_likelihood(*g()))
        case("crf.crf_log_norm" + _end, lambda g=_given: crf.crf_log_norm(g()[0], *g()[2:]))
        case("crf.crf_unary_score" + _end, lambda g=_given: crf.crf_unary_score(g()[1], g()[2], g()[0]))
        case("crf.crf_binary_score" + _end, lambda g=_given: crf.crf_binary_score(*g()[1:]))
        case("crf.crf_decode" + _end, lambda g=_given: crf.crf_decode(g()[0], g()[3], g()[2]))
        case("crf.crf_multitag_sequence_score" + _end, lambda g=_given: crf.crf_multitag_sequence_score(
            g()[0], tf.constant(True) | (g()[0] > 0), *g()[2:]))
case("crf.crf_log_likelihood: variable", lambda: crf.crf_log_likelihood(
    x(2, 4, 3), ids(2, 4, below=3), tf.constant([4, 2])))
case("crf.crf_decode: unknown", lambda: crf.crf_decode(unknown(x(2, 4, 3), None, None, 3), x(3, 3), tf.constant([4,
    2])))
case("crf.viterbi_decode", lambda: crf.viterbi_decode(
    np.arange(12.0).reshape(4, 3) % 5, np.arange(9.0).reshape(3, 3) % 4))
case("crf.CrfForwardRnnCell", lambda: crf.CrfForwardRnnCell(x(3, 3))(x(2, 3), x(2, 3, seed=1)))
