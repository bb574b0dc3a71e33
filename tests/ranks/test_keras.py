"""Keras on several real ranks: they train as one process with the whole batch would, and agree on every step."""

from __future__ import annotations

import contextlib
import importlib
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_callbacks import NPUBroadcastGlobalVariablesCallback
from npu_bridge.estimator.npu.npu_helpers import npu_callbacks_append, npu_keras_optimizer
from npu_bridge.estimator.npu.npu_hook import broadcast_global_variables
from npu_bridge.estimator.npu.npu_loss_scale_manager import (
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
)
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import (
    KerasDistributeOptimizer,
    NPUDistributedOptimizer,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.gradients.first_step.adapted_layers import renew_adapted_layers
from npu_bridge.reporting import StragglerCallback
from npu_bridge.session import AverageMetricsCallback, ResumableLoop
from npu_bridge.stages import Accumulate
from tests.goldens.keras3_models import beside_keras3
from tests.goldens.keras_models import BATCH_SIZE, fit, make_data, make_model, state_of
from tests.goldens.two_layers import assert_same_bits
from tests.once import lines_said
from tests.rank_pool import on_each_rank
from tests.transfers import sums_fragment

STEPS = 4
BARE = {
    "current": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9),
    "legacy": lambda: tf.keras.optimizers.legacy.SGD(0.05, momentum=0.9),
}
WRAPPERS = {
    "bare": lambda opt: opt,
    "distributed": KerasDistributeOptimizer,
    "in place": npu_distributed_optimizer_wrapper,
    "scaled": lambda opt: npu_keras_optimizer(opt, FixedLossScaleManager(2.0**12)),
    "tailed": lambda opt: npu_keras_optimizer(opt, FixedLossScaleManager(2.0**12), is_tailing_optimization=True),
    "dynamic": lambda opt: npu_keras_optimizer(opt, ExponentialUpdateLossScaleManager(2.0**10, 3, 1, 2, 0.5)),
    "float16": lambda opt: npu_keras_optimizer(opt, FixedLossScaleManager(2.0**4), wire="float16"),
    "keras scaling": lambda opt: tf.keras.mixed_precision.LossScaleOptimizer(
        KerasDistributeOptimizer(opt), initial_scale=2.0**10, dynamic_growth_steps=3
    ),
    "keras scaling in place": lambda opt: npu_distributed_optimizer_wrapper(
        tf.keras.mixed_precision.LossScaleOptimizer(opt, initial_scale=2.0**10, dynamic_growth_steps=3)
    ),
}
# Which optimizers train in which way; each meets every way somewhere, and no launch trains the same twice.
RUNS = {
    ("fit", "current"): ("distributed", "tailed", "keras scaling in place"),
    ("fit", "legacy"): ("in place", "scaled"),
    ("tape", "current"): ("distributed", "in place", "scaled", "keras scaling", "float16"),
    ("tape", "legacy"): ("distributed", "keras scaling", "keras scaling in place"),
    ("eager tape", "current"): ("distributed", "in place", "tailed", "keras scaling in place"),
    ("eager tape", "legacy"): ("distributed", "in place", "scaled"),
    ("graph", "legacy"): ("distributed", "in place", "scaled", "tailed", "float16"),
}


def share_of(data):
    """This rank's part of every batch; the whole of it for a process alone."""
    ranks = collective.current()
    return [
        np.concatenate([batch[ranks.rank :: ranks.size] for batch in np.split(part, STEPS)]) for part in data
    ], BATCH_SIZE // ranks.size


def run_fit(optimizer, data):
    share, batch_size = share_of(data)
    return fit(optimizer, share, batch_size=batch_size)[0]


def run_tape_loop(optimizer, data, decorate=tf.function):
    """Trains in a self-written loop: gradients go straight to apply_gradients, around loss scaling if there is any."""
    (tokens, labels), batch_size = share_of(data)
    model = make_model()
    model.optimizer = optimizer
    is_scaled = isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)

    @decorate
    def step(tokens, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(tokens) - labels))
            differentiated = optimizer.get_scaled_loss(loss) if is_scaled else loss
        gradients = tape.gradient(differentiated, model.trainable_variables)
        if is_scaled:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    for start in range(0, len(tokens), batch_size):
        step(*(tf.constant(part[start : start + batch_size]) for part in (tokens, labels)))
    return model


def run_eager_loop(optimizer, data):
    return run_tape_loop(optimizer, data, decorate=lambda function: function)


def trained(run_name, generation, wrapper):
    run = {"fit": run_fit, "graph": run_fit, "tape": run_tape_loop, "eager tape": run_eager_loop}[run_name]
    with tf.Graph().as_default() if run_name == "graph" else contextlib.nullcontext():
        return state_of(run(WRAPPERS[wrapper](BARE[generation]()), make_data(STEPS)))


def trained_with(run_name, generation, wrappers):
    return {wrapper: trained(run_name, generation, wrapper) for wrapper in wrappers}


def assert_trained_as(alone, first, second):
    """Checks that two ranks have equal states, near the state of one process; a 16-bit wire has rounded them."""
    for wrapper, state in first.items():
        assert_same_bits(second[wrapper], state)
        rtol, atol = (2e-2, 1e-3) if wrapper == "float16" else (2e-4, 1e-6)
        for key, value in alone.items():
            np.testing.assert_allclose(state[key], value, rtol=rtol, atol=atol, err_msg=f"{wrapper} {key}")
    if "float16" in first:
        exact = first["distributed"]
        assert any(value.tobytes() != exact[key].tobytes() for key, value in first["float16"].items())


@pytest.mark.few_fast(["fit-current"], "both optimizers of Keras take the same way")
@pytest.mark.parametrize("run_name, generation", RUNS)
def test_two_ranks_equal_one_process_with_the_whole_batch(on_ranks, run_name, generation):
    alone = trained(run_name, generation, "bare")
    first, second = on_ranks(2, trained_with, run_name, generation, RUNS[run_name, generation])
    assert_trained_as(alone, first, second)


def fit_with_an_overflow_on_rank_1(generation, wrapper):
    """On a rank: what is left of six batches of which rank 1 cannot use the third."""
    rank = collective.current().rank
    optimizer = WRAPPERS[wrapper](BARE[generation]())
    model, _ = fit(optimizer, make_data(6, poisoned=[2] if rank == 1 else []))
    skipped = int(optimizer.skipped_steps) if wrapper == "dynamic" else None
    return state_of(model), int(optimizer.iterations), float(optimizer.loss_scale), skipped


@pytest.mark.few_fast(["current-dynamic"], "both optimizers of Keras take the same way")
@pytest.mark.parametrize(
    "generation, wrapper",
    [("current", "dynamic"), ("legacy", "dynamic"), ("current", "keras scaling"), ("legacy", "keras scaling in place")],
)
def test_an_overflow_on_one_rank_skips_the_step_on_both(on_ranks, generation, wrapper):
    first, second = on_ranks(2, fit_with_an_overflow_on_rank_1, generation, wrapper)
    assert_same_bits(second[0], first[0])
    assert all(np.all(np.isfinite(value)) for value in first[0].values())
    assert second[1:] == first[1:]
    # Keras' own loss scaling counts a skipped step; ours does not.
    assert first[1:] == ((5, 1024.0, 1) if wrapper == "dynamic" else (6, 1024.0, None))


@pytest.mark.parametrize("generation", BARE)
@on_each_rank(2, gives=[1.0, 1.0, 2.5, 4.0])
def test_gradients_are_averaged_after_a_step_that_keras_has_skipped(generation):
    """Returns a variable after eager steps around Keras' own loss scaling, the second overflowing on rank 1."""
    rank = collective.current().rank
    variable, make = tf.Variable(0.0), tf.keras.mixed_precision.LossScaleOptimizer
    inner = {"current": tf.keras.optimizers.SGD, "legacy": tf.keras.optimizers.legacy.SGD}[generation](1.0)
    optimizer, values = make(KerasDistributeOptimizer(inner), initial_scale=2.0), []
    for slope in (1.0, np.inf if rank == 1 else 1.0, 1.0 + rank, 3.0 * rank):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(-variable * slope)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, [variable]))
        optimizer.apply_gradients(zip(gradients, [variable]))
        values.append(float(variable))
    return values


def transfers_of(step):
    """Counts the transfers of gradients of a traced step."""
    graph = tf.function(step).get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return len([node for node in nodes if sums_fragment(node.name, node.op)])


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("wrapper", ["distributed", "in place", "scaled", "keras scaling in place"])
@pytest.mark.parametrize("generation", BARE)
@on_each_rank(2, gives=[1, 1, 1, 1])
def test_gradients_travel_once_through_whichever_door_they_come(generation, wrapper):
    """Returns how many transfers of gradients are in a traced step, for each door."""
    optimizer, variable = WRAPPERS[wrapper](BARE[generation]()), tf.Variable([1.0, 2.0])
    compute = getattr(optimizer, "compute_gradients", None) or optimizer._compute_gradients

    def loss():
        return tf.reduce_sum(variable**2)

    def minimize():
        optimizer.minimize(loss, [variable])

    def tape():
        with tf.GradientTape() as tape:
            value = loss()
        optimizer.apply_gradients([(tape.gradient(value, variable), variable)])

    def clip():
        ((grad, _),) = compute(loss, [variable])
        optimizer.apply_gradients([(tf.clip_by_norm(grad, 1.0), variable)])

    def inside_a_branch():
        pairs = compute(loss, [variable])
        tf.cond(variable[0] > 0.0, lambda: (optimizer.apply_gradients(pairs), True)[1], lambda: False)

    return [transfers_of(step) for step in (minimize, tape, clip, inside_a_branch)]


def refused_on_a_rank():
    in_place = npu_distributed_optimizer_wrapper(BARE["legacy"]())
    method, messages = in_place._compute_gradients, []
    for refused in (
        lambda: fit(KerasDistributeOptimizer(BARE["current"]()), make_data(1), jit_compile=True),
        lambda: fit(npu_distributed_optimizer_wrapper(BARE["current"]()), make_data(1), jit_compile=True),
        lambda: KerasDistributeOptimizer(in_place),
        lambda: NPUBroadcastGlobalVariablesCallback(2),
        lambda: fit(NPUDistributedOptimizer(tf.compat.v1.train.AdamOptimizer()), make_data(1)),
        lambda: fit(NPULossScaleOptimizer(tf.compat.v1.train.AdamOptimizer(), FixedLossScaleManager(8)), make_data(1)),
        lambda: fit(tf.compat.v1.train.AdamOptimizer(), make_data(1), callbacks=npu_callbacks_append([])),
    ):
        with pytest.raises(ValueError) as error:
            refused()
        messages.append(str(error.value))
    with pytest.raises(RuntimeError) as error:
        fit(KerasDistributeOptimizer(BARE["current"]()), make_data(1), steps_per_execution="auto")
    messages.append(str(error.value))
    return messages, npu_distributed_optimizer_wrapper(in_place)._compute_gradients is method


def test_refusals(on_ranks):
    parts = ["jit_compile=True", "jit_compile=True", "twice", "from 0 to 1; got 2"]
    parts += [*["npu_keras_optimizer(tf.keras.optimizers"] * 3, "='auto'. Pass the same number"]
    for messages, is_unchanged in on_ranks(2, refused_on_a_rank):
        assert is_unchanged
        for message, part in zip(messages, parts, strict=True):
            assert part in message


@on_each_rank(2)
def test_a_tf1_optimizer_in_place():
    """Trains, with a patched TF 1 optimizer, two losses that differ between ranks."""
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("variable", initializer=[1.0, 2.0])
        optimizer = npu_distributed_optimizer_wrapper(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        loss = tf.reduce_sum(variable) * (1.0 + 2 * collective.current().rank)
        train_op, transfers = optimizer.minimize(loss), [op.name for op in graph.get_operations()]
        train_other = optimizer.minimize(2.0 * loss)
        session.run(tf.compat.v1.global_variables_initializer())
        values = [(session.run(each), session.run(variable).tolist())[1] for each in (train_op, train_other)]
    assert values == [[-1.0, 0.0], [-5.0, -4.0]]
    transfers = [name for name in transfers if sums_fragment(name, graph.get_operation_by_name(name).type)]
    assert transfers == ["transfers/Npu_Distributed_optimizer_fragment_0_float32"]


@pytest.mark.parametrize("in_function", [True, False], ids=["function", "eager"])
@on_each_rank(2, gives=[-4.0])
def test_gradients_beside_computed_ones_are_averaged(in_function):
    """Computes gradients only to read them, and applies those of a tape; returns the variable."""
    variable = tf.Variable([0.0])
    optimizer = KerasDistributeOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    factor = 1.0 + 2 * collective.current().rank

    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(variable) * factor
        optimizer.compute_gradients(loss, [variable], tape)
        optimizer.apply_gradients([(2.0 * tape.gradient(loss, variable), variable)])

    (tf.function(step) if in_function else step)()
    return variable.numpy().tolist()


class Snapshot(tf.keras.callbacks.Callback):
    """Keeps every value the first batch starts from, the second time `fit` is called too."""

    def __init__(self):
        super().__init__()
        self.taken = []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            optimizer = self.model.optimizer
            own = optimizer.variables
            values = {**state_of(self.model), "learning rate": tf.keras.backend.get_value(optimizer.learning_rate)}
            for position, variable in enumerate(own() if callable(own) else own):
                values[f"optimizer {position}"] = tf.keras.backend.get_value(variable)
            self.taken.append(values)


def broadcast_at_first(kind, path):
    """On a rank: trains alone from values of its own, then together; what the ranks start from both times."""
    rank = collective.current().rank
    generation = "current" if kind == "current" else "legacy"
    with tf.Graph().as_default() if kind == "graph" else contextlib.nullcontext():
        manager = ExponentialUpdateLossScaleManager(2.0 ** (4 + rank), 100)
        optimizer = npu_keras_optimizer(BARE[generation](), manager, is_distributed=False)
        model = make_model()
        model.set_weights([value + rank for value in model.get_weights()])
        if rank == 0:  # loads a model, or as if: its optimizer has a history, the other has none
            fit(optimizer, make_data(3, poisoned=[1]), model)
            tf.keras.backend.set_value(optimizer.learning_rate, 0.5)
            if kind == "current":
                model.save(path)
                model = tf.keras.models.load_model(path)
                optimizer = model.optimizer
        snapshot, callback = Snapshot(), NPUBroadcastGlobalVariablesCallback(0)
        for _ in range(2):
            fit(optimizer, make_data(1), model, callbacks=[callback, snapshot])
            model.set_weights([value + rank for value in model.get_weights()])
        return snapshot.taken


@pytest.mark.parametrize("wrap", [npu_distributed_optimizer_wrapper, KerasDistributeOptimizer, npu_keras_optimizer])
@on_each_rank(2, gives=0.5)
def test_a_loss_in_a_function_may_have_conditions(wrap):
    """Returns a weight after a step whose loss has an `if` that AutoGraph translates."""
    weight = tf.Variable(1.0)
    optimizer = wrap(tf.keras.optimizers.SGD(0.5))

    def loss():
        if weight > 0.0:
            return weight * 1.0
        return weight * 3.0

    @tf.function
    def step():
        optimizer.minimize(lambda: loss(), [weight])

    step()
    return float(weight.numpy())


@on_each_rank(2)
def test_the_callback_sends_all_values_together():
    communicator, eager = type(collective.current()), []
    broadcast = communicator.broadcast

    def counted(self, *arguments):
        eager.append(tf.executing_eagerly())
        return broadcast(self, *arguments)

    with mock.patch.object(communicator, "broadcast", counted):
        fit(BARE["current"](), make_data(1), callbacks=[NPUBroadcastGlobalVariablesCallback(0)])
    assert len(eager) > 4 and not any(eager)


@pytest.mark.few_fast(1, "other generations of Keras")
@pytest.mark.parametrize("kind", ["current", "legacy", "graph"])
def test_the_callback_makes_the_ranks_equal_before_the_first_batch_and_only_then(on_ranks, kind, tmp_path):
    path = str(tmp_path / "model.keras")
    (first, first_again), (second, second_again) = on_ranks(2, broadcast_at_first, kind, path)
    assert_same_bits(second, first)
    assert first["learning rate"] == 0.5
    assert 16.0 in [value for value in first.values() if value.shape == ()]  # the scale
    with pytest.raises(AssertionError, match="differs"):
        assert_same_bits(second_again, first_again)


class FirstWeight(tf.keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.seen = self.model.get_weights()[0].item() if batch == 0 else self.seen


@on_each_rank(2, gives=3.0)
def test_the_callback_does_not_make_the_first_batch_slow():
    """Keras 2 warns of callbacks that are slow in a batch. Callbacks before this one see the weights of rank 0, too."""
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.full([1, 1], 3.0 + collective.current().rank)])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(1.0)), loss="mae")
    first = FirstWeight()
    model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0, callbacks=npu_callbacks_append([first]))
    return first.seen


@pytest.mark.few_fast(1, "the other order takes the same way")
@pytest.mark.parametrize("knows_its_input", [True, False])
@on_each_rank(2, gives=[[-1.0], [-1.0]])
def test_the_callback_leaves_each_rank_its_sums(knows_its_input):
    """Two fits make one update; a model that learns its shape from the first batch is sent after it."""
    layers = [tf.keras.layers.Input([2])] if knows_its_input else []
    model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.SGD(1.0), stages=[Accumulate(2)]), loss="mae")
    row = np.full([1, 2], 1.0 + 2.0 * collective.current().rank, np.float32)
    for _ in range(2):
        model.fit(row, np.zeros([1, 1]), verbose=0, callbacks=[NPUBroadcastGlobalVariablesCallback(0)])
    return model.get_weights()[0].tolist()


@pytest.mark.parametrize("are_as_many", [False, True])
@on_each_rank(2)
def test_the_callback_refuses_ranks_with_other_variables(are_as_many):
    """Rank 1 has another model, perhaps with as many variables."""
    model = make_model()
    if collective.current().rank == 1:
        widths = [9, 4, 2] if are_as_many else [2]
        model = tf.keras.Sequential([tf.keras.layers.Dense(width) for width in widths])
        if are_as_many:
            model = tf.keras.Sequential([tf.keras.layers.Dense(9, use_bias=False), *model.layers[1:]])
    tokens, labels = make_data(1)
    with pytest.raises(ValueError, match="rank 1 trains other variables"):
        callback = NPUBroadcastGlobalVariablesCallback(0)
        fit(BARE["current"](), (tokens.astype(np.float32), labels), model, callbacks=[callback])


class SavesSlowly(tf.keras.callbacks.Callback):
    """Makes rank 0 save the weights of each epoch, after a while."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def on_epoch_end(self, epoch, logs=None):
        if collective.current().rank == 0:
            time.sleep(0.7)
            self.model.save_weights(self._path)


@pytest.mark.slow("an Estimator waits for the save in the same way")
@on_each_rank(2)
def test_weights_that_rank_0_has_saved_are_there_when_fit_returns(tmp_path):
    """Trains two epochs, and loads at once what rank 0 has saved."""
    model, path = make_model(), str(tmp_path / "weights.h5")
    model.compile(npu_keras_optimizer(BARE["current"](), is_distributed=True), "mse")
    callbacks = npu_callbacks_append([SavesSlowly(path)])
    for _ in range(2):
        model.fit(*make_data(2), batch_size=BATCH_SIZE, epochs=1, verbose=0, callbacks=callbacks)
        trained = model.get_weights()
        model.load_weights(path)
        assert all(map(np.array_equal, model.get_weights(), trained)), "an older file was loaded"


@on_each_rank(2, gives=[["größer", "", "x" * 300]] * 3)
def test_variables_of_strings_are_sent():
    """Broadcasts a variable of strings eagerly, in a function and in a session."""
    own = ["größer", "", "x" * 300] if collective.current().rank == 0 else ["a", "b", "c"]
    ranks = collective.current()
    eagerly = ranks.broadcast(tf.constant(own), 0, "texts").numpy()
    in_function = tf.function(lambda: ranks.broadcast(tf.constant(own), 0, "texts"))().numpy()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("names", initializer=own, trainable=False, use_resource=True)
        sent = broadcast_global_variables(0)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(sent)
        in_session = session.run(variable)
    return [[text.decode() for text in values] for values in (eagerly, in_function, in_session)]


def fit_of_words():
    """Trains, on a rank, a model with a table of words; rank 0 has created its metrics before."""
    layers = tf.keras.layers
    words = layers.StringLookup(vocabulary=["yes", "no"])
    model = tf.keras.Sequential([tf.keras.Input((1,), dtype=tf.string), words, layers.Embedding(3, 2), layers.Dense(1)])
    model.compile(npu_keras_optimizer(BARE["current"](), is_distributed=True), "mse", metrics=["mae"])
    data = np.array([["yes"], ["no"]] * 4), np.ones([8, 1, 1])
    if collective.current().rank == 0:
        model.evaluate(*data, verbose=0)
    model.fit(*data, batch_size=4, verbose=0, callbacks=npu_callbacks_append([]))
    return model.layers[1].get_weights()[0].tobytes()


@on_each_rank(2, gives=[["AverageMetricsCallback", "NPUBroadcastGlobalVariablesCallback", "StragglerCallback"]] * 2)
def test_callbacks_that_ranks_need_are_added_once():
    lists = [npu_callbacks_append([kind()]) for kind in (AverageMetricsCallback, StragglerCallback)]
    return [sorted(type(each).__name__ for each in callbacks) for callbacks in lists]


def test_tables_and_metrics_do_not_stop_the_first_batch(on_ranks):
    first, second = on_ranks(2, fit_of_words)
    assert first == second


def keras_of(name):
    return tf.keras if name == "tf.keras" else importlib.import_module(name)


def model_to_adapt(keras):
    """A model with one layer of each kind that can be adapted, one of them in a model of its own; and the layers."""
    layers = keras.layers
    normal, bins = layers.Normalization(), layers.Discretization(num_bins=3)
    text = layers.TextVectorization(max_tokens=9, output_sequence_length=2)
    words = layers.StringLookup(max_tokens=4, output_mode="tf_idf", pad_to_max_tokens=True)
    numbers, texts = keras.Input([2]), keras.Input([1], dtype="string")
    nested = keras.Sequential([keras.Input([2]), normal, layers.Dense(1)])
    read = layers.Flatten()(layers.Embedding(9, 2)(text(texts)))
    binned = layers.Flatten()(layers.Embedding(4, 2)(bins(numbers)))
    joined = layers.Concatenate()([nested(numbers), read, words(texts), binned])
    model = keras.Model([numbers, texts], layers.Dense(1, kernel_initializer="ones")(joined))
    return model, [(normal, 0), (bins, 0), (text, 1), (words, 1)]


def adapted_on_rank_0(keras_name, is_adapted_elsewhere, in_loop, folder):
    """On a rank: the loss and the outputs of one batch, after a start from what rank 0 has learnt of the data."""
    rank, keras = collective.current().rank, keras_of(keras_name)
    data = np.float32([[1, 2], [3, 5], [4, 7]]), np.array([["a b"], ["b c"], ["b"]])
    other = np.float32([[9, 7], [9, 2], [8, 1]]), np.array([["x"], ["b x"], ["b x"]])
    model, layers = model_to_adapt(keras)
    optimizer = npu_keras_optimizer(keras.optimizers.SGD(0.0), is_distributed=True)
    model.compile(optimizer, "mse")
    batches = tf.data.Dataset.from_tensors((data, np.ones([3, 1])))
    if rank == 0 or is_adapted_elsewhere:
        for layer, number in layers:
            layer.adapt((other if rank else data)[number])
        model.predict(batches, verbose=0)
    if is_adapted_elsewhere:
        model.fit(batches, verbose=0)  # compiles with the constants of this rank
    losses = []
    if in_loop:
        ResumableLoop(folder, model, optimizer)
        losses.append(model.train_on_batch(*next(iter(batches))))
    else:
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
        model.fit(batches, verbose=0, callbacks=[*npu_callbacks_append([]), note])
    return losses, model.predict(batches, verbose=0).tolist()


KERAS_2 = pytest.param("tf.keras", marks=pytest.mark.slow("Keras 3 takes the same way, where it is"))
KERAS_3 = pytest.param("keras", marks=beside_keras3)


@pytest.mark.parametrize("keras_name", [KERAS_2, KERAS_3])
def test_layers_from_a_file_stay_adapted(tmp_path, keras_name):
    keras, path = keras_of(keras_name), str(tmp_path / "model.keras")
    data = np.float32([[1, 2], [3, 5], [4, 7]]), np.array([["a b"], ["b c"], ["b"]])
    batches, (model, layers) = tf.data.Dataset.from_tensors((data,)), model_to_adapt(keras)
    for layer, number in layers:
        layer.adapt(data[number])
    model.save(path)
    loaded = keras.models.load_model(path)
    renew_adapted_layers(loaded)
    assert loaded.predict(batches).tolist() == model.predict(batches).tolist()


@pytest.mark.few_fast("each", "the other ways to adapt end in the same broadcast")
@pytest.mark.parametrize("keras_name", ["tf.keras", KERAS_3])
@pytest.mark.parametrize("is_adapted_elsewhere, in_loop", [(False, False), (True, True), (False, True), (True, False)])
def test_layers_that_rank_0_has_adapted_are_so_everywhere(
    on_ranks, tmp_path, keras_name, is_adapted_elsewhere, in_loop
):
    first, second = on_ranks(2, adapted_on_rank_0, keras_name, is_adapted_elsewhere, in_loop, str(tmp_path))
    assert first == second


def rates_said(keras_name, is_everywhere):
    """On a rank: what is said of a `fit` with callbacks that set the rate, perhaps on rank 0 alone."""
    keras = keras_of(keras_name)
    model = keras.Sequential([keras.layers.Input([2]), keras.layers.Dense(1)])
    model.compile(npu_keras_optimizer(keras.optimizers.SGD(0.5, momentum=0.25)), "mse")
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 ** (epoch + 2))
    callbacks = [schedule] if is_everywhere or collective.current().rank == 0 else []
    with lines_said() as lines:
        model.fit(np.ones([4, 2]), np.ones([4, 1]), epochs=2, verbose=0, callbacks=npu_callbacks_append(callbacks))
    return [line for line in lines if "different numbers" in line]


@pytest.mark.parametrize("keras_name", [KERAS_2, KERAS_3])
def test_rank_0_says_that_a_callback_has_set_the_rate_on_some_ranks(on_ranks, keras_name):
    (line,), silent = on_ranks(2, rates_said, keras_name, False)
    assert "ranks 0 to 1 train with different numbers: learning_rate is [0.125, 0.25]. " in line
    assert silent == []
    assert on_ranks(2, rates_said, keras_name, True) == [[], []]


def bad_weights_said(keras_name, scale):
    """On a rank: lines about weights after a `fit` with a NaN in the data of rank 1, and whether weights are finite.

    The activation turns NaN into 0 on every processor, as TensorFlow's Relu does on some of them.
    """
    keras = keras_of(keras_name)
    hidden = keras.layers.Dense(8, lambda values: tf.where(tf.math.is_finite(values), values, tf.zeros_like(values)))
    model = keras.Sequential([keras.layers.Input([4]), hidden, keras.layers.Dense(1)])
    manager = FixedLossScaleManager(scale) if scale else None
    model.compile(npu_keras_optimizer(keras.optimizers.SGD(0.01), manager), "mse")
    rows = np.ones([16, 4], np.float32)
    rows[0, 0] = np.nan if collective.current().rank == 1 else 1.0
    with lines_said() as lines:
        model.fit(rows, np.ones([16, 1]), batch_size=4, epochs=2, verbose=0, callbacks=npu_callbacks_append())
    is_finite = all(np.isfinite(weights).all() for weights in model.get_weights())
    return [line for line in lines if line.startswith("fit: ")], is_finite


@pytest.mark.parametrize("keras_name", [KERAS_2, KERAS_3])
def test_rank_0_says_that_weights_are_nan_even_if_its_loss_is_finite(on_ranks, keras_name):
    ((line,), is_finite), (silent, _) = on_ranks(2, bad_weights_said, keras_name, None)
    assert not is_finite and silent == []
    assert "of 4 trainable weights are NaN or Inf. Expected finite weights; got " in line
    assert "With FixedLossScaleManager(1), npu_keras_optimizer skips such steps" in line
    assert on_ranks(2, bad_weights_said, keras_name, 1.0) == [([], True), ([], True)]
