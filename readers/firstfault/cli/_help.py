"""``firstfault help``: the help of the group or of one command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from firstfault.cli._support import EXIT

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _commands(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem | str]:
    del parameter
    group = context.find_root().command
    names = group.list_commands(context) if isinstance(group, click.Group) else []
    return [name for name in names if name.startswith(incomplete)]


@click.command("help")
@click.argument("command", required=False, shell_complete=_commands)
@click.pass_context
def help_(context: click.Context, command: str | None) -> int:
    """Show the help of COMMAND; without it the list of commands.

    \b
    Examples:
      firstfault help
      firstfault help show
    """  # noqa: D301 - click's mark of lines to keep
    root = context.find_root()
    group = root.command
    if command is None or not isinstance(group, click.Group):
        click.echo(root.get_help())
        return EXIT.OK
    name, found, _ = group.resolve_command(root, [command])
    if found is not None:
        click.echo(found.get_help(click.Context(found, root, name)))
    return EXIT.OK
