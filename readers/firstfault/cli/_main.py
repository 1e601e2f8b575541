"""The group, its commands, and what happens to an error."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import click

from firstfault.cli._classify import classify
from firstfault.cli._show import show
from firstfault.cli._support import EXIT, debug_option, debugging, fail
from firstfault.cli._watch import watch
from firstfault.errors import FirstFaultError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.metadata import EntryPoint

__all__ = ["main"]

COMMANDS_GROUP = "firstfault.commands"
"""Entry-point group: a distribution (our own plugin) adds commands without this library knowing it."""


class _Group(click.Group):
    """Loads commands of other distributions only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(point.name for point in _entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for point in _entry_points():
            if point.name == cmd_name:
                return _loaded(point)
        return None


def _entry_points() -> tuple[EntryPoint, ...]:
    import importlib.metadata  # noqa: PLC0415 - slow, and a command of our own needs none of it

    return tuple(importlib.metadata.entry_points(group=COMMANDS_GROUP))


def _loaded(point: EntryPoint) -> click.Command:
    try:
        command: click.Command = point.load()
    except ImportError as error:
        missing = getattr(error, "name", None) or str(error)
        reason = f"`firstfault {point.name}` needs {missing}, which is not installed; pip install 'firstfault[elastic]'"
        return _unavailable(point.name, reason)
    return command


def _unavailable(name: str, reason: str) -> click.Command:
    def explain() -> None:
        raise FirstFaultError(reason)

    return click.Command(
        name,
        callback=explain,
        short_help=f"(not available: {reason})",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="firstfault")
@debug_option
def group() -> None:
    """Tell which worker killed a distributed training job, why, and whether to run it again."""


group.add_command(classify)
group.add_command(show)
group.add_command(watch)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with one of `EXIT`."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("stamina").setLevel(logging.ERROR)
    try:
        code = group.main(args=arguments, prog_name="firstfault", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT.USAGE)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted")
        sys.exit(EXIT.INTERRUPTED)
    except FirstFaultError as error:
        if debugging():
            raise
        fail(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nobody wants a traceback for that
        sys.exit(EXIT.TOOL_FAILED)
    except Exception as error:
        if debugging():
            raise
        fail(f"unexpected {type(error).__name__}: {error} (run with --debug for a traceback)")
        sys.exit(EXIT.TOOL_FAILED)
    sys.exit(code if isinstance(code, int) else EXIT.OK)
