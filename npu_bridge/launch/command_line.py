"""Base class and options that the commands of `npu-run` share, and how they print and fail."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any, Callable, NoReturn

import click

from npu_bridge.base.terminal import echo, flush_or_silence, in_line, silence

__all__ = ["EPILOG", "SETTINGS", "Command", "ending_on", "fail", "launcher_options"]

SETTINGS = {"help_option_names": ["-h", "--help"]}
EPILOG = "Options of the script itself follow two dashes: train.py -- --batch 32."
# For the libraries of TensorFlow, Horovod's connections, pipes to ranks, and the files of a script (ours); systems give
# a thousand.
LEAST_OPEN_FILES = 64


class Command(click.Command):
    """A command that ends with one sentence and exit code 2 where its streams or files fail it, not with a traceback.

    Whatever it prints goes through `echo`, click's own messages as well, which repeat what was typed.
    """

    def main(self, args=None, prog_name=None, complete_var=None, standalone_mode=True, **extra):
        """As click has it."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        name = prog_name or f"npu-run {self.name}"
        try:
            _check_process(name)
            code = super().main(args, prog_name, complete_var, False, **extra)
            sys.exit(code if isinstance(code, int) else 0)
        except click.ClickException as error:
            text = io.StringIO()
            error.show(text)
            fail(text.getvalue().rstrip("\n"), error.exit_code)
        except click.Abort:
            fail("Aborted!", 1)
        finally:
            flush_or_silence()

    def make_context(self, info_name, args, parent=None, **extra):
        """As click has it; here help is printed."""
        with _failing_with_a_sentence(info_name):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """As click has it, which would take a reader that is gone for exit code 1, and so for an answer."""
        with _failing_with_a_sentence(ctx.command_path):
            return super().invoke(ctx)


@contextlib.contextmanager
def _failing_with_a_sentence(name: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        silence(sys.stdout)
        fail(f"{name}: nobody reads the output any more")
    except OSError as error:
        silence(sys.stdout)
        fail(f"{name}: {in_line(str(error))}")


def fail(text: str, code: int = 2) -> NoReturn:
    """Prints a text on standard error, if anybody reads it, and ends the process."""
    try:
        echo(text, err=True)
    except (OSError, ValueError):
        silence(sys.stderr)
    sys.exit(code)


def _check_process(name: str) -> None:
    """Ends the process where it cannot work: a closed stream's number would be that of the next file to be opened."""
    for stream, what, sign in ((sys.stdout, "standard output", ">"), (sys.stderr, "standard error", "2>")):
        if stream is None:
            fail(
                f"{name}: {what} is closed. Expected a terminal, a file or a pipe; say {sign}/dev/null to see nothing."
            )
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_OPEN_FILES, hard))
        except (ValueError, OSError):
            fail(
                f"{name}: this process may open {soft} files. Expected at least {LEAST_OPEN_FILES}; say ulimit -n 1024 "
                f"before it."
            )


@contextlib.contextmanager
def ending_on(*errors: type[Exception], command: str) -> Iterator[None]:
    """Inside, these errors end the process with one line and exit code 2."""
    try:
        yield
    except errors as error:
        fail(f"npu-run {command}: {in_line(str(error))}")


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
