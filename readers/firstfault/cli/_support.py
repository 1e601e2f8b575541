"""What all commands share: exit codes, the debug switch, one line for an error."""

from __future__ import annotations

import enum
import os
from typing import Any

import click

from firstfault.text import printable

__all__ = ["EXIT", "debug_option", "debugging", "fail", "uri_argument"]


class EXIT(enum.IntEnum):
    """Exit codes; documented in docs/cli.md, other tools rely on them."""

    OK = 0
    TOOL_FAILED = 1
    USAGE = 2
    NOTHING_FOUND = 3
    TIMEOUT = 4
    ROOT_CAUSE = 10
    ROOT_CAUSE_RETRYABLE = 11
    INTERRUPTED = 130


_DEBUG = "firstfault.debug"


def _remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    del parameter
    if value:
        context.meta[_DEBUG] = True
        # the group's own handler runs after the context is gone
        os.environ["FIRSTFAULT_DEBUG"] = "1"


def debug_option(command: Any) -> Any:
    """Give a command ``--debug``: a traceback instead of one line."""
    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=_remember, help="Show a traceback when the tool fails."
    )(command)


def _named(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not value.strip():
        raise click.UsageError(f"{parameter.human_readable_name} is empty; name the attempt's output prefix", context)
    return value


def uri_argument(command: Any) -> Any:
    """Give a command the argument ``URI``, which may not be empty: as of a variable that is not set."""
    return click.argument("uri", callback=_named)(command)


def debugging() -> bool:
    """Whether tracebacks were asked for."""
    return bool(os.environ.get("FIRSTFAULT_DEBUG"))


def fail(message: str) -> None:
    """Print one line to stderr."""
    click.echo(f"firstfault: {' '.join(printable(message).split())}", err=True)
