"""Compares the results of a case under the genuine TensorFlow 1.15 with its results here."""

from __future__ import annotations

import ast

import numpy as np

TOLERANCE = 1e-5


def differences(genuine, here):
    """Returns sentences, one for each thing that differs between two cases."""
    found = []
    if "error" in genuine or "error" in here:
        expected = genuine.get("error")
        if here.get("error") not in (expected, "ValueError" if expected == "AssertionError" else expected):
            found.append(f"genuine: {genuine.get('message', 'no error')}; here: {here.get('message', 'no error')}")
        return found
    for name in [*genuine, *(name for name in here if name not in genuine)]:
        ours, theirs = here.get(name), genuine.get(name)
        if isinstance(ours, str) or isinstance(theirs, str) or ours is None or theirs is None:
            if not is_alike(name, theirs, ours):
                found.append(f"{name}: genuine {short(theirs)}, here {short(ours)}")
        elif ours.shape != theirs.shape or ours.dtype.kind != theirs.dtype.kind:
            found.append(f"{name}: genuine {theirs.dtype}{theirs.shape}, here {ours.dtype}{ours.shape}")
        elif ours.dtype.kind not in "fc":
            if not np.array_equal(ours, theirs):
                found.append(f"{name}: genuine {short(theirs)}, here {short(ours)}")
        else:
            far = distance(theirs, ours)
            if not far <= TOLERANCE * (100 if ours.dtype == np.float16 else 1):
                found.append(f"{name}: genuine {short(theirs)}, here {short(ours)}, relative {far:.1e}")
    return found


def is_alike(name, genuine, here):
    """Whether two texts say the same; a shape here may be known where that of 1.15 is not, a gradient zero for none."""
    if isinstance(here, np.ndarray):
        return isinstance(genuine, str) and genuine == "no gradient" and not here.any()
    if not isinstance(genuine, str) or here is None:
        return False
    if name.startswith("static ") and genuine != here:
        (kind, shape), (kind_here, shape_here) = genuine.split(" ", 1), here.split(" ", 1)
        shape, shape_here = ast.literal_eval(shape), ast.literal_eval(shape_here)
        return kind == kind_here and (shape is None or shape_here is not None and len(shape) == len(shape_here) and all(
            known in (None, size) for known, size in zip(shape, shape_here)))  # fmt: skip
    return genuine == here


def distance(genuine, here):
    """The largest difference in parts of the largest absolute value, at least 1; infinite where one is not finite."""
    genuine, here = genuine.astype(np.float64), here.astype(np.float64)
    same = (genuine == here) | (np.isnan(genuine) & np.isnan(here))
    if same.all():
        return 0.0
    finite = np.abs(genuine[np.isfinite(genuine)])
    apart = np.abs(np.where(same, 0, genuine) - np.where(same, 0, here))
    return float(np.nan_to_num(apart / max(1.0, finite.max() if finite.size else 0), nan=np.inf).max())


def signature_problem(genuine, here):
    """Returns the difference here for a call that 1.15 accepts, or None; more arguments at the end do not count."""
    if genuine is None or here is None:
        return None
    (theirs, defaults), (ours, defaults_here) = genuine, here
    theirs = [name for name in theirs if name != "*"]
    if "*" not in ours and ours[: len(theirs)] != theirs:
        return f"genuine {theirs}, here {ours}"
    changed = {name: (value, defaults_here[name]) for name, value in defaults.items() if name in defaults_here}
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    return f"defaults, genuine and here: {changed}" if changed else None


def short(value):
    return " ".join(str(value).split())[:160]
