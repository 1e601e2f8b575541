"""``firstfault prune`` removes old runs, and nothing else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from firstfault.cli import EXIT
from firstfault.cli._main import group
from firstfault.runs import MARK, begin_run

if TYPE_CHECKING:
    from pathlib import Path

JOINED = "r1-99999-0000000-joined-0000000000001-00000000000000000000000000000000.pb"


def _run(folder: Path, number: int, host: str = "") -> Path:
    """Make a run that has ended; `host`: began there, if not here."""
    run = folder / f"run-{number}"
    os.close(begin_run(run))
    if host:
        (run / MARK).write_text(f"{host}\n")
    (run / "0" / "firstfault" / "roster").mkdir(parents=True)
    (run / "0" / "firstfault" / "roster" / JOINED).write_bytes(bytes(1000))
    os.utime(run / MARK, (number, number))
    return run


def _prune(*arguments: str) -> str:
    ran = CliRunner().invoke(group, ["prune", *arguments], standalone_mode=False)
    assert ran.return_value == EXIT.OK, ran.exception
    return ran.output


@pytest.mark.parametrize("name", [".firstfault/torchrun", ".firstfault/runs", "."])
def test_old_runs(name: str, tmp_path: Path) -> None:
    """The last runs stay, the others go, and the command says which, and how much that was."""
    runs = [_run(tmp_path / name, number) for number in range(1, 23)]
    assert _prune(str(tmp_path)) == f"removed {runs[1]}\nremoved {runs[0]}\nremoved 2 runs, 0.0 MB\n"
    assert [run for run in runs if run.exists()] == runs[2:]
    _prune(str(tmp_path), "--keep", "1")
    assert [run for run in runs if run.exists()] == runs[-1:]


def test_what_stays(tmp_path: Path) -> None:
    """A run that a process still holds, or that another host began and has not ended, and what others made."""
    folder = tmp_path / ".firstfault" / "torchrun"
    goes = [_run(folder, 1), _run(folder, 2, "other")]
    (goes[1] / "0" / "error.pb").touch()
    stays = [_run(folder, number, "other" if number == 3 else "") for number in (3, 4, 5, 6)]
    held = begin_run(stays[1])
    (stays[2] / "notes.txt").touch()
    (stays[3] / MARK).unlink()
    elsewhere = _run(tmp_path / "elsewhere", 7)
    (folder / "link").symlink_to(elsewhere)
    try:
        told = _prune(str(tmp_path), "--keep", "0")
    finally:
        os.close(held)
    assert [run.exists() for run in goes] == [False, False]
    assert all(run.exists() for run in (*stays, elsewhere))
    for run, why in zip(
        stays[:3], ("it may still go on",) * 2 + ("firstfault did not make notes.txt in it",), strict=True
    ):
        assert f"firstfault: kept {run}: {why}" in told
