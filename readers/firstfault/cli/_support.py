"""Shared by all commands: exit codes, --debug, the argument URI, error lines."""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, Any

import click

from firstfault.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem


class EXIT(enum.IntEnum):
    """Exit codes; documented in docs/cli.md, other tools rely on them."""

    OK = 0
    TOOL_FAILED = 1
    USAGE = 2
    NOTHING_FOUND = 3
    TIMEOUT = 4
    UNREADABLE = 5
    ROOT_CAUSE = 10
    ROOT_CAUSE_RETRYABLE = 11
    INTERRUPTED = 130


_DEBUG = "firstfault.debug"


def _remember(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    del parameter
    if value:
        context.meta[_DEBUG] = True
        # `main` handles errors after the context is gone
        os.environ["FIRSTFAULT_DEBUG"] = "1"


def debug_option(command: Any) -> Any:
    """Give a command ``--debug``: a traceback instead of one line."""
    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=_remember, help="Show a traceback when the tool fails."
    )(command)


def complete_files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of files, also for what may be a URI."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - only a shell that completes needs it

    del context, parameter
    return [CompletionItem(incomplete, type="file")]


def complete_strategies(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the strategies whose names begin so; installed packages may add some."""
    from firstfault.strategies import strategy_names  # noqa: PLC0415 - as above

    del context, parameter
    return [name for name in strategy_names() if name.startswith(incomplete)]


def _not_empty(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise click.UsageError(f"{parameter.human_readable_name} is empty; name the attempt's output prefix", context)
    return value


def uri_argument(*, required: bool = True) -> Callable[[Any], Any]:
    """Return a decorator that gives a command the argument ``URI``. It must not be empty, as an unset variable is."""
    return click.argument("uri", required=required, callback=_not_empty, shell_complete=complete_files)


def missing_package(what: str, error: ImportError) -> str:
    """Return a sentence that says what `what` needs, and how to install it."""
    missing = getattr(error, "name", None) or str(error)
    how = "install the extra elastic: pip install '<wheel>[elastic]', or 'firstfault[elastic]' from your index"
    return f"{what} needs {missing}, which is not installed; {how}"


def debugging() -> bool:
    """Whether --debug was given."""
    return bool(os.environ.get("FIRSTFAULT_DEBUG"))


def fail(message: str) -> None:
    """Print one line to stderr."""
    click.echo(f"firstfault: {' '.join(printable(message).split())}", err=True)
