"""Frozen layers cost nothing in the updates that do not train them, and training is that of the schedule."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import stages
from npu_bridge.estimator.npu.npu_config import NPURunConfig
from npu_bridge.estimator.npu.npu_estimator import NPUEstimator
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import FixedLossScaleManager
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.gradients.collections import STEP_SKIPPED, gradients_of
from npu_bridge.gradients.graph_mode import classic_control_flow
from npu_bridge.graph.run import run_of
from npu_bridge.reporting import History, HistoryHook
from tests.goldens.cases import GOLDENS, exponential
from tests.goldens.checks import assert_close
from tests.goldens.models import in_numpy
from tests.goldens.two_layers import assert_same_bits
from tests.goldens.ways import InFit
from tests.ranks.test_freezing import assert_frozen_layers_cost_nothing, executed
from tests.ranks.ways import started_session
from tests.refusing import refuses

tf1 = tf.compat.v1
SHORT = {"groups": [["first"], ["second"]], "kind": "explicit", "sequence": [0, 1, 1]}


def test_a_session_runs_no_operator_of_a_frozen_layer():
    """Of its backward pass and its update; its variables and slots keep their bits."""
    assert_frozen_layers_cost_nothing([executed()])


def test_hooks_see_the_gradients_and_the_decision_of_each_step_with_frozen_layers(tmp_path):
    with tf.Graph().as_default() as graph:
        first, second = (tf1.get_variable(f"{name}/w", initializer=1.0) for name in ("first", "second"))
        fed, inner = tf1.placeholder(tf.float32, []), tf1.train.GradientDescentOptimizer(0.1)
        optimizer = NPUOptimizer(inner, FixedLossScaleManager(1), is_loss_scale=True, stages=[stages.Freeze(SHORT)])
        train_op = optimizer.minimize(first * second * fed, tf1.train.get_or_create_global_step())
        run = run_of(graph, train_op, {fed: 1.0})
        decision = graph.get_collection(STEP_SKIPPED)[0].op.inputs
        assert {tensor.name for tensor in [*gradients_of(graph), *decision]} <= run.values
        with tf1.train.MonitoredTrainingSession(hooks=[HistoryHook(str(tmp_path / "history"))]) as session:
            for batch in (1.0, np.nan, 1.0, 1.0, np.nan):
                session.run([train_op, sorted(run.values)], {fed: batch})
    rows = History(str(tmp_path / "history")).rows
    assert [(row.step, row.skipped) for row in rows] == [(1, False), (1, True), (2, False), (3, False), (3, True)]


def awkward_loss(variables, rows):
    """The loss of a model with an embedding, a loop, a condition and a function."""
    table, kernel, last = variables

    @tf.function
    def called(x):
        return tf.tanh(x) * tf.reduce_sum(kernel)

    x = tf.nn.embedding_lookup(table, rows)
    x = tf.sin(tf.matmul(x, kernel))
    _, x = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, tf.tanh(tf.matmul(x, kernel))), [0, x])
    x = tf.cond(tf.reduce_sum(rows) > 4, lambda: x * kernel[0], lambda: tf.exp(x))
    return tf.reduce_sum(tf.square(tf.matmul(called(x) + tf.matmul(x, kernel), last)))


def trained_awkwardly(way, steps=7):
    """Variables after training in a graph, a function or eagerly."""
    random = np.random.RandomState(3)
    values = [random.randn(*shape).astype(np.float32) / 2 for shape in ((5, 2), (2, 2), (2, 2))]
    names = ["first/table", "first/kernel", "second/kernel"]
    batches = random.randint(0, 5, [steps, 3])
    if way.startswith("graph"):
        control_flow = classic_control_flow() if way.endswith("classic") else contextlib.nullcontext()
        with tf.Graph().as_default(), control_flow:
            variables = [
                tf1.get_variable(name, initializer=value, use_resource=True) for name, value in zip(names, values)
            ]
            fed = tf1.placeholder(tf.int32, [3])
            inner = tf1.train.MomentumOptimizer(0.1, 0.9)
            optimizer = NPUOptimizer(inner, stages=[stages.Freeze(SHORT), stages.ClipByGlobalNorm(1.0)])
            train_op = optimizer.minimize(awkward_loss(variables, fed))
            with started_session() as session:
                for batch in batches:
                    session.run(train_op, {fed: batch})
                return session.run(variables)
    variables = [tf.Variable(value, name=name) for name, value in zip(names, values)]
    inner = tf.keras.optimizers.legacy.SGD(0.1, 0.9)
    optimizer = npu_keras_optimizer(inner, stages=[stages.Freeze(SHORT), stages.ClipByGlobalNorm(1.0)])

    def step(rows):
        optimizer.minimize(lambda: awkward_loss(variables, rows), variables)

    step = tf.function(step) if way == "function" else step
    for batch in batches:
        step(tf.constant(batch, tf.int32))
    return [variable.numpy() for variable in variables]


@pytest.mark.slow("a model of each kind")
def test_models_with_loops_conditions_functions_and_embeddings_freeze_too():
    expected = trained_awkwardly("eager")
    for way in ("function", "graph", "graph, classic"):
        for ours, value in zip(trained_awkwardly(way), expected):
            np.testing.assert_allclose(ours, value, rtol=1e-4, atol=1e-6, err_msg=way)


@pytest.mark.few_fast(1, "three trainings each")
@pytest.mark.parametrize("settings", [{"steps_per_execution": 2}, {"run_eagerly": True}, {"jit_compile": True}])
def test_other_ways_to_run_a_keras_step_do_the_same(settings):
    golden = GOLDENS["frozen, clipped"]
    training = InFit(golden, is_counted=not settings.get("jit_compile"), **settings)
    training.train(golden.problem.fed_to(0, 20))
    after = in_numpy(golden, 1).trace[19]
    assert training.updates() == after.updates
    assert_close(training.values(), after.values[0], settings, golden.problem)


def test_keras_in_a_graph_freezes(keras_batches):
    """Where a session runs the step that Keras makes of a legacy optimizer."""
    results = []
    for is_graph in (False, True):
        with tf.Graph().as_default() if is_graph else contextlib.nullcontext():
            dense = [
                tf.keras.layers.Dense(3, name=name, kernel_initializer="ones", activation="tanh")
                for name in ("first", "second")
            ]
            model = tf.keras.Sequential([tf.keras.Input([3]), *dense])
            optimizer = npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(0.1, 0.9), stages=[stages.Freeze(SHORT)])
            model.compile(optimizer, loss="mse")
            model.fit(*keras_batches, batch_size=4, shuffle=False, verbose=0)
            results.append(model.get_weights())
    for ours, expected in zip(*results):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def keras_batches():
    random = np.random.RandomState(2)
    return random.randn(24, 3).astype(np.float32), random.randn(24, 3).astype(np.float32)


def model_fn(features, labels, mode):
    x = features
    for name in ("first", "second"):
        kernel = tf1.get_variable(f"{name}/kernel", initializer=np.eye(3, dtype=np.float32))
        x = tf.tanh(tf.matmul(x, kernel))
    loss = tf.reduce_mean(tf.square(x - labels))
    inner = tf1.train.AdamOptimizer(0.1)
    optimizer = NPUOptimizer(inner, exponential(2.0**8, 5), True, True, stages=[stages.Freeze(SHORT)])
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=optimizer.minimize(loss, tf1.train.get_or_create_global_step())
    )


def test_an_estimator_trains_several_steps_in_a_run_with_frozen_layers(tmp_path, keras_batches):
    results = []
    for loop in (1, 3):
        config = NPURunConfig(model_dir=str(tmp_path / str(loop)), iterations_per_loop=loop, save_checkpoints_steps=100)
        estimator = NPUEstimator(model_fn, config=config)
        estimator.train(lambda: tf.data.Dataset.from_tensor_slices(keras_batches).batch(4), max_steps=6)
        results.append({name: estimator.get_variable_value(name) for name in estimator.get_variable_names()})
    assert results[0]["freeze_updates"] == 6
    assert_same_bits(results[1], results[0])


def test_a_type_0_schedule_of_10_groups_is_full_in_20_of_29_updates():
    schedule = stages.FreezeSchedule(groups=10, kind="continuous", full_share=0.7, total_steps=1000)
    assert list(schedule.sequence[:30]) == [0] * 20 + list(range(1, 10)) + [0]
    assert len(schedule.sequence) == 1010
    assert list(stages.FreezeSchedule(2, "continuous", full_share=0.4).sequence[:3]) == [0, 1, 0], "none trains group 0"


def test_an_interval_schedule_draws_what_it_says():
    default = stages.FreezeSchedule()
    sequence = default.sequence
    assert len(sequence) == int(1.01 * 65536) and sequence[0] == 0
    assert np.mean(sequence == 0) == pytest.approx(0.7, abs=1e-4)
    counts = np.bincount(sequence)[1:]
    assert len(counts) == 9
    np.testing.assert_allclose(counts / counts.sum(), np.arange(9, 0, -1) / 45, atol=0.01)
    for stop in range(1, 200):  # the share is kept from the beginning on
        assert np.count_nonzero(sequence[:stop]) <= 0.3 * stop + 1
    assert np.array_equal(stages.FreezeSchedule().sequence, sequence)
    other = stages.FreezeSchedule(seed=1)
    assert other.digest() != default.digest() == stages.FreezeSchedule().digest()
    assert not stages.FreezeSchedule(full_share=1.0).sequence.any()
    assert not stages.FreezeSchedule(groups=1).sequence.any()
    assert np.mean(stages.FreezeSchedule(full_share=0.1).sequence == 0) == pytest.approx(0.1, abs=1e-4)


def test_layers_are_cut_into_blocks_of_equal_numbers():
    layers = ["stem/conv/kernel", "stem/bn/gamma", "stem/bn/beta"]  # one block: what says "bn" joins
    for number in range(6):
        layers += [f"block_{number}/dense/kernel", f"block_{number}/dense/bias", f"block_{number}/dense/scale"]
    assert stages.FreezeSchedule(groups=7).last_group_of_each([f"{name}:0" for name in layers]) == [
        *[0] * 3,
        *[group for group in range(1, 7) for _ in range(3)],
    ]
    # 7 blocks in 3 groups: two for each, and the last one also what is left
    assert stages.FreezeSchedule(groups=3).last_group_of_each(layers)[::3] == [0, 0, 1, 1, 2, 2, 2]
    plain = ["w0", "w1", "w2", "w3", "subnet", "out_bias"]
    assert stages.FreezeSchedule(groups=2).last_group_of_each(plain) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="2 blocks of layers for 3 groups. Use groups=2"):
        stages.FreezeSchedule(groups=3).last_group_of_each(plain)


def test_parts_of_a_model_are_named_by_expressions_or_variables():
    names = ["bert/embedding:0", "bert/layer_0/kernel:0", "bert/layer_1/kernel:0", "bert/layer_10/kernel:0", "head:0"]
    parts = [["embedding"], ["layer_0/", "layer_1/"], ["layer_10"]]
    assert stages.FreezeSchedule(groups=parts).last_group_of_each(names) == [0, 1, 1, 2, 2]
    variable = tf.Variable([1.0], name="bert/layer_1/kernel")
    schedule = stages.FreezeSchedule(groups=[[variable], ["head"]])
    assert schedule.last_group_of_each(names) == [1, 1, 0, 1, 1]
    again = stages.FreezeSchedule.of(schedule.get_config())
    assert again.get_config() == schedule.get_config() and again.last_group_of_each(names) == [1, 1, 0, 1, 1]
    with pytest.raises(ValueError, match="'layer_0_/kernl'.*Did you mean 'bert/layer_0/kernel'"):
        stages.FreezeSchedule(groups=[["layer_0_/kernl"], ["head"]]).last_group_of_each(names)
    with pytest.raises(ValueError, match="bert/layer_10/kernel in parts 0 and 1"):
        stages.FreezeSchedule(groups=[["layer_1"], ["layer_10"]]).last_group_of_each(names)


@pytest.mark.parametrize("make", [lambda arguments: stages.FreezeSchedule(**arguments), stages.Freeze])
@refuses(
    ({"kind": "intervall"}, ValueError, "Did you mean 'interval'"),
    ({"kind": 1}, ValueError, "kind has an unknown value"),
    ({"groups": "layer"}, TypeError, "'layer' (str)"),
    ({"groups": ["layer"]}, TypeError, "Write [["),
    ({"groups": [[]]}, ValueError, "an empty list"),
    ({"groups": [["("]]}, ValueError, "cannot be read"),
    ({"groups": [[4]]}, TypeError, "4 (int)"),
    ({"kind": "explicit"}, ValueError, "sequence=None"),
    ({"sequence": [0]}, ValueError, "kind='interval'"),
    ({"kind": "explicit", "sequence": [0, 1.0]}, TypeError, "entry 1 of sequence is not an integer"),
    ({"kind": "explicit", "sequence": [0, 10]}, ValueError, "each 0 to 9; got 10"),
    ({"kind": "explicit", "sequence": []}, ValueError, "empty"),
    ({"kind": "explicit", "sequence": 5}, TypeError, "not a list"),
)
def test_bad_arguments_are_refused_at_construction(arguments, make):
    make(arguments)


def test_a_table_of_a_file_makes_a_schedule_and_is_explained(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[[stages]]\nstage = 'Freeze'\nschedule = {groups = [['first'], ['second']], full_share = 0.5}\n")
    config = NPURunConfig.from_file(path)
    with tf.Graph().as_default():
        inner = tf1.train.GradientDescentOptimizer(0.1)
        told = stages.explain(NPUOptimizer(inner, exponential(2.0**8, 5), True, True, stages=config.stages), ranks=2)
    lines = told.splitlines()
    assert "freeze" in lines[1] and "'full_share': 0.5" in lines[1] and "depend on the training" in lines[1]
    assert "reduce" in lines[2]
    path.write_text("\n[[stages]]\nstage = 'Freeze'\nschedule = {groups = 2, full_shar = 0.5}\n")
    with pytest.raises(ValueError, match=r"run.toml:4: key stages\[0\].schedule: .*'full_share'\?"):
        NPURunConfig.from_file(path)
    with pytest.raises(TypeError, match="FreezeSchedule"):
        stages.Freeze(10)


def test_stages_that_need_every_variable_in_every_step_are_refused_beside_it():
    inner = tf1.train.GradientDescentOptimizer(0.1)
    needing = [stages.PartialSync(), stages.TopK(0.1), stages.Threshold(0.1), stages.Accumulate(2, exchange="batch")]
    for other in needing:
        with pytest.raises(ValueError, match=f"Freeze leaves variables out.*{type(other).__name__}.*only one of these"):
            NPUDistributedOptimizer(inner, stages=[stages.Freeze(SHORT), other])
    for other in (stages.Adasum(), stages.TopK(0.1, error_feedback=False)):
        NPUDistributedOptimizer(inner, stages=[stages.Freeze(SHORT), other])
    with pytest.raises(ValueError, match="SharedUpdate"):
        NPUDistributedOptimizer(inner, is_weight_update_sharding=True, stages=[stages.Freeze(SHORT)])


@pytest.mark.parametrize("is_graph", [True, False])
def test_variables_of_two_groups_share_a_gradient(is_graph):
    schedule = {"groups": [["first"], ["second"], ["third"]], "kind": "explicit", "sequence": [0, 1, 2]}
    names = ("first", "second", "third")
    with tf.Graph().as_default() if is_graph else contextlib.nullcontext():
        variables = [tf1.Variable(0.0, name=name, use_resource=True) for name in names]
        optimizer = npu_keras_optimizer(tf.keras.optimizers.legacy.SGD(1.0), stages=[stages.Freeze(schedule)])
        inner = tf1.train.GradientDescentOptimizer(1.0)
        optimizer = NPUOptimizer(inner, stages=[stages.Freeze(schedule)]) if is_graph else optimizer
        values = []
        if is_graph:
            train_op = optimizer.minimize(variables[0] + variables[1] + variables[2])
            with started_session() as session:
                for _ in range(3):
                    session.run(train_op)
                    values.append(session.run(variables))
        else:
            step = tf.function(
                lambda: [optimizer.minimize(lambda: sum(variables[1:], variables[0]), variables), None][1]
            )
            for _ in range(3):
                step()
                values.append([variable.numpy() for variable in variables])
    assert values == [[-1, -1, -1], [-1, -2, -2], [-1, -2, -3]]


def test_the_loss_and_what_hangs_on_the_forward_pass_are_computed_in_all_steps():
    """Where frozen variables alone need it for the backward pass, too."""
    with tf.Graph().as_default():
        variables = [tf1.get_variable(name, initializer=1.0, use_resource=True) for name in ("first", "second")]
        grown = tf.exp(variables[0])
        shown = tf.negative(grown)
        loss = variables[1] + grown
        optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1), stages=[stages.Freeze(SHORT)])
        grads = [grad for grad, _ in optimizer.compute_gradients(loss)]
        train_op = optimizer.apply_gradients(zip(grads, variables))
        with started_session() as session:
            losses = []
            for _ in range(4):
                losses.append(session.run([loss, shown, *grads]))
                session.run(train_op)
    first = [np.exp(1.0), np.exp(1.0 - 0.1 * np.exp(1.0))]
    expected = [[1 + first[0], -first[0], first[0], 1.0]]
    expected += [[1 - 0.1 * step + first[1], -first[1], 0.0 if step < 3 else first[1], 1.0] for step in (1, 2, 3)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_eager_gradients_of_frozen_variables_are_zero_before_others_see_them():
    first, second = (tf.Variable([1.0], name=name) for name in ("first", "second"))
    pipeline, seen = stages.pipeline("eager", stages=[stages.Freeze(SHORT)]), []
    for _ in SHORT["sequence"]:
        step = pipeline.begin()
        with tf.GradientTape() as tape:
            loss = pipeline.scale(tf.reduce_sum(first + second), step)
        gradients = pipeline.gradients(step, tape, loss, [first, second])
        seen.append([float(gradient[0]) for gradient in gradients])
        pairs = pipeline.combine(step, zip(gradients, [first, second]))
        pipeline.apply(step, pairs, tf.keras.optimizers.legacy.SGD(0.0).apply_gradients)
    assert seen == [[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]


def test_what_would_change_frozen_variables_is_refused():
    pipeline = stages.pipeline("loop", stages=[stages.Freeze(SHORT)])
    first, second = (tf.Variable([1.0], name=name) for name in ("first", "second"))
    step = pipeline.begin()
    pipeline.combine(step, [(tf.ones([1]), first), (tf.ones([1]), second)])
    with pytest.raises(ValueError, match="group 1 trains no variable on which the loss depends"):
        pipeline.combine(pipeline.begin(), [(tf.ones([1]), first), (None, second)])
