"""The registry: trainings by name, with the ways and numbers of ranks in which each is run."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from npu_bridge import stages
from npu_bridge.amp.groups import GroupLossScaleManager
from npu_bridge.amp.loss_scale import DynamicLossScaleManager
from npu_bridge.estimator.npu.npu_loss_scale_manager import ExponentialUpdateLossScaleManager
from tests.goldens.problems import Fed, Layers

WINDOW = 3
# Tables of stages as `stages.from_config` takes them, by short names.
TABLES = {
    "accumulate": {"stage": "Accumulate", "steps": WINDOW},
    "accumulate sums": {"stage": "Accumulate", "steps": WINDOW, "reduction": "sum"},
    "accumulate two": {"stage": "Accumulate", "steps": 2},
    "accumulate reduced": {"stage": "Accumulate", "steps": WINDOW, "exchange": "batch"},
    "accumulate reduced sums": {"stage": "Accumulate", "steps": WINDOW, "reduction": "sum", "exchange": "batch"},
    "accumulate judged sums": {"stage": "Accumulate", "steps": WINDOW, "reduction": "sum", "loss_scale": "batch"},
    "clip locally": {"stage": "ClipLocally", "low": -0.5, "high": 0.75},
    "clip layers locally": {"stage": "ClipLocally", "low": 0.05},
    "clip by value": {"stage": "ClipByValue", "low": 0.4},
    "clip by norm": {"stage": "ClipByGlobalNorm", "clip_norm": 1.5},
    "clip sums by norm": {"stage": "ClipByGlobalNorm", "clip_norm": 3.0},
    "clip layers by norm": {"stage": "ClipByGlobalNorm", "clip_norm": 0.3},
    "centralise": {"stage": "CentralizeGradients"},
    "top k": {"stage": "TopK", "density": 0.2},
    "top k, forgetful": {"stage": "TopK", "density": 0.2, "error_feedback": False},
    "top k of a fragment": {"stage": "TopK", "density": 0.2, "per": "fragment"},
    "top k of many": {"stage": "TopK", "density": 0.4},
    "threshold": {"stage": "Threshold", "value": 0.8},
    "adasum": {"stage": "Adasum"},
    "adasum of means": {"stage": "Adasum", "averaged_ranks": 2},
    "adasum of hosts": {"stage": "Adasum", "averaged_ranks": "host"},
    "adasum of weights": {"stage": "Adasum", "on": "weights"},
    "adasum of weights, of means": {"stage": "Adasum", "averaged_ranks": 2, "on": "weights"},
    "partial sync": {"stage": "PartialSync", "threshold": 12},
    "freeze": {
        "stage": "Freeze",
        "schedule": {"groups": [["table"], ["kernel"], ["vector"]], "kind": "explicit", "sequence": [0, 1, 2, 1]},
    },
    "freeze kernel": {
        "stage": "Freeze",
        "schedule": {"groups": [["kernel"], ["vector"]], "kind": "explicit", "sequence": [0, 1]},
    },
    # Group 1 freezes the first layer, group 2 the first two; the schedule is shorter than the training.
    "freeze layers": {
        "stage": "Freeze",
        "schedule": {
            "groups": [["layer_0"], ["layer_1"], ["layer_2", "layer_3/kernel"]],
            "full_share": 0.5,
            "total_steps": 15,
            "seed": 1,
        },
    },
}
FUNCTIONS = ("function", "fit, legacy", "fit, current")


def exponential(first, every):
    """Returns a manager that doubles and halves its scale."""
    return ExponentialUpdateLossScaleManager(first, every, 1, 2, 0.5)


def dynamic(first, every):
    """Returns a manager of the same rule with the interface of `npu_bridge.amp`."""
    return DynamicLossScaleManager(first, growth_interval=every)


def apex(first, every):
    """Returns a manager of the same rule with the arguments of APEX."""
    return DynamicLossScaleManager.apex(first, scale_window=every)


class Golden(NamedTuple):
    """One training.

    Attributes:
      name: of the case.
      problem: what is trained, `Fed` or `Layers`.
      stages: tables of stages, in the order in which an optimizer gets them.
      scales: for each loss or group how its loss scale begins and moves, as arguments of `models._Scale`.
      managers: makes the loss-scale manager of each loss, or that of all groups.
      groups: patterns of variables, for a loss scale of each group; or none.
      rate, momentum: of the optimizer inside, 0 for plain gradient descent.
      is_sharded: ranks share the update.
      fast: by number of ranks the ways to train it in `make test`.
      slow: the same of what only `make test-all` trains.
    """

    name: str
    problem: object
    stages: tuple = ()
    scales: tuple = ((2.0**10, 4),)
    managers: tuple = (exponential,)
    groups: tuple = ()
    rate: float = 0.1
    momentum: float = 0.0
    is_sharded: bool = False
    fast: dict = {}  # noqa: RUF012 - is not changed
    slow: dict = {}  # noqa: RUF012

    def made_stages(self):
        """Makes the stages anew."""
        return stages.from_config({"stages": list(self.stages)})

    def made_managers(self):
        """Makes a loss-scale manager anew, or one for each loss."""
        if self.groups:
            return self.managers[0](list(self.groups), [first for first, *_ in self.scales])
        made = [make(*rule) for make, rule in zip(self.managers, self.scales)]
        return made if len(made) > 1 else made[0]

    def parts_of(self, grads):
        """Returns, of the gradients for each loss, those with a separate loss scale."""
        if not self.groups:
            return grads
        ((of, rows),) = grads
        return [
            ({name: grad if re.search(pattern, name) else np.zeros_like(grad) for name, grad in of.items()}, rows)
            for pattern in self.groups
        ]


GOLDENS = {}


def _add(name, problem, tables=(), **fields):
    GOLDENS[name] = Golden(name, problem, tuple(TABLES[table] for table in tables), **fields)


def _of_stages(*tables, **fast_and_slow):
    _add(" + ".join(tables), Fed(), tables, **fast_and_slow)


_ALL = ("graph", "graph, tailed", *FUNCTIONS)
_of_stages("accumulate", fast={1: ("graph",)})
_of_stages("accumulate sums", "clip by norm", fast={1: ("graph", "function"), 2: ("function",)})
_of_stages("clip locally", fast={1: ("graph",)})
_of_stages("clip by value", fast={1: ("graph",)})
_of_stages("clip by norm", fast={1: ("graph",)})
_of_stages("centralise", fast={1: ("graph",)})
_of_stages("centralise", "clip by norm", "clip by value", "clip locally", "accumulate", fast={1: _ALL, 2: FUNCTIONS})
# Stages that do nothing on one rank. On two ranks graphs are those of `chains.py`.
_of_stages("clip by norm", "accumulate", "clip locally", "top k", fast={2: ("function", "fit, current")})
_of_stages("top k of a fragment", fast={2: ("function",)})
_of_stages("adasum", slow={2: FUNCTIONS[1:], 4: ("graph",)})
_LAST = ("clip by norm", "centralise")
_of_stages("accumulate", "clip locally", "adasum", *_LAST, fast={1: ("graph",)}, slow={2: ("function",)})
_of_stages("adasum of means", slow={4: ("graph",)})
_of_stages("adasum of weights, of means", "clip by norm", slow={4: ("graph",)})
_of_stages("accumulate", "adasum of weights", *_LAST, slow={2: ("function", "fit, current")})
_of_stages("partial sync", fast={1: ("graph",)}, slow={2: FUNCTIONS[1:]})
_of_stages("accumulate", "clip by norm", "partial sync", fast={1: ("graph",)}, slow={2: ("function",)})
_of_stages("threshold", slow={4: ("graph",)})
_LONG = ("accumulate", "clip locally", "clip by value", *_LAST)
_of_stages(*_LONG, "top k", slow={4: ("graph", "fit, legacy")})
_of_stages(*_LONG, "partial sync", slow={4: ("graph, tailed",)})
_of_stages(*_LONG, "threshold", slow={4: ("function",)})
_of_stages(*_LONG, "adasum", slow={4: ("fit, current",)})
_of_stages("accumulate", "clip by norm", "top k")  # what keeps most; for tests of checkpoints


def _of_forms(name, *tables):
    """Accumulation that judges every batch; the second half of the training has no overflow."""
    problem = Fed(32, bad={(3, 0, "table"): np.inf, (9, 1, "table"): np.inf})
    ways = {1: ("graph, tailed", "minimize"), 2: ("graph", "graph, tailed", "minimize")}
    fields = {"managers": (dynamic,), "scales": ((2.0**10, 2),), "rate": 0.25, "fast": {1: ("graph",)}, "slow": ways}
    _add(name, problem, ("clip sums by norm", *tables), **fields)


_of_forms("boost", "accumulate reduced")
_of_forms("boost, sums", "accumulate reduced sums")
_of_forms("apex", "accumulate judged sums")


def _of_layers(name, *tables, **fields):
    bad = {(6, 0, "y"): np.inf, (20, 1, "y"): np.nan, (33, 0, "y"): np.nan}
    fields |= {"scales": ((2.0**8, 5),), "rate": 0.2, "momentum": 0.9}
    _add(name, Layers(bad=bad), ("freeze layers", *tables), **fields)


_of_layers("frozen", fast={1: ("graph",)}, slow={2: FUNCTIONS[1:]})
_of_layers(
    "frozen, clipped",
    "clip layers by norm",
    fast={1: ("graph",)},
    slow={1: ("function, own tape", "eager", "fit, current"), 2: ("graph, tailed", "function")},
)
_of_layers(
    "frozen, in windows",
    "clip layers by norm",
    "accumulate two",
    "clip layers locally",
    fast={1: ("graph", "graph, tailed")},
    slow={1: ("function", "fit, legacy"), 2: ("graph",), 4: ("graph",)},
)


def _of_two_losses(name, *tables, **fields):
    bad = {(3, 0, "table"): np.inf, (6, 1, "table_1"): np.nan, (7, 0, "table_1"): -np.inf}
    bad |= {(9, 1, "table"): np.inf, (9, 0, "table_1"): np.nan}
    fields |= {"managers": (apex, exponential), "scales": ((2.0**10, 4), (2.0**3, 3)), "rate": 0.25}
    _add(name, Fed(16, bad=bad, losses=2), tables, **fields)


_WAYS_OF_TWO = ("graph", "graph, tailed", "passes, legacy", "passes", "passes, eager", "eager, of TF 1")
_of_two_losses("two losses", fast={1: _WAYS_OF_TWO}, slow={2: _WAYS_OF_TWO})
_of_two_losses("two losses + sharding", is_sharded=True, slow={2: ("graph",)})
_of_two_losses("two losses + freeze", "freeze kernel", slow={2: ("graph", "passes")})
_of_two_losses("two losses + adasum of weights", "adasum of weights", slow={2: ("graph", "passes")})
for _table in ("top k of many", "adasum", "partial sync"):
    _of_two_losses(f"two losses + {_table}", _table, slow={2: ("graph",)})

_BAD_GROUPS = ((2, 0, "poison_1"), (4, 1, "poison_2"), (7, 1, "poison_0"), (7, 0, "poison_3"))
_WAYS_OF_GROUPS = ("graph", "graph, tailed", "minimize", "passes")
_add(
    "groups",
    Layers(12, dict.fromkeys(_BAD_GROUPS, np.inf), is_poisonable=True),
    scales=tuple((first, 1, 2.0 ** (1 / 1000), 2.0**-0.5) for first in (2.0**4, 2.0**12, 2.0**6)),
    managers=(GroupLossScaleManager,),
    groups=("layer_0/", "layer_1/", "layer_[23]/"),
    rate=0.05,
    fast={1: _WAYS_OF_GROUPS},
    slow={2: _WAYS_OF_GROUPS},
)


def plan(ranks, is_slow):
    """Returns pairs of a way and a name to train on so many ranks, in `make test` or only in `make test-all`."""
    return [
        (way, golden.name)
        for golden in GOLDENS.values()
        for way in (golden.slow if is_slow else golden.fast).get(ranks, ())
    ]
