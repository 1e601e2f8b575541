"""The command ``prune``: removes old runs from a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from firstfault.cli._support import EXIT, debug_option, echo, fail
from firstfault.utils.text import counted

_OWN = {"firstfault.run", "inputs.pb", "logs", "raw", "report.html"}
"""What a run's folder may contain in addition to its attempts."""


@click.command()
@click.argument("folder", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--keep", default=20, show_default=True, type=click.IntRange(min=0), metavar="N", help="Runs to keep.")
@debug_option
def prune(folder: Path, keep: int) -> int:
    """Remove old runs below FOLDER, by default the current one.

    This covers the runs of `firstfault run` and of torchrun's jobs below .firstfault, and runs directly in FOLDER, for
    a FOLDER that FIRSTFAULT_FOLDER names. It keeps the last N of each, runs that may still be active, and runs with
    foreign files.

    \b
    Examples:
      firstfault prune
      firstfault prune --keep 5 /shared/runs
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.run_folder import PRUNED, runs_in  # noqa: PLC0415

    removed, freed = 0, 0
    for name in ("", *PRUNED):
        for run in runs_in(folder / name)[keep:]:
            if why := _explain_kept_run(run):
                fail(f"kept {run}: {why}")
                continue
            # lstat: deleting a link frees nothing of its target
            size = sum(path.lstat().st_size for path in run.rglob("*") if not path.is_dir())
            shutil.rmtree(run)
            echo(f"removed {run}")
            removed, freed = removed + 1, freed + size
    echo(f"removed {counted(removed, 'run')}, {freed / 1e6:.1f} MB")
    return EXIT.OK


def _explain_kept_run(run: Path) -> str:
    """Return why a run isn't removed; empty if it is."""
    from firstfault.run_folder import may_go_on  # noqa: PLC0415 - as above

    # FOLDER may be any folder, so only what firstfault made is ever deleted
    foreign = sorted(path.name for path in run.iterdir() if path.name not in _OWN and not path.name.isdecimal())
    if foreign:
        return f"firstfault did not make {', '.join(foreign)} in it"
    return "it may still be running" if may_go_on(run) else ""
