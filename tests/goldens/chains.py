"""Chains of stages in which every two stages meet, and real training with many of them in one graph."""

from __future__ import annotations

import itertools
import json
import random
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from npu_bridge import collective
from npu_bridge.estimator.npu.npu_optimizer import NPUOptimizer
from tests.goldens.cases import TABLES, Golden
from tests.goldens.checks import kept_in
from tests.goldens.problems import Fed
from tests.goldens.two_layers import as_built

tf1 = tf.compat.v1
STEPS, MOMENTUM = 24, 0.9
SYNCHRONISING = ("TopK", "Threshold", "Adasum", "PartialSync")  # at most one: each keeps ranks together by itself
# Arguments for a stage of each kind. Bounds of single gradients are sums of powers of two, so that values that are
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
    """One chain to train with; the decision about a step is taken early where it `is_tailed`."""

    golden: Golden
    is_tailed: bool

    def refused(self):
        """Returns the names of two stages that exclude each other, or None."""
        names = [table["stage"] for table in self.golden.stages]
        pairs = list(itertools.combinations(names, 2))
        together = [pair for pair in pairs if set(pair) <= set(SYNCHRONISING)]
        equal = [pair for pair in pairs if pair[0] == pair[1]]
        needing = filter(_needs_all_variables, self.golden.stages if "Freeze" in names else ())
        return next(iter([*together, *equal, *(("Freeze", table["stage"]) for table in needing)]), None)

    def met(self):
        """Returns the stages with the arguments of others, and tailing or momentum, that they meet in this chain."""
        own = {("is_tailed", self.is_tailed), ("momentum", self.golden.momentum)}
        for table in self.golden.stages:
            own |= {(table["stage"], key, json.dumps(value)) for key, value in table.items() if key != "stage"}
        return {(table["stage"], *argument) for table in self.golden.stages for argument in own}


def _needs_all_variables(table):
    """Returns True for a stage that needs every variable in every update."""
    keeps = table["stage"] in ("TopK", "Threshold") and table.get("error_feedback", True)
    return keeps or table["stage"] == "PartialSync"


def cases(seed=15):
    """Returns every pair of stages, then longer chains until all pairs that can meet have met in these, too."""
    source = random.Random(seed)
    plain = {table["stage"]: table for table in reversed(TABLES.values()) if "exchange" not in table}
    taken = [_case(source, pair) for pair in itertools.combinations_with_replacement(plain.values(), 2)]
    drawn = [case for case in (_case(source, _chain(source)) for _ in range(2000)) if case.refused() is None]
    missing = set().union(*(case.met() for case in drawn))
    while missing:
        taken.append(max(drawn, key=lambda case: len(case.met() & missing)))
        missing -= taken[-1].met()
    return taken


def _chain(source):
    shares = {name: 0.25 if name == "Freeze" else 0.5 for name in ARGUMENTS if name not in SYNCHRONISING}
    names = [name for name, share in shares.items() if source.random() < share]
    names += source.sample(SYNCHRONISING, source.choice([0, 1, 1, 1]))
    source.shuffle(names)
    return [{"stage": name, **ARGUMENTS[name](source.choice)} for name in names]


def _case(source, chain):
    places = [(source.randrange(STEPS), source.randrange(2)) for _ in range(4)]
    values = [np.inf, -np.inf, np.nan, 1e25]
    bad = {(*place, source.choice(list(Fed.shapes))): source.choice(values) for place in places}
    is_tailed, momentum = source.random() < 0.5, source.choice([0.0, MOMENTUM])
    problem = Fed(STEPS, source.randrange(1, 2**31), bad)
    return Case(Golden("chain", problem, tuple(chain), momentum=momentum), is_tailed)


class Result(NamedTuple):
    """The results of training on one rank; attributes as those of `models.Trained`, and of its last step."""

    values: dict
    slots: dict
    residuals: dict
    sums: dict
    scales: list
    updates: int


def trained_together(numbers):
    """Trains with several chains of `cases()` in one graph; returns a `Result`, or the refusal's text, by number."""
    results, training, of_all = {}, {}, cases()
    with tf.Graph().as_default():
        step = tf1.placeholder(tf.int32, [])
        for number in numbers:
            golden, is_tailed = of_all[number]
            try:
                inner, manager = tf1.train.MomentumOptimizer(golden.rate, golden.momentum), golden.made_managers()
                name, added = f"chain_{number}", golden.made_stages()
                optimizer = NPUOptimizer(inner, manager, True, True, is_tailed, name=name, stages=added)
            except ValueError as error:
                results[number] = str(error)
                continue
            training[number] = _Training(name, optimizer, manager, golden.problem, step)
        train_ops = {number: (one.scale, one.train_op) for number, one in training.items()}
        with tf1.Session(config=as_built()) as session:
            session.run(tf1.global_variables_initializer())
            fetched = [session.run(train_ops, {step: number}) for number in range(STEPS)]
            left = session.run({variable.name: variable for variable in tf1.global_variables()})
    for number, one in training.items():
        results[number] = one.result([float(of_step[number][0]) for of_step in fetched], left)
    return results


class _Training:
    def __init__(self, name, optimizer, manager, problem, step):
        self._name = name
        with tf1.variable_scope(name):
            self._variables = {
                key: tf1.get_variable(key, initializer=value, use_resource=key != "vector")
                for key, value in problem.start_values().items()
            }
            count = tf1.get_variable("count", initializer=tf.constant(0, tf.int64), trainable=False)
        fed = problem.fed_to(collective.current().rank)
        grads = {key: tf.gather(np.stack([of_step[key] for of_step in fed]), step) for key in fed[0]}
        self.scale = manager.get_loss_scale()
        (loss,) = problem.losses_of(self._variables, grads)
        self.train_op = optimizer.minimize(loss, count, list(self._variables.values()))
        self._slots = {key: optimizer.get_slot(variable, "momentum") for key, variable in self._variables.items()}

    def result(self, scales, left):
        own = {name: value for name, value in left.items() if f"{self._name}/" in name}
        values = {key: left[variable.name] for key, variable in self._variables.items()}
        slots = {key: left[slot.name] for key, slot in self._slots.items()}
        kept = [
            {name.rpartition("/")[2]: value for name, value in kept_in(own, folder).items()}
            for folder in ("not_sent", "accumulated")
        ]
        return Result(values, slots, *kept, scales, int(left[f"{self._name}/count:0"]))
