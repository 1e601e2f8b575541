"""Reads from /proc why a worker makes no progress."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from firstfault_torch.time_limits import KERNEL_STATE_POLL_SECONDS

KERNEL_STATES = {
    b"T": "is stopped by a signal (SIGSTOP)",
    b"t": "is held by a debugger",
    b"D": "is blocked in the kernel",
}
MAX_FINDINGS = 3
CLOCK_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources used so far by a worker and its descendants."""

    cpu_seconds: float
    io_bytes: int


def measure_usage(pid: int) -> Usage:
    """Return the resources used by a process and its descendants; zero where /proc is unreadable."""
    cpu = read = 0
    for each in (pid, *_list_descendants(pid)):
        fields = _read_stat(each)
        cpu += sum(map(int, fields[11:13])) if len(fields) > 12 else 0  # noqa: PLR2004 - proc(5): utime, stime
        # proc(5): rchar and wchar count the bytes of all read and write calls, pipes and cached files included.
        read += sum(int(line.split()[1]) for line in _read_lines(each, "io") if line[:6] in {b"rchar:", b"wchar:"})
    return Usage(cpu / CLOCK_TICKS_PER_SECOND, read)


def read_kernel_state(pid: int) -> list[str]:
    """Return findings about a worker that is stopped or blocked, and about its descendants."""
    found = [_read_state(pid)]
    # A traced process runs or sleeps between its stops, so its state alone doesn't show the debugger.
    tracer = next((line.split()[1] for line in _read_lines(pid, "status") if line.startswith(b"TracerPid:")), b"0")
    found += ["is held by a debugger"] if tracer != b"0" and not found[0] else []
    for child in _list_descendants(pid):
        state = "has ended" if _read_stat(child)[:1] == [b"Z"] else _read_state(child)
        name = b"".join(_read_lines(child, "comm")).decode(errors="replace")
        found += [f"its process {child} ({name}) {state}"] if state else []
    return list(filter(None, found))[:MAX_FINDINGS]


def _read_state(pid: int) -> str:
    fields = _read_stat(pid)
    if fields[:1] == [b"D"]:
        # a short time in the kernel is normal: only a state that lasts is a finding
        time.sleep(KERNEL_STATE_POLL_SECONDS)
        fields = _read_stat(pid)
    state = KERNEL_STATES.get(fields[0], "") if fields else ""
    # The kernel function that blocks; "0" where the kernel doesn't reveal it.
    channel = b"".join(_read_lines(pid, "wchan")).decode(errors="replace") if fields[:1] == [b"D"] else ""
    return f"{state} ({channel})" if channel.strip("0") else state


def _list_descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        # Linux lists a child under the thread that forked it, such as a data loader's.
        tasks = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    for task in tasks:
        for child in b" ".join(_read_lines(pid, f"task/{task}/children")).split():
            found += [int(child), *_list_descendants(int(child))]
    return found


def _read_stat(pid: int) -> list[bytes]:
    # proc(5): the name in parentheses may contain spaces and parentheses; the state follows the last one.
    return b" ".join(_read_lines(pid, "stat")).rpartition(b")")[2].split()


def _read_lines(pid: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().splitlines()
    except OSError:
        return []
