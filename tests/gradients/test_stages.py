"""Stages on one rank: what they refuse, what they leave alone, and how they are saved."""

from __future__ import annotations

import contextlib
import itertools
import math
import re

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import stages
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.gradients.stages.partial_sync import split_into_partitions
from npu_bridge.gradients.step import Step
from tests.goldens.cases import exponential
from tests.loose_code import REPOSITORY, run_pieces_of

tf1 = tf.compat.v1
HALVES = {"groups": [["w"], ["v"]], "kind": "explicit", "sequence": [0, 1]}


def test_two_stages_that_keep_ranks_together_are_refused():
    inner = tf1.train.GradientDescentOptimizer(0.1)
    kinds = [stages.Adasum(), stages.PartialSync(), stages.TopK(0.1), stages.Threshold(0.1)]
    for pair in itertools.combinations(kinds, 2):
        with pytest.raises(ValueError, match="more than once"):
            NPUDistributedOptimizer(inner, stages=list(pair))
    for kind in kinds:
        with pytest.raises(ValueError, match="is_distributed=True"):
            NPUOptimizer(inner, stages=[kind])
    for kind in (stages.PartialSync(), stages.Adasum(on="weights")):  # after which ranks do not update alike
        with pytest.raises(ValueError, match="is_weight_update_sharding=False"):
            NPUDistributedOptimizer(inner, is_weight_update_sharding=True, stages=[kind])
    with pytest.raises(ValueError, match="inside"):
        distributed = NPUDistributedOptimizer(inner, stages=[stages.PartialSync()])
        NPULossScaleOptimizer(distributed, exponential(2.0**10, 4), is_distributed=True)
    with pytest.raises(ValueError, match="an optimizer with PartialSync"):
        stages.sync_all(NPUDistributedOptimizer(inner))


@pytest.mark.parametrize("is_made_eagerly", [True, False])
@pytest.mark.parametrize("make_stage", [lambda: stages.Accumulate(2), lambda: stages.Freeze(HALVES)])
def test_an_optimizer_made_outside_of_the_graph_that_it_trains_is_told(make_stage, is_made_eagerly):
    with contextlib.nullcontext() if is_made_eagerly else tf.Graph().as_default():
        optimizer = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1), stages=[make_stage()])
    with tf.Graph().as_default(), pytest.raises(ValueError, match="Make the optimizer in the graph that it trains"):
        optimizer.minimize(tf1.get_variable("w", initializer=1.0) + tf1.get_variable("v", initializer=1.0))


def test_sums_of_one_graph_are_not_for_another():
    with tf.Graph().as_default():
        optimizer = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1), stages=[stages.Accumulate(2)])
        optimizer.minimize(tf1.get_variable("w", initializer=1.0))
    with tf.Graph().as_default(), pytest.raises(ValueError, match="an optimizer for each graph; got a variable accum"):
        optimizer.minimize(tf1.get_variable("w", initializer=1.0))


def test_the_largest_values_are_found_whatever_a_sample_of_them_says():
    count, share = 2**16, 0.01
    random = np.random.RandomState(0)
    misleading = random.uniform(0.0, 1.0, count)
    misleading[::32] += 1.0  # all that the sample sees is large
    vectors = {
        "normal": random.randn(count),
        "heavy tails": random.standard_cauchy(count),
        "one value": np.full(count, 3.0),
        "mostly zeros": np.where(random.rand(count) < share / 2, random.randn(count), 0.0),
        "misleading": misleading,
        "sorted": np.arange(count) - count / 2,
    }
    stage = stages.TopK(share)
    wanted = math.ceil(share * count)
    for name, vector in vectors.items():
        vector = vector.astype(np.float32)
        positions = tf.function(stage._select_positions)(tf.constant(vector)).numpy()
        assert len(set(positions)) == wanted, name
        largest = np.sort(np.abs(vector))[-wanted:]
        np.testing.assert_array_equal(np.sort(np.abs(vector[positions])), largest, err_msg=name)


def test_partitions_are_cut_from_the_last_variable_on():
    sizes = (3, 1, 9, 2, 2, 2)
    variables = [tf.zeros([size]) for size in sizes]
    for threshold, expected in (
        (1, [[2], [2], [2], [9], [3], [1]]),
        (2, [[2, 2], [9], [2, 1], [3]]),
        (5, [[2, 2, 2], [9], [1, 3]]),
        (100, [[2, 2, 2, 9, 1, 3]]),
    ):
        cut = [[part.shape[0] for part in parts] for parts in split_into_partitions(variables, threshold)]
        assert cut == expected


def test_a_schedule_moves_once_in_a_window():
    rates = tf.keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [1.0, 0.1, 0.01])
    variable = tf.Variable(0.0)
    for make in (tf.keras.optimizers.legacy.SGD, tf.keras.optimizers.SGD):
        variable.assign(0.0)
        optimizer = npu_keras_optimizer(make(rates), stages=[stages.Accumulate(2)])
        seen = []
        for _ in range(8):
            optimizer.minimize(lambda: variable * 1.0, [variable])
            seen.append(round(-variable.numpy(), 4))
        np.testing.assert_allclose(seen, [0, 1, 1, 2, 2, 2.1, 2.1, 2.11], rtol=1e-5)
        assert int(optimizer.iterations) == 4


def test_all_sums_of_a_window_are_stored_in_one_condition():
    def conditions(count):
        variables = [tf.Variable([1.0]) for _ in range(count)]
        optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(0.1), stages=[stages.Accumulate(2)])
        step = tf.function(lambda: optimizer.minimize(lambda: tf.add_n(variables), variables))
        return sum(op.type in ("If", "StatelessIf") for op in step.get_concrete_function().graph.get_operations())

    assert conditions(2) == conditions(5) > 0


def test_a_keras_model_is_saved_with_its_stages_in_the_middle_of_a_window(tmp_path):
    def new_model():
        model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=[3], kernel_initializer="ones")])
        layers = {"groups": [["kernel"], ["bias"]], "kind": "explicit", "sequence": [0, 1]}
        added = [stages.Accumulate(3), stages.ClipByValue(0.5), stages.Freeze(layers)]
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)  # of legacy ones such a file holds no state
        model.compile(npu_keras_optimizer(optimizer, exponential(2.0**10, 4), stages=added), loss="mse")
        return model

    random = np.random.RandomState(0)
    data = random.randn(8, 3).astype(np.float32), random.randn(8, 2).astype(np.float32)

    def fit(model, start, stop):
        model.fit(data[0][start:stop], data[1][start:stop], batch_size=1, shuffle=False, verbose=0)
        return model

    whole, half = fit(new_model(), 0, 8), fit(new_model(), 0, 4)
    half.save(tmp_path / "model.keras")
    loaded = fit(tf.keras.models.load_model(tmp_path / "model.keras"), 4, 8)
    for ours, expected in zip(loaded.get_weights(), whole.get_weights()):
        np.testing.assert_array_equal(ours, expected)


def test_gradients_from_elsewhere_are_refused_instead_of_applied_one_by_one():
    with tf.Graph().as_default():
        variable = tf1.get_variable("variable", [2])
        optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1), stages=[stages.Accumulate(2)])
        with pytest.raises(ValueError, match="compute_gradients"):
            optimizer.apply_gradients([(tf.ones([2]), variable)])


def test_gradients_without_variables_are_refused():
    """By stages that would have to know them, also on one rank."""
    needing = [stages.Accumulate(2), stages.TopK(0.1), stages.Threshold(0.1), stages.CentralizeGradients()]
    needing.append(stages.Freeze({"groups": 1}))
    others = [stages.TopK(0.1, error_feedback=False), stages.ClipByGlobalNorm(1.0), stages.ClipByValue(1.0)]
    for stage in [*needing, *others]:
        for generation in (tf.keras.optimizers, tf.keras.optimizers.legacy):
            optimizer = npu_keras_optimizer(generation.SGD(), exponential(2.0**10, 4), stages=[stage])
            optimizer.get_scaled_loss(tf.constant(1.0))
            if stage in others:
                (grad,) = optimizer.get_unscaled_gradients([tf.ones([2]) * optimizer.loss_scale])
                assert grad.shape == [2]
                continue
            with pytest.raises(ValueError, match=f"{type(stage).__name__} needs the variable.*get_unscaled_gradients"):
                optimizer.get_unscaled_gradients([tf.ones([2])])


@pytest.mark.few_fast(1, "other generations of Keras take the same way")
@pytest.mark.parametrize("generation", [tf.keras.optimizers, tf.keras.optimizers.legacy])
def test_keras_must_not_put_batches_together_that_a_stage_puts_together(generation):
    data = np.ones([6, 3], np.float32), np.ones([6, 1], np.float32)

    def fit(added, **arguments):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=[3], kernel_initializer="zeros")])
        model.compile(npu_keras_optimizer(generation.SGD(0.1), stages=[added]), loss="mse", **arguments)
        before = model.get_weights()
        try:
            model.fit(*data, batch_size=1, verbose=0, steps_per_epoch=6)
        finally:
            changed = not np.array_equal(model.get_weights()[0], before[0])
            refused = int(model.optimizer.iterations) == 0 and not changed
            outcomes.append(refused)
        return model

    outcomes = []
    for steps in (2, "auto"):
        with pytest.raises(RuntimeError, match=rf"Accumulate and Keras .*got steps_per_execution='?{steps}'?\. Leave"):
            fit(stages.Accumulate(2), steps_per_execution=steps)
    assert int(fit(stages.Accumulate(2), steps_per_execution=1).optimizer.iterations) == 3
    assert int(fit(stages.ClipByValue(1.0), steps_per_execution=2).optimizer.iterations) == 6
    assert outcomes == [True, True, False, False]


def test_copies_of_stages_share_nothing_and_stay_of_their_class():
    class Remembers(stages.Stage):
        def __init__(self):
            self.seen = {}

    class FreezesLess(stages.Freeze):
        pass

    given = [Remembers(), FreezesLess({"kind": "explicit", "groups": 2, "sequence": [0, 1]})]
    first, second = (npu_keras_optimizer(tf.keras.optimizers.SGD(1.0), stages=given) for _ in range(2))
    one, other = ({type(stage): stage for stage in made.backward_passes.pipeline.stages} for made in (first, second))
    one[Remembers].seen["kernel"] = 1.0
    assert other[Remembers].seen == given[0].seen == {}
    assert one[FreezesLess] is not other[FreezesLess]


class TwiceTheLoss(stages.LossStage):
    def scale_loss(self, loss, step):
        return 2.0 * loss


@pytest.mark.parametrize("generation", [tf.keras.optimizers, tf.keras.optimizers.legacy])
def test_a_stage_of_your_own_changes_the_loss_of_keras(generation):
    def weights_after_fit(optimizer):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer, "mse")
        model.fit(np.float32([[1.0, 2.0], [3.0, 4.0]]), np.float32([[1.0], [2.0]]), epochs=2, verbose=0)
        return model.get_weights()

    ours = weights_after_fit(npu_keras_optimizer(generation.SGD(2.0**-6), stages=[TwiceTheLoss()]))
    np.testing.assert_equal(ours, weights_after_fit(generation.SGD(2.0**-5)))


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_stage_of_your_own_that_makes_an_inf_skips_the_step(is_scaled):
    class Squared(stages.Stage):
        def after_reduce(self, step):
            step.map(lambda grad: grad * grad)

    with tf.Graph().as_default():
        variable = tf1.get_variable("variable", initializer=[0.0])
        slope = tf1.placeholder(tf.float32, [])
        manager = exponential(2.0**10, 4) if is_scaled else None
        optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), manager, True, is_scaled, stages=[Squared()])
        train_op = optimizer.minimize(tf.reduce_sum(variable) * slope)
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            for value in (3.0, 1e18, 2.0):
                session.run(train_op, {slope: value})
            assert session.run(variable)[0] == -13.0


PIECES_OF_PAGES = {"stages": 5, "stages_accumulate": 2, "stages_ranks": 4, "tailing": 3}


@pytest.mark.parametrize("name", PIECES_OF_PAGES)
def test_the_code_of_a_page_runs(name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert run_pieces_of(f"docs/{name}.md") == PIECES_OF_PAGES[name]


def test_every_page_about_stages_is_run():
    assert {page.stem for page in (REPOSITORY / "docs").glob("stages*.md")} == {*PIECES_OF_PAGES} - {"tailing"}


def test_the_table_of_the_page_names_every_stage_and_its_order_every_place():
    page = (REPOSITORY / "docs" / "stages.md").read_text()
    public = [getattr(stages, name) for name in stages.__all__ if isinstance(getattr(stages, name), type)]
    for stage in public:
        if issubclass(stage, stages.Stage) and stage.__module__ != stages.Stage.__module__:  # not a base class
            assert re.search(rf"^\| .*`{stage.__name__}\(.* \| `{stage.place}` \|", page, re.MULTILINE), stage
    order = page[page.index("    scale ─►") : page.index("Between `reduce`")]
    assert re.findall(r"[a-z][a-z ]*[a-z]", order) == list(stages.PLACES)


def test_centralisation_leaves_out_variables_whose_names_contain_a_word():
    grad = tf.constant([[1.0, 2.0], [3.0, 6.0]])
    table, kernel = tf.Variable(tf.zeros([2, 2]), name="bias_table"), tf.Variable(tf.zeros([2, 2]), name="kernel")
    step = Step([(grad, table), (grad, kernel)])
    stages.CentralizeGradients().after_reduce(step)
    np.testing.assert_array_equal(step.gradients[0], grad)
    np.testing.assert_array_equal(step.gradients[1], [[-1.0, -2.0], [1.0, 2.0]])


def test_gradients_with_one_value_for_each_output_are_not_centralised_to_zero():
    grads = [tf.constant([[1.0, 2.0]]), tf.constant([[[3.0, 5.0]]]), tf.constant([[1.0], [3.0]])]
    step = Step([(grad, tf.Variable(grad, name="kernel")) for grad in grads])
    stages.CentralizeGradients().after_reduce(step)
    assert [grad.numpy().tolist() for grad in step.gradients] == [[[1.0, 2.0]], [[[3.0, 5.0]]], [[-1.0], [1.0]]]
