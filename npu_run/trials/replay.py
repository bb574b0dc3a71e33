"""Replays a record in the ranks of `npu-run replay`: feeds its inputs, and compares losses and weights bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from npu_bridge.base.files import write_atomically
from npu_bridge.base.reading import open_file
from npu_bridge.session.hooked_session import TrainingHook
from npu_run.trials.record import folder_of_rank, read_weights
from npu_run.trials.replay_tf1 import Replay


class ReplayStepsHook(TrainingHook):
    """A hook that replays a record in the first training session of a process, and then ends the script.

    The hook writes a JSON file with `steps`, the number of steps, and `differences`, a list of sentences.

    Raises:
      OSError: the folder has no record for this rank.
    Ranks: local.
    """

    def __init__(self, folder: str, rank: int, verdict: str):
        self._replay = Replay(folder, rank)
        self._folder, self._verdict = folder_of_rank(folder, rank), verdict
        self._session: Any = None
        self._losses: list[float | None] = []

    def after_create_session(self, session, coord):
        """Loads the recorded weights."""
        if self._session is None:
            self._session = session
            self._replay.load_weights(session)

    def before_run(self, run_context):
        """Feeds the inputs of the recorded step."""
        if run_context.session is not self._session:
            return None
        feeds = self._replay.feeds(self._session.graph, len(self._losses))
        return tf.estimator.SessionRunArgs([] if self.training.loss is None else self.training.loss, feeds)

    def after_run(self, run_context, run_values):
        """Notes the loss; after the last step, writes the differences and raises SystemExit."""
        if run_context.session is not self._session:
            return
        self._losses.append(None if self.training.loss is None else float(run_values.results))
        if len(self._losses) < self._replay.steps:
            return
        losses = self._replay.losses, self._losses
        write_verdict(self._verdict, self._folder, losses, read_weights(self._session))
        raise SystemExit(0)


def write_verdict(path: str, folder: str, losses: tuple[list, list], weights: Mapping[str, Any]) -> None:
    """Writes the number of steps and the differences from the record, which are sentences, to a JSON file.

    Args:
      path: path of the file.
      folder: folder of the rank's part of the record.
      losses: losses in the record, and losses in this run.
      weights: weights after the last step, by name.
    """
    found = [
        f"the loss of step {step} is {there!r} in the record and {here!r} here"
        for step, (there, here) in enumerate(zip(*losses))
        if there != here and not (there != there and here != here)
    ]
    saved = os.path.join(folder, "weights_after.npz")
    recorded: dict[str, np.ndarray] = {}
    if os.path.lexists(saved):
        with open_file(saved, "rb", within_folder=folder) as file:
            recorded = dict(np.load(file))
    for name in recorded:
        if name not in weights:
            found.append(f"this run has no variable {name}")
            continue
        there, here = recorded[name], np.asarray(weights[name]).astype(recorded[name].dtype)
        if there.tobytes() != here.tobytes():
            apart = np.abs(there.astype(np.float64) - here.astype(np.float64)).max()
            found.append(f"{name} differs by {apart:.3g} at most after {len(losses[1])} steps")
    write_atomically(path, json.dumps({"steps": len(losses[1]), "differences": found}, indent=1))
