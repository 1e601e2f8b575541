"""What a worker tells about itself: the space and limits of its machine, dead threads, collectives,
its GPU.
"""

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from firstfault.model import (
    Collective,
    CollectiveProgress,
    FileSystem,
    SystemState,
    ThreadFailure,
    Verdict,
)
from firstfault.report import build_report
from firstfault.report.fault_owner import FaultOwner
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job
from firstfault_torch import time_limits
from firstfault_torch.compat.torch_worker import backends_that_abort
from firstfault_torch.failures.capture import capture
from firstfault_torch.node.channel import from_message, to_message
from firstfault_torch.node_context import Moment
from firstfault_torch.worker import process_state

_GIB = 1 << 30
_EIO = "[Errno 5] Input/output error"
_FULL = FileSystem("/data", 0, 100 * _GIB, 7, 9)
_WRITTEN = FileSystem("/mnt/x", _GIB, 2 * _GIB)


def _verdict(kind: str, text: str, system: SystemState) -> Verdict:
    job = make_job(make_error(3, exception=kind, message=text, system=system))
    return run_strategy(get_strategy("evidence"), job)


def _state(error: BaseException) -> SystemState:
    return process_state.measure_system_state(error, capture(error))


def test_an_errors_file_system_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path's file system comes first, also if the file does not exist,
    and of a cause in a wrapper.
    """
    raised = RuntimeError("training failed")
    raised.__cause__ = OSError(28, "No space left on device", str(tmp_path / "no" / "file.pt"))
    found, *others = _state(raised).file_systems
    space = os.statvfs(tmp_path)
    assert (found.path, found.total_bytes) == (
        str(tmp_path / "no" / "file.pt"),
        space.f_frsize * space.f_blocks,
    )
    assert {os.getcwd(), "/dev/shm"} <= {item.path for item in others}  # noqa: PTH109, S108
    # also if Python finds no folder for temporary files, because the disk is full
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    assert _state(raised).file_systems[0].path == found.path


def test_a_failed_write_without_a_path_records_the_usual_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The working folder and /dev/shm are recorded, with the number of open files."""
    monkeypatch.setattr(
        process_state, "_iter_files_open_for_writing", lambda: iter(())
    )  # pytest's, too
    found = _state(
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    )
    assert {os.getcwd(), "/dev/shm"} <= {item.path for item in found.file_systems}  # noqa: PTH109, S108
    assert found.open_files
    assert dict(found.limits).get("RLIMIT_NOFILE", 1) > 0


def _full(monkeypatch: pytest.MonkeyPatch, folder: Path, error: int = 0) -> None:
    """Let a folder be on a full disk of 2 MiB; or on one with free space that refuses
    writes with an error number.
    """
    real = os.statvfs

    def statvfs(path: str) -> SimpleNamespace:
        names = ("f_frsize", "f_blocks", "f_bavail", "f_favail", "f_files", "f_flag")
        space = SimpleNamespace(**{name: getattr(real(path), name) for name in names})
        if str(path).startswith(str(folder)):
            space.f_blocks = 512
            space.f_bavail = 100 if error else 0
            space.f_frsize = 4096
        return space

    monkeypatch.setattr(os, "statvfs", statvfs)
    if error:
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(error, "refused")))


class _Checkpoint:
    """Writes where torch.save, numpy and SQLite do: its path is a variable of a frame,
    or that of an open file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def by_name(self, _data: str = "data/0") -> None:
        folder = self.path  # noqa: F841 - what is found
        self._fail()

    def by_file(self) -> None:
        with self.path.open("wb") as file:
            self._fail(file)

    def by_open_file(self) -> None:
        self.file = self.path.open("wb")
        self._fail()

    def _fail(self, _file: object = None) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")


@pytest.mark.parametrize(
    "how", [_Checkpoint.by_name, _Checkpoint.by_file, _Checkpoint.by_open_file]
)
@pytest.mark.parametrize(
    ("error", "why"), [(0, ""), (errno.EDQUOT, " (quota)"), (errno.ENOSPC, "")]
)
def test_a_failed_writes_file_is_found_in_variables_or_open_files(
    how: Callable[[_Checkpoint], None],
    error: int,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text that does not tell where and why a write failed: the variables, or the open files,
    and the disk do.
    """
    _full(monkeypatch, tmp_path, error)
    checkpoint = _Checkpoint(tmp_path / "checkpoint.pt")
    with pytest.raises(RuntimeError) as caught:
        how(checkpoint)
    system = _state(caught.value)
    if how is _Checkpoint.by_open_file:
        checkpoint.file.close()
    full = next(disk for disk in system.full if disk.path.startswith(str(checkpoint.path)))
    assert full.text == f"0 B of 2.0 MiB free at {tmp_path / 'checkpoint.pt'}{why}"
    verdict = _verdict("RuntimeError", str(caught.value), system)
    assert verdict.category == "disk_full"
    assert verdict.headline.startswith(
        f"RuntimeError, rank 3 on worker-0: {system.full[0].text[:60]}"
    )
    assert decide(verdict).reason == "the retry may need the same space, but that isn't proven"
    assert list(tmp_path.glob(".firstfault*")) == []


def test_a_failed_write_on_a_healthy_disk_stays_unexplained(tmp_path: Path) -> None:
    """On a healthy disk a failed write stays one of the storage;
    the report claims neither a fault nor its end.
    """
    with pytest.raises(RuntimeError) as caught:
        _Checkpoint(tmp_path / "checkpoint.pt").by_name()
    system = _state(caught.value)
    assert system.file_systems[0].path == str(tmp_path / "checkpoint.pt")
    assert system.full == ()
    job = make_job(
        make_error(3, exception="RuntimeError", message=str(caught.value), system=system)
    )
    verdict = run_strategy(get_strategy("evidence"), job)
    report = build_report(job, verdict, decide(verdict))
    assert (verdict.category, report.answers.fault_owner) == ("storage", FaultOwner.EITHER)
    assert "may have been full" in report.answers.retry_reason


def test_unrelated_exceptions_measure_nothing() -> None:
    """An exception that no limit explains asks for nothing;
    an OSError may carry anything as its path.
    """
    assert _state(KeyError("labels")) == SystemState()
    for name in (7, b"/\xff", "\x00", "/" + "x" * 5000):
        assert isinstance(_state(OSError(5, "error", name)), SystemState)


def test_a_process_records_its_limits() -> None:
    """A process records that its memory and its threads are limited;
    a limit above the machine's memory is none.
    """
    program = (
        "import json, os, resource\nfrom firstfault_torch.failures.capture import capture\nfrom"
        " firstfault_torch.worker.process_state import measure_system_state\nmemory ="
        " os.sysconf('SC_PHYS_PAGES') *"
        " os.sysconf('SC_PAGE_SIZE')\nresource.setrlimit(resource.RLIMIT_AS, (memory // 2, memory"
        " // 2))\nresource.setrlimit(resource.RLIMIT_DATA, (memory * 2, memory * 2))\nthreads ="
        " min(limit for limit in (4711, resource.getrlimit(resource.RLIMIT_NPROC)[1]) if limit >="
        " 0)\nresource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))\nfor error in"
        ' (MemoryError(), RuntimeError("can\'t start new thread")):\n   '
        " print(json.dumps(measure_system_state(error, capture(error)).limits))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        limits = dict(json.loads(line))
        assert {"RLIMIT_AS", "RLIMIT_NPROC"} <= set(limits)
        assert "RLIMIT_DATA" not in limits


@pytest.mark.parametrize(
    ("kind", "text", "system", "category"),
    [
        (
            "RuntimeError",
            "PytorchStreamWriter failed writing file data/0",
            SystemState((_FULL,)),
            "disk_full",
        ),
        (
            "RuntimeError",
            "unexpected pos 704 vs 598",
            SystemState((FileSystem("/", 9, _GIB, 0, 7),)),
            "disk_full",
        ),
        (
            "RuntimeError",
            "unexpected pos 704 vs 598",
            SystemState((FileSystem("/", _GIB, 2 * _GIB),)),
            "storage",
        ),
        ("OSError", f"{_EIO}: '/mnt/x'", SystemState((_WRITTEN, _FULL)), "storage"),
        ("OSError", "1048576 requested and 524288 written", SystemState((_WRITTEN,)), "storage"),
        (
            "OperationalError",
            "disk I/O error",
            SystemState((replace(_WRITTEN, free_bytes=0),)),
            "disk_full",
        ),
        (
            "OSError",
            f"{_EIO}: '/data'",
            SystemState((_FULL, FileSystem("/", _GIB, 2 * _GIB))),
            "disk_full",
        ),
        ("MemoryError", "", SystemState(limits=(("RLIMIT_AS", 4 * _GIB),)), "config"),
        ("MemoryError", "", SystemState(), "host_oom"),
    ],
)
def test_the_category_uses_what_was_recorded(
    kind: str,
    text: str,
    system: SystemState,
    category: str,
) -> None:
    """A failed write is a full disk if the disk was full;
    a limited process did not use up the host's memory.
    """
    assert _verdict(kind, text, system).category == category


def test_the_report_shows_what_was_recorded() -> None:
    """The details name the full file system and the limits."""
    system = SystemState(
        (_FULL, FileSystem("/", _GIB, 2 * _GIB)), (("RLIMIT_AS", 4 * _GIB), ("RLIMIT_NOFILE", 9)), 7
    )
    job = make_job(
        make_error(
            3,
            exception="OSError",
            message="[Errno 28] No space left on device",
            system=system,
        )
    )
    verdict = run_strategy(get_strategy("evidence"), job)
    facts = {fact.name: fact.value for fact in build_report(job, verdict, decide(verdict)).facts}
    assert facts["Disk"] == "0 B of 100.0 GiB free at /data"
    assert facts["Limits"] == "RLIMIT_AS 4.0 GiB, 7 of 9 files open"


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.ExceptHookArgs]]:
    """Watch the threads of this process; return the calls of the previous hook."""
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(process_state, "_recorded_thread_failures", [])
    monkeypatch.setattr(threading, "excepthook", told.append)
    undo = process_state.watch_threads()
    yield told
    undo()
    assert threading.excepthook == told.append
    told.clear()  # it holds the threads' frames


def _dies(error: BaseException, name: str = "loader") -> None:
    def fail() -> None:
        raise error

    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()


def test_a_dead_thread_is_recorded_and_reported(reported: list[threading.ExceptHookArgs]) -> None:
    """An exception that ends a thread is recorded with thread and time, and reported as before."""
    error = ValueError("bad shard")
    before = Moment.now()
    _dies(error)
    (failure,) = process_state.get_thread_failures()
    assert failure.thread == "loader"
    assert before.wall_ns <= failure.timestamp_ns <= Moment.now().wall_ns
    assert (failure.exception.type, failure.exception.message) == ("ValueError", "bad shard")
    assert failure.exception.frames[-1].function == "fail"
    assert [(args.exc_value, args.thread and args.thread.name) for args in reported] == [
        (error, "loader")
    ]


class _HostileError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("a text that breaks")


def test_the_first_ten_dead_threads_are_recorded(reported: list[threading.ExceptHookArgs]) -> None:
    """All are reported; of those that did not call sys.exit() the first ten are recorded,
    a hostile one by its type.
    """
    _dies(SystemExit(3))  # Python's hook ignores it, too
    _dies(_HostileError())
    for index in range(12):
        _dies(ValueError(), f"loader-{index}")
    first, *others = process_state.get_thread_failures()
    assert first.exception.type.endswith("_HostileError")
    assert [failure.thread for failure in others] == [f"loader-{index}" for index in range(9)]
    assert [type(args.exc_value) for args in reported] == [
        SystemExit,
        _HostileError,
        *[ValueError] * 12,
    ]


def test_another_hook_stays_when_ours_is_undone(
    reported: list[threading.ExceptHookArgs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that was set after ours stays when ours is undone."""
    undo = process_state.watch_threads()
    with monkeypatch.context() as patched:
        patched.setattr(threading, "excepthook", print)
        undo()
        assert threading.excepthook is print
    undo()


# --- collectives ----------------------------------------------------------------------------------


@pytest.fixture
def progress() -> Iterator[Callable[[], CollectiveProgress]]:
    """Return the progress of the process group of a job of one process when no collective runs.

    torch notes the end of a collective a moment after the call's return, on a busy machine not at
    all, and keeps what it has of earlier groups.
    """
    earlier = process_state.read_collective_progress()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def look() -> CollectiveProgress:
        deadline = time.monotonic() + 5
        while True:
            found = list(process_state.read_collective_progress())
            for item in earlier:
                found.remove(item)
            (own,) = found
            if own.completed == own.enqueued or time.monotonic() > deadline:
                return own
            time.sleep(0.01)

    yield look
    dist.destroy_process_group()


def test_each_collective_counts_and_the_last_is_named(
    progress: Callable[[], CollectiveProgress],
) -> None:
    """Each collective of a real process group counts, and the last one is named."""
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    first = progress()
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    last = progress()
    assert (first.group, last.group) == ("default_pg", "default_pg")
    assert (first.last_operation, last.last_operation) == ("gloo:all_reduce", "gloo:broadcast")
    assert (first.enqueued, last.enqueued) == (1, 3)
    assert last.completed in {2, 3}


BROADCAST = Collective(6, "nccl:broadcast", "[[2, 3]] -> [[2, 3]]", "Float -> Float", "completed")
ALL_REDUCE = Collective(7, "nccl:all_reduce")
TRACE = {
    "pg_config": {"1": {"name": "1", "desc": "undefined", "ranks": "[0, 3]"}},
    "pg_status": {
        "0": {
            "last_enqueued_collective": 7,
            "last_started_collective": 7,
            "last_completed_collective": 6,
        },
        "1": {
            "last_enqueued_collective": 2,
            "last_started_collective": -1,
            "last_completed_collective": -1,
        },
        "2": {
            "last_enqueued_collective": -1,
            "last_started_collective": -1,
            "last_completed_collective": -1,
        },
    },
    "entries": [
        {
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:broadcast",
            "collective_seq_id": 6,
            "p2p_seq_id": 1,
            "input_sizes": [[2, 3]],
            "output_sizes": [[2, 3]],
            "input_dtypes": ["Float"],
            "output_dtypes": ["Float"],
            "state": "completed",
            "is_p2p": False,
        },
        {
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "collective_seq_id": 7,
        },
    ],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            json.dumps(TRACE),
            (
                CollectiveProgress("1", "", 2, 0, (), (0, 3)),
                CollectiveProgress("default_pg", "nccl:all_reduce", 7, 6, (BROADCAST, ALL_REDUCE)),
            ),
        ),
        ("{}", ()),
        ("", ()),
        ("no json", ()),
        ('{"pg_status": null, "entries": null}', ()),
        ('{"pg_status": {"0": {}, "1": null, "2": {"last_enqueued_collective": "x"}}}', ()),
        ('{"pg_status": {}, "entries": [{}, null, {"process_group": [], "pg_id": 0}]}', ()),
    ],
    ids=["two groups", "empty", "no text", "no json", "nulls", "odd states", "odd entries"],
)
def test_the_readable_parts_of_a_dump_are_used(
    text: str, expected: tuple[CollectiveProgress, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The readable parts of the flight recorder's dump are used;
    a group without collectives is left out.
    """
    monkeypatch.setattr(
        "torch._C._distributed_c10d._dump_fr_trace_json", lambda: text, raising=False
    )
    assert process_state.read_collective_progress() == expected


def _trace(backend: str, enqueued: int) -> dict[str, Any]:
    return {
        "pg_status": {
            "0": {"last_enqueued_collective": enqueued, "last_completed_collective": enqueued}
        },
        "entries": [
            {
                "pg_id": 0,
                "process_group": ["0", "default_pg"],
                "profiling_name": f"{backend}:all_reduce",
                "collective_seq_id": enqueued,
            }
        ],
    }


def _in_group(*name: str) -> dict[str, Any]:
    trace = _trace("gloo", 4)
    trace["entries"][0]["process_group"] = name
    return trace


@pytest.mark.parametrize(
    ("nccl", "other", "expected"),
    [
        (_trace("nccl", 9), {"entries": []}, [("default_pg", 9)]),
        (_trace("nccl", 9), _trace("gloo", 4), [("default_pg", 9), ("default_pg, gloo", 4)]),
        (_trace("nccl", 9), _trace("nccl", 9), [("default_pg", 9)]),
        ({}, _trace("gloo", 4), [("default_pg", 4)]),
        ({}, _in_group("3", "undefined"), [("3", 4)]),
        ({}, _in_group("3", "mesh_tp"), [("mesh_tp (3)", 4)]),
        ({}, _in_group("3"), [("3", 4)]),
    ],
    ids=[
        "nccl",
        "two devices",
        "one recorder, two names",
        "gloo",
        "undefined",
        "several groups",
        "no description",
    ],
)
def test_both_recorders_are_read(
    nccl: dict[str, Any],
    other: dict[str, Any],
    expected: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL fills one recorder, the other backends fill the second; neither hides the other.

    Several groups may have one description, so the group's own name is added.
    """
    monkeypatch.setattr(
        "torch._C._distributed_c10d._dump_nccl_trace_json", lambda: json.dumps(nccl), raising=False
    )
    monkeypatch.setattr(
        "torch._C._distributed_c10d._dump_fr_trace_json", lambda: json.dumps(other), raising=False
    )
    assert [
        (progress.group, progress.enqueued) for progress in process_state.read_collective_progress()
    ] == expected


def _hooked(calls: list[bool], completed: int = -1) -> str:
    """Return what a recorder that is hooked into a group tells after these calls; True:
    it is not seen to end.
    """
    trace = _trace("nccl2", len(calls))
    trace["pg_status"]["0"] = {
        "last_enqueued_collective": len(calls) - 1,
        "last_completed_collective": completed,
    }
    trace["entries"] = [
        {
            **trace["entries"][0],
            "collective_seq_id": number,
            "state": "scheduled",
            "retired": is_retired,
        }
        for number, is_retired in enumerate(calls, 1)
    ]
    return json.dumps(trace)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_hooked([True]), [(1, None)]),
        (_hooked([True] * 3), [(3, None)]),
        (_hooked([False]), [(1, 0)]),
        (_hooked([False] * 9, completed=7), [(9, 8)]),
    ],
    ids=["one, end unknown", "ends unknown", "the first one hangs", "the last one hangs"],
)
def test_collectives_are_numbered_by_their_entries(
    text: str, expected: list[tuple[int, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of collectives are those of the entries;
    a backend may not tell when a collective ends.
    """
    monkeypatch.setattr(
        "torch._C._distributed_c10d._dump_fr_trace_json", lambda: text, raising=False
    )
    assert [
        (progress.enqueued, progress.completed)
        for progress in process_state.read_collective_progress()
    ] == expected


def test_the_recorder_of_each_backend_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorders of the backends that the process's groups have are read;
    those of NCCL also without a group.
    """
    abort = Mock()
    backend = SimpleNamespace(name=lambda: "own", abort=abort)
    gloo = SimpleNamespace(name=lambda: "gloo", abort=Mock(side_effect=AssertionError))
    of_older_torch = type("ProcessGroupNCCL", (), {"abort": abort})()
    ask = Mock(
        side_effect=[backend, backend, gloo, of_older_torch, RuntimeError("no backend for mps")] * 3
    )
    group = Mock(_device_types=["cuda", "xpu", "cpu", "hpu", "mps"], _get_backend=ask)
    world = SimpleNamespace(pg_map={group: None, Mock(_device_types=[]): None})
    monkeypatch.setattr("torch.distributed.distributed_c10d._world", world)
    asked: list[str] = []

    def dump(backend: str = "gloo") -> str:
        """backend: name of the backend"""  # noqa: D415 - as torch's
        asked.append(backend)
        return json.dumps(_trace(backend, 7) if backend == "own" else {})

    monkeypatch.setattr(
        "torch._C._distributed_c10d._dump_nccl_trace_json", lambda: "{}", raising=False
    )
    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace_json", dump, raising=False)
    assert [
        (item.group, item.enqueued, item.last_operation)
        for item in process_state.read_collective_progress()
    ] == [("default_pg", 7, "own:all_reduce")]
    assert asked == ["nccl", "nccl-lazy", "nccl2", "own", "gloo"]
    assert backends_that_abort() == [abort, abort]


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks"),
    reason="torch 2.15 does it: `make newest`",
)
def test_a_custom_backends_recorder_is_found() -> None:
    """Torch hooks a recorder into a group of any backend, which is found;
    it does not see the collectives end.
    """

    class Ended(dist.Work):
        def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - torch's signature
            return True

    class Own(c10d.Backend):  # type: ignore[misc]
        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return "own"

        def allreduce(self, *_: Any) -> Ended:
            return Ended()

    made: list[Own] = []

    def create(_store: Any, rank: int, size: int, _timeout: Any) -> Own:
        made.append(Own(rank, size))  # torch keeps its native half only
        return made[-1]

    dist.Backend.register_backend("own", create, devices=["cpu"])
    dist.init_process_group("own", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            dist.all_reduce(torch.ones(3))
        (progress,) = (
            item
            for item in process_state.read_collective_progress()
            if item.last_operation == "own:all_reduce"
        )
        assert len(backends_that_abort()) == 1
    finally:
        dist.destroy_process_group()
    assert (progress.group, progress.enqueued, progress.completed) == ("default_pg", 2, None)
    assert [entry.sequence for entry in progress.last] == [1, 2]


def test_a_state_survives_json_within_limits(
    reported: list[threading.ExceptHookArgs], progress: Callable[[], CollectiveProgress]
) -> None:
    """A state survives JSON; texts and stacks are cut to a message's limits."""
    dist.all_reduce(torch.ones(1))
    own = progress()
    assert from_message({}) == ((), (), None)
    _dies(ValueError("bad shard"))
    _dies(ValueError("x" * 10_000))
    message: dict[str, Any] = json.loads(
        json.dumps(
            to_message(
                process_state.read_collective_progress(), process_state.get_thread_failures()
            )
        )
    )
    collectives, (first, second), _ = from_message(message)
    assert own in collectives
    assert collectives == process_state.read_collective_progress()
    short, long = process_state.get_thread_failures()
    assert _facts(first) == _facts(short)
    assert (second.thread, second.exception.message) == (long.thread, "x" * 2000)


def _facts(failure: ThreadFailure) -> tuple[object, ...]:
    exception = failure.exception
    # the lines around a frame stay in the process
    frames = [(frame.file, frame.line, frame.function, frame.code) for frame in exception.frames]
    return (failure.thread, failure.timestamp_ns, exception.type, exception.message, frames)


# --- the GPU --------------------------------------------------------------------------------------


def _has_gpu(monkeypatch: pytest.MonkeyPatch, properties: Callable[[int], Any]) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


@pytest.mark.parametrize(
    ("properties", "uuid"),
    [
        (lambda: SimpleNamespace(uuid="8f3a-1"), "GPU-8f3a-1"),
        (lambda: SimpleNamespace(uuid="GPU-8f3a-1"), "GPU-8f3a-1"),
        (SimpleNamespace, ""),
        (Mock(side_effect=RuntimeError("CUDA error: unspecified launch failure")), ""),
    ],
)
def test_a_gpus_uuid_has_nvidia_smis_format(
    properties: Callable[[], Any], uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format is nvidia-smi's; without one from torch, or if the driver raises,
    the field is empty.
    """
    assert process_state.read_gpu_uuid() == "", "CUDA is not initialised for the question"
    asked: list[int] = []
    current = threading.local()
    current.device = 1
    _has_gpu(monkeypatch, lambda device: asked.append(device) or properties())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    assert process_state.read_gpu_uuid() == uuid
    assert asked == [1]


@pytest.mark.parametrize(
    ("limit", "asked", "ask"),
    [
        (
            "GPU_UUID_TIMEOUT_SECONDS",
            "torch.cuda.get_device_properties",
            process_state.read_gpu_uuid,
        ),
        (
            "FILE_SYSTEMS_TIMEOUT_SECONDS",
            "os.statvfs",
            lambda: _state(OSError(5, "Input/output error", "/data")).file_systems,
        ),
        (
            "FLIGHT_RECORDER_TIMEOUT_SECONDS",
            "torch._C._distributed_c10d._dump_fr_trace_json",
            process_state.read_collective_progress,
        ),
    ],
)
def test_a_stuck_driver_or_file_system_is_given_up(
    limit: str,
    asked: str,
    ask: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stuck driver or file system is given up; the document does without."""
    hangs = threading.Event()
    _has_gpu(monkeypatch, lambda _: None)
    monkeypatch.setattr(asked, lambda *_: hangs.wait(60), raising=False)
    monkeypatch.setattr(time_limits, limit, 0.1)
    began = time.monotonic()
    assert not ask()
    assert time.monotonic() - began < 30
    hangs.set()


def test_held_back_descriptors_are_closed_for_a_document() -> None:
    """They are closed when a document needs them,
    but not a file of the program's under one of their numbers.
    """
    process_state.release_files()
    process_state.hold_files_back()
    held = list(process_state._held_descriptors)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, held[0])
    process_state.release_files()
    os.fstat(held[0])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[1])
    os.close(null)
    os.close(held[0])
