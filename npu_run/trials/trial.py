"""Describes one run of a script for a trial: folder, seed, steps. The launcher passes it to the ranks as text."""

from __future__ import annotations

import json
from typing import NamedTuple

SEED = 20150  # for scripts that set none; any number would do (ours)


class Trial(NamedTuple):
    """One run of a script.

    Attributes:
      folder: absolute path of the folder for its history, which Estimators take as their `model_dir` (`model` in it,
        if the script is ended early); "" for no folder.
      seed: added to every seed the script sets, or to `SEED` if it sets none; None leaves seeds alone.
      rounding: number of the draw by which initial weights are changed by one rounding; 0 for none.
      steps: training steps after which the script is ended; 0 for never.
      operators: path of a file to list the operators of the first training step in; "" for none.
      parameters: path of a file for the number of trained parameters; "" for none.
      record: absolute path of the folder to record the first `steps` steps in; "" for none.
      tensors: whether to record what the operators of these steps compute, too.
      replay: absolute path of the folder to feed recorded steps from; "" for none.
    """

    folder: str = ""
    seed: int | None = None
    rounding: int = 0
    steps: int = 0
    operators: str = ""
    parameters: str = ""
    record: str = ""
    tensors: bool = False
    replay: str = ""

    def as_text(self) -> str:
        """Returns the text for `of_text`."""
        return json.dumps(self._asdict())

    @classmethod
    def of_text(cls, text: str) -> Trial:
        """Parses the text of `as_text`."""
        return cls(**json.loads(text))
