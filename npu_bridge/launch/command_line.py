"""What commands of `npu-run` share: settings, how they fail, and the options of those that run a script themselves."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any, Callable

import click

__all__ = ["EPILOG", "SETTINGS", "ending_on", "launcher_options"]

SETTINGS = {"help_option_names": ["-h", "--help"]}
EPILOG = "Options of the script itself follow two dashes: train.py -- --batch 32."


@contextlib.contextmanager
def ending_on(*errors: type[Exception], command: str) -> Iterator[None]:
    """Inside, these errors end the process with one line and exit code 2."""
    try:
        yield
    except errors as error:
        click.echo(f"npu-run {command}: {error}", err=True)
        sys.exit(2)


def launcher_options(command: Callable) -> Callable:
    """Adds `-np`, `--tf1`, `--tf2`, `--tree`, SCRIPT and its arguments to a command.

    The command gets `launcher`, these options as a list of words for `npu-run`, `script` and `arguments`.
    """

    @click.option("-np", "size", type=click.IntRange(min=1), metavar="N", help="Number of ranks. Default: 1.")
    @click.option("--tf1", "era", flag_value="--tf1", help="The script is one of TensorFlow 1.")
    @click.option("--tf2", "era", flag_value="--tf2", help="The script is one of TensorFlow 2.")
    @click.option("--tree", "trees", multiple=True, metavar="DIR", help="Modules in DIR are the script's own, too.")
    @click.argument("script")
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
    @functools.wraps(command)
    def with_launcher(*given: Any, size: int | None, era: str | None, trees: tuple[str, ...], **others: Any) -> Any:
        if not os.path.isfile(others["script"]):
            raise click.UsageError(f"there is no file {others['script']!r} to run. Expected a Python script.")
        launcher = [] if size is None else ["-np", str(size)]
        launcher += [era] if era else []
        launcher += [word for tree in trees for word in ("--tree", os.path.abspath(tree))]
        return command(*given, launcher=launcher, **others)

    return with_launcher
