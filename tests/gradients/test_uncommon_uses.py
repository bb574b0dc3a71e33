"""Uses of stages that are rare but legal: sums that alone overflow, variables trained in turn, norms beyond float32."""

from __future__ import annotations

import copy
import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import boost, collective, stages
from npu_bridge.amp.custom_loops import scale_loss, unscaled_gradients
from npu_bridge.estimator.npu.npu_helpers import npu_keras_optimizer
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager, FixedLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import (
    NPUDistributedOptimizer,
    NPUOptimizer,
    npu_distributed_optimizer_wrapper,
)
from npu_bridge.gradients.arithmetic import sum_gradients_by_variable, sum_repeated_rows
from npu_bridge.gradients.inner.families import adapt_optimizer
from npu_bridge.gradients.inner.interface import InnerOptimizer
from npu_bridge.gradients.stages.all_reduce import cut_fragments
from npu_bridge.gradients.step import Step
from npu_bridge.gradients.steps.backward_passes import ScaledSteps
from npu_bridge.stages import (
    Accumulate,
    Adasum,
    CentralizeGradients,
    ClipByGlobalNorm,
    Freeze,
    PartialSync,
    Stage,
    TopK,
)
from tests.goldens.two_layers import in_graph
from tests.rank_pool import on_each_rank
from tests.ranks.ways import started_session
from tests.refusing import refuses

tf1 = tf.compat.v1


def falling_scale(initial):
    return ExponentialUpdateLossScaleManager(initial, 1000, decr_every_n_nan_or_inf=1, decr_ratio=0.5)


def train_windows(managers, stage, gradients):
    """Trains a float16 variable, a batch for each gradient; returns the loss scales and the values after each batch."""
    weight = tf.Variable(tf.ones([1], tf.float16))
    pipeline = stages.pipeline("windows", managers if len(managers) > 1 else managers[0], stages=[stage])
    seen = []
    for gradient in gradients:
        step = pipeline.begin()
        with tf.GradientTape() as tape:
            loss = pipeline.scale(tf.reduce_sum(weight * gradient), step)
        pairs = pipeline.combine(step, zip(tape.gradient(loss, [weight]), [weight]))
        pipeline.apply(step, pairs, lambda pairs: weight.assign_sub(pairs[0][0] / 16))
        seen.append((*(float(manager.get_loss_scale()) for manager in managers), float(weight[0])))
    return seen


def test_the_scale_falls_if_only_the_sum_of_a_window_is_too_large_for_16_bits():
    seen = train_windows([falling_scale(2**14)], Accumulate(4, "sum", loss_scale="batch"), [1.0] * 8)
    assert seen == [(2**14, 1.0)] * 3 + [(2**13, 1.0)] * 4 + [(2**13, 0.75)]


def test_the_scale_of_a_loss_falls_if_only_the_sum_of_a_window_is_too_large_for_16_bits():
    seen = train_windows([falling_scale(2**14), falling_scale(2**15)], Accumulate(4, "sum"), [1.0] * 8)
    assert seen[3] == (2**13, 2**15, 1.0), "only the first loss takes part"
    assert seen[7] == (2**13, 2**15, 0.75)


def test_a_batch_that_overflows_lowers_the_scale_once_and_not_again_with_its_window():
    seen = train_windows([falling_scale(2**14)], Accumulate(4, loss_scale="batch"), [1.0, 8.0, 1.0, 1.0])
    assert [scale for scale, _ in seen] == [2**14, 2**13, 2**13, 2**13]


@in_graph
def test_variables_trained_in_turn_have_windows_of_their_own():
    first, second = (tf1.get_variable(name, initializer=1.0) for name in ("first", "second"))
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.25), stages=[Accumulate(2)])
    losses = {first: first, second: 2 * second}
    train = [optimizer.minimize(loss, var_list=[variable]) for variable, loss in losses.items()]
    with started_session() as session:
        for updates in range(3):
            assert session.run([first, second]) == [1 - 0.25 * updates, 1 - 0.5 * updates]
            for op in train * 2:
                session.run(op)
    assert [variable.op.name for variable in tf1.global_variables() if "steps" in variable.name] == [
        "accumulated_steps",
        "accumulated_steps_1",
    ]


@in_graph
def test_variables_trained_in_turn_are_frozen_by_updates_of_their_own():
    variables = {
        name: [tf1.get_variable(f"{name}/layer_{n}/kernel", initializer=0.0) for n in range(2)] for name in "ab"
    }
    schedule = {"groups": [["layer_0/"], ["layer_1/"]], "kind": "explicit", "sequence": [0, 1]}
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), stages=[Freeze(schedule)])
    train = [optimizer.minimize(first + last, var_list=[first, last]) for first, last in variables.values()]
    with started_session() as session:
        for op in train * 4:
            session.run(op)
        assert session.run(list(variables.values())) == [[-2.0, -4.0]] * 2


def sync_in_turn(shares):
    """On a rank: trains two lists of two variables in turn; returns their values, and those after `sync_all`.

    With `shares`, both lists also contain a third variable.
    """
    lists = [[tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])] for _ in range(2)]
    if shares:
        common = tf.Variable([0.0, 0.0])
        lists = [[common, *variables] for variables in lists]
    pipeline = stages.pipeline("in_turn", is_distributed=True, stages=[PartialSync(1)])
    rank = float(collective.current().rank)
    for variables in lists * 2:
        step = pipeline.begin()
        pairs = pipeline.combine(step, [(tf.fill([2], rank), variable) for variable in variables])
        pipeline.apply(step, pairs, lambda pairs: [variable.assign_sub(grad) for grad, variable in pairs])
    before = [float(variable[0]) for variables in lists for variable in variables[-2:]]
    stages.sync_all(pipeline)
    return before, [float(variable[0]) for variables in lists for variable in variables[-2:]]


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "with a common variable"])
def test_every_part_of_variables_trained_in_turn_is_averaged(on_ranks, shares):
    (first, synced), (second, also_synced) = on_ranks(2, sync_in_turn, shares)
    # The last variable of each list is averaged with the first update, the other one with the second.
    assert first == [-1.0, -0.5, -1.0, -0.5]
    assert second == [-1.0, -1.5, -1.0, -1.5]
    assert synced == also_synced == [-1.0] * 4


def move_one_scale_by_two_losses():
    """Trains two lists with one optimizer, one after the other and then in one run; returns the error of this run."""
    with tf.Graph().as_default(), tf1.Session() as session:
        optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), falling_scale(8.0), True, is_loss_scale=True)
        variables = [tf1.get_variable(name, initializer=[1.0]) for name in "ab"]
        steps = [optimizer.minimize(tf.reduce_sum(each), var_list=[each]) for each in variables]
        session.run(tf1.global_variables_initializer())
        for step in steps:
            session.run(step)
        try:
            session.run(steps)
        except ValueError as error:
            return str(error)


def test_two_updates_of_one_scale_in_one_run_are_refused_on_ranks_and_warned_of_on_one(on_ranks, caplog):
    for error in on_ranks(2, move_one_scale_by_two_losses):
        assert "one run changes a loss scale twice" in error and "separate calls of session.run" in error
    assert move_one_scale_by_two_losses() is None and "one run changes a loss scale twice" in caplog.text


@pytest.mark.parametrize("changed", [False, True], ids=["as returned", "clipped"])
def test_gradients_of_two_losses_keep_their_scales_if_both_are_computed_first(graph, changed):
    variable = tf1.get_variable("variable", initializer=[1.0])
    managers = [falling_scale(1024), falling_scale(1024)]
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.5), managers, is_loss_scale=True)
    losses = [tf.reduce_sum(variable * np.float32(np.inf)), tf.reduce_sum(variable)]
    computed = [optimizer.compute_gradients(loss, [variable], loss_id=number) for number, loss in enumerate(losses)]
    if changed:
        computed = [[(tf.clip_by_value(grad, -1, 1), variable) for grad, variable in pairs] for pairs in computed]
    train = [optimizer.apply_gradients(pairs) for pairs in computed]
    with started_session() as session:
        for op in train * 2:
            session.run(op)
        assert session.run([manager.get_loss_scale() for manager in managers]) == [256, 1024]
        assert session.run(variable) == [0.0]


@on_each_rank(2)
def test_gradients_that_would_lose_a_part_on_the_way_are_refused():
    ways = {"as it is": {}, "rounded": {"wire": "bfloat16"}, "selected": {"stages": [TopK(0.1)]}}
    said = []
    for name, value in (*((name, 1 + 2j) for name in ways), ("selected", np.float64(1e39))):
        pipeline = stages.pipeline(name, is_distributed=True, **ways[name])
        with pytest.raises(TypeError) as refused:
            pipeline.combine(pipeline.begin(), [(tf.constant([value]), tf.Variable([value], name="phase"))])
        said.append(str(refused.value))
    assert [text.partition(":")[0] for text in said] == ["AllReduce", "AllReduce", "TopK", "TopK"]
    assert "cannot exchange the complex gradient of phase:0. Expected a gradient of real numbers; got" in said[1]
    assert "Expected float32 or 16 bits; got the gradient of phase:0 of float64" in said[3]


@pytest.mark.parametrize("changed", [False, True], ids=["as returned", "clipped"])
def test_gradients_of_two_losses_may_be_applied_together(graph, changed):
    variables = [tf1.get_variable(f"variable_{number}", initializer=[1.0]) for number in range(2)]
    managers = [falling_scale(1024), falling_scale(1024)]
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.5), managers, is_loss_scale=True)
    factor = tf1.placeholder_with_default(np.float32(np.inf), [])
    losses = [tf.reduce_sum(variables[0]), tf.reduce_sum(variables[1] * factor)]
    pairs = [
        pair
        for number, (loss, variable) in enumerate(zip(losses, variables))
        for pair in optimizer.compute_gradients(loss, [variable], loss_id=number)
    ]
    if changed:
        pairs = [(tf.clip_by_value(grad, -1, 1), variable) for grad, variable in pairs]
    train = optimizer.apply_gradients(pairs)
    with started_session() as session:
        session.run(train)
        assert session.run(variables) == [[1.0], [1.0]]
        session.run(train, {factor: 1.0})
        assert session.run([manager.get_loss_scale() for manager in managers]) == [1024, 512]
        assert session.run(variables) == [[0.5], [0.5]]


def test_an_eager_overflow_is_seen_if_only_gradients_of_its_own_loss_were_clipped():
    variables = [tf.Variable([1.0], name=f"variable_{number}") for number in range(2)]
    managers = [falling_scale(1024), falling_scale(1024)]
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.5), managers, is_loss_scale=True)
    (kept,) = optimizer.compute_gradients(lambda: tf.reduce_sum(variables[0]), variables[:1], loss_id=0)
    ((infinite, _),) = optimizer.compute_gradients(
        lambda: tf.reduce_sum(variables[1]) * np.inf, variables[1:], loss_id=1
    )
    optimizer.apply_gradients([kept, (tf.clip_by_value(infinite, -1, 1), variables[1])])
    assert [variable.numpy() for variable in variables] == [[1.0], [1.0]]
    assert [manager.get_loss_scale().numpy() for manager in managers] == [1024, 512]


@pytest.mark.skipif(keras.__version__[0] != "2", reason="optimizers of Keras 3 have no compute_gradients")
def test_an_eager_keras_overflow_is_seen_if_only_gradients_of_its_own_loss_were_clipped():
    variables, manager = [tf.Variable([1.0]) for _ in range(2)], falling_scale(1024)
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(0.5), manager)
    (kept,) = optimizer.compute_gradients(lambda: tf.reduce_sum(variables[0]), variables[:1])
    ((infinite, _),) = optimizer.compute_gradients(lambda: tf.reduce_sum(variables[1]) * np.inf, variables[1:])
    optimizer.apply_gradients([kept, (tf.clip_by_value(infinite, -1, 1), variables[1])])
    assert [variable.numpy() for variable in variables] == [[1.0], [1.0]]
    assert manager.get_loss_scale().numpy() == 512


def test_accumulated_gradients_keep_their_imaginary_parts():
    variable = tf.Variable([1 + 2j], dtype=tf.complex64)
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.5), stages=[Accumulate(2)])
    for _ in range(2):
        optimizer.minimize(lambda: tf.reduce_sum(tf.abs(variable) ** 2), var_list=[variable])
    np.testing.assert_allclose(variable.numpy(), [0.0], atol=1e-6)


def test_windows_of_lists_with_common_variables_are_warned_of(caplog):
    trunk, *heads = (tf.Variable(1.0) for _ in range(3))
    pipeline = stages.pipeline("heads", stages=[Accumulate(2)])
    for head in heads:
        step = pipeline.begin()
        pairs = pipeline.combine(step, [(tf.constant(1.0), trunk), (tf.constant(1.0), head)])
        pipeline.apply(step, pairs, lambda pairs: None)
    assert "some steps have gradients of other variables than the steps before" in caplog.text


def test_a_window_takes_dense_or_sparse_gradients_of_a_variable_and_not_both():
    table = tf.Variable(tf.zeros([3, 1]), name="table")
    pipeline = stages.pipeline("kinds", stages=[Accumulate(2)])
    rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1]), tf.constant([3, 1]))
    pipeline.combine(pipeline.begin(), [(tf.ones([3, 1]), table)])
    with pytest.raises(ValueError, match="the gradients of table are dense in some batches and sparse in others"):
        pipeline.combine(pipeline.begin(), [(rows, table)])


def test_counters_of_variables_trained_in_turn_are_saved(tmp_path):
    def made():
        variables = [tf.Variable([0.0]), tf.Variable([0.0])]
        pipeline = stages.pipeline("saved", stages=[Freeze({"groups": 1, "kind": "explicit", "sequence": [0]})])
        return variables, pipeline, tf.train.Checkpoint(**pipeline.state())

    def train(variables, pipeline):
        for variable in variables:
            step = pipeline.begin()
            pairs = pipeline.combine(step, [(tf.ones([1]), variable)])
            pipeline.apply(step, pairs, lambda pairs: None)

    variables, pipeline, checkpoint = made()
    train([*variables, variables[1]], pipeline)
    path = checkpoint.save(tmp_path / "saved")
    variables, pipeline, checkpoint = made()
    checkpoint.restore(path)
    train(variables, pipeline)
    assert [int(counter) for counter in pipeline.variables] == [2, 3]


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_many_rows_of_one_index_are_added_up_in_float32(dtype):
    rows = tf.IndexedSlices(tf.ones([5000, 1], dtype), tf.zeros([5000], tf.int32), tf.constant([3, 1]))
    (value,) = tf.cast(sum_repeated_rows(rows).values[0], tf.float32).numpy()
    assert value == tf.cast(tf.cast(5000.0, dtype), tf.float32)


@refuses(
    ValueError,
    ({"is_joint": False, "manager": falling_scale(4)}, "each rank would decide alone"),
    ({"stages": [Accumulate(2, exchange="batch"), PartialSync()]}, "but with PartialSync they differ"),
    ({"stages": [Accumulate(2, exchange="batch"), Adasum(on="weights")]}, "but with Adasum they differ"),
)
def test_settings_that_would_make_ranks_differ_are_refused(settings):
    stages.pipeline("refused", is_distributed=True, **settings)


def test_partial_sync_says_that_it_needs_the_variables():
    sgd = tf.keras.optimizers.SGD(0.1)
    optimizer = npu_keras_optimizer(sgd, FixedLossScaleManager(1.0), stages=[PartialSync()])
    with pytest.raises(ValueError, match="PartialSync"):
        optimizer.get_unscaled_gradients([tf.constant([1.0])])


def test_slots_of_variables_with_one_name_are_told_apart():
    variables = [tf.Variable([float(number)], name="same") for number in range(2)]
    inner = adapt_optimizer(tf.keras.optimizers.Adam(), "test")
    inner.create_state(variables)
    inner.apply_gradients([(tf.constant([number + 1.0]), variables[number]) for number in range(2)], None, None)
    assert [float(inner.get_slot(variable, "m")[0]) for variable in variables] == pytest.approx([0.1, 0.2])


def test_all_slots_are_found_in_one_pass(monkeypatch):
    """A look-up for each slot that reads all names took 21 s with 300 variables."""
    variables = [tf.Variable([1.0], name=f"layer_{number}/kernel") for number in range(30)]
    inner, splits = adapt_optimizer(tf.keras.optimizers.Adam(), "test"), []
    split = type(inner)._split_slot_name
    monkeypatch.setattr(type(inner), "_split_slot_name", lambda self, name: splits.append(name) or split(self, name))
    assert [slot.name.split("/")[1] for slot in inner.make_slots(variables)] == ["m"] * 30 + ["v"] * 30
    assert len(splits) == len(inner.variables())


def test_variables_of_one_name_are_not_compared_with_each_other(monkeypatch):
    variables = [tf.Variable([1.0], name="same") for _ in range(60)]
    inner, hashed = adapt_optimizer(tf.keras.optimizers.Adam(), "test"), []
    inner.create_state(variables)
    kind = type(variables[0].ref())
    original = kind.__hash__
    monkeypatch.setattr(kind, "__hash__", lambda self: hashed.append(1) or original(self))
    assert len(inner.slots_of(variables)) == 120
    assert len(hashed) < 20 * len(variables)


@on_each_rank(2, gives=[1, 2])
def test_ranks_create_slots_once_in_eager_steps():
    """Returns of how many variables the slots were created, for each time in five eager steps."""
    variables, made = [tf.Variable([1.0], name=f"v{number}") for number in range(2)], []
    optimizer = NPUDistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9))
    make = InnerOptimizer.make_slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InnerOptimizer, "make_slots", lambda self, given: made.append(len(given)) or make(self, given))
        for trained in (variables[:1], variables[:1], variables, variables, variables[:1]):
            optimizer.minimize(functools.partial(tf.add_n, trained), var_list=trained)
    return made


@on_each_rank(2)
def test_a_mean_of_float16_numbers_is_finite():
    """The numbers are large, dense and in rows, without loss scaling."""
    large, table = tf.fill([2], tf.constant(60000.0, tf.float16)), tf.Variable(tf.zeros([3, 2], tf.float16))
    pipeline = stages.pipeline("large", is_distributed=True)
    rows = tf.IndexedSlices(large[tf.newaxis], tf.constant([1]), tf.constant([3, 2]))
    pairs = pipeline.combine(pipeline.begin(), [(large, tf.Variable(large)), (rows, table)])
    dense, of_table = [tf.convert_to_tensor(grad).numpy().tolist() for grad, _ in pairs]
    assert dense == [60000.0] * 2
    assert of_table == [[0.0] * 2, [60000.0] * 2, [0.0] * 2]


@pytest.mark.parametrize(
    ("gradient", "clipped"),
    [
        (np.float64([3.0, 4.0]), [0.6, 0.8]),
        (np.float64([1e100, 0.0]), [1.0, 0.0]),
        (np.float32([1.2e19] * 3), [3**-0.5] * 3),  # half the sum of squares is finite, and the sum is not
    ],
    ids=["small", "float64", "float32"],
)
def test_a_norm_beyond_float32_is_clipped(gradient, clipped):
    variable = tf.Variable(np.zeros_like(gradient))
    pipeline = stages.pipeline("norm", stages=[ClipByGlobalNorm(1.0)])
    ((made, _),) = pipeline.combine(pipeline.begin(), [(tf.constant(gradient), variable)])
    np.testing.assert_allclose(made, clipped, rtol=1e-6)


def test_the_largest_numbers_of_float16_stay_finite_when_they_are_centralised():
    gradient = tf.constant([[65504.0], [-65504.0], [-65504.0]], tf.float16)
    pipeline = stages.pipeline("centre", stages=[CentralizeGradients()])
    ((made, _),) = pipeline.combine(pipeline.begin(), [(gradient, tf.Variable(gradient, name="kernel"))])
    assert made.numpy().tolist() == [[65504.0], [-43680.0], [-43680.0]]


def test_a_gradient_of_unknown_shape_is_centralised_in_the_shape_of_its_variable():
    variable = tf.Variable([[1.0], [3.0]], name="kernel")
    pipeline = stages.pipeline("centre", stages=[CentralizeGradients()])

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def centred(gradient):
        return pipeline.combine(pipeline.begin(), [(gradient, variable)])[0][0]

    assert centred([[1.0], [3.0]]).numpy().tolist() == [[-1.0], [1.0]]


def test_a_stage_whose_copy_would_lose_an_argument_is_refused():
    class ClipByPower(ClipByGlobalNorm):
        def __init__(self, clip_norm, power=1):
            super().__init__(clip_norm)
            self.power = power

    class ClipByNamedNorm(ClipByGlobalNorm):
        def __init__(self, **arguments):
            super().__init__(**arguments)

    assert repr(copy.copy(ClipByNamedNorm(clip_norm=2.0))) == "ClipByNamedNorm(clip_norm=2.0)"

    class HalfClip(ClipByGlobalNorm):
        def __init__(self):
            super().__init__(0.5)

    for stage, expected in ((ClipByPower(1.0, power=2), "clip_norm, power"), (HalfClip(), "nothing")):
        text = f"get_config does not fit the constructor. Expected a get_config that returns {expected};"
        with pytest.raises(TypeError, match=text):
            NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), stages=[stage])


def test_values_are_selected_only_where_they_take_fewer_bytes_than_the_gradient():
    assert [TopK(density).sent_bytes(4.0, ranks=2) for density in (0.25, 0.5, 0.75)] == [2.0, 4.0, 4.0]
    assert TopK(0.25).sent_bytes(6.0, ranks=4) == 6.0


@in_graph
def test_stages_that_replace_gradients_keep_the_order_of_the_backward_pass():
    values = tf.constant(1.0)
    variables = [tf1.get_variable(f"layer_{number}", initializer=1.0) for number in range(4)]
    for variable in variables:
        values = tf.square(values * variable)
    pairs = list(zip(tf.gradients(values, variables), variables))
    names = [variable.name for variable in variables]
    step = Step(pairs)
    step.map(lambda grad: grad * 2.0)
    # Two fragments; in the order of the list, the second one would begin with the last layer.
    expected = cut_fragments([grad for grad, _ in pairs], names)
    assert expected[0][0] == 3
    assert cut_fragments(step.gradients, names) == expected
    step.losses.scales, step.losses.common_scale = (tf.constant(2.0), tf.constant(4.0)), tf.constant(2.0)
    converted = step.losses.convert_to_common_scale(pairs, 1)
    assert cut_fragments([grad for grad, _ in converted], names) == expected
    summed = sum_gradients_by_variable(pairs, pairs)
    assert cut_fragments([grad for grad, _ in summed], names) == expected
    step.map_gradient_elements(tf.sign)
    assert cut_fragments(step.gradients, names) == expected


@on_each_rank(2)
def test_a_list_that_contains_another_one_is_averaged_by_turns_of_its_own():
    """Trains two variables and the last one alone in turn, twice."""
    first, last = tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])
    pipeline = stages.pipeline("head", is_distributed=True, stages=[PartialSync(1)])
    rank = float(collective.current().rank)
    for variables in [[first, last], [last]] * 2:
        step = pipeline.begin()
        pairs = pipeline.combine(step, [(tf.fill([2], rank), variable) for variable in variables])
        pipeline.apply(step, pairs, lambda pairs: [variable.assign_sub(grad / 2) for grad, variable in pairs])
    assert (float(first[0]), float(last[0])) == (-0.5, -1.0)


def hide_in(hook, window, is_scaled):
    """Trains, on a rank, with a stage that takes signs; one gradient of the last rank is Inf. Returns the values."""

    class TakeSigns(Stage):
        needs = ("a verdict",)

    setattr(TakeSigns, hook, lambda self, step: step.map_gradient_elements(tf.sign))
    variable, ranks = tf.Variable([8.0]), collective.current()
    manager = falling_scale(1) if is_scaled else None
    added = [TakeSigns(), *([Accumulate(window)] if window > 1 else [])]
    pipeline = stages.pipeline("signs", manager, is_distributed=ranks.size > 1, stages=added)
    values = []
    for number in range(2 * window):
        step = pipeline.begin()
        pipeline.scale(variable[0], step)
        is_bad = number == 0 and ranks.rank == ranks.size - 1
        pairs = pipeline.combine(step, [(tf.constant([np.inf if is_bad else 3.0]), variable)])
        pipeline.apply(step, pairs, lambda pairs: variable.assign_sub(pairs[0][0]))
        values.append(float(variable[0]))
    return values


@pytest.mark.parametrize("is_scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("hook", ["each_batch", "before_reduce"])
def test_a_custom_stage_hides_no_infinite_gradient_on_any_rank(on_ranks, hook, is_scaled):
    assert hide_in(hook, 1, is_scaled) == [8.0, 7.0]
    assert hide_in(hook, 2, is_scaled) == [8.0, 8.0, 8.0, 7.0]
    assert on_ranks(2, hide_in, hook, 1, is_scaled) == [[8.0, 7.0]] * 2


class HalveAtVerdict(Stage):
    place = "verdict"
    keeps_usable = True

    def before_reduce(self, step):
        step.map(lambda grad: grad / 2.0)


@on_each_rank(2, gives=6.0)
def test_a_change_before_the_average_is_sent_from_the_place_of_the_verdict_too():
    variable = tf.Variable([8.0])
    pipeline = stages.pipeline("halves", is_distributed=True, stages=[HalveAtVerdict()])
    step = pipeline.begin()
    pairs = pipeline.combine(step, [(tf.constant([4.0]), variable)])
    pipeline.apply(step, pairs, lambda pairs: variable.assign_sub(pairs[0][0]))
    return float(variable[0])


def test_gradients_that_a_function_keeps_in_variables_are_not_taken_for_unscaled_ones(caplog):
    variable, kept, manager = tf.Variable([1.0]), tf.Variable([0.0]), falling_scale(4)
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(0.25), manager)
    optimizer.build([variable])

    @tf.function
    def train():
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = optimizer.get_scaled_loss(tf.reduce_sum(variable))
            (gradient,) = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable]))
            kept.assign_add(gradient)
        optimizer.apply_gradients([(kept.read_value(), variable)])

    train()
    assert variable.numpy().tolist() == [0.5]
    assert "the loss was not scaled" not in caplog.text


@pytest.mark.parametrize(("hook", "place"), [("each_batch", "local clip"), ("before_reduce", "freeze")])
def test_a_change_by_a_custom_stage_reaches_the_sums_of_a_window(hook, place):
    class Halve(Stage):
        keeps_usable = True

    Halve.place = place
    setattr(Halve, hook, lambda self, step: step.map(lambda grad: grad / 2.0))
    variable = tf.Variable([8.0])
    pipeline = stages.pipeline("halve", stages=[Accumulate(2), Halve()])
    for _ in range(2):
        step = pipeline.begin()
        pairs = pipeline.combine(step, [(tf.constant([4.0]), variable)])
        pipeline.apply(step, pairs, lambda pairs: variable.assign_sub(pairs[0][0]))
    assert float(variable[0]) == 6.0


class Normalise(Stage):
    keeps_usable = False

    def after_reduce(self, step):
        step.map(lambda grad: grad / tf.norm(grad))


@pytest.mark.parametrize("decorate", [tf.function, lambda train: train])
def test_stages_after_a_sum_of_exchanged_batches_see_the_whole_sum_only(decorate):
    """A quotient of two zeros is NaN, and would be left out of the window in place of a batch."""
    variable = tf.Variable([10.0, 10.0])
    pipeline = stages.pipeline("sums", falling_scale(4), stages=[Accumulate(2, "sum", exchange="batch"), Normalise()])

    @decorate
    def train(gradient):
        step = pipeline.begin()
        pipeline.scale(tf.constant(0.0), step)
        pairs = pipeline.combine(step, [(gradient * step.loss_scale, variable)])
        pipeline.apply(step, pairs, lambda pairs: variable.assign_sub(pairs[0][0]))
        return step.should_apply

    batches = [[1.0, 0.0], [2.0, np.inf], [2.0, 4.0], [3.0, 0.0], [5.0, 0.0]]
    applied = [bool(train(tf.constant(batch))) for batch in batches]
    assert applied == [True, False, True, True, True]
    assert variable.numpy() == pytest.approx([10.0 - 0.6 - 1.0, 10.0 - 0.8])


def test_a_stage_that_other_gradients_do_not_reach_is_named(graph, caplog):
    variable = tf1.get_variable("variable", initializer=[1.0])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), stages=[ClipByGlobalNorm(1.0)])
    optimizer.apply_gradients([(tf.gradients(tf.reduce_sum(variable**2), variable)[0], variable)])
    assert "ClipByGlobalNorm did not change the gradients, because other code computed them" in caplog.text


def test_a_function_whose_tape_has_made_the_gradients_says_what_was_left_out(caplog):
    variable = tf.Variable([1.0])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), stages=[ClipByGlobalNorm(1.0)])
    optimizer.minimize(lambda: tf.reduce_sum(variable))

    @tf.function
    def train():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    train()
    assert "ClipByGlobalNorm did not change the gradients, because other code computed them" in caplog.text


def test_stages_inside_of_an_average_over_ranks_are_refused():
    inner = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), stages=[ClipByGlobalNorm(1.0)])
    with pytest.raises(ValueError, match="ClipByGlobalNorm would change the gradients of each rank, and not their"):
        NPUDistributedOptimizer(inner)


@pytest.mark.parametrize(
    ("family", "switch"),
    [
        (tf.keras.optimizers, {"skip_gradients_aggregation": True}),
        (tf.keras.optimizers.legacy, {"experimental_aggregate_gradients": False}),
    ],
)
def test_a_switch_of_keras_that_leaves_stages_out_names_them(family, switch, caplog):
    variable = tf.Variable([1.0])
    optimizer = npu_keras_optimizer(family.SGD(1.0), stages=[ClipByGlobalNorm(1.0)])
    optimizer.apply_gradients([(tf.constant([0.5]), variable)])
    assert not caplog.messages
    optimizer.apply_gradients([(tf.constant([8.0]), variable)], **switch)
    assert "ClipByGlobalNorm did not change the gradients, because other code computed them" in caplog.text


@pytest.mark.parametrize("wrap", [NPUOptimizer, npu_keras_optimizer], ids=["TF 1", "Keras"])
def test_an_average_in_place_refuses_stages_that_come_before_it(wrap):
    bare = tf1.train.GradientDescentOptimizer(1.0) if wrap is NPUOptimizer else tf.keras.optimizers.SGD(1.0)
    inner = wrap(bare, is_distributed=False, stages=[ClipByGlobalNorm(1.0)])
    with pytest.raises(ValueError, match="ClipByGlobalNorm would change the gradients of each rank, and not their"):
        npu_distributed_optimizer_wrapper(inner)


@pytest.mark.parametrize("stage", [Accumulate(2), PartialSync(), Freeze({"groups": 2})], ids=repr)
def test_an_optimizer_that_evaluates_its_loss_refuses_gradients_of_other_losses(stage):
    newton = boost.SubspaceNewton(boost.Basis(np.eye(1, 2, dtype=np.float32)), alpha=0.0)
    with pytest.raises(ValueError, match="SubspaceNewton needs the averaged gradients of the loss of each step"):
        NPUOptimizer(newton, is_distributed=True, stages=[stage])


def test_an_eager_step_with_gradients_of_other_code_says_what_was_left_out(caplog):
    variable = tf.Variable([1.0])
    arguments = {"is_loss_scale": True, "stages": [ClipByGlobalNorm(1.0)]}
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), falling_scale(4), **arguments)
    optimizer.apply_gradients([(tf.constant([8.0]), variable)])
    assert "the loss was not scaled, because other code computed the gradients" in caplog.text
    assert "ClipByGlobalNorm did not change the gradients" in caplog.text
    assert float(variable[0]) == -7.0


def test_gradients_of_a_tape_after_an_eager_step_are_those_of_other_code(caplog):
    """The step before overflowed; its verdict is not for gradients of the same variable that come later."""
    variable = tf.Variable([1.0])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), falling_scale(4), is_loss_scale=True)
    optimizer.minimize(lambda: tf.reduce_sum(variable) * float("inf"), var_list=[variable])
    assert float(variable[0]) == 1.0 and "other code" not in caplog.text
    optimizer.apply_gradients([(tf.constant([8.0]), variable)])
    assert float(variable[0]) == -7.0 and "other code computed the gradients" in caplog.text


def test_sums_that_a_script_keeps_are_not_called_those_of_other_code(graph, caplog):
    variable = tf1.get_variable("variable", initializer=[1.0])
    kept = tf1.get_variable("kept", initializer=[0.0], trainable=False)
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), falling_scale(4), is_loss_scale=True)
    ((gradient, _),) = optimizer.compute_gradients(tf.reduce_sum(variable))
    with tf.control_dependencies([kept.assign_add(gradient)]):
        optimizer.apply_gradients([(kept.read_value() + 0.5 * variable, variable)])
    assert "other code" not in caplog.text


class AddPenalty(stages.LossStage):
    def __init__(self, variable):
        self._variable = variable

    def scale_loss(self, loss, step):
        return loss + 2.0 * self._variable


def test_a_term_that_a_stage_adds_to_the_loss_is_scaled():
    variable = tf.Variable(1.0)
    pipeline = stages.pipeline("penalty", FixedLossScaleManager(1024.0), stages=[AddPenalty(variable)])
    step = pipeline.begin()
    with tf.GradientTape() as tape:
        loss = pipeline.scale(3.0 * variable, step)
    ((gradient, _),) = pipeline.combine(step, [(tape.gradient(loss, variable), variable)])
    assert float(gradient) == 5.0


@pytest.mark.parametrize("has_scale", [True, False])
def test_a_term_that_a_stage_adds_to_the_loss_is_in_a_backward_pass(has_scale):
    variable, other = tf.Variable(1.0), tf.Variable(1.0)
    manager = FixedLossScaleManager(1024.0) if has_scale else None
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(1.0), manager, stages=[AddPenalty(variable)])
    with tf.GradientTape() as tape:
        loss = 3.0 * variable + other
    with scale_loss(loss, optimizer) as scaled:
        scaled.backward(tape, [variable, other])
    assert [float(gradient) for gradient, _ in unscaled_gradients(optimizer)] == [5.0, 1.0]


def test_a_window_of_summed_gradients_of_two_passes_in_a_function_is_refused():
    variable = tf.Variable([1.0])
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(1.0), stages=[Accumulate(2)])

    @tf.function
    def train():
        computed = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable)
            computed += optimizer.compute_gradients(loss, [variable], tape)
        optimizer.apply_gradients([(computed[0][0] + computed[1][0], variable)])

    with pytest.raises(ValueError, match="Accumulate needs the gradients of each step apart"):
        train()


def test_a_loss_that_was_not_scaled_is_told(graph, caplog):
    variable = tf1.get_variable("variable", initializer=[1.0])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), falling_scale(4), is_loss_scale=True)
    optimizer.compute_gradients(tf.reduce_sum(variable))
    optimizer.apply_gradients([(tf.gradients(tf.reduce_sum(variable**2), variable)[0], variable)])
    assert "the loss was not scaled, because other code computed the gradients" in caplog.text


@in_graph
def test_the_scale_falls_if_an_inner_optimizer_would_skip_scaled_gradients():
    """The square of a gradient of 1e12 times 2**32 is no float32, but the gradient is."""
    variable = tf1.get_variable("variable", initializer=[1.0, 1.0])
    inner = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(1e-12), stages=[TopK(0.3, error_feedback=False)])
    manager = ExponentialUpdateLossScaleManager(2**32, 1, decr_every_n_nan_or_inf=1, decr_ratio=2**-10)
    train = NPULossScaleOptimizer(inner, manager).minimize(tf.reduce_sum(variable) * 1e12)
    with started_session() as session:
        for scale, value in ((2**22, 1.0), (2**23, 0.0)):
            session.run(train)
            assert session.run(manager.get_loss_scale()) == scale
            np.testing.assert_allclose(session.run(variable), [value] * 2, atol=1e-6)


def test_own_stages_may_be_where_the_optimizer_has_some_of_its_own():
    class Watch(Stage):
        place = "record"

    class Keep(Stage):
        place = "guard"

    optimizer = NPUOptimizer(
        tf1.train.GradientDescentOptimizer(1.0), falling_scale(4), is_loss_scale=True, stages=[Keep(), Watch()]
    )
    lines = [line.split() for line in stages.explain(optimizer).splitlines()]
    assert [words[1] for words in lines if words[2] in ("Keep()", "Watch()")] == ["guard", "record"]


@pytest.mark.parametrize("bound", [None, 1.0], ids=["summed", "clipped and summed"])
def test_every_loss_of_a_sum_of_gradients_is_checked(graph, bound):
    variable = tf1.get_variable("variable", initializer=[1.0])
    managers, factor = [falling_scale(1024), falling_scale(1024)], tf1.placeholder_with_default(np.float32(np.inf), [])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.25), managers, is_loss_scale=True)
    losses = [tf.reduce_sum(variable) * factor, tf.reduce_sum(variable)]
    computed = [optimizer.compute_gradients(loss, loss_id=number)[0][0] for number, loss in enumerate(losses)]
    if bound is not None:
        computed = [tf.clip_by_value(grad, -bound, bound) for grad in computed]
    train = optimizer.apply_gradients([(sum(computed), variable)])
    with started_session() as session:
        session.run(train)
        assert session.run([manager.get_loss_scale() for manager in managers]) == [512, 1024]
        session.run(train, {factor: 1.0})
        assert session.run(variable) == [0.5]


APART = {
    "scaled": list,
    "window of batches": lambda: [Accumulate(2)],
    "frozen": lambda: [Freeze({"groups": [["table"], ["kernel"]], "kind": "explicit", "sequence": [0, 1]})],
}


@in_graph
def train_in_parts(others, parts):
    """Returns the loss scale and two variables after each of six steps, three of which overflow in one gradient."""
    table, bias, kernel = (tf1.get_variable(name, initializer=tf.ones([3, 1])) for name in ("table", "bias", "kernel"))
    factor, manager = tf1.placeholder(tf.float32, []), falling_scale(2**10)
    sgd = tf1.train.GradientDescentOptimizer(0.125)
    optimizer = NPUOptimizer(sgd, manager, is_loss_scale=True, stages=others)
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 1])) + tf.reduce_sum(bias + kernel * factor)
    pairs, seen = optimizer.compute_gradients(loss, [table, bias, kernel]), []
    train = [optimizer.apply_gradients(pairs[part]) for part in parts]
    with started_session() as session:
        for value in (1.0, 2.0, np.inf, 1.0, np.inf, np.inf):
            session.run(train, {factor: value})
            seen.append([each.tolist() for each in session.run([manager.get_loss_scale(), table, kernel])])
    return seen


@pytest.mark.parametrize("kind", APART)
def test_a_step_that_is_applied_in_parts_is_one_step(kind):
    parts = [slice(0, 3, 2), slice(1, 2)] if kind == "frozen" else [slice(0, 2), slice(2, 3)]
    assert train_in_parts(APART[kind](), parts) == train_in_parts(APART[kind](), [slice(None)])


def test_an_eager_step_that_is_applied_in_parts_moves_the_loss_scale_once():
    pair, manager = [tf.Variable(1.0), tf.Variable(1.0)], falling_scale(8)
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(0.5), manager, is_loss_scale=True)
    for scale, factor in ((4.0, np.inf), (2.0, np.inf), (2.0, 1.0)):
        pairs = optimizer.compute_gradients(lambda factor=factor: pair[0] + pair[1] * factor, pair)
        optimizer.apply_gradients(pairs[:1])
        optimizer.apply_gradients(pairs[1:])
        assert float(manager.get_loss_scale()) == scale
    assert [float(each) for each in pair] == [0.5, 0.5]


@in_graph
def test_a_window_of_summed_gradients_of_two_steps_is_refused():
    variable = tf1.get_variable("variable", initializer=[1.0])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), stages=[Accumulate(2)])
    computed = [optimizer.compute_gradients(tf.reduce_sum(variable))[0][0] for _ in range(2)]
    with pytest.raises(ValueError, match="NPUOptimizer: Accumulate needs the gradients of each step apart"):
        optimizer.apply_gradients([(sum(computed), variable)])
    optimizer.apply_gradients([(computed[0], variable)])


@on_each_rank(2)
@in_graph
def test_values_not_sent_are_kept_if_gradients_of_two_losses_are_applied_together():
    variables = [tf1.get_variable(f"variable_{number}", initializer=tf.ones([4])) for number in range(2)]
    weights = tf.constant([1.0, 2.0, 3.0, 4.0])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), is_distributed=True, stages=[TopK(0.25)])
    computed = [optimizer.compute_gradients(tf.reduce_sum(each * weights), [each]) for each in variables]
    train = optimizer.apply_gradients(sum(computed, []))
    with started_session() as session:
        session.run(train)
        kept = session.run([each for each in tf1.global_variables() if each.shape == [4] and each not in variables])
    assert np.array_equal(kept, [[1.0, 2.0, 3.0, 0.0]] * 2)


@in_graph
def test_a_stage_of_ones_own_sees_the_updated_variable():
    class Follow(Stage):
        def after_update(self, step):
            return seen.assign(variable.read_value())

    variable, seen = tf1.get_variable("variable", initializer=1.0), tf1.get_variable("seen", initializer=0.0)
    pipeline = stages.pipeline("follow", stages=[Follow()])

    def update_late(pairs):
        late = tf.numpy_function(lambda grad: (time.sleep(0.2), grad)[1], [pairs[0][0]], tf.float32)
        return [variable.assign_sub(tf.ensure_shape(late, []))]

    step = pipeline.begin()
    train = pipeline.apply(step, pipeline.combine(step, [(tf.constant(0.5), variable)]), update_late)
    with started_session() as session:
        session.run(train)
        assert session.run(seen) == 0.5


def test_a_stage_of_ones_own_sees_the_update_of_a_keras_optimizer():
    class Follow(Stage):
        def after_update(self, step):
            return seen.assign(variable.read_value())

    variable, seen, optimizer = tf.Variable(1.0), tf.Variable(0.0), keras.optimizers.SGD(0.5)
    optimizer.build([variable])
    pipeline = stages.pipeline("follow_keras", stages=[Follow()])

    @tf.function
    def train():
        step = pipeline.begin()
        pipeline.apply(step, pipeline.combine(step, [(tf.constant(1.0), variable)]), optimizer.apply_gradients)

    train()
    assert (seen.numpy(), int(optimizer.iterations)) == (0.5, 1)


def test_clipping_in_a_branch_hides_no_infinite_gradient():
    variable, factor, manager = tf.Variable([1.0]), tf.Variable(np.inf), falling_scale(4)
    optimizer = npu_keras_optimizer(tf.keras.optimizers.SGD(1.0), manager)
    optimizer.build([variable])

    @tf.function
    def train():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(variable * factor))
        (gradient,) = optimizer.get_unscaled_gradients(tape.gradient(loss, [variable]))

        def update():
            optimizer.apply_gradients([(tf.clip_by_value(gradient, -1.0, 1.0), variable)])
            return True

        tf.cond(tf.reduce_all(variable > 0.0), update, lambda: False)

    train()
    assert (variable.numpy().tolist(), float(manager.get_loss_scale())) == ([1.0], 2.0)
    factor.assign(0.5)
    train()
    assert variable.numpy().tolist() == [0.5]


def test_the_innermost_function_takes_its_own_scaled_step():
    opened, own, taken = ScaledSteps(), [Step(), Step()], []

    @tf.function
    def inner():
        opened.keep(own[1])
        taken.append(opened.remove(is_nested=True))
        return 0

    @tf.function
    def outer():
        opened.keep(own[0])
        inner()
        taken.append(opened.remove())
        return 0

    outer()
    assert taken[0] is own[1] and taken[1] is own[0]


def test_a_scaled_step_that_serves_again_has_no_gradients_of_the_first():
    opened, variable = ScaledSteps(), tf.Variable(1.0)
    opened.keep(Step())
    opened.remove(is_nested=True, variables=[variable]).kept.in_float32.append((tf.constant(0.0), tf.constant(1e-9)))
    assert opened.reuse([tf.Variable(2.0)]).kept.in_float32 == []


def test_an_elementwise_stage_sees_each_row_of_a_sparse_gradient_once():
    class TakeSigns(Stage):
        def after_reduce(self, step):
            step.map_gradient_elements(tf.sign)

    pipeline = stages.pipeline("rows", stages=[TakeSigns()])
    rows = tf.IndexedSlices(tf.constant([[2.0], [-1.0], [3.0]]), tf.constant([1, 1, 0]), tf.constant([2, 1]))
    ((made, _),) = pipeline.combine(pipeline.begin(), [(rows, tf.Variable([[0.0], [0.0]]))])
    assert tf.convert_to_tensor(made).numpy().tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("decorate", [tf.function, lambda train: train], ids=["function", "eager"])
def test_a_note_that_a_stage_replaces_is_kept_beside_accumulation(decorate):
    class Remember(Stage):
        def each_batch(self, step):
            step.notes[self] = tf.constant(1.0)

        def after_reduce(self, step):
            step.notes[self] = step.notes[self] + step.gradients[0]

        def after_update(self, step):
            return step.run_when_due(lambda: seen.assign(step.notes[self]))

    variable, seen = tf.Variable(0.0), tf.Variable(0.0)
    pipeline = stages.pipeline("notes", stages=[Accumulate(2), Remember()])

    @decorate
    def train():
        step = pipeline.begin()
        pairs = pipeline.combine(step, [(tf.constant(3.0), variable)])
        pipeline.apply(step, pairs, lambda pairs: variable.assign_sub(pairs[0][0]))

    train()
    assert float(seen) == 0.0
    train()
    assert float(seen) == 4.0


@on_each_rank(2, gives=(1.0, 2.0))
def test_a_stage_at_an_early_place_cannot_make_variables_infinite():
    """Returns the variable and the loss scale."""

    class Divide(Stage):
        place = "local clip"

        def after_reduce(self, step):
            step.map(lambda grad: grad / 0.0)

    variable, manager = tf.Variable([1.0]), falling_scale(4)
    pipeline = stages.pipeline("divide", manager, is_distributed=True, stages=[Divide()])
    step = pipeline.begin()
    with tf.GradientTape() as tape:
        loss = pipeline.scale(tf.reduce_sum(variable), step)
    pairs = pipeline.combine(step, [(tape.gradient(loss, variable), variable)])
    pipeline.apply(step, pairs, lambda pairs: variable.assign_sub(pairs[0][0]))
    return float(variable[0]), float(manager.get_loss_scale())


def test_scaled_gradients_are_not_applied_and_losses_with_scales_of_their_own_not_mixed():
    variable = tf.Variable(1.0)
    pipeline = stages.pipeline("mixed", [falling_scale(4), falling_scale(8)])
    step = pipeline.begin()
    for number in range(2):
        pipeline.scale(variable, step, number)
    with pytest.raises(ValueError, match="the gradients are still multiplied by the loss scale"):
        pipeline.apply(step, [(tf.constant(1.0), variable)], lambda pairs: None)
    with pytest.raises(ValueError, match="losses with different loss scales were differentiated in one pass"):
        pipeline.combine(step, [(tf.constant(1.0), variable)])


@on_each_rank(2, gives=[1.0, 2.0])
def test_gradients_are_sent_whole_where_that_takes_as_few_bytes():
    """Half of the values, with their places, are as many bytes."""
    pipeline = stages.pipeline("half", is_distributed=True, stages=[TopK(0.5)])
    ((made, _),) = pipeline.combine(pipeline.begin(), [(tf.constant([1.0, 2.0]), tf.Variable([0.0, 0.0]))])
    return made.numpy().tolist()


@in_graph
def test_one_rank_that_shares_its_update_with_nobody_gives_all_slots():
    variable = tf1.get_variable("variable", initializer=1.0)
    momentum = tf1.train.MomentumOptimizer(1.0, 0.5)
    optimizer = NPUDistributedOptimizer(momentum, is_weight_update_sharding=True)
    optimizer.minimize(variable)
    assert optimizer.get_slot(variable, "momentum") is not None


def test_a_float16_variable_is_guarded_beside_a_float32_one():
    narrow, wide = tf.Variable(tf.constant([60000.0], tf.float16)), tf.Variable([1.0])
    optimizer = NPUOptimizer(tf1.train.GradientDescentOptimizer(1.0), FixedLossScaleManager(1.0), is_loss_scale=True)
    optimizer.apply_gradients([(tf.constant([-60000.0], tf.float16), narrow), (tf.constant([1.0]), wide)])
    assert (narrow.numpy(), wide.numpy()) == ([60000.0], [0.0])
