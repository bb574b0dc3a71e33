"""`npu-run --timeline FIRST:LAST`: records these training steps on every rank, and draws them."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from npu_bridge.base import environment
from npu_bridge.base.reading import read_json
from npu_bridge.base.terminal import path_for_message
from npu_bridge.base.tf_internals import keras3
from npu_bridge.base.tf_internals.profiles import watch_calls
from npu_bridge.base.tf_internals.training import watch_keras_optimizers
from npu_run.errors import LaunchError
from npu_run.trials.start import watch_training

_RECORDING = "NPU_RUN_TIMELINE"
_RANGE = re.compile(r"(\d{1,18}):(\d{1,18})")
PICTURE, FACTS, OVERLAP = "tail.svg", "tail.json", "overlap.svg"
FILES = ("timeline_rank_*.json", PICTURE, FACTS, OVERLAP)


class Recording(NamedTuple):
    """The range of steps that every rank records.

    Attributes:
      first: the first step.
      last: the end of the range, the first step that is not recorded any more.
      folder: absolute path of the folder for the files.
    """

    first: int
    last: int
    folder: str

    @property
    def steps(self) -> range:
        return range(self.first, self.last)

    def path_of(self, rank: int) -> str:
        """Returns the path of a rank's file."""
        return os.path.join(self.folder, f"timeline_rank_{rank}.json")

    def announce_to_ranks(self) -> None:
        """Tells the ranks, through an environment variable, which steps to record and in which (existing) folder."""
        environment.write_variable(_RECORDING, json.dumps(self))

    def draw_tail(self, ranks: int) -> str:
        """Draws the tail (communication after the backward pass) from the files of all ranks.

        Returns:
          A line that names the recorded steps and the picture.
        """
        found = [facts for facts in map(_read_facts, map(self.path_of, range(ranks))) if facts is not None]
        if not any(facts["steps"] for facts in found):
            return f"timeline: nothing was recorded of {_describe_steps(self.steps)}. {_explain_missing_steps(found)}"
        # The drawing imports TensorFlow, whose log lines would be noise here.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        from npu_bridge.reporting.tail_report import draw_tail

        picture, facts, overlap = (os.path.join(self.folder, name) for name in (PICTURE, FACTS, OVERLAP))
        try:
            tail = draw_tail(found, picture, facts, overlap)
        except OSError as error:
            return f"timeline: {path_for_message(picture)} cannot be written ({error}). Name another folder with --out."
        missing = sorted(set(range(ranks)) - {facts["rank"] for facts in found})
        elsewhere = f" (not there: the files of ranks {', '.join(map(str, missing))})" if missing else ""
        return (
            f"timeline: {_describe_steps(tail.steps)}, exposed tail {tail.exposed_ms:.1f} ms of {tail.step_ms:.1f} ms "
            f"(the median step); {path_for_message(picture)}{elsewhere}"
            f"{f'; steps that overlap: {path_for_message(overlap)}' if tail.overlaps else ''}"
        )

    @classmethod
    def parse(cls, text: str, folder: str) -> Recording:
        """Reads the value of the option, such as "20:25".

        Raises:
          LaunchError: the text is not a range of steps.
        """
        numbers = _RANGE.fullmatch(text.strip())
        if not numbers or int(numbers[1]) >= int(numbers[2]):
            raise LaunchError(
                f"--timeline is not a range of steps. Expected FIRST:LAST with FIRST < LAST, where LAST itself is not "
                f"recorded; got {text[:60]!r}. Pass --timeline 20:25 for steps 20 to 24."
            )
        return cls(int(numbers[1]), int(numbers[2]), os.path.abspath(folder))


def pop_recording_from_environment() -> Recording | None:
    """Returns the steps that a rank must record, or None; removes this setting from the environment of children."""
    text = os.environ.pop(_RECORDING, None)
    return None if text is None else Recording(*json.loads(text))


def record_training(recording: Recording, rank: int) -> None:
    """Records the training of a rank; called before TensorFlow is loaded."""

    @functools.cache
    def recorder():
        from npu_bridge.reporting.step_recorder import StepRecorder

        return StepRecorder(recording.steps, recording.path_of(rank), rank)

    @functools.cache
    def call_recorder():
        from npu_bridge.reporting.call_recorder import CallRecorder

        return CallRecorder(recorder())

    def note_update(optimizer, pairs):
        call_recorder().record_update()

    watch_training(lambda: [recorder()])
    watch_calls(lambda function, call: call_recorder().record_call(function, call))
    for watch in (watch_keras_optimizers, keras3.watch_optimizers):
        watch(lambda optimizer: None, note_update)


def _describe_steps(steps: Sequence[int]) -> str:
    """Describes steps in words."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def _read_facts(path: str) -> dict[str, Any] | None:
    try:
        return read_json(path, within_folder=os.path.dirname(path))["npu_bridge"]
    except (OSError, ValueError, KeyError):
        return None


def _explain_missing_steps(facts_of_ranks: list[dict[str, Any]]) -> str:
    seen = [facts for facts in facts_of_ranks if facts["last_step_seen"] is not None]
    if not seen:
        return (
            "Expected runs of a session that train, or calls of model.fit or of a tf.function that update by a Keras "
            "optimizer; got none. Put the step of an eager loop into a tf.function."
        )
    first, last = seen[0]["first_step_seen"], seen[0]["last_step_seen"]
    pace = seen[0]["steps_per_run"]
    if pace > 1:
        return (
            f"Only the last step of a run of {pace} steps can be recorded (iterations_per_loop). Expected such a step; "
            f"got steps {first} to {last} at intervals of {pace}. Pass --timeline {last}:{last + 1}, or set "
            f"iterations_per_loop=1."
        )
    return f"This run trained steps {first} to {last}. Choose steps in this range."
