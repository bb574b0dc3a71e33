"""Checks, when an optimizer is built, that all ranks will send the same gradients, with the same settings of stages.

If ranks build a collective differently, it waits forever, fails far from its cause, or sums unrelated values. So each
rank writes a plan of its all-reduces to the job's key-value store and reads the plans of others. This adds nothing to a
graph, and no rank waits: rank 0 reads all existing plans, the other ranks read the plan of rank 0. Each rank writes
before it reads, so of rank 0 and any other rank, at least one sees both plans.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import http.client
import itertools
import json
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.terminal import logger
from npu_bridge.base.tf_internals.callers import is_building_evaluation
from npu_bridge.collective.rendezvous.key_value_store import KeyValueStore

_LOG = logger(__name__)
_POLL_SECS = 0.02
# The number that Keras appends to a repeated name.
_NAME_NUMBER = re.compile(r"_(\d+)(?=[/:]|$)")


class RanksDisagreeError(RuntimeError):
    """An error for ranks that would all-reduce different gradients, or decide differently about a step."""

    # Without this attribute, TensorFlow 2.15 replaces errors raised while a function is traced by its own.
    ag_pass_through = True


class PlannedGradient(NamedTuple):
    """One gradient of a plan.

    Attributes:
      name: the variable's name.
      shape: the variable's shape, as text.
      kind: "a dense gradient", "a sparse gradient" or "no gradient".
      dtype: name of the gradient's dtype; "" without a gradient.
    """

    name: str
    shape: str
    kind: str
    dtype: str


@dataclasses.dataclass
class AllReducePlan:
    """The all-reduces of one rank for one optimizer.

    Attributes:
      owner: name of the optimizer; empty if the optimizer all-reduces nothing.
      gradients: the all-reduced gradients, in the order of the variables.
      fragments: positions in `gradients`, one list per fragment, in the order in which gradients become ready.
      settings: texts, numbers and booleans by name, which must be equal on all ranks.
      has_numbered_names: whether Keras gave the names, with numbers that count up in a process. These numbers may
        differ, because one rank can have built more models before.
    """

    owner: str = ""
    gradients: list[PlannedGradient] = dataclasses.field(default_factory=list)
    fragments: list[list[int]] = dataclasses.field(default_factory=list)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_numbered_names: bool = False

    def to_text(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> AllReducePlan:
        """Parses a plan that `to_text` wrote."""
        plan = cls(**json.loads(text))
        plan.gradients = [PlannedGradient(*gradient) for gradient in plan.gradients]
        return plan

    def difference_from(self, reference: AllReducePlan) -> PlanDifference | None:
        """Returns the first difference from rank 0's plan, or None: in the gradients, then settings, then fragments."""
        return (
            _difference_of_gradients(reference, self)
            or _difference_of_settings(reference.settings, self.settings)
            or _difference_of_fragments(reference, self)
        )


class PlanDifference(NamedTuple):
    """The parts of a message about the first difference between two plans."""

    problem: str
    expected: str
    got: str
    fix: str


class AgreementChecks:
    """Posts the plans of this rank, and compares them with the plans of other ranks.

    Plans are counted by the name of their optimizer: the n-th plan of a name is compared with the n-th plans of this
    name on other ranks. So if only one rank posts a plan, later plans of other names are still compared correctly.
    """

    def __init__(self):
        self._counts: collections.Counter = collections.Counter()

    def check(
        self,
        plan: Any,
        rank: int,
        size: int,
        members: Sequence[int] | None = None,
        patience_secs: float = 0.0,
        training: str = "",
    ) -> None:
        """Posts a plan, and compares it with the plans of other ranks.

        Does nothing without a key-value store, or while an Estimator builds a graph that trains nothing. Sends three
        requests to the job's own server; rank 0 sends one more for every other rank.

        Args:
          plan: an `AllReducePlan`, or an object with the same `owner`, `to_text`, `from_text` and `difference_from`.
          rank, size: this rank and the number of ranks that compare.
          members: the comparing ranks' numbers in the job; None for the whole job.
          training: the label of the plan's training, from `wire_names.current_collectives_label`.
          patience_secs: how long to wait for missing plans. A rank that posts its plan later compares the two plans.
        Raises:
          RanksDisagreeError: another rank has a different plan. At least one of two such ranks raises.
        Ranks: local; every rank calls this in the same order.
        """
        # In an elastic job, a rank that joins later would count from 0.
        if is_building_evaluation() or not KeyValueStore("plans").exists or environment.is_flag_on("HOROVOD_ELASTIC"):
            return
        owner = f"{training}{plan.owner}"
        scope = f"plan_{self._counts[owner]}_{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
        self._counts[owner] += 1
        try:
            found = _exchange_descriptions(plan, scope, rank, size, time.monotonic() + patience_secs)
        except (OSError, http.client.HTTPException) as error:
            # The store is gone when a job is ending; whether ranks agree no longer matters then.
            _LOG.info("%s: not compared with other ranks: %s", plan.owner, error)
            return
        if found is not None:
            other, (problem, expected, got, fix) = found
            first, other = (0, other) if members is None else (members[0], members[other])
            raise RanksDisagreeError(
                f"{plan.owner}: rank {other} and rank {first} {problem}. Expected {expected} as on rank {first}; got "
                f"{got}. {fix}"
            )


@functools.cache
def agreements_of_process() -> AgreementChecks:
    """Returns the object that exchanges and compares the plans of this process; it is made at the first call."""
    return AgreementChecks()


def _exchange_descriptions(plan, scope, rank, size, deadline):
    """Posts a plan; returns a rank above 0 whose plan differs from the plan of rank 0, and the difference, or None."""
    texts, digests = KeyValueStore(scope), KeyValueStore(f"{scope}_digest")
    text = plan.to_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    texts.put(rank, text)
    digests.put(rank, digest)
    for other in range(1, size) if rank == 0 else [0]:
        posted = digests.get(other)
        while posted is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECS)
            posted = digests.get(other)
        if posted not in (None, digest):
            theirs = type(plan).from_text(texts.get(other))
            found = theirs.difference_from(plan) if rank == 0 else plan.difference_from(theirs)
            if found is not None:
                return max(rank, other), found
    return None


def _difference_of_gradients(reference, plan):
    problem, fix = "would reduce different gradients", "Build the same model on every rank."
    expected, actual = _gradients_by_label(reference), _gradients_by_label(plan)
    for label, gradient in expected.items():
        if label not in actual:
            return PlanDifference(
                problem, f"the variable {gradient.name} of shape {gradient.shape}", "no such variable", fix
            )
    for label, gradient in actual.items():
        if label not in expected:
            return PlanDifference(problem, "the same variables", f"also {gradient.name} of shape {gradient.shape}", fix)
    for label, gradient in expected.items():
        for what, right, wrong in zip(("the shape ", "", "the dtype "), gradient[1:], actual[label][1:]):
            if right != wrong:
                return PlanDifference(problem, f"{what}{right} of {gradient.name}", wrong, fix)
    for place, (right, wrong) in enumerate(zip(expected, actual)):
        if right != wrong:
            return PlanDifference(problem, f"{expected[right].name} at position {place}", actual[wrong].name, fix)
    return None


def _gradients_by_label(plan):
    """Returns a dict of the gradients in order; its keys name the variables in the same way on all ranks."""
    names = [gradient.name for gradient in plan.gradients]
    # A script can name the scope around the whole model after the rank.
    around = len(os.path.commonprefix([name.split("/")[:-1] for name in names]))
    names = ["/".join(name.split("/")[around:]) for name in names]
    numbers = [tuple(map(int, _NAME_NUMBER.findall(name))) for name in names]
    stems = [_NAME_NUMBER.sub("", name) if plan.has_numbered_names else name for name in names]
    seen: collections.Counter = collections.Counter()
    labels: dict[int, tuple] = {}
    for position in sorted(range(len(names)), key=lambda position: (numbers[position], position)):
        labels[position] = (stems[position], seen[stems[position]])
        seen[stems[position]] += 1
    return {labels[position]: gradient for position, gradient in enumerate(plan.gradients)}


def _difference_of_settings(reference, settings):
    for name in {**reference, **settings}:
        if reference.get(name) != settings.get(name):
            expected, got = (f"{name}={of[name]}" if name in of else f"no {name}" for of in (reference, settings))
            return PlanDifference("were set up differently", expected, got, "Pass every rank the same settings.")
    return None


def _difference_of_fragments(reference, plan):
    order, other_order = (list(itertools.chain(*of.fragments)) for of in (reference, plan))
    for place, (right, wrong) in enumerate(zip(order, other_order)):
        if right != wrong:
            return PlanDifference(
                "would reduce gradients in a different order",
                f"{reference.gradients[right].name} at position {place}",
                plan.gradients[wrong].name,
                "Build the model in the same order on every rank.",
            )
    numbers, other_numbers = _fragment_numbers(reference), _fragment_numbers(plan)
    for position in order:
        if numbers[position] != other_numbers[position]:
            return PlanDifference(
                "split gradients into different fragments",
                f"{reference.gradients[position].name} in fragment {numbers[position]} of {len(reference.fragments)}",
                f"fragment {other_numbers[position]} of {len(plan.fragments)}",
                "Set the same split strategy on every rank, before the optimizer is used.",
            )
    return None


def _fragment_numbers(plan):
    """Maps the position of each gradient to the number of its fragment, from 0."""
    return {position: number for number, fragment in enumerate(plan.fragments) for position in fragment}
