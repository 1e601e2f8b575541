"""Runs started in the working folder, for ``show --last`` and for ``ls`` without a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from firstfault.cli._support import fail
from firstfault.run_folder import (
    RUNS_FOLDERS,
    find_fallback_folders,
    find_fallback_runs,
    find_runs_folders_here,
    get_begin_time,
    list_runs,
    read_working_folders,
)


def find_last_run() -> str:
    """Return the run of this working folder that was begun last.

    Raises:
        UsageError: there is none.
    """
    runs_here = [run for folder in find_runs_folders_here() for run in list_runs(folder)]
    runs = [*runs_here, *_find_runs_among_temporary(has_runs_here=bool(runs_here))]
    if not runs:
        searched_text = f"no runs below {' or '.join(RUNS_FOLDERS)}{_describe_foreign_runs()}"
        raise click.UsageError(f"{searched_text}; pass a log file or the attempt's output prefix")
    last = max(runs, key=get_begin_time)
    if last not in runs_here:
        _report_origin(last, last)
    return str(last)


def find_own_folders() -> list[str]:
    """Return the folders with runs of this working folder, and its runs among temporary files,
    each as a folder.
    """
    folders_here = find_runs_folders_here()
    among_temporary = _find_runs_among_temporary(has_runs_here=bool(folders_here))
    for run in among_temporary[:1]:
        _report_origin(run.parent, run)
    return [*map(str, (*folders_here, *among_temporary))] or list(RUNS_FOLDERS)


def _find_runs_among_temporary(*, has_runs_here: bool) -> Sequence[Path]:
    """Return the runs among temporary files that were started here; only without any run,
    those of unknown folders.
    """
    try:
        working = os.getcwd()  # noqa: PTH109 - as `begin_run` records it
    except OSError:  # it has been removed
        working = ""
    fallback_runs = find_fallback_runs(working)
    return fallback_runs if fallback_runs or has_runs_here else find_fallback_runs("")


def _report_origin(folder: Path, run: Path) -> None:
    # on stderr: stdout may be JSON
    fail(f"from {folder}, started in {', '.join(read_working_folders(run)) or 'an unknown folder'}")


def _describe_foreign_runs() -> str:
    """Return a sentence about runs of this user among temporary files that were started elsewhere,
    or an empty string if there are none.
    """
    runs = [run for folder in find_fallback_folders() for run in list_runs(folder)]
    newest = max(runs, key=get_begin_time, default=None)
    return f" were started here ({newest} was started elsewhere)" if newest is not None else ""
