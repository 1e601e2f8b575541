"""The command ``prune``: removes old runs from a folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import click

from firstfault.cli._support import EXIT, debug_option, echo, fail
from firstfault.utils.text import counted

_OWN_FILE = re.compile(
    r"firstfault\.run|inputs\.pb|logs|raw|report\.html|requeues-[\d_]+\.json|\d+"
)
"""What a run's folder may contain: attempts, and the records of `firstfault run` and `requeue`."""


class _LocalFolder(click.Path):
    """A folder on this machine; for one on object storage,
    the error names what removes old runs there.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the folder's path."""
        from firstfault.store import is_remote  # noqa: PLC0415 - `--help` needs none of it

        if is_remote(str(value)):
            self.fail(
                f"{value} is on object storage: set a lifecycle rule of the bucket for this prefix",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


@click.command()
@click.argument(
    "folder", default=".", type=_LocalFolder(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--keep",
    default=20,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Runs to keep.",
)
@debug_option
def prune(folder: Path, keep: int) -> int:
    """Remove old runs below FOLDER, by default the current one.

    This covers the runs of `firstfault run` and of torchrun's jobs below .firstfault, and runs
    directly in FOLDER, for a FOLDER that FIRSTFAULT_FOLDER names. Without FOLDER, it also covers
    your runs among temporary files, which are there if another folder couldn't be written. It keeps
    the last N of each, runs that may still be active, runs with foreign files, and other users'
    runs.

    \b
    Examples:
      firstfault prune
      firstfault prune --keep 5 /shared/runs
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.layout import RUN_MARK  # noqa: PLC0415 - as below
    from firstfault.run_folder import (  # noqa: PLC0415 - `--help` needs none of it
        PRUNED_FOLDERS,
        find_fallback_folders,
        find_unmarked_runs,
        list_runs,
    )

    removed, freed = 0, 0
    is_here = folder == Path()
    here = folder.absolute()
    fallbacks = [
        fallback for fallback in find_fallback_folders() if is_here or here in fallback.parents
    ]
    for parent in (folder, *(folder / name for name in PRUNED_FOLDERS), *fallbacks):
        for run in list_runs(parent)[keep:]:
            if why := _explain_kept_run(run):
                fail(f"kept {run}: {why}")
                continue
            # lstat: deleting a link frees nothing of its target
            size = sum(path.lstat().st_size for path in run.rglob("*") if not path.is_dir())
            shutil.rmtree(run)
            echo(f"removed {run}")
            removed, freed = removed + 1, freed + size
        for run in find_unmarked_runs(parent):
            fail(f"kept {run}: without a file {RUN_MARK} in it, firstfault may not have made it")
    echo(f"removed {counted(removed, 'run')}, {freed / 1e6:.1f} MB")
    return EXIT.OK


def _explain_kept_run(run: Path) -> str:
    """Return why a run isn't removed; empty if it is."""
    from firstfault.run_folder import belongs_to_another_user, may_be_active  # noqa: PLC0415

    if belongs_to_another_user(run):
        return "it belongs to another user"
    # FOLDER may be any folder, so only what firstfault made is ever deleted
    foreign = sorted(path.name for path in run.iterdir() if not _OWN_FILE.fullmatch(path.name))
    if foreign:
        return f"firstfault did not make {', '.join(foreign)} in it"
    try:
        return "it may still be running" if may_be_active(run) else ""
    except OSError as error:  # its mark is a link, or can't be read
        return f"{error.filename or run}: {error.strerror}"
