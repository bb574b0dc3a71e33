"""One process: Keras optimizers with a pipeline beside bare ones and beside Keras' own loss scaling."""

from __future__ import annotations

import functools
import time

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import KerasDistributeOptimizer, NPUOptimizer
from npu_bridge.stages import Accumulate
from tests.goldens.keras_models import OPTIMIZERS, fit, make_data, make_model, state_of
from tests.goldens.two_layers import assert_same_bits

tf1 = tf.compat.v1
KerasLossScaling = tf.keras.mixed_precision.LossScaleOptimizer
EACH_GENERATION = pytest.mark.parametrize("name", ["current adam", "legacy adam"])
# Keras counts a skipped step in `iterations`, which enters Adam's bias correction but not momentum.
MOMENTUM = {
    "current": lambda: tf.keras.optimizers.SGD(0.05, momentum=0.9),
    "legacy": lambda: tf.keras.optimizers.legacy.SGD(0.05, momentum=0.9),
}


def dynamic(optimizer, init=2.0**10, growth=3, stages=()):
    """Our loss scaling with the rule of Keras' own: halved at an overflow, doubled after some good steps."""
    return npu_keras_optimizer(optimizer, ExponentialUpdateLossScaleManager(init, growth, 1, 2, 0.5), stages=stages)


def dynamic_with_rows(optimizer):
    """`dynamic` with variables that hold a row for each rank in a checkpoint, and no value before."""
    return dynamic(optimizer, stages=[Accumulate(1)])


def fixed(optimizer, scale=2.0**12):
    return npu_keras_optimizer(optimizer, FixedLossScaleManager(scale))


@pytest.fixture
def float16_policy():
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    tf.keras.mixed_precision.set_global_policy("float32")


@pytest.mark.few_fast(1, "other optimizers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_that_of_the_bare_optimizer(name):
    data = make_data(4)
    bare, losses = fit(OPTIMIZERS[name](), data)
    names = [variable.name for variable in bare.optimizer.variables()]
    for optimizer in (KerasDistributeOptimizer(OPTIMIZERS[name]()), fixed(OPTIMIZERS[name]())):
        ours, our_losses = fit(optimizer, data)
        assert our_losses == losses
        assert_same_bits(state_of(ours), state_of(bare))
        assert [variable.name for variable in optimizer.variables()][: len(names)] == names
    assert losses[-1] != losses[0]


@EACH_GENERATION
def test_on_one_process_the_function_is_that_of_the_bare_optimizer(name):
    def operators_of(optimizer):
        variable = tf.Variable([1.0, 2.0])
        step = tf.function(lambda: (optimizer.minimize(lambda: tf.reduce_sum(variable**2), [variable]), 0)[1])
        graph = step.get_concrete_function().graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return [node.op for node in nodes]

    bare = operators_of(OPTIMIZERS[name]())
    assert operators_of(KerasDistributeOptimizer(OPTIMIZERS[name]())) == bare
    assert len(bare) > 10


@pytest.mark.few_fast(["current adam"], "both optimizers of Keras take the same way")
@EACH_GENERATION
def test_in_a_tf1_graph_too(name):
    if name == "current adam":
        with tf.Graph().as_default(), pytest.raises(ValueError, match=r"tf\.keras\.optimizers\.legacy\.Adam"):
            fit(KerasDistributeOptimizer(OPTIMIZERS[name]()), make_data(1))
        return

    def trained(wrap, poisoned=()):
        with tf.Graph().as_default():
            optimizer = wrap(OPTIMIZERS[name]())
            model, losses = fit(optimizer, make_data(4, poisoned))
            readings = [getattr(optimizer, part, None) for part in ("loss_scale", "skipped_steps", "iterations")]
            return (
                state_of(model),
                losses,
                [part if part is None else tf.keras.backend.get_value(part) for part in readings],
            )

    bare, losses, _ = trained(lambda optimizer: optimizer)
    for wrap in (KerasDistributeOptimizer, fixed):
        ours, our_losses, _ = trained(wrap)
        assert our_losses == losses
        assert_same_bits(ours, bare)
    _, losses, readings = trained(dynamic, poisoned=[1])
    assert np.isfinite(losses).tolist() == [True, False, True, True]
    assert readings == [512.0, 1, 3]


@pytest.mark.slow("XLA compiles a training")
@EACH_GENERATION
def test_a_step_that_is_compiled_as_a_whole_trains_alike(name):
    """XLA orders arithmetic as it likes, so that only graphs without another operator give the same bits."""
    states = []
    for optimizer in (
        OPTIMIZERS[name](),
        KerasDistributeOptimizer(OPTIMIZERS[name]()),
        dynamic(OPTIMIZERS[name](), growth=2),
    ):
        tf.keras.utils.set_random_seed(1)
        model = tf.keras.Sequential([tf.keras.layers.Input([3]), tf.keras.layers.Dense(2, activation="tanh")])
        tokens, labels = make_data(4)
        states.append(state_of(fit(optimizer, (tokens.astype(np.float32), labels), model, jit_compile=True)[0]))
    bare, distributed, scaled = states
    assert_same_bits(distributed, bare)
    for key, value in bare.items():
        np.testing.assert_allclose(scaled[key], value, rtol=1e-4, atol=1e-7)
    assert optimizer.loss_scale.numpy() == 2.0**12


class Trace(tf.keras.callbacks.Callback):
    """Notes after every batch: weights, the loss scale and whether the step was skipped."""

    def __init__(self):
        super().__init__()
        self.weights, self.scales, self.skips = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        self.weights.append(self.model.get_weights())
        self.scales.append(float(optimizer.loss_scale))
        self.skips.append(bool(getattr(optimizer, "last_step_skipped", False)))


@pytest.mark.few_fast(1, "other generations of Keras")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["function", "eager"])
@pytest.mark.parametrize("generation", MOMENTUM)
def test_step_by_step_as_keras_own_loss_scaling(generation, run_eagerly):
    poisoned = [2, 3, 8]
    traces = []
    peer = KerasLossScaling(MOMENTUM[generation](), initial_scale=2.0**10, dynamic_growth_steps=3)
    ours = dynamic(MOMENTUM[generation]())
    for optimizer in (peer, ours):
        traces.append(Trace())
        fit(optimizer, make_data(10, poisoned), callbacks=traces[-1:], run_eagerly=run_eagerly)
    expected, trace = traces
    assert trace.scales == expected.scales
    assert [batch for batch, is_skipped in enumerate(trace.skips) if is_skipped] == poisoned
    for actual, right in zip(trace.weights, expected.weights):
        for value, right_value in zip(actual, right):
            np.testing.assert_array_equal(value, right_value)
    for batch in poisoned:
        for value, before in zip(trace.weights[batch], trace.weights[batch - 1]):
            np.testing.assert_array_equal(value, before)
    assert int(ours.skipped_steps) == 3
    assert (int(ours.iterations), int(peer.iterations)) == (7, 10)


@pytest.mark.few_fast("each", "not every pair")
@pytest.mark.parametrize("decorate", [lambda step: step, tf.function], ids=["eager", "function"])
@pytest.mark.parametrize("generation", MOMENTUM)
def test_a_tape_of_ones_own(generation, decorate):
    """The two calls Keras has for it; clipping between them and the update acts on gradients in true units."""

    def trained(optimizer):
        variable = tf.Variable([1.0, -2.0])

        @decorate
        def step(poison):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable**2) * poison
                scaled_loss = optimizer.get_scaled_loss(loss)
            gradients = optimizer.get_unscaled_gradients([tape.gradient(scaled_loss, variable), None])
            assert gradients[1] is None
            gradients, _ = tf.clip_by_global_norm(gradients[:1], 1.0)
            optimizer.apply_gradients(zip(gradients, [variable]))

        scales = []
        for poison in (1.0, 1.0, np.inf, 1.0, 1.0, 1.0):
            step(tf.constant(poison))
            scales.append(float(optimizer.loss_scale))
        return variable.numpy().tolist(), scales

    peer = KerasLossScaling(MOMENTUM[generation](), initial_scale=2.0**10, dynamic_growth_steps=3)
    ours = dynamic(MOMENTUM[generation]())
    assert trained(ours) == trained(peer)
    assert int(ours.skipped_steps) == 1


@pytest.mark.few_fast(1, "other generations of Keras take the same way")
@pytest.mark.usefixtures("float16_policy")
@EACH_GENERATION
def test_keras_adds_no_second_loss_scaling(name):
    ours, mine = dynamic(OPTIMIZERS[name]()), KerasDistributeOptimizer(OPTIMIZERS[name]())
    scaled, losses = fit(ours, make_data(4))
    averaged, _ = fit(mine, make_data(4))
    peer, expected_losses = fit(OPTIMIZERS[name](), make_data(4))
    assert scaled.optimizer is ours
    assert isinstance(peer.optimizer, KerasLossScaling)
    assert losses == expected_losses
    assert ours.loss_scale.numpy() == 2.0**11
    # Without loss scaling of its own it gets Keras', as any optimizer does.
    assert isinstance(averaged.optimizer, KerasLossScaling)
    assert averaged.optimizer.inner_optimizer is mine
    assert_same_bits(state_of(averaged), {key: value for key, value in state_of(peer).items() if int(key) < 5})


@pytest.mark.usefixtures("float16_policy", "graph")
def test_keras_adds_no_second_loss_scaling_in_a_tf1_graph():
    optimizer = dynamic(OPTIMIZERS["legacy adam"]())
    model, losses = fit(optimizer, make_data(2))
    assert model.optimizer is optimizer
    assert np.all(np.isfinite(losses))


def saved_and_loaded(model, way, wrap, name, folder):
    """The model after a way through a file; where the way holds no model, a new one is compiled first."""
    if way == "weights":
        model.save_weights(str(folder / "checkpoint"))
        loaded = make_model()
        loaded.compile(wrap(OPTIMIZERS[name]()), loss="mse")
        loaded.load_weights(str(folder / "checkpoint"))
        return loaded
    path = str(folder / {"keras": "model.keras", "h5": "model.h5", "folder": "model"}[way])
    model.save(path)
    loaded = tf.keras.models.load_model(path)
    if way == "folder":  # Keras restores no optimizer from it, but its variables are there
        loaded.load_weights(f"{path}/variables/variables")
    return loaded


@pytest.mark.few_fast(1, "other kinds of files and generations of Keras")
@pytest.mark.parametrize(
    "name, way",
    [
        ("current adam", "keras"),
        ("current adam", "h5"),
        ("current adam", "folder"),
        ("current adam", "weights"),
        ("legacy adam", "h5"),
        ("legacy adam", "folder"),
        ("legacy adam", "weights"),
    ],
)
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_training_goes_on_from_a_saved_model(name, way, tmp_path):
    """Weights, slots, loss scale, counters and skipped steps: the next steps are those of the uninterrupted run."""
    wrap = dynamic_with_rows if way == "h5" else dynamic
    model, _ = fit(wrap(OPTIMIZERS[name]()), make_data(5, poisoned=[1]))
    loaded = saved_and_loaded(model, way, wrap, name, tmp_path)
    assert type(loaded.optimizer) is type(model.optimizer)
    assert loaded.optimizer.get_config()["manager"] == model.optimizer.get_config()["manager"]
    traces = [], []
    for each, trace in zip((model, loaded), traces):
        for features, labels in tf.data.Dataset.from_tensor_slices(make_data(3, poisoned=[1])).batch(8):
            loss = each.train_on_batch(features, labels)
            optimizer = each.optimizer
            trace.append((loss, float(optimizer.loss_scale), int(optimizer.skipped_steps), int(optimizer.iterations)))
    assert traces[0] == traces[1]
    assert traces[0][-1][1:] == (512.0, 2, 6)
    for value, expected in zip(loaded.get_weights(), model.get_weights()):
        np.testing.assert_array_equal(value, expected)


@EACH_GENERATION
def test_checkpoints_are_those_of_the_bare_optimizer(name, tmp_path):
    """A run can start to be distributed or scaled, or cease to be, in its middle."""

    def checkpoint_of(optimizer, variable):
        return tf.train.Checkpoint(optimizer=optimizer, variable=variable)

    def step(optimizer, variable):
        optimizer.minimize(lambda: variable**2, [variable])

    for before, after in ((lambda opt: opt, dynamic), (dynamic, lambda opt: opt), (KerasDistributeOptimizer, dynamic)):
        variable, restored_variable = tf.Variable(1.0), tf.Variable(0.0)
        optimizer, restored = before(OPTIMIZERS[name]()), after(OPTIMIZERS[name]())
        step(optimizer, variable)
        path = checkpoint_of(optimizer, variable).save(str(tmp_path / "checkpoint"))
        checkpoint_of(restored, restored_variable).restore(path).expect_partial()
        step(optimizer, variable)
        step(restored, restored_variable)
        assert restored_variable.numpy() == variable.numpy() != 1.0
        assert int(restored.iterations) == 2


@pytest.mark.slow("sparse gradients are compared with numpy in each way to train by tests/gradients/test_stages.py")
def test_clipped_sparse_gradients_train_in_a_tf1_graph_as_eagerly():
    """Of every family but Nadam, which does not train in such graphs."""
    families = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Ftrl", "Lion")
    start = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    rows = np.linspace(-1.0, 2.0, 10, dtype=np.float32).reshape([5, 2])

    def loss_of(weights, table):
        return tf.reduce_sum(weights**2) + tf.reduce_sum(tf.square(tf.gather(table, [1, 1, 3])))

    def make(family, clip):
        return getattr(tf.keras.optimizers, family)(0.1, **{clip: 0.75}, use_ema=family == "Adam")

    results, expected = {}, {}
    with tf.Graph().as_default():
        updates = []
        for number, family in enumerate(families):
            other = ("global_clipnorm", False) if number % 2 else ("clipnorm", number % 4 == 0)
            for clip, use_resource in (("global_clipnorm", True), other):
                manager = FixedLossScaleManager(128.0) if number % 3 == 0 else None
                with tf1.variable_scope(f"{family}_{clip}_{use_resource}", use_resource=use_resource):
                    own = [tf1.get_variable("w", initializer=start), tf1.get_variable("e", initializer=rows)]
                optimizer = NPUOptimizer(make(family, clip), manager, is_distributed=False, is_loss_scale=bool(manager))
                updates.append(optimizer.minimize(loss_of(*own), var_list=own))
                results[family, clip, use_resource] = own
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for _ in range(3):
                session.run(updates)
            results = session.run(results)
    for family, clip in {key[:2] for key in results}:
        own, optimizer = [tf.Variable(start), tf.Variable(rows)], make(family, clip)
        for _ in range(3):
            optimizer.minimize(functools.partial(loss_of, *own), own)
        expected[family, clip] = [variable.numpy() for variable in own]
    for (family, clip, _), values in results.items():
        for value, other, first in zip(values, expected[family, clip], (start, rows)):
            np.testing.assert_allclose(value, other, rtol=2e-6, atol=1e-7, err_msg=f"{family} {clip}")
            assert np.any(value != first), (family, clip)
    assert len(results) == 20


def test_weights_decay_after_the_loss_has_read_them():
    """In a TF 1 graph nothing but the gradient makes an update wait."""
    start = np.array([1.0, -2.0, 3.0], np.float32)

    def make():
        return tf.keras.optimizers.SGD(0.1, weight_decay=0.5)

    with tf.Graph().as_default():
        weights = tf1.get_variable("weights", initializer=start, use_resource=True)
        late = tf1.py_func(lambda: time.sleep(0.3), [], [])
        with tf.control_dependencies([late]):
            read = tf.identity(weights.read_value())
        update = NPUOptimizer(make()).minimize(tf.reduce_sum(read**2), var_list=[weights])
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(update)
            trained = session.run(weights)
    weights = tf.Variable(start)
    make().minimize(lambda: tf.reduce_sum(weights**2), [weights])
    np.testing.assert_allclose(trained, weights.numpy(), rtol=1e-6)
