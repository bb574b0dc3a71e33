"""`npu-run --split FILE`: hands speeds that an earlier run has measured to the ranks, which cut gradients by them."""

from __future__ import annotations

from npu_bridge.base import environment
from npu_bridge.base.reading import read_json
from npu_bridge.collective.measured_split import VARIABLE, Speeds
from npu_bridge.launch.errors import LaunchError

__all__ = ["announce_split"]


def announce_split(path: str) -> None:
    """Tells the ranks, which inherit the environment.

    Args:
      path: `tail.json` of a run with `--timeline`.
    Raises:
      LaunchError: the file cannot be read, or holds no speeds.
    """
    try:
        speeds = Speeds.of_facts(read_json(path)["speeds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise LaunchError(
            f"--split {path} cannot be used: {reason}. Expected tail.json of a run that reduced gradients. Make "
            f"it with npu-run --timeline 20:25 and this script."
        ) from error
    environment.write_variable(VARIABLE, speeds.as_text())
