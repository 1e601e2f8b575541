"""``firstfault show`` on the log folder of a real torchrun, which ran without firstfault."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from firstfault.cli import EXIT
from firstfault.testing import make_error
from firstfault_logs import snapshot_of
from firstfault_logs.torchrun_folder import workers_in
from tests.readers.commands import Ran
from tests.readers.conftest import Attempt

Show: TypeAlias = Callable[[Path], tuple[int, dict[str, Any]]]


pytest.importorskip("torch", reason="the folders are torchrun's")

_TRAINING = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

def main(fault):
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        # it records the loss of its peer, however early torchrun terminates it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for step in range(4):
        dist.all_reduce(torch.ones(2))
        if step == 2 and dist.get_rank() == 1:
            if fault.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, fault))
            try:
                {}["labels"]
            except KeyError as error:
                raise ValueError("bad batch 7") from error
    dist.destroy_process_group()

record(main)(sys.argv[1])
"""


def run_torchrun(folder: Path, *options: str, fault: str) -> Path:
    script = folder / "train.py"
    script.write_text(_TRAINING, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--log-dir",
        str(folder / "logs"),
        "--standalone",
    ]
    subprocess.run(
        [*command, "--nproc-per-node=2", *options, str(script), fault],
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
    )
    return folder / "logs"


def _worker(
    folder: Path,
    run: str = "none_hbse3iwq",
    rank: int = 0,
    attempt: int = 0,
    **files: str,
) -> Path:
    """Make the folder of a worker, with `error` as its error.json and `stderr` as its log."""
    path = folder / run / f"attempt_{attempt}" / str(rank)
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / {"error": "error.json", "stderr": "stderr.log"}[name]).write_text(
            text, encoding="utf-8"
        )
    return path


@pytest.fixture
def show(run: Callable[..., Ran]) -> Show:
    """Return a function that shows a folder: the exit code and the JSON."""

    def shown(folder: Path) -> tuple[int, dict[str, Any]]:
        ran = run("show", "--json", str(folder))
        assert ran.err == "", ran.err
        return ran.code, json.loads(ran.out)

    return shown


@pytest.mark.jobs
def test_the_rank_that_raised_is_the_root_cause(show: Show, tmp_path: Path) -> None:
    """The rank that raised is the root cause, with its traceback,
    its cause and its time in whole seconds.
    """
    code, found = show(run_torchrun(tmp_path, fault="raise"))
    root = found["root"]
    assert code == EXIT.ROOT_CAUSE
    assert (found["verdict"]["ranks"], root["type"], root["message"]) == (
        [1],
        "KeyError",
        "'labels'",
    )
    assert "ValueError: bad batch 7" in found["verdict"]["message"]
    assert root["time"].endswith(".000000000Z")
    assert found["verdict"]["victims"]["count"] == 1
    notes = found["verdict"]["coverage"]["notes"]
    assert (
        "torchrun's log folder has times in whole seconds, and neither exit codes nor signals"
        in notes
    )
    assert "ranks are local ranks: the folder has no global ones" in notes
    assert found["uri"] is None


@pytest.mark.jobs
def test_a_worker_that_left_nothing_is_the_root_cause_with_low_confidence(
    show: Show, tmp_path: Path
) -> None:
    """A worker that left nothing is the root cause, with low confidence,
    if the others only lost their peer.
    """
    code, found = show(run_torchrun(tmp_path, fault="SIGKILL"))
    assert code == EXIT.ROOT_CAUSE
    assert found["first_line"].startswith("no error file rank 1 ")
    assert (found["verdict"]["ranks"], found["verdict"]["confidence"]) == ([1], "low")
    assert (
        "a worker that was killed, or stopped by torchrun, leaves no error.json" in found["unknown"]
    )


@pytest.mark.jobs
def test_redirected_logs_add_signals_and_global_ranks(show: Show, tmp_path: Path) -> None:
    """With redirected logs a crash has its signal, and torch's prefix tells the global ranks."""
    _, found = show(run_torchrun(tmp_path, "-r", "3", fault="SIGSEGV"))
    assert (found["verdict"]["ranks"], found["root"]["signal"]) == ([1], "SIGSEGV")
    assert "Fatal Python error: Segmentation fault" in found["root"]["log"]
    assert not [
        note for note in found["verdict"]["coverage"]["notes"] if note.startswith("ranks are local")
    ]


def test_only_a_nodes_last_attempt_is_read(show: Show, tmp_path: Path) -> None:
    """After a restart only the last attempt of a node is read."""
    for attempt, what in enumerate(("first", "last")):
        _worker(tmp_path, rank=0, attempt=attempt)
        _worker(tmp_path, rank=1, attempt=attempt, error=json.dumps({"message": f"E: {what}"}))
    run = tmp_path / "none_hbse3iwq"
    for path, said, restarts in (
        (tmp_path, "last", 1),
        (run, "last", 1),
        (run / "attempt_0", "first", 0),
    ):
        root = show(path)[1]["root"]
        assert (root["rank"], root["message"], root["restarts"]) == (1, said, restarts)
    assert show(run / "attempt_0" / "1")[1]["root"]["message"] == "first"


_RAISED = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    g()\n'


def test_nodes_of_one_run_are_read_together(show: Show, tmp_path: Path) -> None:
    """The folders of the nodes of one run are read together;
    an earlier run with the same id is not.
    """
    for path in [
        *_worker(tmp_path, "job_abcd1234", error='{"message": "old"}').iterdir(),
        *tmp_path.rglob("*"),
    ]:
        os.utime(path, (1_000_000, 1_000_000))
    lost = (
        "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer"
        " [10.2.0.9]:41000"
    )
    for rank, said in enumerate((lost, "KeyError: 'labels'")):
        text = "".join(f"[rank{rank}]: {line}\n" for line in f"{_RAISED}{said}".splitlines())
        _worker(tmp_path, f"job_node_{rank}xx", stderr=text)
    _, found = show(tmp_path)
    assert (
        found["verdict"]["ranks"],
        found["root"]["local_rank"],
        found["verdict"]["victims"]["count"],
    ) == ([1], 0, 1)
    assert "2 folders of the run 'job' count as its nodes" in found["verdict"]["coverage"]["notes"]
    assert (found["root"]["type"], found["root"]["time"]) == ("KeyError", None)


def test_a_run_without_an_error_exits_with_3(tmp_path: Path, run: Callable[..., Ran]) -> None:
    """A run whose workers left no error has exit code 3 and a line that says what is missing."""
    _worker(tmp_path, stderr="epoch 3\n")
    ran = run("show", str(tmp_path))
    assert (ran.code, ran.out) == (EXIT.NOTHING_FOUND, "")
    assert "no worker left an error.json, and no stderr.log ends with a traceback" in ran.err


@pytest.mark.parametrize(
    "text",
    [
        '{"message": {"message": "boom", "extraInfo": "text"}}',
        '{"message": {"message": "boom", "extraInfo": {"timestamp": "99999999999999"}}}',
        '{"message": {"message": "boom", "extraInfo": {"timestamp": "' + "9" * 3000 + '"}}}',
        "[" * 200_000,
        "[1",
    ],
    ids=["extraInfo", "14 digits", "3,000 digits", "deep", "damaged"],
)
def test_a_foreign_error_file_is_named_and_the_other_worker_read(
    show: Show, tmp_path: Path, text: str
) -> None:
    """An error.json that torchrun never writes is named, and the other worker is still read."""
    for rank, said in enumerate((text, '{"message": "ValueError: boom"}')):
        _worker(tmp_path, rank=rank, error=said)
    _, found = show(tmp_path)
    assert (found["root"]["message"], found["verdict"]["coverage"]["unreadable"]) == ("boom", 1)
    assert any(
        "attempt_0/0/error.json: no error.json of torchrun: " in note for note in found["unknown"]
    )


def test_unreadable_error_files_are_reported_with_the_requested_folder(
    tmp_path: Path, run: Callable[..., Ran]
) -> None:
    """The line about it names the folder that was asked for."""
    _worker(tmp_path, error="[1")
    ran = run("show", str(tmp_path))
    assert ran.code == EXIT.UNREADABLE
    assert ran.err.startswith(f"firstfault: no root cause in {tmp_path}: ")


def test_dangling_links_and_fifos_do_not_stop_the_reader(show: Show, tmp_path: Path) -> None:
    """A dangling symlink and a FIFO in place of a log do not stop the reader."""
    rank = _worker(tmp_path, error='{"message": "ValueError: boom"}')
    (rank / "stdout.log").symlink_to(tmp_path / "missing")
    os.mkfifo(rank / "stderr.log")
    assert show(tmp_path)[1]["root"]["message"] == "boom"


def test_a_workers_traceback_outweighs_its_data_loaders_crash(tmp_path: Path) -> None:
    """A worker's own traceback counts, not the crash of its DataLoader's process above it."""
    lines = (
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f (most recent call first):",
        '  File "/job/data.py", line 3 in __getitem__',
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/job/train.py", line 9, in main',
        "[rank0]:     for batch in loader:",
        (
            "[rank0]: RuntimeError: DataLoader worker (pid 77) is killed by signal: Segmentation"
            " fault."
        ),
    )
    for text, what in (("\n".join(lines), "RuntimeError"), ("\n".join(lines[:4]), "SIGSEGV")):
        _worker(tmp_path, stderr=f"{text}\n")
        snapshot = snapshot_of([tmp_path])
        assert snapshot is not None
        assert [document.what for document in snapshot.documents] == [what]


def test_torchruns_own_error_file_has_the_workers_exit_code(show: Show, tmp_path: Path) -> None:
    """The file that torchrun writes for its own parent has the exit code of the worker."""
    said = {
        "message": "SignalException: got 15",
        "errorCode": 143,
        "extraInfo": {"timestamp": "1700000000"},
    }
    (tmp_path / "error.json").write_text(json.dumps({"message": said}), encoding="utf-8")
    _, found = show(tmp_path)
    assert (found["root"]["exit_code"], found["root"]["rank"]) == (143, None)
    assert found["root"]["time"] == "2023-11-14T22:13:20.000000000Z"


def test_an_underscore_in_a_folders_random_end_is_no_rank(tmp_path: Path) -> None:
    """The random characters behind the run's id may contain an underscore;
    unknown ranks stay unknown.
    """
    for name in ("job_hbse3iwq", "job_nt_bgjvv", "other_5xk2n1aa"):
        _worker(tmp_path, name, error='{"message": "ValueError: boom"}')
    for path in (tmp_path / "other_5xk2n1aa").rglob("*"):
        os.utime(path, (1_000_000, 1_000_000))
    snapshot = snapshot_of([tmp_path])
    assert snapshot is not None
    places = [
        (document.node, document.rank, document.place.local_rank) for document in snapshot.documents
    ]
    assert places == [("job_hbse3iwq", None, 0), ("job_nt_bgjvv", None, 0)]


def test_other_folders_are_no_log_folders(tmp_path: Path, attempt: Attempt) -> None:
    """Output prefixes, folders of attempts, and folders that only look alike are
    not taken for torchrun's.
    """
    attempt.write(make_error())
    (tmp_path / "runs" / "0" / "firstfault" / "errors").mkdir(parents=True)
    (tmp_path / "alike" / "attempt_0" / "logs").mkdir(parents=True)
    (tmp_path / "kfp" / "attempt-0" / "0").mkdir(parents=True)
    for folder in (
        attempt.folder,
        tmp_path / "runs",
        tmp_path / "alike",
        tmp_path / "kfp",
        tmp_path / "missing",
    ):
        assert workers_in(folder) == []


def test_an_attempts_documents_outweigh_torchruns_logs_beside_them(
    show: Show, tmp_path: Path, attempt: Attempt
) -> None:
    """An attempt's own documents count, although torchrun's log folder lies in the same place."""
    attempt.write(make_error(5))
    _worker(attempt.folder, error='{"message": "boom"}')
    assert show(attempt.folder)[1]["verdict"]["ranks"] == [5]


def test_a_traceback_before_the_end_of_a_log_is_no_failure(tmp_path: Path) -> None:
    """A traceback that a program printed before it went on is no failure,
    only one at the end of its log is.
    """
    raised = f"{_RAISED}OSError: no space\n"
    for text, count in ((f"{raised}retrying\n", 0), (f"retrying\n{raised}", 1)):
        _worker(tmp_path, stderr=text)
        snapshot = snapshot_of([tmp_path])
        assert snapshot is not None
        assert [document.what for document in snapshot.documents] == ["OSError"] * count
