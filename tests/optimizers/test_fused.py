"""Variables updated together get the numbers, the slots and the checkpoints of variables updated one by one."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from npu_bridge.optimizers import flat_slots, keras, keras_legacy, tf1
from npu_bridge.optimizers import fused as fused_module
from tests.optimizers import numpy_models

v1 = tf.compat.v1
SHAPES = ([4, 6], [5], [], [7], [3, 2], [40, 30], [50, 20], [6, 4], [6])  # two are large, see `small_limits`
STEPS = 12
GROUPS = [{"match": "v1|v3", "lr": 0.02}]
CASES = [(name, given) for name, (_, cases) in numpy_models.CASES.items() for given in cases]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Joined tensors of few elements, so that small tests have several of them and large variables."""
    monkeypatch.setattr(fused_module, "JOINED_ELEMENTS", 100)
    monkeypatch.setattr(fused_module, "FLAT_ELEMENTS", 50)


def _values(seed, shapes=SHAPES):
    random = np.random.RandomState(seed)
    return [np.asarray(random.randn(*shape)) for shape in shapes]


def _gradients(steps=STEPS):
    """Gradients of several magnitudes."""
    random = np.random.RandomState(4)
    return [[random.randn(*shape) * 10.0 ** random.uniform(-4, 1) for shape in SHAPES] for _ in range(steps)]


class Training:
    """A graph with some variables, gradients that are fed, and a session."""

    def __init__(self, make, dtype=np.float32, use_resource=True, wrap=lambda optimizer: optimizer):
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.variables = [
                v1.get_variable(f"v{i}", initializer=value.astype(dtype), use_resource=use_resource)
                for i, value in enumerate(_values(3))
            ]
            self.fed = [v1.placeholder(dtype, variable.shape) for variable in self.variables]
            self.optimizer = make()
            wrapped = wrap(self.optimizer)
            loss = tf.add_n([tf.cast(tf.reduce_sum(v * g), tf.float32) for v, g in zip(self.variables, self.fed)])
            self.step = wrapped.apply_gradients(wrapped.compute_gradients(loss, self.variables))
            self.saver = v1.train.Saver()
            self.session = v1.Session()
            self.session.run(v1.global_variables_initializer())
            self.graph.finalize()

    def run(self, gradients):
        for step in gradients:
            self.session.run(self.step, dict(zip(self.fed, step)))
        return self

    def values(self):
        return dict(zip([v.op.name for v in self.variables], self.session.run(self.variables)))

    def set_values(self, values):
        feeds = {v.initializer.inputs[1]: value for v, value in zip(self.variables, values)}
        self.session.run([v.initializer for v in self.variables], feeds)

    def states(self):
        with self.graph.as_default():
            return self.optimizer.get_states(self.session)

    def save(self, path):
        with self.graph.as_default():
            return self.saver.save(self.session, str(path), write_meta_graph=False)

    def restore(self, path):
        with self.graph.as_default():
            self.saver.restore(self.session, path)

    def set_states(self, states):
        with self.graph.as_default():
            self.optimizer.set_states(states, self.session)


def _assert_alike(one, other, tolerance=2e-6):
    assert one.keys() == other.keys()
    for name in one:
        largest = np.max(np.abs(other[name])) + 1e-30
        np.testing.assert_allclose(one[name] / largest, other[name] / largest, rtol=0, atol=tolerance, err_msg=name)


def _assert_alike_in_states(one, other, tolerance=2e-6):
    assert one.keys() == other.keys() and one["step_counter"] == other["step_counter"]
    for slot in set(one) - {"step_counter"}:
        _assert_alike(one[slot], other[slot], tolerance)


@pytest.mark.few_fast(6, "every rule on every place")
@pytest.mark.parametrize("name, given", CASES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CASES)])
def test_together_is_one_by_one(name, given):
    make = getattr(tf1, name)
    one_by_one = Training(lambda: make(**given, groups=GROUPS)).run(_gradients())
    fused = Training(lambda: make(**given, groups=GROUPS, fused=True)).run(_gradients())
    _assert_alike(fused.values(), one_by_one.values())
    _assert_alike_in_states(fused.states(), one_by_one.states())


@pytest.mark.slow("every optimizer on every kind of variable")
def test_reference_variables_and_narrow_ones():
    for arguments in ({"use_resource": False}, {"dtype": np.float16}, {"dtype": np.float64}):
        one_by_one = Training(lambda: tf1.LAMB(0.01, weight_decay=0.1), **arguments).run(_gradients())
        fused = Training(lambda: tf1.LAMB(0.01, weight_decay=0.1, fused=True), **arguments).run(_gradients())
        _assert_alike(fused.values(), one_by_one.values(), 1e-3 if "dtype" in arguments else 2e-6)


@pytest.mark.slow("checkpoints in both directions")
@pytest.mark.parametrize("name", ["LAMB", "Adam", "SGD"])
def test_checkpoints_do_not_tell_how_they_were_made(name, tmp_path):
    def training(fused):
        given = {"momentum": 0.9} if name == "SGD" else {}
        return Training(lambda: getattr(tf1, name)(0.01, **given, fused=fused))

    whole = training(False).run(_gradients())
    for first, second in ((True, False), (False, True), (True, True)):
        half = training(first).run(_gradients()[:5])
        path = half.save(tmp_path / f"{first}{second}")
        slots = {n for n, _ in tf.train.list_variables(path)} - {v.op.name for v in half.variables}
        assert slots == {
            f"v{i}/{name}/{slot}" for i in range(len(SHAPES)) for slot in whole.states() if slot != "step_counter"
        } | {f"{name}/update_count"}
        half.run(_gradients()[5:])  # a save changes nothing
        _assert_alike(half.values(), whole.values())
        other = training(second).run(_gradients(3))  # what it held before is forgotten
        other.restore(path)
        other.run(_gradients()[5:])
        _assert_alike(other.values(), whole.values())
        _assert_alike_in_states(other.states(), whole.states())


def test_states_by_name():
    whole = Training(lambda: tf1.Adam(0.01, fused=True)).run(_gradients())
    half = Training(lambda: tf1.Adam(0.01, fused=True)).run(_gradients()[:5])
    states = half.states()
    assert states["step_counter"] == 5 and set(states) == {"step_counter", "m", "v"}
    assert states["m"]["v0"].shape == (4, 6)
    other = Training(lambda: tf1.Adam(0.01)).run(_gradients(1))
    other.set_values(half.values().values())
    other.set_states(states)
    other.run(_gradients()[5:])
    _assert_alike(other.values(), whole.values())
    with pytest.raises(ValueError, match="Adam: unknown state.*Did you mean 'm of v1'"):
        other.set_states({"m": {"v11": np.zeros([5])}})
    with pytest.raises(ValueError, match=r"m of v1 has another shape than its variable. Expected \(5,\); got \(4,\)"):
        other.set_states({"m": {"v1": np.zeros([4])}})


def test_a_graph_has_one_empty_function(monkeypatch):
    traced, trace = [], flat_slots._trace_function
    monkeypatch.setattr(flat_slots, "_trace_function", lambda function: traced.append(function) or trace(function))
    Training(lambda: tf1.LAMB(0.01, groups=GROUPS, fused=True)).run(_gradients()[:1])
    names = [function.__name__ for function in traced]
    assert names.count("_move_to_flat") == names.count("_move_from_flat") > names.count("<lambda>") == 1


def test_weights_changed_from_outside_are_seen():
    def changed(fused):
        training = Training(lambda: tf1.LAMB(0.01, weight_decay=0.1, fused=fused)).run(_gradients()[:4])
        training.set_values(_values(9))
        return training.run(_gradients()[4:]).values()

    _assert_alike(changed(True), changed(False))


def test_a_skipped_step_leaves_everything():
    def scaled(fused):
        wrap = lambda optimizer: NPUOptimizer(optimizer, FixedLossScaleManager(8.0), is_loss_scale=True)  # noqa: E731
        return Training(lambda: tf1.LAMB(0.01, fused=fused), wrap=wrap)

    trained = [scaled(True), scaled(False)]
    bad = [[np.full_like(grad, np.inf) for grad in _gradients()[0]]]
    for training in trained:
        training.run(_gradients()[:3])
        before = {**training.values(), **training.states()["m"]}
        training.run(bad)
        after = {**training.values(), **training.states()["m"]}
        assert all(np.array_equal(before[name], after[name]) for name in before)
        training.run(_gradients()[3:])
    _assert_alike(trained[0].values(), trained[1].values())
    _assert_alike_in_states(trained[0].states(), trained[1].states())


def test_keras_optimizers_update_together_too():
    def trained(**given):
        variables = [tf.Variable(value.astype(np.float32), name=f"v{i}") for i, value in enumerate(_values(3))]
        optimizer = keras.LAMB(0.01, weight_decay=0.1, groups=GROUPS, **given)
        step = tf.function(lambda *gradients: optimizer.apply_gradients(list(zip(gradients, variables))))
        for gradients in _gradients():
            step(*[tf.constant(gradient, tf.float32) for gradient in gradients])
        optimizer.apply_gradients([(tf.constant(g, tf.float32), v) for g, v in zip(_gradients()[0], variables)])
        return {v.name: v.numpy() for v in variables}, optimizer

    one_by_one, fused = trained(), trained(fused=True)
    _assert_alike(fused[0], one_by_one[0])
    _assert_alike_in_states(fused[1].get_states(), one_by_one[1].get_states())
    assert fused[1].get_config()["fused"] is True
    with pytest.raises(ValueError, match="legacy Keras optimizers update one variable after the other"):
        keras_legacy.LAMB(fused=True)
    with pytest.raises(TypeError, match="LAMB: fused is not a boolean"):
        tf1.LAMB(fused=1)


@pytest.mark.few_fast(1, "other generations of Keras")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["as it is", "compiled by XLA"])
def test_fused_optimizers_train_in_functions_of_all_kinds(is_compiled):
    def losses_of_model(optimizer):
        v2.keras.utils.set_random_seed(1)
        model = v2.keras.Sequential([v2.keras.Input([6]), v2.keras.layers.Dense(8), v2.keras.layers.Dense(3)])
        model.compile(npu_keras_optimizer(optimizer), "mse", jit_compile=is_compiled)
        return model.fit(features, labels, epochs=3, batch_size=16, shuffle=False, verbose=0).history["loss"]

    def losses_of_function(optimizer):
        kernel, bias = tf.Variable(tf.ones([6, 3])), tf.Variable(tf.zeros([3]))

        @tf.function(jit_compile=is_compiled)
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(features @ kernel + bias - labels))
            optimizer.apply_gradients(zip(tape.gradient(loss, [kernel, bias]), [kernel, bias]))
            return loss

        return [float(step()) for _ in range(3)]

    v2 = tf.compat.v2
    features = np.random.RandomState(0).randn(32, 6).astype(np.float32)
    labels = features[:, :3]
    assert np.allclose(*(losses_of_model(keras.LAMB(0.01, fused=fused)) for fused in (True, False)), rtol=1e-5)
    for name in ("LAMB", "Adam"):
        of_keras, of_tf1 = getattr(keras, name), getattr(tf1, name)
        expected = losses_of_function(of_keras(0.01))
        for optimizer in (of_keras(0.01, fused=True), of_tf1(0.01, fused=True)):
            assert np.allclose(losses_of_function(optimizer), expected, rtol=1e-5)
        assert expected[2] < expected[0]
