"""What a worker records about the space and the limits of its machine when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import pytest

from firstfault.model import FileSystem, SystemState
from firstfault.report import report_of
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job
from firstfault_torch.capture import capture
from firstfault_torch.worker import process_state as machine
from firstfault_torch.worker.process_state import system_state

if TYPE_CHECKING:
    from pathlib import Path

    from firstfault.model import Verdict

_GIB = 1 << 30
_EIO = "[Errno 5] Input/output error"
_FULL = FileSystem("/data", 0, 100 * _GIB, 7, 9)


def _verdict(kind: str, text: str, system: SystemState) -> Verdict:
    job = make_job(make_error(3, exception=kind, message=text, system=system))
    return run_strategy(get_strategy("evidence"), job)


def _state(error: BaseException) -> SystemState:
    return system_state(error, capture(error))


def test_the_path_of_an_error(tmp_path: Path) -> None:
    """The path's file system comes first, also if the file does not exist, and of a cause in a wrapper."""
    raised = RuntimeError("training failed")
    raised.__cause__ = OSError(28, "No space left on device", str(tmp_path / "no" / "file.pt"))
    found, *others = _state(raised).file_systems
    space = os.statvfs(tmp_path)
    assert (found.path, found.total_bytes) == (str(tmp_path / "no" / "file.pt"), space.f_frsize * space.f_blocks)
    assert {os.getcwd(), "/dev/shm"} <= {item.path for item in others}  # noqa: PTH109, S108


def test_a_full_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is recorded though Python finds no folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    found = _state(OSError(28, "No space left on device", str(tmp_path / "file.pt"))).file_systems
    assert found[0].path == str(tmp_path / "file.pt")


def test_a_failed_write_without_a_path() -> None:
    """The working folder and /dev/shm are recorded, with the number of open files."""
    found = _state(RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"))
    assert {os.getcwd(), "/dev/shm"} <= {item.path for item in found.file_systems}  # noqa: PTH109, S108
    assert found.open_files
    assert dict(found.limits).get("RLIMIT_NOFILE", 1) > 0


def test_other_failures_record_nothing() -> None:
    """An exception that no limit explains asks for nothing."""
    assert _state(KeyError("labels")) == SystemState()


def test_a_file_system_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is recorded without it."""
    release = threading.Event()
    monkeypatch.setattr(os, "statvfs", lambda _: release.wait(60))
    monkeypatch.setattr(machine, "FILE_SYSTEMS_S", 0.1)
    began = time.monotonic()
    assert _state(OSError(5, "Input/output error", "/data")).file_systems == ()
    assert time.monotonic() - began < 30
    release.set()


def test_hostile_names() -> None:
    """An OSError may carry anything as its path."""
    for name in (7, b"/\xff", "\x00", "/" + "x" * 5000):
        assert isinstance(_state(OSError(5, "error", name)), SystemState)


def test_limits_of_a_process() -> None:
    """A process records that its memory and its threads are limited; a limit above the machine's memory is none."""
    program = (
        "import json, os, resource\n"
        "from firstfault_torch.capture import capture\n"
        "from firstfault_torch.worker.process_state import system_state\n"
        "memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (memory // 2, memory // 2))\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (memory * 2, memory * 2))\n"
        "threads = min(limit for limit in (4711, resource.getrlimit(resource.RLIMIT_NPROC)[1]) if limit >= 0)\n"
        "resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))\n"
        'for error in (MemoryError(), RuntimeError("can\'t start new thread")):\n'
        "    print(json.dumps(system_state(error, capture(error)).limits))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        limits = dict(json.loads(line))
        assert {"RLIMIT_AS", "RLIMIT_NPROC"} <= set(limits)
        assert "RLIMIT_DATA" not in limits


@pytest.mark.parametrize(
    ("kind", "text", "system", "category"),
    [
        ("RuntimeError", "PytorchStreamWriter failed writing file data/0", SystemState((_FULL,)), "disk_full"),
        ("RuntimeError", "unexpected pos 704 vs 598", SystemState((FileSystem("/", 9, _GIB, 0, 7),)), "disk_full"),
        ("RuntimeError", "unexpected pos 704 vs 598", SystemState((FileSystem("/", _GIB, 2 * _GIB),)), "storage"),
        ("OSError", f"{_EIO}: '/mnt/x'", SystemState((FileSystem("/mnt/x", _GIB, 2 * _GIB), _FULL)), "storage"),
        ("OSError", f"{_EIO}: '/data'", SystemState((_FULL, FileSystem("/", _GIB, 2 * _GIB))), "disk_full"),
        ("MemoryError", "", SystemState(limits=(("RLIMIT_AS", 4 * _GIB),)), "config"),
        ("MemoryError", "", SystemState(), "host_oom"),
    ],
)
def test_the_category_uses_what_was_recorded(kind: str, text: str, system: SystemState, category: str) -> None:
    """A failed write is a full disk if the disk was full; a limited process did not use up the host's memory."""
    assert _verdict(kind, text, system).category == category


def test_the_report_shows_what_was_recorded() -> None:
    """The details name the full file system and the limits."""
    system = SystemState((_FULL, FileSystem("/", _GIB, 2 * _GIB)), (("RLIMIT_AS", 4 * _GIB), ("RLIMIT_NOFILE", 9)), 7)
    job = make_job(make_error(3, exception="OSError", message="[Errno 28] No space left on device", system=system))
    verdict = run_strategy(get_strategy("evidence"), job)
    facts = {fact.name: fact.value for fact in report_of(job, verdict, decide(verdict)).facts}
    assert facts["disk"] == "0 B of 100.0 GiB free at /data"
    assert facts["limits"] == "RLIMIT_AS 4.0 GiB, 7 of 9 files open"
