"""However gradients are cut into fragments, the numbers that arrive are those of every gradient reduced alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.collective import groups
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer, npu_allreduce
from npu_bridge.gradients import AllReduce, Step
from npu_bridge.gradients.stages.all_reduce import cut_fragments
from tests.goldens.two_layers import in_graph
from tests.rank_pool import on_each_rank
from tests.transfers import sums_fragment

tf1 = tf.compat.v1
DTYPES = ("float16", "bfloat16", "float32", "float64")
ROWS = 20


class GradientSet:
    """Random gradients of a random model: dense, sparse or missing ones, of all dtypes and very unequal sizes.

    Args:
      seed: of the model, the same on every rank, and with a rank's number of the values there.
    Attributes:
      kinds: "dense", "sparse" or "none" for each variable.
      dtypes: name of the dtype of each variable.
      of_ranks: for each rank, the values of each gradient (None, array, or values and indices of rows).
    """

    def __init__(self, seed, rank_count):
        model = np.random.RandomState(seed)
        count = model.randint(1, 15)
        self.kinds = list(model.choice(["dense", "sparse", "none"], count, p=[0.75, 0.15, 0.1]))
        self.dtypes = list(model.choice(DTYPES, count))
        self.sizes = (10 ** model.uniform(0, 3.5, count)).astype(int)
        self.made_in_order = model.permutation(count)
        self.of_ranks = [self._values(np.random.RandomState([seed, rank])) for rank in range(rank_count)]

    def _values(self, own):
        return [
            (own.normal(size=(6, 3)), own.randint(0, ROWS, 6))
            if kind == "sparse"
            else own.normal(size=size)
            if kind == "dense"
            else None
            for kind, size in zip(self.kinds, self.sizes)
        ]

    def grads_and_vars(self, rank):
        """Pairs for the graph being built; the gradients become ready in another order than the variables'."""
        gradients = [None] * len(self.kinds)
        for position in self.made_in_order:
            values, dtype = self.of_ranks[rank][position], self.dtypes[position]
            if self.kinds[position] == "dense":
                gradients[position] = tf.identity(tf.constant(values, tf.float64, name="of_loss"))
                gradients[position] = tf.cast(gradients[position], dtype)
            elif self.kinds[position] == "sparse":
                rows, indices = tf.constant(values[0], tf.float64), tf.constant(values[1])
                gradients[position] = tf.IndexedSlices(tf.cast(rows, dtype), indices, tf.constant([ROWS, 3]))
        return list(zip(gradients, self._variables()))

    def _variables(self):
        return [
            tf1.get_variable(f"variable_{position}", [ROWS, 3] if kind == "sparse" else [size], dtype)
            for position, (kind, size, dtype) in enumerate(zip(self.kinds, self.sizes, self.dtypes))
        ]


def random_strategy(random, count):
    """Sets a split strategy for `count` dense gradients, by index or by size."""
    strategies = groups.groups_of_process().strategies
    strategies.reset(groups.WORLD)
    if random.rand() < 0.5 and count:
        picked = random.choice(count, random.randint(1, min(count, 8) + 1), replace=False)
        strategies.set_last_indices(groups.WORLD, sorted(map(int, picked)))
    else:
        shares = random.dirichlet(np.ones(random.randint(1, 9)) * random.choice([0.1, 1.0]))
        strategies.set_percentages(groups.WORLD, list(100 * shares))


def _reduced(name, grads_and_vars, wire, is_scaled):
    step = Step(list(grads_and_vars), divisor=8.0 if is_scaled else None)
    stage = AllReduce(name, wire)
    stage.before_reduce(step)
    stage.all_reduce(step)
    return [grad for grad, _ in step.grads_and_vars]


def _bits(result):
    """Returns the parts of a fetched result that must be equal."""
    if hasattr(result, "indices"):
        return result.values.tobytes() + result.indices.tobytes()
    return result.tobytes()


@in_graph
def reduce_in_many_cuts(seed, cut_count):
    """Reduces, on a rank, one set of gradients in many cuts, and every gradient alone.

    Returns:
      Positions that differ from the gradient reduced alone, for each cut that has some; the numbers of fragments; a
      digest of all results.
    """
    communicator = collective.current()
    gradients = GradientSet(seed, communicator.size)
    random = np.random.RandomState(seed + 1)
    wire = [None, None, tf.float16, tf.bfloat16][random.randint(4)]
    is_scaled = bool(random.randint(2))
    pairs = gradients.grads_and_vars(communicator.rank)
    existing = [position for position, (grad, _) in enumerate(pairs) if grad is not None]
    alone = [_reduced(f"alone_{position}", [pairs[position]], wire, is_scaled)[0] for position in existing]
    cuts, fragment_counts = [], []
    for number in range(cut_count):
        # The last one is the default cut.
        random_strategy(random, gradients.kinds.count("dense"))
        if number == cut_count - 1:
            groups.groups_of_process().strategies.reset(groups.WORLD)
        fragment_counts.append(len(cut_fragments([grad for grad, _ in pairs], gradients.kinds)))
        reduced = _reduced(f"cut_{number}", pairs, wire, is_scaled)
        assert [grad is None for grad in reduced] == [grad is None for grad, _ in pairs]
        cuts.append([reduced[position] for position in existing])
    groups.groups_of_process().strategies.reset(groups.WORLD)
    with tf1.Session() as session:
        alone, cuts = session.run([alone, cuts])
    expected = [_bits(result) for result in alone]
    differing = [
        positions
        for cut in cuts
        if (positions := [existing[at] for at, result in enumerate(cut) if _bits(result) != expected[at]])
    ]
    digest = hashlib.sha256(b"".join(_bits(result) for cut in cuts for result in cut)).hexdigest()
    return differing, fragment_counts, digest


@pytest.mark.slow("all cuts, in graphs; some of eager steps are fast")
def test_on_two_ranks_no_cut_changes_a_bit(on_ranks):
    """The sum of two numbers has the same bits wherever in a transfer they lie."""
    fragment_counts, kinds = set(), set()
    for seed in range(10):
        outcomes = on_ranks(2, reduce_in_many_cuts, seed, 20)
        for differing, counts, digest in outcomes:
            assert differing == [], f"seed {seed}"
            assert digest == outcomes[0][2], f"seed {seed}"
            fragment_counts.update(counts)
        kinds.update(GradientSet(seed, 1).kinds)
    assert len(fragment_counts) >= 8 and kinds == {"dense", "sparse", "none"}


@on_each_rank(2)
def test_no_split_strategy_changes_a_bit():
    """Compares random cuts with what one transfer gives."""
    ranks = collective.current()
    random, own = np.random.RandomState(5), np.random.RandomState(ranks.rank)
    gradients = [tf.constant(own.normal(size=size), tf.float32) for size in random.randint(1, 400, size=12)]
    pairs = [(gradient, tf.Variable(tf.zeros_like(gradient))) for gradient in gradients]
    expected = [_bits(total.numpy()) for total in ranks.all_reduce(gradients, "whole")]
    differing, fragment_counts = 0, set()
    for _ in range(60):
        random_strategy(random, len(gradients))
        fragment_counts.add(len(cut_fragments(gradients, [variable.name for _, variable in pairs])))
        differing += [_bits(total.numpy()) for total in _reduced("cut", pairs, None, False)] != expected
    groups.groups_of_process().strategies.reset(groups.WORLD)
    assert differing == 0
    assert len(fragment_counts) >= 8


@pytest.mark.few_fast(1, "other random cuts")
@pytest.mark.parametrize("seed", [20, 21, 22])
@on_each_rank(2, gives=[])
@in_graph
def test_a_list_given_to_npu_allreduce_may_be_cut_anyhow(seed):
    """Returns which cuts differ from values reduced one by one."""
    communicator = collective.current()
    gradients = GradientSet(seed, communicator.size)
    random = np.random.RandomState(seed + 1)
    values = [grad for grad, _ in gradients.grads_and_vars(communicator.rank) if grad is not None]
    alone = {reduction: npu_allreduce(values, reduction, fusion=0) for reduction in ("mean", "sum")}
    cuts = []
    for number in range(12):
        random_strategy(random, gradients.kinds.count("dense"))
        cuts.append(npu_allreduce(values, ("mean", "sum")[number % 2], fusion=1))
    groups.groups_of_process().strategies.reset(groups.WORLD)
    with tf1.Session() as session:
        alone, cuts = session.run([alone, cuts])
    expected = {reduction: [_bits(result) for result in results] for reduction, results in alone.items()}
    return [
        number
        for number, cut in enumerate(cuts)
        if [_bits(result) for result in cut] != expected[("mean", "sum")[number % 2]]
    ]


@on_each_rank(2)
@in_graph
def test_a_cut_belongs_to_the_optimizer_that_it_was_made_for():
    """What is set for the process is read once for each optimizer, when it is first used."""
    strategies = groups.groups_of_process().strategies
    variables = [tf1.get_variable(f"v{number}", [4]) for number in range(5)]
    loss = tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables])
    options = {"before": {}, "own": {"gradient_split_groups": [1, 2, 3]}, "after": {}, "later": {}}
    optimizers = {
        name: NPUOptimizer(tf1.train.GradientDescentOptimizer(0.1), is_distributed=True, name=name, **each)
        for name, each in options.items()
    }
    try:
        for name in ("before", "own", "after"):
            optimizers[name].compute_gradients(loss, variables)
        strategies.set_last_indices(groups.WORLD, (0, 1, 2, 3, 4))
        optimizers["after"].compute_gradients(loss, variables)
        optimizers["later"].compute_gradients(loss, variables)
    finally:
        strategies.reset(groups.WORLD)
    sent = [op.name for op in tf1.get_default_graph().get_operations() if sums_fragment(op.name, op.type)]
    counts = {name: sum(f"{name}_fragment" in op for op in sent) for name in options}
    assert counts == {"before": 1, "own": 4, "after": 2, "later": 5}  # "after" was used twice
