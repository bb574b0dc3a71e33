"""`npu-run completion`: lets a shell complete commands, options and scripts."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, get_completion_class

from npu_bridge.base.terminal import echo
from npu_run.command_line import Command, complete_script_path
from npu_run.commands import COMMANDS, GROUPS, find_command


@add_completion_class
class _Bash(BashComplete):
    """Completion for bash, which offers both folders and scripts, and adds no space after `NAME=`."""

    source_template = BashComplete.source_template.replace("compopt -o dirnames", "compopt -o plusdirs").replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value != *= ]] || compopt -o nospace"
    )


class CompletionGroup(click.Group):
    """A command group for completion only: it knows all words that can follow `npu-run`, and runs nothing.

    Args:
      launcher: the command that starts scripts; its options are offered too.
    """

    def __init__(self, launcher: click.Command):
        options = [param for param in launcher.params if isinstance(param, click.Option)]
        super().__init__("npu-run", params=options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        """Returns the command of this name; for a script, a command that completes its arguments as files."""
        if name in COMMANDS:
            return find_command(name)
        argument = click.Argument(["files"], nargs=-1, type=click.Path())
        return click.Command(name, params=[argument], context_settings={"ignore_unknown_options": True})

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns completions: options for a word that begins with a dash, else scripts and commands."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        lines = {name: line for group in GROUPS.values() for name, line in group.items()}
        commands = [CompletionItem(name, help=line) for name, line in lines.items() if name.startswith(incomplete)]
        return [*complete_script_path(incomplete), *commands]


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Prints the script that completes npu-run in SHELL: commands, options and scripts.

    \b
    bash: eval "$(npu-run completion bash)"           in ~/.bashrc
    zsh:  eval "$(npu-run completion zsh)"            in ~/.zshrc, after compinit
    fish: npu-run completion fish | source            in ~/.config/fish/config.fish
    """
    made_by = get_completion_class(shell)
    echo(made_by(click.Group("npu-run"), {}, "npu-run", "_NPU_RUN_COMPLETE").source())
