"""Judges whether the losses of a run stay in the band of losses of repeated float32 runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from npu_run.compare.band import judge_losses, measure_band
from npu_run.compare.losses import read_losses
from npu_run.compare.verdict import NotComparableError


class Float32Band:
    """The band of losses of float32 runs that differ only by rounding.

    Args:
      folders: folders of these runs; the first run is the reference.
      tolerance: share of the reference's loss by which a run can differ in every step, even outside the band.
    Raises:
      NotComparableError: a folder has no losses.
    """

    def __init__(self, folders: Sequence[str], tolerance: float):
        runs = [read_losses(folder) for folder in folders]
        self._tolerance = tolerance
        self._steps, self._losses = runs[0].steps, runs[0].values
        try:
            self._band = measure_band(runs)
        except NotComparableError:  # the repeats are identical
            self._band = None

    def judge_run(self, folder: str) -> tuple[bool, str]:
        """Returns whether a run stays inside the band, and the reason in a few words."""
        try:
            run = read_losses(folder)
        except NotComparableError as error:
            return False, str(error)
        steps, here, there = np.intersect1d(run.steps, self._steps, return_indices=True)
        if len(steps) < len(self._steps):
            return False, f"it trained {len(steps)} of {len(self._steps)} steps"
        losses, reference = run.values[here], self._losses[there]
        if not np.isfinite(losses).all():
            return False, f"the loss is {losses[~np.isfinite(losses)][0]} at step {steps[~np.isfinite(losses)][0]}"
        off = np.abs(losses - reference) / np.maximum(np.abs(reference), np.finfo(np.float32).tiny)
        worst = int(off.argmax())
        said = f"at most {off[worst]:.2g} of the loss off, at step {steps[worst]}"
        if off[worst] <= self._tolerance:
            return True, said
        return self._band is not None and bool(judge_losses(self._band, [run]).is_inside), said

    def __str__(self) -> str:
        return f"loss {self._losses[0]:.5g} at step {self._steps[0]}, {self._losses[-1]:.5g} at step {self._steps[-1]}"
