"""Defines the parts that commands of `npu-run` share: base classes, options, printing, errors and JSON output."""

from __future__ import annotations

import contextlib
import functools
import glob
import io
import itertools
import json
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NoReturn

import click
from click.shell_completion import CompletionItem

from npu_bridge.base import environment
from npu_bridge.base.reading import open_file
from npu_bridge.base.terminal import discard_unwritten_output, echo, escape_del, escape_in_line, flush_or_silence
from npu_run.commands import describe_missing_script
from npu_run.errors import LaunchError
from npu_run.tensorflow_choice import TensorFlowChoice

# Version of the `--json` output and of the exit codes' names: rises when a key is removed or changes its meaning.
SCHEMA = 1
VERDICTS = ("fine", "no", "unknown")
# Needed for TensorFlow's libraries, Horovod's connections, pipes to ranks, and the script's files (our own count);
# operating systems allow about a thousand.
LEAST_OPEN_FILES = 64
_QUIET, _VERBOSE = (f"npu_bridge.{name}" for name in ("quiet", "verbose"))


class Command(click.Command):
    """A command that reports failures of streams and files in one sentence, without a traceback, with exit code 2.

    All output goes through `echo`, including click's own messages, which quote the user's input. Each command has the
    options `--quiet` and `--verbose`.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, context_settings={"help_option_names": ["-h", "--help"]}, **keywords)
        for param in self.params:
            if param.metavar in ("FILE", "DIR") or (isinstance(param, click.Argument) and param.type is click.STRING):
                param.type = click.Path(readable=False)  # so that shells complete it
        self.params += [
            _make_flag_option("-q", "--quiet", _QUIET, "Print only results and errors."),
            _make_flag_option("-v", "--verbose", _VERBOSE, "Show everything that TensorFlow prints."),
        ]

    def main(self, args=None, prog_name=None, complete_var=None, standalone_mode=True, **extra):
        """Runs click's `main`; an error ends the process with one sentence."""
        args = sys.argv[1:] if args is None else list(args)
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        name = prog_name or f"npu-run {self.name}"
        try:
            _prepare_process(name)
            with _heed_signals():
                code = super().main(args, prog_name, complete_var, False, **extra)
            sys.exit(code if isinstance(code, int) else 0)
        except click.ClickException as error:
            self._print_problem_if_json(args, error.format_message(), error.exit_code)
            text = io.StringIO()
            error.show(text)
            exit_with_message(text.getvalue().rstrip("\n"), error.exit_code)
        except click.Abort as stop:  # click's name for Ctrl-C, and for an EOFError
            is_signal = isinstance(stop.__cause__, KeyboardInterrupt)
            problem = "stopped by SIGINT" if is_signal else repr(stop.__cause__)
            self._print_problem_if_json(args, problem, 2)
            exit_with_message(f"{name}: {problem}", 128 + signal.SIGINT if is_signal else 2)
        finally:
            flush_or_silence()

    def _print_problem_if_json(self, args: Sequence[str], problem: str, code: int) -> None:
        if "--json" in args and any("--json" in option.opts for option in self.params):
            _print_facts(self, code, {"problem": problem})

    def make_context(self, info_name, args, parent=None, **extra):
        """Parses the words as click does; prints help through `echo`."""
        with _exit_on_stream_errors(info_name):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Invokes the command as click does, with errors as one sentence.

        If the output is closed, the exit code is not 1, because commands that compare use 1 for a result.
        """
        with _exit_on_stream_errors(ctx.command_path):
            if ctx.meta.get(_VERBOSE) or environment.is_flag_on(environment.VERBOSE):
                environment.write_variable(environment.VERBOSE, 1)
                os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0")
            return super().invoke(ctx)


class ScriptCommand(Command):
    """A command with an argument SCRIPT. All words after SCRIPT, except a leading `--`, go to the script."""

    allow_interspersed_args = False  # of click: an option after SCRIPT is the script's

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the words as click does, but takes options only before SCRIPT."""
        names = [param.name for param in self.params if isinstance(param, click.Argument)]
        own: list[str] = []
        words: list[str] = []
        rest = list(args)
        for _ in range(names.index("script") + 1):
            options, rest = self._split_leading_options(ctx, rest)
            own += options
            words += rest[:1]
            rest = rest[1:]
        if words and not {"-q", "--quiet"}.intersection(own):
            self._report_misplaced_option(words[-1], list(itertools.takewhile("--".__ne__, rest)))
        return super().parse_args(ctx, [*own, *words, *rest[rest[:1] == ["--"] :]])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list:
        """Completes words as click does, but offers no options after SCRIPT."""
        return [] if ctx.params.get("script") else super().shell_complete(ctx, incomplete)

    def _report_misplaced_option(self, script: str, words_after_script: Sequence[str]) -> None:
        """Prints a hint if an option of this command follows SCRIPT, and the script's text does not contain it."""
        own = {name: param for param in self.params if isinstance(param, click.Option) for name in param.opts}
        at = next((number for number, word in enumerate(words_after_script) if word.partition("=")[0] in own), None)
        if at is None or not os.path.isfile(script):
            return
        name = words_after_script[at].partition("=")[0]
        with open_file(script, errors="replace") as file:
            if re.search(rf"{re.escape(name)}\b|['\"]{re.escape(name.lstrip('-'))}['\"]", file.read()):
                return
        has_value = not own[name].is_flag and "=" not in words_after_script[at]
        given = " ".join(words_after_script[at : at + 1 + has_value])
        name = _command_name(self)
        line = f"{given} goes to the script. If it is for {name}, write {name} {given} {script}"
        echo(escape_in_line(f"{name}: {line}"), err=True)

    def _split_leading_options(self, ctx: click.Context, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Splits words into leading options and the rest."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        parser = click.Command(self.name, params=options, add_help_option=False).make_parser(ctx)
        rest = parser.parse_args(list(words))[1]
        own = list(words[: len(words) - len(rest)])
        return own[: -1 if own[-1:] == ["--"] else None], rest


def _make_flag_option(short: str, name: str, key: str, doc: str) -> click.Option:
    def store_flag(context: click.Context, option: click.Parameter, given: bool) -> None:
        context.meta[key] = given

    return click.Option([short, name], is_flag=True, expose_value=False, callback=store_flag, help=doc)


def is_quiet() -> bool:
    """Returns whether the running command has the option `--quiet`."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def print_unless_quiet(text: str) -> None:
    """Prints a progress line on standard error, unless `--quiet` is given."""
    if not is_quiet():
        echo(text, err=True)


def add_json_option(command: Callable) -> Callable:
    """Adds the option `--json` to a command, which gets the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/commands.md lists its keys.")(command)


def print_json(exit_code: int, facts: Mapping[str, Any]) -> None:
    """Prints a command's findings and verdict as JSON; the caller must then exit with `exit_code`."""
    _print_facts(click.get_current_context().command, exit_code, facts)


def _print_facts(command: click.Command, exit_code: int, facts: Mapping[str, Any]) -> None:
    whole = {"schema": SCHEMA, "command": command.name, "verdict": VERDICTS[exit_code], **facts}
    echo(escape_del(json.dumps(whole, indent=1)))


@contextlib.contextmanager
def _exit_on_stream_errors(name: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        discard_unwritten_output(sys.stdout)
        exit_with_message(f"{name}: the program that reads the output has ended")
    except OSError as error:
        with contextlib.suppress(OSError):
            _print_problem(str(error))
        discard_unwritten_output(sys.stdout)
        exit_with_message(f"{name}: {escape_in_line(str(error))}")


def exit_with_message(text: str, code: int = 2) -> NoReturn:
    """Prints a text on standard error, if it is open, and ends the process."""
    try:
        echo(text, err=True)
    except (OSError, ValueError):
        discard_unwritten_output(sys.stderr)
    sys.exit(code)


def _prepare_process(name: str) -> None:
    """Prepares the standard streams and the limit on open files for the command `name`.

    Ends the process if standard output or error is closed, because the next opened file would get the stream's number.
    """
    for stream, what, sign in ((sys.stdout, "standard output", ">"), (sys.stderr, "standard error", "2>")):
        if stream is None:
            exit_with_message(
                f"{name}: {what} is closed. Expected a terminal, a file or a pipe; add {sign}/dev/null to see nothing."
            )
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_OPEN_FILES, hard))
        except (ValueError, OSError):
            exit_with_message(
                f"{name}: this process can open only {soft} files. Expected at least {LEAST_OPEN_FILES}; run "
                f"ulimit -n 1024 first."
            )


@contextlib.contextmanager
def _heed_signals() -> Iterator[None]:
    """Raises SystemExit at SIGTERM and SIGHUP in a block, so that a command ends its processes and removes its files.

    Only the main thread can set handlers, and gets signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    stops = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    numbers = [each for each in stops if signal.getsignal(each) == signal.SIG_DFL]
    for each in numbers:
        signal.signal(each, lambda number, frame: sys.exit(128 + number))
    if is_main:  # a parent can ignore the ends of children, and this is inherited: their exit codes would be 0
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)


@contextlib.contextmanager
def exit_on_errors(*errors: type[Exception]) -> Iterator[None]:
    """Ends the command if the block raises one of `errors`: prints one line, and JSON with `--json`; exit code 2."""
    try:
        yield
    except errors as error:
        _print_problem(str(error))
        exit_with_message(f"{_command_name(click.get_current_context().command)}: {escape_in_line(str(error))}")


def _print_problem(text: str) -> None:
    context = click.get_current_context(silent=True)
    if context is not None and context.params.get("as_json"):
        print_json(2, {"problem": text})


def _command_name(command: click.Command) -> str:
    return "npu-run" if command.name == "npu-run" else f"npu-run {command.name}"


def check_script(script: str) -> None:
    """Ends the command if the script's path does not exist. The path of a folder fails later, when it is read."""
    with exit_on_errors(LaunchError):
        if not os.path.exists(script):
            raise LaunchError(describe_missing_script(script))


def add_source_options(command: Callable) -> Callable:
    """Adds `--tf1`, `--tf2`, `--as-installed` (argument `era`: 1, 2, 3 or None) and `--tree` (`trees`) to a command."""
    for option in (
        click.option("--tree", "trees", multiple=True, metavar="DIR", help="Modules in DIR are the script's own, too."),
        click.option(
            "--as-installed", "era", flag_value=3, type=int, help="Use TensorFlow as installed, without older names."
        ),
        click.option("--tf2", "era", flag_value=2, type=int, help="The script is written for TensorFlow 2."),
        click.option("--tf1", "era", flag_value=1, type=int, help="The script is written for TensorFlow 1."),
    ):
        command = option(command)
    return command


def add_settings_option(command: Callable) -> Callable:
    """Adds `--set` to a command, which gets `settings`, a sequence of `NAME=VALUE` for `announce_settings`."""
    doc = "Change an option of its NPURunConfig; repeatable."
    settings = {"multiple": True, "metavar": "NAME=VALUE", "help": doc, "shell_complete": _complete_option}
    return click.option("--set", "settings", **settings)(command)


def _complete_option(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from npu_bridge.options.catalogue import OPTIONS
    from npu_bridge.options.table import RUN_CONFIG

    names = (option.name for option in OPTIONS.options_of(RUN_CONFIG) if option.has_plain_value)
    return [CompletionItem(f"{name}=") for name in names if name.startswith(incomplete)]


def announce_settings(settings: Sequence[str]) -> None:
    """Passes the `--set` options on to processes that the command starts; ends the command if an option is wrong."""
    if settings:
        from npu_bridge.options import from_shell  # imported late: every start of a script loads this module

        with exit_on_errors(TypeError, ValueError):
            from_shell.pass_settings_to_ranks(settings)


def add_script_arguments(command: Callable, endings: Sequence[str] = (".py",)) -> Callable:
    """Adds SCRIPT and its arguments to a command, which gets `script` and `arguments`.

    Shells complete paths with one of the endings.
    """

    def complete_script(context: click.Context, parameter: click.Parameter, incomplete: str) -> list:
        return complete_script_path(incomplete, endings)

    def complete_argument(context: click.Context, parameter: click.Parameter, incomplete: str) -> list:
        return [CompletionItem(incomplete, type="file")]

    arguments = {"nargs": -1, "type": click.UNPROCESSED, "metavar": "[ARGS]..."}
    command = click.argument("arguments", shell_complete=complete_argument, **arguments)(command)
    return click.argument("script", shell_complete=complete_script)(command)


def complete_script_path(incomplete: str, endings: Sequence[str] = (".py",)) -> list[CompletionItem]:
    """Returns completions for the path of a script: folders, and files with one of the endings."""
    found = sorted(path for ending in endings for path in glob.glob(f"{glob.escape(incomplete)}*{ending}"))
    return [CompletionItem(incomplete, type="dir"), *map(CompletionItem, found)]


def make_command_reading_script(command: Callable, file_endings: Sequence[str] = (".py",)) -> click.Command:
    """Makes a command that reads SCRIPT without running it, with the options of `add_source_options` and `--json`.

    The function gets `script` (an existing path), `arguments` and `choice`. It returns the exit code, facts for
    `--json`, and a function that prints the facts as text.
    """

    @add_source_options
    @add_json_option
    @functools.partial(add_script_arguments, endings=file_endings)
    @functools.wraps(command)
    def with_choice(*given: Any, era: int | None, trees: tuple[str, ...], as_json: bool, **others: Any) -> NoReturn:
        check_script(others["script"])
        choice = TensorFlowChoice(era or 0, tuple(map(os.path.abspath, trees)))
        with exit_on_errors(LaunchError, ValueError):
            code, facts, show = command(*given, choice=choice, **others)
        if as_json:
            print_json(code, facts)
        else:
            show()
        sys.exit(code)

    return click.command(cls=ScriptCommand)(with_choice)


def add_launcher_options(command: Callable) -> Callable:
    """Adds `-np`, `--set`, the options of `add_source_options`, SCRIPT and its arguments to a command.

    The command gets `launcher` (the options as a list of words for `npu-run`), `script` and `arguments`.
    """

    @click.option("-np", "size", type=click.IntRange(min=1), metavar="N", help="Number of ranks. Default: 1.")
    @add_settings_option
    @add_source_options
    @add_script_arguments
    @functools.wraps(command)
    def with_launcher(
        *given: Any,
        size: int | None,
        settings: tuple[str, ...],
        era: int | None,
        trees: tuple[str, ...],
        **others: Any,
    ) -> Any:
        check_script(others["script"])
        announce_settings(settings)
        launcher = [] if size is None else ["-np", str(size)]
        launcher += [word for setting in settings for word in ("--set", setting)]
        launcher += [{1: "--tf1", 2: "--tf2", 3: "--as-installed"}[era]] if era else []
        launcher += [word for tree in trees for word in ("--tree", os.path.abspath(tree))]
        return command(*given, launcher=launcher, **others)

    return with_launcher
