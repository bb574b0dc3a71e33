"""Ranks that share the update: the numbers of a training without sharing, and checkpoints that hold everything."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_hook import NPUBroadcastGlobalVariablesHook, broadcast_global_variables
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_optimizer import NPULossScaleOptimizer
from npu_bridge.estimator.npu.npu_optimizer import NPUDistributedOptimizer, NPUOptimizer
from npu_bridge.estimator.npu.npu_saver import NPUSaver
from npu_bridge.gradients.inner import sharding
from npu_bridge.optimizers import fused
from npu_bridge.optimizers import tf1 as ours
from npu_bridge.stages import ClipByGlobalNorm
from tests.goldens.two_layers import OPTIMIZERS, assert_same_bits, in_graph, token_batches
from tests.rank_pool import on_each_rank
from tests.ranks.ways import started_session, tells_disagreement

tf1 = tf.compat.v1
pytestmark = pytest.mark.horovod("slots of other ranks cannot be saved without it")

SLOTS_EACH = {"sgd": 0, "momentum": 1, "adam": 2, "lamb": 2, "keras_adam": 2}
STEPS = 10


class Model:
    """Five variables with a gradient, one of it sparse, and one without; in the default graph."""

    def __init__(self, use_resource=True, seed=1):
        variable = functools.partial(
            tf1.get_variable, initializer=tf1.random_normal_initializer(seed=seed), use_resource=use_resource
        )
        with tf1.variable_scope("model"):
            self.variables = [
                variable("embedding", [20, 4]),
                variable("kernel", [4, 3]),
                variable("bias", [3]),
                variable("kernel_2", [3, 5]),
                variable("unused", [2]),
                variable("scale", []),
            ]
        embedding, kernel, bias, kernel_2, _, scale = self.variables
        self.tokens = tf1.placeholder(tf.int32, [None])
        self.poison = tf1.placeholder_with_default(0.0, [])
        hidden = tf.tanh(tf.matmul(tf.nn.embedding_lookup(embedding, self.tokens), kernel) + bias)
        self.loss = tf.reduce_mean(tf.square(tf.matmul(hidden, kernel_2) * scale - 1.0))
        self.loss += self.poison * tf.reduce_sum(kernel)


def clipped(grads_and_vars):
    gradients, variables = zip(*grads_and_vars)
    return list(zip(tf.clip_by_global_norm(gradients, 0.3)[0], variables))


def own_share(steps, first=0, seed=0):
    ranks = collective.current()
    return [np.array_split(batch, ranks.size)[ranks.rank] for batch in token_batches(steps, 12, seed)[first:]]


def values_of_slots(optimizer, variables, session):
    slots = {
        f"{name} of {variable.op.name}": optimizer.get_slot(variable, name)
        for name in optimizer.get_slot_names()
        for variable in variables
    }
    return session.run({name: slot for name, slot in slots.items() if slot is not None})


@in_graph
def train(name, is_sharded, use_resource):
    """On a rank: values of variables and of the slots that are here, and how many bytes of slots there are."""
    model = Model(use_resource)
    global_step = tf1.train.get_or_create_global_step()
    optimizer = NPUDistributedOptimizer(OPTIMIZERS[name](), is_sharded)
    train_op = optimizer.apply_gradients(clipped(optimizer.compute_gradients(model.loss)), global_step)
    # `value()` reads what is here, also of slots that are elsewhere
    names = {variable.name for variable in model.variables}
    all_slots = [v for v in tf1.global_variables() if "model/" in v.name and v.name not in names]
    with started_session() as session:
        for tokens in own_share(STEPS):
            session.run(train_op, {model.tokens: tokens})
        variables = session.run({v.name: v for v in [*model.variables, global_step]})
        held = sum(value.nbytes for value in session.run([v.value() for v in all_slots]))
        return variables, values_of_slots(optimizer, model.variables, session), held


@pytest.mark.parametrize("is_sharded", [False, True])
@on_each_rank(2, gives=[[0.875, 0.875]] * 2)
@in_graph
def test_gradients_are_clipped_in_float32_for_variables_of_16_bits(is_sharded):
    """The gradients are clipped to 2**-26, which is 0 in float16."""
    variables = [tf1.get_variable(name, initializer=tf.ones([2], tf.float16)) for name in ("one", "two")]
    sgd, stages = tf1.train.GradientDescentOptimizer(2.0**23), [ClipByGlobalNorm(2.0**-25)]
    loss = tf.reduce_sum(tf.cast(variables, tf.float32))
    train_op = NPUDistributedOptimizer(sgd, is_sharded, stages=stages).minimize(loss)
    with started_session() as session:
        session.run(train_op)
        return np.stack(session.run(variables)).tolist()


@on_each_rank(2, gives=dict.fromkeys(["one", "two", "three", "wide"], {-1.0}))
@in_graph
def test_a_transfer_of_what_only_one_rank_has_updated_reaches_the_others():
    # Rank 0 gets two and rank 1 one piece of float32; only rank 1 gets float64.
    kinds = {"one": (8, tf.float32), "two": (8, tf.float32), "three": (16, tf.float32), "wide": (2, tf.float64)}
    variables = {
        name: tf1.get_variable(name, [size], dtype, initializer=tf1.zeros_initializer())
        for name, (size, dtype) in kinds.items()
    }
    loss = tf.add_n([tf.cast(tf.reduce_sum(variable), tf.float32) for variable in variables.values()])
    piece_bytes, sharding.PIECE_BYTES = sharding.PIECE_BYTES, 32
    try:
        train_op = NPUDistributedOptimizer(tf1.train.GradientDescentOptimizer(1.0), True).minimize(loss)
    finally:
        sharding.PIECE_BYTES = piece_bytes
    with started_session() as session:
        session.run(train_op)
        return {name: set(value) for name, value in session.run(variables).items()}


def train_kinds(cases):
    """Trains some kinds of optimizers and variables on a rank, with and without sharding."""
    return {case: (train(case[0], False, case[1]), train(case[0], True, case[1])) for case in cases}


ALL_KINDS = [*((name, True) for name in SLOTS_EACH), ("momentum", False)]


@pytest.mark.few_fast(1, "the same on three ranks and with other slots")
@pytest.mark.parametrize("rank_count, cases", [(2, ALL_KINDS[2:5:2]), (2, ALL_KINDS), (3, ALL_KINDS[3:])])
def test_sharing_the_update_changes_no_bit(on_ranks, rank_count, cases):
    results = on_ranks(rank_count, train_kinds, cases)
    for case, ((expected, expected_slots, all_bytes), _) in results[0].items():
        assert expected["global_step:0"] == STEPS
        own_slots = [result[case][1][1] for result in results]
        for rank, result in enumerate(results):
            assert_same_bits(result[case][1][0], expected)
            # what the slots here take, staging variables for the slots elsewhere included
            assert result[case][1][2] == sum(value.nbytes for value in own_slots[rank].values())
            assert bool(own_slots[rank]) == bool(SLOTS_EACH[case[0]])
        # every slot is on exactly one rank, and has the value it has without sharding
        assert sum(map(len, own_slots)) == len(expected_slots) == 5 * SLOTS_EACH[case[0]]
        for slots in own_slots:
            assert_same_bits(expected_slots, slots)
        assert sum(result[case][1][2] for result in results) == all_bytes


@in_graph
def saved_by_all_ranks(name, is_sharded, folder):
    """Trains a few steps on a rank and saves twice with NPUSaver; returns the paths, and the files of the folder."""
    ranks = collective.current()
    model = Model()
    optimizer = NPUDistributedOptimizer(OPTIMIZERS[name](), is_sharded)
    train_op = optimizer.minimize(model.loss, tf1.train.get_or_create_global_step())
    saver = NPUSaver()
    with started_session() as session:
        for tokens in own_share(5):
            session.run(train_op, {model.tokens: tokens})
        start = f"{folder}/{name}_{is_sharded}_rank_{ranks.rank}"
        return saver.save(session, start, global_step=5), saver.save(session, f"{start}_again"), os.listdir(folder)


def contents(checkpoint):
    reader = tf.train.load_checkpoint(checkpoint)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_same_checkpoints(actual, expected):
    values, expected_values = contents(actual), contents(expected)
    assert sorted(values) == sorted(expected_values)
    assert_same_bits(values, expected_values)


@pytest.mark.slow("trains with every kind of optimizer")
@pytest.mark.parametrize("name", ["adam", "lamb", "keras_adam"])
def test_checkpoints_are_those_of_a_training_without_sharing(on_ranks, tmp_path, name):
    (whole, *_), _ = on_ranks(2, saved_by_all_ranks, name, False, str(tmp_path))
    (path, again, _), (*paths, files) = on_ranks(2, saved_by_all_ranks, name, True, str(tmp_path))
    assert_same_checkpoints(path, whole)
    assert_same_checkpoints(again, whole)
    assert paths == [None, None]
    assert not any(file.startswith(f"{name}_True_rank_1") for file in files)


@in_graph
def saved_by_a_stock_saver(folder):
    """On a rank: rank 0 saves alone before the first update, after it, and after all ranks have saved together."""
    rank = collective.current().rank
    model = Model()
    optimizer = NPUDistributedOptimizer(OPTIMIZERS["adam"](), True)
    train_op = optimizer.minimize(model.loss)
    savers = {"all": tf1.train.Saver(), "global": tf1.train.Saver(tf1.global_variables())}
    outcomes = {}

    def save(moment):
        for kind, saver in savers.items() if rank == 0 else ():
            try:
                outcomes[moment, kind] = saver.save(session, f"{folder}/{moment}_{kind}", write_meta_graph=False)
            except tf.errors.InvalidArgumentError as error:
                outcomes[moment, kind] = error.message

    with started_session() as session:
        save("before")
        session.run(train_op, {model.tokens: [1, 2]})
        save("after")
        NPUSaver().save(session, f"{folder}/together")
        save("later")
    return outcomes


def test_a_stock_saver_never_writes_outdated_slots(on_ranks, tmp_path):
    outcomes, _ = on_ranks(2, saved_by_a_stock_saver, str(tmp_path))
    assert len(outcomes) == 6
    for (moment, kind), outcome in outcomes.items():
        if moment == "before":
            slots = {name: value for name, value in contents(outcome).items() if "/Adam" in name}
            assert len(slots) == 10 and not any(np.any(value) for value in slots.values())
        else:
            assert "slots of other ranks cannot be saved now" in outcome and "NPUSaver" in outcome
            assert not os.path.exists(f"{tmp_path}/{moment}_{kind}.index")
    assert np.any(contents(f"{tmp_path}/together")["model/kernel/Adam"])


def train_in_a_monitored_session(is_sharded, folder, steps):
    """Trains on a rank as scripts do: only rank 0 has a checkpoint folder, and it also saves by hand."""
    rank = collective.current().rank
    with tf.Graph().as_default():
        model = Model(seed=1 + 10 * rank)
        optimizer = NPUDistributedOptimizer(OPTIMIZERS["adam"](), is_sharded)
        global_step = tf1.train.get_or_create_global_step()
        train_op = optimizer.minimize(model.loss, global_step)
        saver = tf1.train.Saver()
        raw = []

        class KeepsTheSession(tf.estimator.SessionRunHook):
            def after_create_session(self, session, coord):
                raw.append(session)

        with tf1.train.MonitoredTrainingSession(
            checkpoint_dir=folder if rank == 0 else None,
            is_chief=True,
            hooks=[NPUBroadcastGlobalVariablesHook(0), KeepsTheSession()],
            save_checkpoint_steps=3,
            log_step_count_steps=None,
        ) as session:
            first = int(raw[0].run(global_step))
            for step, tokens in enumerate(own_share(steps, first), first):
                session.run(train_op, {model.tokens: tokens})
                if rank == 0 and step % 2:
                    session.run(model.loss, {model.tokens: tokens})  # a run of rank 0 alone
                if rank == 0 and step % 4 == 2:
                    saver.save(raw[0], f"{folder}/by_hand", global_step=step)
    return first


def checkpoints_in(folder):
    return {
        name[: -len(".index")]: os.path.join(folder, name[: -len(".index")])
        for name in os.listdir(folder)
        if name.endswith(".index")
    }


@pytest.mark.slow("two trainings with checkpoints")
def test_hooks_of_rank_0_save_as_ever(on_ranks, tmp_path):
    found = {}
    for is_sharded in (False, True):
        folder = str(tmp_path / str(is_sharded))
        assert on_ranks(2, train_in_a_monitored_session, is_sharded, folder, 5) == [0, 0]
        assert on_ranks(2, train_in_a_monitored_session, is_sharded, folder, 11) == [5, 5]
        found[is_sharded] = checkpoints_in(folder)
    assert sorted(found[True]) == sorted(found[False])
    assert {"by_hand-2", "by_hand-10", "model.ckpt-5", "model.ckpt-11"} <= set(found[True])
    for name, path in found[True].items():
        assert_same_checkpoints(path, found[False][name])


@in_graph
def two_losses(kinds, is_sharded, folder):
    """On a rank: an optimizer for each of two losses, both of which also train the variables in the middle."""
    model = Model()
    losses = {"first": (model.loss, model.variables[:3]), "second": (model.loss * 2.0, model.variables[1:])}
    steps = []
    for kind, (name, (loss, variables)) in zip(kinds, losses.items()):
        optimizer = NPUDistributedOptimizer(OPTIMIZERS[kind](), is_sharded, name=name)
        steps.append(optimizer.minimize(loss, var_list=variables))
    saver = NPUSaver()
    with started_session() as session:
        for tokens in own_share(6):
            for step in steps:
                session.run(step, {model.tokens: tokens})
        return saver.save(session, f"{folder}/{collective.current().rank}_{is_sharded}")


@pytest.mark.slow("two optimizers, each as in the other cases")
def test_two_sharded_optimizers_in_one_graph(on_ranks, tmp_path):
    kinds = ("adam", "sgd")  # with slots, and without
    expected, *_ = on_ranks(2, two_losses, kinds, False, str(tmp_path))
    actual, *_ = on_ranks(2, two_losses, kinds, True, str(tmp_path))
    assert_same_checkpoints(actual, expected)


@on_each_rank(2)
def test_what_cannot_be_shared_is_refused():
    """Nothing has been transferred when these are refused."""

    def refused(function):
        with tf.Graph().as_default(), pytest.raises((ValueError, RuntimeError)) as error:
            function()
        return f"{error.type.__name__}: {error.value}"

    def sharded(optimizer=None):
        return NPUDistributedOptimizer(optimizer or OPTIMIZERS["adam"](), True)

    def too_few_gradients():
        model = Model()
        sharded().compute_gradients(model.loss, [model.variables[1], model.variables[4]])

    def part_of_the_gradients():
        model = Model()
        optimizer = sharded()
        optimizer.apply_gradients(optimizer.compute_gradients(model.loss)[:1])

    def other_root():
        sharded().minimize(Model().loss)
        broadcast_global_variables(1)

    def clipped_inside():
        sharded(tf.keras.optimizers.Adam(global_clipnorm=1.0))

    variables = [tf.Variable([1.0]), tf.Variable([1.0])]
    with pytest.raises(RuntimeError) as eager:
        sharded().minimize(lambda: variables[0] + variables[1], var_list=variables)
    cases = (too_few_gradients, part_of_the_gradients, clipped_inside, other_root)
    few, part, clip, root, eager = [*map(refused, cases), str(eager.value)]
    assert "ValueError" in few and "at least 2 gradients for 2 ranks; got 1" in few
    assert "ValueError" in part and "no gradient for rank 1" in part
    assert "global_clipnorm=None; got 1.0" in clip
    assert "root_rank 0; got 1" in root
    assert "in a tf.function" in eager


@tells_disagreement
@in_graph
def only_rank_0_shares():
    """On a rank: what building the optimizer says where the ranks are set up differently."""
    optimizer = NPUDistributedOptimizer(OPTIMIZERS["adam"](), collective.current().rank == 0, name="only_rank_0")
    optimizer.compute_gradients(Model().loss)


def test_ranks_that_do_not_all_share_are_told_when_built(on_ranks):
    """Whichever rank looks last sees the other one's plan."""
    outcomes = on_ranks(2, only_rank_0_shares)
    assert any("is_weight_update_sharding" in outcome for outcome in filter(None, outcomes)), outcomes


def our_lamb(is_fused):
    """With a group that only one variable is in, which one rank alone updates when the work is shared."""
    groups = [{"match": "scale$", "lr": 0.1}]
    return ours.LAMB(0.01, weight_decay=0.1, exclude_from_weight_decay=["bias"], groups=groups, fused=is_fused)


FUSED_WAYS = {
    "tailed": lambda optimizer, manager: NPUOptimizer(optimizer, manager, True, True, True),
    "shared": lambda optimizer, manager: NPULossScaleOptimizer(NPUDistributedOptimizer(optimizer, True), manager, True),
}


@in_graph
def train_by_lamb(way, is_fused, first, end, checkpoint, folder):
    """Values of variables after steps from `first` on, and rank 0's checkpoint."""
    ranks = collective.current()
    tf1.set_random_seed(1)
    model = Model(seed=1 + ranks.rank)  # the start comes from rank 0
    optimizer = FUSED_WAYS[way](our_lamb(is_fused), ExponentialUpdateLossScaleManager(1024, 5, 1, 2, 0.5))
    step = optimizer.minimize(model.loss, tf1.train.get_or_create_global_step())
    saver, broadcast = NPUSaver(), broadcast_global_variables(0)
    with started_session() as session:
        if checkpoint is not None and ranks.rank == 0:
            saver.restore(session, checkpoint)
        session.run(broadcast)
        for number, tokens in enumerate(own_share(end, first), first):
            overflows = number in (2, 5) and ranks.rank == number % 2
            session.run(step, {model.tokens: tokens, model.poison: np.inf if overflows else 0.0})
        path = saver.save(session, f"{folder}/{way}_{is_fused}_{first}_{ranks.rank}")
        return session.run({variable.name: variable for variable in tf1.trainable_variables()}), path


def train_fused_and_not(folder):
    """On a rank: trained fused and unfused, and changed over in the middle."""
    small, large = fused.JOINED_ELEMENTS, fused.FLAT_ELEMENTS
    fused.JOINED_ELEMENTS, fused.FLAT_ELEMENTS = 50, 24  # the table is large
    try:
        results = {
            way: {is_fused: train_by_lamb(way, is_fused, 0, 8, None, folder)[0] for is_fused in (False, True)}
            for way in FUSED_WAYS
        }
        # Trained fused and shared, then unfused; trained unfused and shared, then fused and tailed.
        for is_fused, way in ((True, "shared"), (False, "tailed")):
            middle = train_by_lamb("shared", is_fused, 0, 4, None, folder)[1]
            results[way]["changed"] = train_by_lamb(way, not is_fused, 4, 8, middle, folder)[0]
        return results
    finally:
        fused.JOINED_ELEMENTS, fused.FLAT_ELEMENTS = small, large


@pytest.mark.slow("each way trains twice; tests/optimizers has every rule on one rank")
def test_fused_is_unfused_on_ranks(on_ranks, tmp_path):
    results = on_ranks(2, train_fused_and_not, str(tmp_path), time_limit_secs=280)
    for way, trained in results[0].items():
        for kind, variables in trained.items():
            assert_same_bits(results[1][way][kind], variables)
            for variable, value in variables.items():
                where = f"{way} {kind} {variable}"
                np.testing.assert_allclose(value, trained[False][variable], rtol=0, atol=2e-6, err_msg=where)
