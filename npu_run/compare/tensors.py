"""Compares the tensors of two dumps, and finds the first operator that is out of tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from npu_bridge.base.errors import listed
from npu_run.compare.arrays import ArrayAgreement, choose_tolerance, compare_arrays
from npu_run.compare.dumps import Dump, DumpKey, TensorPlace
from npu_run.compare.names import OperatorMatching, match_operators
from npu_run.compare.verdict import NotComparableError, Verdict

# Causes of a first difference, by the types of operators without computed inputs (the beginnings of their names).
_SOURCES = {
    "B starts from other values": ("Variable", "VarHandle", "ReadVariable"),
    "B is fed other data": ("Placeholder", "Iterator"),
    "B draws other random numbers": ("Random", "TruncatedNormal", "Stateless"),
}
_MOST_STEPS_BACK, _MOST_NAMES = 8, 4
# B's errors may be this many times as large as those of A's repeats, which are few.
_ROOM = 10.0
# Reads of a TF 1 reference variable can show its value after the step.
_REFERENCES = ("Variable", "VariableV2")
_ALMOST_A_MULTIPLE = 0.05


class TensorRow(NamedTuple):
    """The comparison of a tensor that both dumps have.

    Attributes:
      place: the tensor's place in A.
      other: the tensor's place in B.
      type: type of the operator, or "".
      dtypes: dtypes in A and B; empty if a tensor cannot be read.
      agreement: how closely the tensors agree; None if they cannot be compared, for the reason in `problem`.
      how: the rule that matched the names, if they differ.
      is_noise: whether repeats of A are already out of tolerance in this tensor.
    """

    place: TensorPlace
    other: TensorPlace
    type: str
    dtypes: tuple[str, ...]
    agreement: ArrayAgreement | None
    problem: str
    how: str
    is_noise: bool = False

    @property
    def is_inside_tolerance(self) -> bool | None:
        """Whether the tensor is within tolerance; None if it was not compared, or is noise."""
        return None if self.agreement is None or self.is_noise else self.agreement.is_inside


class TensorComparison(NamedTuple):
    """The comparison of the tensors of one step.

    Attributes:
      key: step, rank and graph in A.
      rows: rows in the order of execution.
      matching: the matching of the operators.
      first: the first row out of tolerance, or None.
      inputs: names of the operators that compute the inputs of `first`, and whether they were within tolerance.
      readers: names of the operators that read the outputs of `first`, and whether they were within tolerance.
    """

    key: DumpKey
    rows: list[TensorRow]
    matching: OperatorMatching
    first: TensorRow | None
    inputs: dict[str, bool | None]
    readers: dict[str, bool | None]


def compare_dumps(
    a: Sequence[Dump],
    b: Sequence[Dump],
    tolerance: float | None = None,
    given_pairs: Mapping[str, str] | None = None,
    repeats: Sequence[Sequence[Dump]] = (),
) -> tuple[Verdict, TensorComparison]:
    """Compares dumps step by step, until an operator is out of tolerance.

    Args:
      a, b: dumps of A and B; A is the reference of errors.
      tolerance: relative tolerance; None means the tolerance of the dtype in `arrays.TOLERANCES`.
      given_pairs: dict from names of A's operators to names of B's, for pairs that no rule finds.
      repeats: dumps of other repeats of A. A tensor that is out of tolerance in a repeat is noise and does not count;
        for example, the gradient of a bias without effect is a sum of rounding errors.
    Returns:
      The verdict, and the comparison of the last step that was compared.
    Raises:
      NotComparableError: there is no common step or operator.
    """
    pairs, notes = _pair_dumps(a, b)
    notes += [note for dump in (*a, *b) for note in dump.notes]
    judged: list[TensorRow] = []
    for of_a, of_b in pairs:
        others = [dump for dumps in repeats for dump in dumps if dump.key == of_a.key]
        done = _compare_step(of_a, of_b, others, tolerance, given_pairs or {})
        judged += [row for row in done.rows if row.is_inside_tolerance is not None]
        if done.first is not None:
            break
    notes += _describe_names(done)
    facts = _make_json_facts(done, len(judged))
    if not judged:
        reasons = [row.problem or "A's own repeats differ in it" for row in done.rows]
        problem = next(iter(reasons), "no operator has the same name in both")
        return Verdict("tensors", None, f"No tensor could be compared: {problem}.", facts, tuple(notes)), done
    if done.first is None:
        steps = f"step {done.key.step}" if len(pairs) == 1 else f"{len(pairs)} steps"
        worst = max(judged, key=lambda row: row.agreement.largest_relative)
        sentence = (
            f"All {len(judged)} tensors of {steps} are within tolerance; the largest relative error is "
            f"{worst.agreement.largest_relative:.2g}, at {worst.place.op!r}."
        )
        return Verdict("tensors", True, sentence, facts, tuple(notes)), done
    return Verdict("tensors", False, _describe_first_difference(done), facts, tuple(notes)), done


def _pair_dumps(a: Sequence[Dump], b: Sequence[Dump]) -> tuple[list[tuple[Dump, Dump]], list[str]]:
    """Pairs dumps of the same step, rank and graph.

    If there are no such pairs, ignores the graph, then also the rank.
    """
    for key in (lambda key: key, lambda key: (key.step, key.rank), lambda key: key.step):
        of_a, of_b = {}, {}
        for dumps, found in ((a, of_a), (b, of_b)):
            # If graphs cannot be told apart, the largest is the training.
            for dump in sorted(dumps, key=lambda dump: -len(dump.files)):
                found.setdefault(key(dump.key), dump)
        if common := [name for name in of_a if name in of_b]:
            order = {id(dump): number for number, dump in enumerate(a)}
            pairs = sorted(((of_a[name], of_b[name]) for name in common), key=lambda pair: order[id(pair[0])])
            lost = [len(a) - len(pairs), len(b) - len(pairs)]
            said = (
                f"{len(pairs)} dumps have a partner of the same step and rank; {lost[0]} of A and {lost[1]} of B none."
            )
            return pairs, [said] if any(lost) else []
    if len(a) == 1 or len(b) == 1:  # the step of a folder of plain files is not known
        of_a, of_b = (max(dumps, key=lambda dump: len(dump.files)) for dumps in (a, b))
        return [(of_a, of_b)], [f"Step {of_a.key.step} of A is compared with step {of_b.key.step} of B."]
    steps = [sorted({dump.key.step for dump in dumps}) for dumps in (a, b)]
    raise NotComparableError(f"The dumps have no step in common: A has {steps[0][:6]}, B has {steps[1][:6]}.")


def _compare_step(
    a: Dump, b: Dump, repeats: Sequence[Dump], tolerance: float | None, given_pairs: Mapping[str, str]
) -> TensorComparison:
    noise, noisy = _measure_noise(a, repeats, tolerance)
    matching = match_operators(a.operators, b.operators, given_pairs)
    rows = []
    for place in a.files:
        name = matching.pairs.get(place.op)
        other = None if name is None else TensorPlace(name, *place[1:])
        if other in b.files:
            room = _ROOM * noise.get(place, 0.0)
            rows.append(_compare_tensor(a, b, place, other, matching.how.get(place.op, ""), tolerance, room))
    # A match by scope is a guess, which the shapes have to confirm.
    wrong = {row.place.op for row in rows if row.how == "scope" and row.agreement is None}
    rows = [row._replace(is_noise=row.place in noisy) for row in rows if row.place.op not in wrong]
    matching.only_a.extend(wrong)
    matching.only_b.extend(matching.pairs.pop(name) for name in wrong)
    lost = [row for row in rows if row.is_inside_tolerance is False]
    first = next((row for row in lost if not _reads_reference_variable(a, row.place.op)), lost[0] if lost else None)
    if first is None:
        return TensorComparison(a.key, rows, matching, None, {}, {})
    state: dict[str, bool | None] = {}
    for row in [row for row in rows if row.place.side == "output"] or rows:
        known = state.get(row.place.op, True)
        state[row.place.op] = row.is_inside_tolerance if known else known
    readers: dict[str, list[str]] = {}
    for name, sources in a.inputs.items():
        for source in sources:
            readers.setdefault(source, []).append(name)
    before, behind = (_find_nearest_compared_operators(edges, first.place.op, state) for edges in (a.inputs, readers))
    return TensorComparison(a.key, rows, matching, first, before, behind)


def _measure_noise(
    a: Dump, repeats: Sequence[Dump], tolerance: float | None
) -> tuple[dict[TensorPlace, float], set[TensorPlace]]:
    """Returns the largest relative errors between A's own repeats, and the places that are out of tolerance."""
    noise: dict[TensorPlace, float] = {}
    noisy: set[TensorPlace] = set()
    for other in repeats:
        for place in a.files:
            found = _compare_tensor(a, other, place, place, "", tolerance).agreement if place in other.files else None
            if found is not None and not found.is_inside:
                noisy.add(place)
            elif found is not None:
                noise[place] = max(noise.get(place, 0.0), found.largest_relative)
    if 2 * len(noisy) > len(a.files):
        raise NotComparableError(
            f"The dumps of A's own repeats differ in {len(noisy)} of {len(a.files)} tensors at step {a.key.step}, so "
            f"a difference of B shows nothing; let the repeats differ only in rounding: npu-run --repeat 3 --vary "
            f"rounding."
        )
    return noise, noisy


def _compare_tensor(
    a: Dump,
    b: Dump,
    place: TensorPlace,
    place_in_b: TensorPlace,
    matched_by: str,
    tolerance: float | None,
    noise_tolerance: float = 0.0,
) -> TensorRow:
    """Compares two tensors; `noise_tolerance` is a relative error, above the tolerance, that noise can cause."""
    row = TensorRow(
        place, place_in_b, a.types.get(place.op) or b.types.get(place_in_b.op, ""), (), None, "", matched_by
    )
    try:
        x, y = a.array(place), b.array(place_in_b)
        row = row._replace(dtypes=(x.computed_dtype, y.computed_dtype))
        if x.size != y.size:
            problem = f"{place.op!r} has the shape {list(x.shape)} in A and {list(y.shape)} in B"
            return row._replace(problem=problem)
        allowed = choose_tolerance(x) if tolerance is None else tolerance
        return row._replace(agreement=compare_arrays(x, y, max(allowed, noise_tolerance)))
    except NotComparableError as error:
        return row._replace(problem=str(error).rstrip("."))


def _reads_reference_variable(dump: Dump, op: str) -> bool:
    """Returns whether an operator is a TF 1 reference variable or reads a TF 1 reference variable."""
    read = dump.inputs.get(op, [])[:1] if dump.types.get(op) == "Identity" else [op]
    return any(dump.types.get(name) in _REFERENCES for name in read)


def _find_nearest_compared_operators(
    edges: Mapping[str, list[str]], op: str, is_inside_by_name: Mapping[str, bool | None]
) -> dict[str, bool | None]:
    """Returns the nearest compared operators along the edges, passing through operators that were not compared."""
    found: dict[str, bool | None] = {}
    seen, border = {op}, [op]
    for _ in range(_MOST_STEPS_BACK):
        following = []
        for name in dict.fromkeys(source for place in border for source in edges.get(place, ())):
            if name in seen:
                continue
            seen.add(name)
            if name in is_inside_by_name:
                found[name] = is_inside_by_name[name]
            else:
                following.append(name)
        border = following
    found.update(dict.fromkeys(border))
    return found


def _describe_first_difference(tensors: TensorComparison) -> str:
    row = tensors.first
    found, number = row.agreement, tensors.rows.index(row) + 1
    kind = f" ({row.type})" if row.type else ""
    op, side, slot = row.place
    what = op if side == "output" and not slot else f"{side} {slot} of {op}"
    said = (
        f"The first operator out of tolerance is {what!r}{kind}, tensor {number} of {len(tensors.rows)} in the order "
        f"of execution at step {tensors.key.step}: {_describe_agreement(found)}"
    )
    if row.dtypes[0] != row.dtypes[1]:
        said += f"; it is {row.dtypes[0]} in A and {row.dtypes[1]} in B"
    source = next((text for text, starts in _SOURCES.items() if row.type.startswith(starts)), None)
    if source:
        return f"{said}; {source}."
    good = [repr(name) for name, is_inside in tensors.inputs.items() if is_inside]
    lost = [repr(name) for name, is_inside in tensors.inputs.items() if is_inside is None]
    late = [repr(name) for name, is_inside in tensors.inputs.items() if is_inside is False]
    if good:
        plural, verb = ("s", "are") if len(good) > 1 else ("", "is")
        said += f"; its input{plural} {listed(good, _MOST_NAMES)} {verb} inside"
    if lost:
        said += f"; {listed(lost, _MOST_NAMES)} {'were' if len(lost) > 1 else 'was'} not compared"
    if late:
        verb = "are" if len(late) > 1 else "is"
        said += f"; {listed(late, _MOST_NAMES)} {verb} out, too, or shows the variable after this step"
    return f"{said}."


def _describe_agreement(agreement: ArrayAgreement) -> str:
    if agreement.not_finite[2]:
        in_a, in_b, only = agreement.not_finite
        return f"NaN or infinity in {in_a} elements of A and {in_b} of B, in {only} of one alone"
    beyond = f"{100 * agreement.mismatches:.3g} % of {agreement.elements} elements beyond"
    said = (
        f"largest relative error {agreement.largest_relative:.2g} over {agreement.tolerance:g}, {beyond}, "
        f"cosine {agreement.cosine:.8f}"
    )
    rest = max(agreement.distance**2 - (agreement.gain - 1) ** 2, 0.0) ** 0.5
    if (
        agreement.elements > 1
        and abs(agreement.gain - 1) > agreement.tolerance
        and rest < _ALMOST_A_MULTIPLE * abs(agreement.gain - 1)
    ):
        said += f", B is {agreement.gain:.6g} times A"
    return said


def _describe_names(tensors: TensorComparison) -> list[str]:
    notes, matching = [], tensors.matching
    for names, side in ((matching.only_a, "A"), (matching.only_b, "B")):
        if names:
            notes.append(f"Operators of {side} without a partner: {len(names)}, {listed(names, _MOST_NAMES)}.")
    if matching.inside:
        notes.append(
            f"Operators of A inside fused ones of B: {len(matching.inside)}, "
            f"{listed(list(matching.inside), _MOST_NAMES)}."
        )
    noise = [row.place.op for row in tensors.rows if row.is_noise]
    if noise:
        notes.append(
            f"Tensors that were not judged, as A's own repeats differ in them: {len(noise)}, "
            f"{listed(noise, _MOST_NAMES)}."
        )
    problems = [row.problem for row in tensors.rows if row.problem]
    if problems:
        notes.append(f"Tensors that could not be compared: {len(problems)}, {'; '.join(problems[:3])}.")
    return notes


def _make_json_facts(tensors: TensorComparison, compared: int) -> dict[str, Any]:
    first = tensors.first
    return {
        "step": tensors.key.step,
        "compared": compared,
        "first": None if first is None else first.place.op,
        "inputs": tensors.inputs,
        "readers": tensors.readers,
        "only_a": tensors.matching.only_a,
        "only_b": tensors.matching.only_b,
        "inside_fused": tensors.matching.inside,
        "tensors": [
            {
                "operator": row.place.op,
                "in_b": row.other.op,
                "type": row.type,
                "side": row.place.side,
                "slot": row.place.slot,
                "matched": row.how or "same name",
                "problem": row.problem,
                **({} if row.agreement is None else row.agreement.as_json_facts()),
            }
            for row in tensors.rows
        ],
    }
