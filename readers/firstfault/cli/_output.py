"""Writes reports to a terminal, a pipe or a file."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from firstfault.errors import UsageError

if TYPE_CHECKING:
    from firstfault.report import Report


def on_terminal() -> bool:
    """Whether stdout is a terminal, or FORCE_COLOR is set."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def show_report(report: Report, *, verbose: bool = False) -> None:
    """Print a report: folded and coloured on a terminal, else one fact per line."""
    from firstfault.render.plain import terminal_text  # noqa: PLC0415 - `--help` needs none of it

    if not on_terminal():
        echo(terminal_text(report, verbose=verbose))
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe needs none of it

    from firstfault.render.terminal import print_report  # noqa: PLC0415 - as above

    print_report(report, Console(), verbose=verbose)


def echo(text: str) -> None:
    """Print to stdout; escape characters that its encoding does not have."""
    from firstfault.render.plain import encodable  # noqa: PLC0415 - as above

    click.echo(encodable(text, sys.stdout.encoding or "utf-8"))


def check_file(path: str) -> None:
    """Check that a file can be written, before the work for its content.

    Raises:
        UsageError: `path` is empty or a folder, or its folder is missing or not writable.
    """
    try:
        obstacle = _obstacle(Path(path)) if path else "the name is empty; name a file"
    except (OSError, ValueError) as error:  # not a valid file name
        obstacle = f"{_reason(error)}; name another file"
    if obstacle:
        raise UsageError(f"cannot write {path!r}: {obstacle}")


def _obstacle(target: Path) -> str:
    if target.is_dir():
        return "it is a folder; name a file in it"
    if not target.parent.is_dir():
        return f"there is no folder {str(target.parent)!r}; make it first"
    is_file = target.is_file() or not target.exists()
    if (not os.access(target, os.W_OK) and target.exists()) or (is_file and not os.access(target.parent, os.W_OK)):
        return "permission denied; name a file where you may write"
    return ""


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _new_file_mode() -> int:
    """Return the mode of new files under the umask of this process."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_file(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically.

    Raises:
        UsageError: the file cannot be written.
    """
    target = Path(path)
    data = text.encode("utf-8", "backslashreplace")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a device or a pipe must not be replaced
            return
        whole = target.resolve()
        handle, beside = tempfile.mkstemp(dir=whole.parent, prefix=".firstfault-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(beside, _new_file_mode())  # noqa: PTH101 - mkstemp makes it private
            Path(beside).replace(whole)
        except OSError:
            with contextlib.suppress(OSError):
                Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {_reason(error)}; name another file") from error
