"""``firstfault classify``, ``firstfault prune``,
and ``firstfault show -`` with a document from stdin.
"""

import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument

from firstfault.cli import EXIT
from firstfault.cli._main import group
from firstfault.conclude import conclude
from firstfault.layout import RUN_MARK, error_key_for
from firstfault.model import Kind
from firstfault.run_folder import begin_run
from firstfault.testing import make_error, make_job
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, encode
from tests.readers.commands import Ran
from tests.seals import encode_sealed_verdict


@pytest.fixture
def classify(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Ran]) -> Callable[..., Ran]:
    """Return a function that runs the command on a text from stdin."""

    def call(text: str, *arguments: str) -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return run("classify", *arguments)

    return call


def test_classify_answers_each_line_in_order(classify: Callable[..., Ran]) -> None:
    """One answer per line, in order, with the id of the input; empty lines are skipped."""
    rows = [
        {"id": "a", "exception_type": "ValueError", "message": "bad batch"},
        {"id": 2, "message": "[gloo/pair.cc:1] Connection closed by peer [10.0.0.7]:4711"},
        {"message": "CUDA error: misaligned address", "exception_type": None, "more": 1},
    ]
    done = classify("\n\n".join(json.dumps(row) for row in rows))
    first, second, third = (json.loads(line) for line in done.out.splitlines())
    assert done.code == 0
    assert first == {
        "id": "a",
        "role": "primary",
        "category": "user_code",
        "pointer": None,
        "signature": "program",
    }
    assert (second["id"], second["role"], second["pointer"]) == (
        2,
        "secondary",
        {"ip": "10.0.0.7", "port": 4711},
    )
    assert (third["id"], third["signature"]) == (None, "gpu-kernel")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"id": 1}\n{"id": ', "line 2 of stdin is not JSON"),
        ("[" * 5_000, "line 1 of stdin is not JSON"),
        ("[1]", "line 1 of stdin must be an object"),
        ('{"message": 7}', "'message' in line 1 of stdin must be a string"),
    ],
)
def test_classify_names_the_number_of_an_invalid_line(
    text: str, reason: str, classify: Callable[..., Ran]
) -> None:
    """An invalid line has exit code 2 and an error with its number."""
    done = classify(text)
    assert done.code == 2
    assert reason in done.err
    assert len(done.err.splitlines()) == 1


def test_classify_without_stdin_is_a_usage_error() -> None:
    """It has exit code 2 and an error that says what is missing."""
    command = f"{shlex.quote(sys.executable)} -m firstfault classify <&-"
    done = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "firstfault: stdin is closed; give it lines of JSON\n",
    )


def test_a_users_signatures_come_first_and_invalid_ones_are_named(
    tmp_path: Path, classify: Callable[..., Ran]
) -> None:
    """A file's signatures come first; an invalid file is named in the error."""
    file = tmp_path / "ours.toml"
    file.write_text(
        'schema = 1\n[[signature]]\nid = "ours"\npattern = "bad batch"\nrole ='
        ' "secondary"\ncategory = "data"\nexample = "bad batch"\nwhy = "ours"\n'
    )
    row = json.dumps({"id": 1, "exception_type": "ValueError", "message": "bad batch"})
    assert json.loads(classify(row, "--signatures", str(file)).out)["signature"] == "ours"
    file.write_text("schema = 2")
    done = classify(row, "--signatures", str(file))
    assert (done.code, done.out) == (2, "")
    assert f"{file}:1: must have schema = 1" in done.err


JOINED = "r1-99999-0000000-joined-0000000000001-00000000000000000000000000000000.pb"


def _run(folder: Path, number: int, host: str = "") -> Path:
    """Make a run that has ended; `host`: began there, if not here."""
    run = folder / f"run-{number}"
    os.close(begin_run(run))
    if host:
        (run / RUN_MARK).write_text(f"{host}\n")
    (run / "0" / "firstfault" / "roster").mkdir(parents=True)
    (run / "0" / "firstfault" / "roster" / JOINED).write_bytes(bytes(1000))
    os.utime(run / RUN_MARK, (number, number))
    return run


def _end_rank(run: Path, incarnation: str, *, age_seconds: float) -> None:
    """Let the rank of a run end with a failure, so long ago."""
    roster = run / "0" / "firstfault" / "roster"
    failed = JOINED.replace("joined", "failed").replace("0000000000001", incarnation)
    (roster / failed).touch()
    then = time.time() - age_seconds
    for path in (*roster.iterdir(), roster):
        os.utime(path, (then, then))


@pytest.mark.parametrize("folder", ["s3://bucket/runs", "gs://bucket/runs"])
def test_prune_names_the_lifecycle_rule(folder: str) -> None:
    """Object storage isn't pruned: the error is one line that names what removes old runs there."""
    ran = CliRunner().invoke(group, ["prune", folder])
    assert ran.exit_code == 2
    assert (
        f"{folder} is on object storage: set a lifecycle rule of the bucket for this prefix"
        in ran.output
    )


def _prune(*arguments: str) -> str:
    ran = CliRunner().invoke(group, ["prune", *arguments], standalone_mode=False)
    assert ran.return_value == EXIT.OK, ran.exception
    return ran.output


@pytest.mark.parametrize("name", [".firstfault/torchrun", ".firstfault/runs", "."])
def test_prune_keeps_the_last_runs_and_says_what_it_removed(name: str, tmp_path: Path) -> None:
    """The last runs stay, the others go, and the command says which, and how much that was."""
    runs = [_run(tmp_path / name, number) for number in range(1, 23)]
    assert (
        _prune(str(tmp_path)) == f"removed {runs[1]}\nremoved {runs[0]}\nremoved 2 runs, 0.0 MB\n"
    )
    assert [run for run in runs if run.exists()] == runs[2:]
    _prune(str(tmp_path), "--keep", "1")
    assert [run for run in runs if run.exists()] == runs[-1:]


def test_ls_lists_the_runs_that_show_and_prune_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Ran]
) -> None:
    """`ls` lists the runs that `show --last` and `prune` find, also those among temporary files."""
    monkeypatch.chdir(tmp_path)
    private = tmp_path / "temporary" / f".firstfault-{os.geteuid()}"
    private.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(private.parent))
    nothing = run("ls")
    assert (nothing.code, nothing.out) == (EXIT.NOTHING_FOUND, "")
    assert nothing.err.startswith(
        "firstfault: no attempts below .firstfault/torchrun or .firstfault/runs; "
    )
    folders = [Path(".firstfault/torchrun"), Path(".firstfault/runs"), private / "torchrun"]
    for number, folder in enumerate(folders):
        attempt = _run(folder, number) / "0"
        (attempt / "error.pb").write_bytes(_sealed())
    listed = run("ls").out.splitlines()
    assert sorted(line.split()[1] for line in listed) == sorted(
        f"{path}/run-{n}/0" for n, path in enumerate(folders)
    )


def test_prune_keeps_held_foreign_and_unrelated_folders(tmp_path: Path) -> None:
    """A run that a process still holds, or that another host began and has not ended,
    and what others made.
    """
    folder = tmp_path / ".firstfault" / "torchrun"
    goes = [_run(folder, 1), _run(folder, 2, "other"), _run(folder, 8, "other")]
    (goes[0] / "requeues-4711_2.json").touch()
    (goes[1] / "0" / "error.pb").touch()
    # ranks without an agent publish no verdict
    _end_rank(goes[2], "0000000000002", age_seconds=90_000)
    stays = [_run(folder, number, "other" if number == 3 else "") for number in (3, 4, 5, 6)]
    recent, restarted = (_run(folder, number, "other") for number in (9, 10))
    _end_rank(recent, "0000000000002", age_seconds=60)
    _end_rank(restarted, "0000000000000", age_seconds=90_000)
    held = begin_run(stays[1])
    (stays[2] / "notes.txt").touch()
    (stays[3] / RUN_MARK).unlink()
    elsewhere = _run(tmp_path / "elsewhere", 7)
    (folder / "link").symlink_to(elsewhere)
    try:
        told = _prune(str(tmp_path), "--keep", "0")
    finally:
        os.close(held)
    assert [run.exists() for run in goes] == [False] * 3
    assert all(run.exists() for run in (*stays, elsewhere, recent, restarted))
    reasons = (
        "it may still be running",
        "it may still be running",
        "firstfault did not make notes.txt in it",
        "without a file firstfault.run in it, firstfault may not have made it",
        "it may still be running",
        "it may still be running",
    )
    for run, why in zip((*stays, recent, restarted), reasons, strict=True):
        assert f"firstfault: kept {run}: {why}" in told


def test_show_reads_the_last_of_unmarked_runs(tmp_path: Path, run: Callable[..., Ran]) -> None:
    """`show` reads the last of them, as `ls` lists them, and no file of another kind beside it."""
    for number, name in enumerate(("4711.0", "4712.0"), 1):
        errors = tmp_path / name / "0" / "firstfault" / "errors"
        errors.mkdir(parents=True)
        error = make_error(3, message=f"boom {number}")
        (errors / error_key_for(error)).write_bytes(encode(error))
        roster = errors.with_name("roster")
        roster.mkdir()
        os.utime(roster, (number, number))
        (tmp_path / name / "requeues-4711.json").write_text('{"starts": [0]}')
    ran = run("show", str(tmp_path))
    assert (ran.code, "boom 2" in ran.out) == (EXIT.ROOT_CAUSE, True)


_STOCK = ErrorDocument(error=ContainerError(code="USER:Unknown", message="Trace: the loss is NaN"))


def _sealed() -> bytes:
    conclusion = conclude(make_job(make_error(3, message="sealed boom")))
    return encode_sealed_verdict(conclusion.verdict, conclusion.decision, fault_timestamp_ns=None)


@pytest.fixture
def shown(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Ran]
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that shows bytes on stdin: the exit code, stdout and stderr."""

    def show(data: bytes, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        ran = run("show", "-", *options)
        return ran.code, ran.out, ran.err

    return show


@pytest.mark.parametrize(
    ("document", "options", "code", "said"),
    [
        (encode(make_error(3, message="boom")), (), EXIT.ROOT_CAUSE, "rank 3"),
        (encode(make_error(3)), ("--json",), EXIT.ROOT_CAUSE, '"uri":null'),
        (encode(make_error(3, kind=Kind.RECOVERABLE)), (), EXIT.ROOT_CAUSE_RETRYABLE, "rank 3"),
        (_STOCK.SerializeToString(), (), EXIT.ROOT_CAUSE, "the loss is NaN"),
        (_sealed(), (), EXIT.ROOT_CAUSE, "sealed boom"),
    ],
    ids=["ours", "as JSON", "recoverable", "Flyte's own", "sealed"],
)
def test_a_document_on_stdin_is_reported_without_a_place(
    shown: Callable[..., tuple[int, str, str]],
    document: bytes,
    options: tuple[str, ...],
    code: EXIT,
    said: str,
) -> None:
    """A document on stdin is reported as one in a storage,
    and the report names no place to look for it.
    """
    found, out, err = shown(document, *options)
    assert (found, err) == (code, "")
    assert said in out
    assert "firstfault show" not in out


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "stdin is empty; check whether the command before the pipe failed"),
        (b"\nnot found", "stdin is not an error document"),
        (b"\x00" * (MAX_DOCUMENT_BYTES + 1), f"stdin has more than {MAX_DOCUMENT_BYTES} bytes"),
    ],
    ids=["empty", "another format", "too large"],
)
def test_bytes_that_are_no_document_exit_with_one_line(
    shown: Callable[..., tuple[int, str, str]], data: bytes, said: str
) -> None:
    """Bytes that are no document have exit code 1 and one line that says why."""
    code, out, err = shown(data)
    (line,) = err.splitlines()
    assert (code, out) == (EXIT.TOOL_FAILED, "")
    assert said in line


def test_a_terminal_as_stdin_is_a_usage_error() -> None:
    """If stdin is a terminal, the command exits with 2 and a hint instead of waiting for input."""
    leader, terminal = os.openpty()
    command = [sys.executable, "-m", "firstfault", "show", "-"]
    try:
        ran = subprocess.run(command, stdin=terminal, capture_output=True, timeout=60, check=False)
    finally:
        os.close(leader)
        os.close(terminal)
    (line,) = ran.stderr.decode().splitlines()
    assert ran.returncode == EXIT.USAGE
    assert "pipe a log or an error document into it: firstfault show - < train.log" in line
