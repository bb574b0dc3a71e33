"""Chains of stages drawn at random, and real training with many of them in one graph."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge import collective, stages
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.stage_cases import dynamic, kept_in, loss_of
from tests.stage_models import LEARNING_RATE, SHAPES, SYNCHRONISING, TABLES, gradients_of, start_values
from tests.training import as_built

tf1 = tf.compat.v1
STEPS, MOMENTUM = 24, 0.9
# What a stage of each kind can be given. Bounds of single gradients are sums of powers of two, so that values that are
# equal in exact arithmetic are equal in float32, too: of equal ones TopK sends the first.
_PARTS = [["table"], ["kernel"], ["vector"]]
ARGUMENTS = {
    "Freeze": lambda draw: {
        "schedule": {
            "groups": draw([_PARTS, _PARTS[1:]]),
            "kind": "explicit",
            "sequence": draw([[0, 1], [0, 1, 1, 0, 1]]),
        }
    },
    "Accumulate": lambda draw: {"steps": draw([1, 2, 3, 4]), "reduction": draw(["mean", "sum"])},
    "ClipLocally": lambda draw: draw([{"low": -0.5, "high": 0.75}, {"low": 1.0}, {"low": 0.25, "high": 0.5}]),
    "TopK": lambda draw: {
        "density": draw([0.05, 0.25, 0.5, 0.9, 1.0]),
        "error_feedback": draw([True, True, False]),
        "per": draw(["tensor", "fragment"]),
    },
    "Threshold": lambda draw: {"value": draw([0.3, 0.8, 2.1]), "error_feedback": draw([True, True, False])},
    "Adasum": lambda draw: {"averaged_ranks": draw([1, 1, 2, "host"]), "on": draw(["gradients", "weights"])},
    "PartialSync": lambda draw: {"threshold": draw([1, 12, 100])},
    "ClipByValue": lambda draw: draw([{"low": 0.4}, {"low": -0.3, "high": 0.9}, {"low": 0.1, "high": 0.6}]),
    "ClipByGlobalNorm": lambda draw: {"clip_norm": draw([0.5, 1.5, 100.0])},
    "CentralizeGradients": lambda draw: draw([{}, {}, {"skip": ["kernel"]}]),
}


class Case(NamedTuple):
    """One chain to train with.

    Attributes:
      chain: tables of stages, in the order in which an optimizer gets them.
      momentum: that of the optimizer inside, 0 for plain gradient descent.
      is_tailed: the decision about a step is taken early.
      seed: of the gradients.
      bad: what is not finite, or has no finite square, as for `gradients_of`.
    """

    chain: tuple
    momentum: float
    is_tailed: bool
    seed: int
    bad: dict

    def fed(self, rank):
        """The gradients of one rank."""
        return gradients_of(rank, STEPS, self.seed, self.bad)

    def refused(self):
        """The names of two stages of which only one can be there, or None."""
        names = [table["stage"] for table in self.chain]
        pairs = list(itertools.combinations(names, 2))
        together = [pair for pair in pairs if set(pair) <= set(SYNCHRONISING)]
        equal = [pair for pair in pairs if pair[0] == pair[1]]
        needing = [table["stage"] for table in self.chain if _needs_all_variables(table)] if "Freeze" in names else []
        return next(iter([*together, *equal, *(("Freeze", name) for name in needing)]), None)


def _needs_all_variables(table):
    """True for a stage that cannot do without some variables in some updates."""
    keeps = table["stage"] in ("TopK", "Threshold") and table.get("error_feedback", True)
    return keeps or table["stage"] == "PartialSync"


def cases(accepted, seed=15):
    """Every pair of stages, and chains drawn at random until so many of these are accepted."""
    source = random.Random(seed)
    plain = {table["stage"]: table for table in reversed(TABLES.values())}
    drawn = [_case(source, pair) for pair in itertools.combinations_with_replacement(plain.values(), 2)]
    while accepted:
        drawn.append(_case(source, _chain(source)))
        accepted -= drawn[-1].refused() is None
    return drawn


def _chain(source):
    shares = {name: 0.25 if name == "Freeze" else 0.5 for name in ARGUMENTS if name not in SYNCHRONISING}
    names = [name for name, share in shares.items() if source.random() < share]
    names += source.sample(SYNCHRONISING, source.choice([0, 1, 1, 1, 1, 1, 2]))
    if names and source.random() < 0.05:
        names.append(source.choice(names))
    source.shuffle(names)
    return [{"stage": name, **ARGUMENTS[name](source.choice)} for name in names]


def _case(source, chain):
    places = [(source.randrange(STEPS), source.randrange(2)) for _ in range(4)]
    values = [np.inf, -np.inf, np.nan, 1e25]
    bad = {place: (source.choice(list(SHAPES)), source.choice(values)) for place in places}
    is_tailed, momentum = source.random() < 0.5, source.choice([0.0, MOMENTUM])
    return Case(tuple(chain), momentum, is_tailed, source.randrange(1, 2**31), bad)


class Result(NamedTuple):
    """What training gave on one rank; attributes as those of `stage_models.Trained`."""

    values: dict
    slots: dict
    residuals: dict
    sums: dict
    scales: list
    updates: int


def trained_together(numbered):
    """Trains with several chains in one graph.

    Args:
      numbered: by a number for names, the cases.
    Returns:
      By number a `Result` for this rank, or the text of the refusal.
    """
    results, training = {}, {}
    with tf.Graph().as_default():
        step = tf1.placeholder(tf.int32, [])
        for number, case in numbered.items():
            try:
                added = stages.from_config({"stages": case.chain})
                inner = tf1.train.MomentumOptimizer(LEARNING_RATE, case.momentum)
                name, manager = f"chain_{number}", dynamic()
                optimizer = NPUOptimizer(inner, manager, True, True, case.is_tailed, name=name, stages=added)
            except ValueError as error:
                results[number] = str(error)
                continue
            training[number] = _Training(name, optimizer, manager, case, step)
        train_ops = {number: (one.scale, one.train_op) for number, one in training.items()}
        with tf1.Session(config=as_built()) as session:
            session.run(tf1.global_variables_initializer())
            fetched = [session.run(train_ops, {step: number}) for number in range(STEPS)]
            left = session.run({variable.name: variable for variable in tf1.global_variables()})
    for number, one in training.items():
        results[number] = one.result([float(of_step[number][0]) for of_step in fetched], left)
    return results


class _Training:
    def __init__(self, name, optimizer, manager, case, step):
        self._name = name
        with tf1.variable_scope(name):
            self._variables = {
                key: tf1.get_variable(key, initializer=value, use_resource=key != "vector")
                for key, value in start_values().items()
            }
            count = tf1.get_variable("count", initializer=tf.constant(0, tf.int64), trainable=False)
        fed = case.fed(collective.current().rank)
        grads = {key: tf.gather(np.stack([of_step[key] for of_step in fed]), step) for key in fed[0]}
        self.scale = manager.get_loss_scale()
        self.train_op = optimizer.minimize(loss_of(self._variables, grads), count, list(self._variables.values()))
        self._slots = {key: optimizer.get_slot(variable, "momentum") for key, variable in self._variables.items()}

    def result(self, scales, left):
        own = {name: value for name, value in left.items() if f"{self._name}/" in name}
        values = {key: left[variable.name] for key, variable in self._variables.items()}
        slots = {key: left[slot.name] for key, slot in self._slots.items()}
        kept = kept_in(own, "not_sent"), kept_in(own, "accumulated")
        return Result(values, slots, *kept, scales, int(left[f"{self._name}/count:0"]))
