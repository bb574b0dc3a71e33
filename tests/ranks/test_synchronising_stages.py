"""Adasum and partial synchronisation on real ranks: hostile gradients, updates, refusals."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from tests.once import lines_said
from tests.rank_pool import on_each_rank
from tests.ranks.ways import started_session

tf1 = tf.compat.v1


@on_each_rank(2)
def test_adasum_is_a_sum_of_orthogonal_gradients_and_the_mean_of_the_same():
    """Gradients are opposite, tiny, zero, too large together, or of no rows."""
    rank = collective.current().rank
    sign = 1.0 - 2.0 * rank
    grads = {
        "opposite": [sign, 2.0 * sign],
        "same": [3.0, -1.0],
        "orthogonal": [1.0 - rank, 1.0 * rank],
        "tiny and large": [1e-20, 0.0] if rank else [1e10, 0.0],
        "zero here": [0.0, 0.0] if rank else [1.0, 5.0],
        "zero": [0.0, 0.0],
    }
    variables = {name: tf.Variable([0.0, 0.0]) for name in grads}
    table = tf.Variable(tf.zeros([3, 2]))
    rows = tf.IndexedSlices(tf.ones([rank, 2]), tf.fill([rank], tf.constant(2)), tf.constant([3, 2]))
    pipeline = stages.pipeline("hostile", is_distributed=True, stages=[stages.Adasum()])
    pairs = [(tf.constant(grad), variables[name]) for name, grad in grads.items()]
    # Row 2 on rank 0, rows 1 and 0 on rank 1.
    own = tf.IndexedSlices(tf.ones([rank + 1, 2]), tf.constant([1, 0] if rank else [2]), tf.constant([3, 2]))
    unordered = [(own, tf.Variable(tf.zeros([3, 2]))), (rows, table), (None, tf.Variable(1.0))]
    combined = pipeline.combine(pipeline.begin(), [*pairs, *unordered])
    assert dict(zip(grads, (grad.numpy().tolist() for grad, _ in combined))) == {
        "opposite": [0.0, 0.0],
        "same": [3.0, -1.0],
        "orthogonal": [1.0, 1.0],
        "tiny and large": [5e9, 0.0],
        "zero here": [1.0, 5.0],
        "zero": [0.0, 0.0],
    }
    assert tf.convert_to_tensor(combined[-3][0]).numpy().tolist() == [[1.0, 1.0]] * 3
    assert tf.convert_to_tensor(combined[-2][0]).numpy().tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert combined[-1][0] is None

    huge = tf.Variable([0.0] * 4)
    for size in (1.8e19, 1.0):  # half the sum of two squares is finite, that of four is not
        own = size * tf.constant([1.0, 1.0, 0.0, 0.0] if rank else [0.0, 0.0, 1.0, 1.0])
        step = pipeline.begin()
        summed = pipeline.combine(step, [(own, huge)])
        pipeline.apply(step, summed, lambda pairs: huge.assign_sub(pairs[0][0]))
    assert huge.numpy().tolist() == [-1.0] * 4, "a sum whose square overflows was applied, or a good one was not"


def refusals_of(added):
    with tf.Graph().as_default():
        optimizer = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(0.1), stages=[added])
        with pytest.raises(ValueError) as refused:
            optimizer.minimize(tf.reduce_sum(tf1.get_variable("variable", [2])))
        return str(refused.value)


def test_adasum_on_three_ranks_is_refused_before_the_first_step(on_ranks):
    for text in on_ranks(3, refusals_of, stages.Adasum()):
        assert text == (
            "Adasum: ranks are combined in pairs, pairs of pairs and so on. Expected 1, 2, 4, 8... ranks; got 3 "
            "ranks. Start another number of ranks, or leave Adasum out."
        )


def test_adasum_in_groups_that_do_not_divide_the_ranks_is_refused(on_ranks):
    for text in on_ranks(2, refusals_of, stages.Adasum(3)):
        assert "got 2 ranks in groups of 3" in text


@on_each_rank(2, by_rank=[[-1.0, -1.5], [-2.0, -1.5]])
def test_ranks_start_alike_though_no_gradient_is_sent():
    """The last variable is averaged after the first update."""
    rank = collective.current().rank
    with tf.Graph().as_default():
        first, second = (tf1.get_variable(name, initializer=[10.0 * rank] * 2) for name in ("first", "second"))
        inner = tf1.train.GradientDescentOptimizer(1.0)
        train_op = NPUDistributedOptimizer(inner, stages=[stages.PartialSync(1)]).minimize(
            tf.reduce_sum(first + second) * (rank + 1.0)
        )
        with started_session() as session:
            session.run(train_op)
            return [float(value[0]) for value in session.run([first, second])]


@on_each_rank(2, gives=[0.75])
def test_gradients_of_a_group_of_ranks_are_clipped_before_their_mean():
    """The ranks have the gradients 3.0 and 0.5."""
    kernel = tf.Variable([0.0])
    added = [stages.ClipLocally(1.0), stages.Adasum(2, on="weights")]
    pipeline = stages.pipeline("clipped", is_distributed=True, stages=added)
    gradient = tf.constant([0.5 if collective.current().rank else 3.0])
    return pipeline.combine(pipeline.begin(), [(gradient, kernel)])[0][0].numpy().tolist()


@pytest.mark.parametrize("stage", [stages.PartialSync(), stages.Adasum(on="weights")], ids=repr)
@on_each_rank(2)
def test_weights_of_16_bits_are_not_combined(stage):
    """Ranks would not combine their float32 copies."""
    variable = tf.Variable(tf.ones([2], tf.bfloat16), name="narrow")
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1), is_distributed=True, stages=[stage])
    with pytest.raises(ValueError, match="ranks would combine the rounded weights of narrow.*O2"):
        optimizer.minimize(lambda: tf.reduce_sum(tf.cast(variable, tf.float32)), var_list=[variable])


@pytest.mark.parametrize("stage", [stages.PartialSync(), stages.Adasum(on="weights")], ids=repr)
@on_each_rank(2)
def test_a_constraint_holds_for_weights_that_ranks_have_combined(stage):
    """Variables of length 1 get an update in another direction on each rank."""
    variables = [tf.Variable([[0.6], [0.8]], constraint=tf.keras.constraints.UnitNorm()) for _ in range(2)]
    gradient = tf.one_hot([collective.current().rank], 2, axis=0)
    for wrap, inner, each in (
        (NPUOptimizer, tf1.train.GradientDescentOptimizer, variables[0]),
        (npu_keras_optimizer, keras.optimizers.SGD, variables[1]),
    ):
        wrap(inner(1.0), is_distributed=True, stages=[stage]).apply_gradients([(gradient, each)])
    lengths = [float(tf.norm(variable)) for variable in variables]
    np.testing.assert_allclose(lengths, 1.0, rtol=1e-5)


@pytest.mark.parametrize("stage", [stages.PartialSync(), stages.Adasum(on="weights")], ids=repr)
def test_moving_averages_of_weights_that_ranks_combine_later_are_refused(stage):
    for averaging in (tf.keras.optimizers.SGD(use_ema=True), keras.optimizers.SGD(use_ema=True)):
        with pytest.raises(ValueError, match=f"Leave use_ema or {type(stage).__name__} out"):
            npu_keras_optimizer(averaging, is_distributed=True, stages=[stage])


@on_each_rank(2)
def test_updates_are_averaged_where_the_same_and_summed_where_orthogonal():
    """Updates are the same on all ranks, or orthogonal, or too large for 16 bits."""
    rank = collective.current().rank
    grads = {
        "same": tf.constant([3.0, -1.0]),
        "orthogonal": tf.one_hot(rank, 2) * (rank + 1.0),
        "too large": tf.constant([30000.0 - 30000.0 * rank, 1.0], tf.float16),
    }
    variables = {name: tf.Variable(tf.zeros_like(grad)) for name, grad in grads.items()}
    variables["too large"].assign([-60000.0, 0.0])  # another 30000 less is no float16 any more
    pipeline = stages.pipeline("kinds", is_distributed=True, stages=[stages.Adasum(on="weights")])
    step = pipeline.begin()
    pairs = pipeline.combine(step, [(grads[name], variables[name]) for name in grads])
    pipeline.apply(step, pairs, lambda pairs: [variable.assign_sub(grad) for grad, variable in pairs][-1])
    values = {name: variable.numpy().tolist() for name, variable in variables.items()}
    assert values == {"same": [-3.0, 1.0], "orthogonal": [-1.0, -2.0], "too large": [-60000.0, -1.0]}


def built_model(added=None):
    """Returns a model, and a function that trains it with a batch and returns weights and slots."""
    model = tf.keras.Sequential([tf.keras.layers.Input([3]), tf.keras.layers.Dense(2), tf.keras.layers.Dense(1)])
    model.compile(npu_keras_optimizer(tf.keras.optimizers.Adam(0.1), stages=added or [stages.PartialSync(2)]))
    model.optimizer.build(model.trainable_variables)

    @tf.function
    def train(rows):
        model.optimizer.minimize(lambda: tf.reduce_mean((model(rows) - 1.0) ** 2), model.trainable_variables)

    def update(seed):
        train(tf.constant(np.random.RandomState(seed).randn(4, 3), tf.float32))
        return state_of(model)

    return model, update


def state_of(model):
    values = [*model.weights, *model.optimizer.variables]
    return np.concatenate([value.numpy().ravel() for value in values if value.shape.is_fully_defined()])


@on_each_rank(2)
def test_each_rank_goes_on_from_its_own_weights_and_slots_in_a_keras_file(tmp_path):
    """Trains one update further, in memory and from a file, in a model that has layers of other names."""
    rank, (first, update), (second, update_second) = collective.current().rank, built_model(), built_model()
    for seed in (rank, rank + 2):
        update(seed)
    stages.sync_all(first.optimizer)
    if rank == 0:
        first.save_weights(tmp_path / "model.weights.h5")
        second.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(update_second(rank + 4), update(rank + 4))


def saved_in_two_ways(folder):
    """On a rank: weights and slots, which rank 0 saves."""
    model, update = built_model()
    state = update(collective.current().rank)
    stages.sync_all(model.optimizer)
    if collective.current().rank == 0:
        model.save_weights(f"{folder}/model.weights.h5")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{folder}/checkpoint")
    return state


WAYS = "model.weights.h5", "checkpoint"


def load(model, way, folder):
    if way == "checkpoint":
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(str(folder / way))
    else:
        model.load_weights(folder / way)


def test_one_rank_goes_on_with_the_mean_of_weights_and_slots(on_ranks, tmp_path):
    states = on_ranks(2, saved_in_two_ways, str(tmp_path))
    for way in WAYS:
        model, _ = built_model()
        load(model, way, tmp_path)
        model.optimizer._pipeline.pipeline.begin()
        np.testing.assert_allclose(state_of(model), np.mean(states, axis=0), rtol=1e-6)


@pytest.mark.slow("for a message")
def test_rank_0_says_that_it_drops_rows_of_a_stage_that_is_gone(on_ranks, tmp_path):
    on_ranks(2, saved_in_two_ways, str(tmp_path))
    for way in WAYS:
        model, update = built_model([stages.CentralizeGradients()])
        with lines_said() as lines:
            load(model, way, tmp_path)
            update(0)
        assert "weights and slots of each rank" in lines[0] and "dropped" in lines[0]
