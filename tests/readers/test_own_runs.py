"""Which runs `show --last` and `ls` find: those that were started in the working folder,
and no other job's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from firstfault.cli import EXIT
from firstfault.layout import RUN_MARK
from firstfault.run_folder import (
    begin_run,
    make_fallback_folder,
    may_be_active,
    read_working_folders,
)
from firstfault.testing import make_error
from firstfault_logs.framing.lines import files_below
from tests.readers.commands import Ran
from tests.readers.conftest import Attempt

Run = Callable[..., Ran]

NONE = "no runs below .firstfault/torchrun or .firstfault/runs"


def _record(attempt: Attempt, folder: Path) -> Path:
    made = attempt.at(folder)
    os.close(begin_run(made.folder))
    made.at(0).write(make_error(1))
    return made.folder


@pytest.fixture(autouse=True)
def _own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "here")


def test_a_run_of_another_folder_is_never_shown(
    attempt: Attempt,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is never shown as the run of this folder, also not without a run here;
    in its own folder it's found.
    """
    monkeypatch.chdir(tmp_path / "elsewhere")
    foreign = _record(attempt, make_fallback_folder() / "foreign")
    assert read_working_folders(foreign) == [str(tmp_path / "elsewhere")]
    assert not may_be_active(foreign)
    shown = run("show", "--last", "--json")
    assert json.loads(shown.out)["uri"] == f"{foreign}/0"
    assert shown.err == f"firstfault: from {foreign}, started in {tmp_path / 'elsewhere'}\n"
    listed = run("ls")
    assert f"{foreign}/0" in listed.out
    assert f"from {foreign.parent}, started in {tmp_path / 'elsewhere'}" in listed.err

    monkeypatch.chdir(tmp_path / "here")
    alone = run("show", "--last")
    assert (alone.code, alone.out) == (EXIT.USAGE, "")
    assert f"{NONE} were started here ({foreign} was started elsewhere)" in alone.err
    assert run("ls").code == EXIT.NOTHING_FOUND
    own = _record(attempt, Path(".firstfault/torchrun/own").absolute())
    os.utime(own / RUN_MARK, (1_000, 1_000))
    shown = run("show", "--last", "--json")
    assert (json.loads(shown.out)["uri"], shown.err) == (".firstfault/torchrun/own/0", "")
    assert [line.split()[1] for line in run("ls").out.splitlines()] == [
        ".firstfault/torchrun/own/0"
    ]


def test_a_run_without_a_working_folder_is_shown_last_with_its_place(
    attempt: Attempt, run: Run
) -> None:
    """A run among temporary files without a working folder is shown only without a run here,
    and with its place.
    """
    unknown = _record(attempt, make_fallback_folder() / "unknown")
    (unknown / RUN_MARK).write_text("host\n")
    shown = run("show", "--last", "--json")
    assert json.loads(shown.out)["uri"] == f"{unknown}/0"
    assert shown.err == f"firstfault: from {unknown}, started in an unknown folder\n"
    assert f"{unknown}/0" in run("ls").out
    own = _record(attempt, Path(".firstfault/torchrun/own").absolute())
    os.utime(own / RUN_MARK, (1_000, 1_000))
    assert json.loads(run("show", "--last", "--json").out)["uri"] == ".firstfault/torchrun/own/0"
    assert str(unknown) not in run("ls").out


def test_files_of_runs_are_not_read_as_logs(attempt: Attempt, run: Run, tmp_path: Path) -> None:
    """A folder with logs and firstfault's runs is read without the files of the runs,
    which may be JSON.
    """
    record = _record(attempt, tmp_path / "job" / "run")
    (record / "0" / "firstfault" / "roster").mkdir(exist_ok=True)
    (record / "0" / "firstfault" / "roster" / "decision-stall-00000-0000000.json").write_text("{}")
    copied = tmp_path / "job" / "copied" / "firstfault"
    (copied / "roster").mkdir(parents=True)
    (copied / "verdict.json").write_text('{"error": "RuntimeError"}')
    (tmp_path / "job" / "train.log").write_text("[rank1]: ValueError: no labels\n")
    assert files_below(tmp_path / "job") == [tmp_path / "job" / "train.log"]
