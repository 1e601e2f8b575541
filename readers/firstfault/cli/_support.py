"""Shared by all commands: exit codes, options, the argument URI, error lines, and the output."""

from __future__ import annotations

import enum
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from firstfault.errors import UsageError
from firstfault.store import get_scheme
from firstfault.store.settings import find_storage
from firstfault.utils.text import printable

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from firstfault.report import Report


class EXIT(enum.IntEnum):
    """Exit codes; documented in docs/reference/cli.md, other tools rely on them."""

    OK = 0
    TOOL_FAILED = 1
    USAGE = 2
    NOTHING_FOUND = 3
    TIMEOUT = 4
    UNREADABLE = 5
    ROOT_CAUSE = 10
    ROOT_CAUSE_RETRYABLE = 11
    INTERRUPTED = 130


_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def fail(message: str) -> None:
    """Print one line to stderr."""
    # the message may quote a document: no line breaks, no escape sequences
    click.echo(f"firstfault: {' '.join(printable(message).split())}", err=True)


def missing_package(what: str, error: ImportError, extra: str = "elastic") -> str:
    """Return an error message with the package that `what` needs, and the extra to install."""
    missing = getattr(error, "name", None) or str(error)
    how = (
        f"install the extra {extra}: in a clone pip install '.[{extra}]', else"
        f" 'firstfault[{extra}]' from your index"
    )
    cpu = (
        f"; for torch's CPU build, first run pip install torch --index-url {_CPU_INDEX}"
        if missing == "torch"
        else ""
    )
    return f"{what} needs {missing}, which is not installed; {how}{cpu}"


# --- options and arguments ------------------------------------------------------------------------


def debug_option(command: Any) -> Any:
    """Give a command ``--debug``: a traceback instead of one line."""

    def remember(_context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value:
            # `main` handles errors after the context is gone
            os.environ["FIRSTFAULT_DEBUG"] = "1"

    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Show a traceback when the tool fails.",
    )(command)


def debugging() -> bool:
    """Whether --debug was given."""
    return bool(os.environ.get("FIRSTFAULT_DEBUG"))


def complete_files(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete the names of files, also for what may be a URI."""
    from click.shell_completion import (  # noqa: PLC0415 - only a shell that completes needs it
        CompletionItem,
    )

    return [CompletionItem(incomplete, type="file")]


def complete_strategies(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the strategies with names that begin like this; installed packages may add some."""
    from firstfault.strategies import list_strategy_names  # noqa: PLC0415 - as above

    return [name for name in list_strategy_names() if name.startswith(incomplete)]


def uri_argument(*, required: bool = True) -> Callable[[Any], Any]:
    """Return a decorator that gives a command the argument ``URI``. It must not be empty,
    as an unset variable is.
    """

    def not_empty(
        context: click.Context, parameter: click.Parameter, value: str | None
    ) -> str | None:
        if value is not None and not value.strip():
            name = parameter.human_readable_name
            raise click.UsageError(
                f"{name} is empty; pass a log file or the attempt's output prefix", context
            )
        return value

    return click.argument(
        "uri",
        required=required,
        callback=not_empty,
        shell_complete=complete_files,
    )


def reader_options(command: Any) -> Any:
    """Give a command ``--strategy`` and ``--expected-nodes``."""
    strategy = click.option(
        "--strategy",
        shell_complete=complete_strategies,
        help="Strategy that finds the root cause; default: that of the job.",
    )
    nodes = "Number of nodes that should have reported."
    return strategy(
        click.option("--expected-nodes", type=click.IntRange(min=1), metavar="N", help=nodes)(
            command
        )
    )


SCHEMES_GROUP = "firstfault.schemes"
"""Entry-point group: the scheme, and a function from a URI to the attempt's output prefix."""


def resolve_uri(uri: str) -> str:
    """Return the output prefix that a URI refers to, or `uri` itself if no installed distribution
    supports its scheme.

    Raises:
        UsageError: the package that supports the scheme isn't completely installed.
    """
    scheme = get_scheme(uri)
    # no distribution can redirect the URI of a storage
    if find_storage(scheme):
        return uri
    import importlib.metadata  # noqa: PLC0415 - slow, and storages don't need it

    for point in importlib.metadata.entry_points(group=SCHEMES_GROUP):
        if point.name == scheme:
            try:
                find = point.load()
            except ImportError as error:
                raise UsageError(missing_package(f"{scheme}://", error)) from error
            prefix = str(find(uri))
            # on stderr: the report on stdout stays the same for both URIs
            fail(f"{uri} is {prefix}")
            return prefix
    return uri


# --- output ---------------------------------------------------------------------------------------


_DEFAULT_COLUMNS = 80
"""Width of a terminal that doesn't report one."""


def on_terminal() -> bool:
    """Whether stdout is a terminal, or FORCE_COLOR is set."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def show_report(report: Report, *, verbose: bool = False) -> None:
    """Print a report, with color on a terminal."""
    from firstfault.render.terminal import (  # noqa: PLC0415 - `--help` needs none of it
        print_report,
        terminal_text,
    )

    if not on_terminal():
        echo(terminal_text(report, verbose=verbose))
        return
    from rich.console import Console  # noqa: PLC0415 - as above

    console = Console()
    console.width = console.width or _DEFAULT_COLUMNS  # COLUMNS=0: a terminal without a size
    print_report(report, console, verbose=verbose)


def echo(text: str) -> None:
    """Print to stdout; escape characters that its encoding doesn't have."""
    from firstfault.render.plain_lines import encodable  # noqa: PLC0415 - as above

    click.echo(encodable(text, sys.stdout.encoding or "utf-8"))


def write_file(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically.

    Raises:
        UsageError: the file can't be written.
    """
    target = Path(path)
    data = text.encode("utf-8", "backslashreplace")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a device or a pipe must not be replaced
            return
        # follow a symbolic link: replacing it would leave the file it points to unchanged
        whole = target.resolve()
        beside = whole.with_name(f".firstfault-{uuid.uuid4().hex}")
        # Write a temporary file and rename it: a reader, or a kill halfway, never sees half a
        # report.
        try:
            with beside.open("xb") as file:
                file.write(data)
            beside.replace(whole)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror or error}; pass another file"
        ) from error
