"""The command group, its command ``help``, and the handling of errors."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from firstfault.cli._support import EXIT, debug_option, debugging, fail, missing_package
from firstfault.errors import FirstFaultError
from firstfault.utils.text import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from click.shell_completion import CompletionItem

COMMANDS_GROUP = "firstfault.commands"
"""Entry-point group for the commands of other distributions, such as our plugin."""


BUILT_IN_COMMANDS = ("classify", "ls", "prune", "show", "watch")
"""Commands of this package; each is in a module of its name."""


class _CommandGroup(click.Group):
    """Imports a command on its first use, and suggests a command for a misspelt one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = (*super().list_commands(ctx), *BUILT_IN_COMMANDS)
        return sorted({*names, *(point.name for point in _entry_points(ctx))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # built-in commands first: another distribution can't replace them
        own = super().get_command(ctx, cmd_name)
        if cmd_name in BUILT_IN_COMMANDS:
            own = getattr(importlib.import_module(f"firstfault.cli._{cmd_name}"), cmd_name)
        return own or next(
            (_load_command(point) for point in _entry_points(ctx) if point.name == cmd_name), None
        )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            meant = difflib.get_close_matches(name.lower(), known, n=1)
            if Path(name).exists():
                raise click.UsageError(
                    f"{name!r} isn't a command; did you mean 'firstfault show {name}'?", ctx
                )
            hint = f"did you mean {meant[0]!r}?" if meant else f"commands are {_join_names(known)}"
            raise click.UsageError(f"unknown command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


def _join_names(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _entry_points(context: click.Context) -> Sequence[EntryPoint]:
    import importlib.metadata  # noqa: PLC0415 - slow, and built-in commands don't need it

    # once a command line: each call reads the files of all installed distributions
    if COMMANDS_GROUP not in context.meta:
        context.meta[COMMANDS_GROUP] = tuple(importlib.metadata.entry_points(group=COMMANDS_GROUP))
    points: Sequence[EntryPoint] = context.meta[COMMANDS_GROUP]
    return points


def _load_command(point: EntryPoint) -> click.Command:
    """Return a command of another distribution; if its packages are missing,
    one that prints what to install.
    """
    try:
        command: click.Command = point.load()
    except ImportError as error:
        extra = "torch" if point.value.startswith("firstfault_torch.") else "elastic"
        reason = missing_package(f"`firstfault {point.name}`", error, extra)

        def explain() -> None:
            raise FirstFaultError(reason)

        # any argument is accepted, so that the command prints what to install instead of a usage
        # error
        return click.Command(
            point.name,
            callback=explain,
            help=reason,
            short_help=f"(needs the extra {extra})",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
    return command


@click.group(
    cls=_CommandGroup,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="firstfault")
@debug_option
@click.pass_context
def group(context: click.Context) -> None:
    """Find out which worker killed a distributed training job, why, and whether to run it again.

    \b
    Examples:
      firstfault show slurm.out
      firstfault torchrun --nproc-per-node 8 train.py
      firstfault show --last --html report.html
      firstfault ls --since 7d
      firstfault run train.py train --nodes 2
      firstfault show s3://bucket/metadata/propeller/f3a9/n0/data/0
    """  # noqa: D301 - click's mark of lines to keep
    if context.invoked_subcommand is None:
        raise click.UsageError(
            f"missing command; commands are {_join_names(group.list_commands(context))}", context
        )


# --- small commands -------------------------------------------------------------------------------


def _complete_commands(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem | str]:
    del parameter
    return [name for name in group.list_commands(context) if name.startswith(incomplete)]


@click.command("help")
@click.argument("command", required=False, shell_complete=_complete_commands)
@click.pass_context
def help_(context: click.Context, command: str | None) -> int:
    """Show the help of COMMAND; without it the list of commands.

    \b
    Examples:
      firstfault help
      firstfault help show
    """  # noqa: D301 - click's mark of lines to keep
    shown = root = context.find_root()
    if command is not None:
        name, subcommand, _ = group.resolve_command(root, [command])
        shown = click.Context(subcommand, root, name) if subcommand is not None else root
    click.echo(shown.get_help())
    return EXIT.OK


group.add_command(help_)


# --- errors ---------------------------------------------------------------------------------------


def _format_usage_error(error: click.ClickException) -> str:
    """Return a usage error in one line, with a pointer to --help unless it
    already suggests something.
    """
    text = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or text.endswith("?"):
        return text
    return f"{text} (see '{context.command_path} --help')"


_CLIENTS = (
    "aiobotocore",
    "asyncio",
    "azure",
    "botocore",
    "fsspec",
    "gcsfs",
    "google",
    "s3fs",
    "stamina",
)
"""Loggers of the storages' clients: what they would print is part of the error's one line."""


class _OneLine(logging.Formatter):
    """Formats a log record as one line without control characters: it may quote a document."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the record's line."""
        is_own = record.name.startswith("firstfault")  # the line has the name
        return " ".join(
            printable(record.message if is_own else super().formatMessage(record)).split()
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with one of `EXIT`."""
    if sys.stdout is None:  # closed: the caller wants the exit code alone
        # open until the process ends
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    # errors become one line of ours; the clients would log each failed request in addition
    for client in _CLIENTS:
        logging.getLogger(client).setLevel(logging.CRITICAL)
    try:
        # in standalone mode click would print errors in its own form and exit with its own codes
        code = group.main(args=arguments, prog_name="firstfault", standalone_mode=False)
    except click.ClickException as error:
        fail(_format_usage_error(error))
        sys.exit(EXIT.USAGE)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted")
        sys.exit(EXIT.INTERRUPTED)
    except FirstFaultError as error:
        # with --debug Python prints the traceback
        if debugging():
            raise
        fail(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone: no traceback
        sys.exit(EXIT.TOOL_FAILED)
    except Exception as error:
        if debugging():
            raise
        fail(f"unexpected {type(error).__name__}: {error} (run with --debug for a traceback)")
        sys.exit(EXIT.TOOL_FAILED)
    sys.exit(code if isinstance(code, int) else EXIT.OK)
