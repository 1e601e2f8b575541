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
DESCRIPTOR_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 17: "pread64", 18: "pwrite64", 42: "connect", 43: "accept", 44: "sendto",
        45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 73: "flock", 74: "fsync", 288: "accept4",
    },
    "aarch64": {
        63: "read", 64: "write", 67: "pread64", 68: "pwrite64", 203: "connect", 202: "accept", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 32: "flock", 82: "fsync", 242: "accept4",
    },
}  # fmt: skip
"""System calls that may wait, by machine and number; their first argument is a descriptor."""
OTHER_CALLS = {
    "x86_64": {
        7: "poll", 23: "select", 35: "nanosleep", 61: "wait4", 230: "clock_nanosleep", 232: "epoll_wait",
        247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait", 56: "openat", 72: "pselect6", 73: "ppoll", 95: "waitid", 101: "nanosleep",
        115: "clock_nanosleep", 260: "wait4",
    },
}  # fmt: skip
"""Further calls that may wait. Without futex:
a thread that waits for a lock doesn't show who holds it.
"""
MAX_FINDINGS = 3
CLOCK_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources used so far by a worker and its descendants."""

    cpu_seconds: float
    io_bytes: int


def measure_usage(pid: int) -> Usage:
    """Return the resources used by a process and its descendants;
    zero where /proc is unreadable.
    """
    cpu = read = 0
    for each in (pid, *_list_descendants(pid)):
        fields = _read_stat(each)
        # proc(5): utime, stime
        cpu += sum(map(int, fields[11:13])) if len(fields) > 12 else 0  # noqa: PLR2004
        # proc(5): rchar and wchar count the bytes of all read and write calls, pipes and cached
        # files included.
        read += sum(
            int(line.split()[1])
            for line in _read_lines(each, "io")
            if line[:6] in {b"rchar:", b"wchar:"}
        )
    return Usage(cpu / CLOCK_TICKS_PER_SECOND, read)


def read_kernel_state(pid: int) -> list[str]:
    """Return findings about a worker that is stopped or blocked, and about its descendants."""
    found = [_read_state(pid)]
    # A traced process runs or sleeps between its stops, so its state alone doesn't show the
    # debugger.
    tracer = next(
        (line.split()[1] for line in _read_lines(pid, "status") if line.startswith(b"TracerPid:")),
        b"0",
    )
    found += ["is held by a debugger"] if tracer != b"0" and not found[0] else []
    for child in _list_descendants(pid):
        state = "has ended" if _read_stat(child)[:1] == [b"Z"] else _read_state(child)
        name = b"".join(_read_lines(child, "comm")).decode(errors="replace")
        found += [f"its process {child} ({name}) {state}"] if state else []
    return list(filter(None, found))[:MAX_FINDINGS]


def describe_wait(pid: int) -> str:
    """Return the system call in which a process's main thread waits, such as "waits in read of a
    pipe", or "" if it waits in no known system call.

    Reading it neither stops nor interrupts the process.
    """
    before = _read_lines(pid, "syscall")
    time.sleep(KERNEL_STATE_POLL_SECONDS)
    # proc_pid_syscall(5): the number, the arguments, and where the call was made; "running" outside
    # of calls. Equal lines: it's the same call, or at least the same one in a loop.
    fields = b" ".join(before).split()
    if before != _read_lines(pid, "syscall") or not fields or not fields[0].isdigit():
        return ""
    machine = os.uname().machine
    number = int(fields[0])
    if name := OTHER_CALLS.get(machine, {}).get(number):
        return f"waits in {name}"
    if not (name := DESCRIPTOR_CALLS.get(machine, {}).get(number)):
        return ""
    try:
        target = os.readlink(f"/proc/{pid}/fd/{int(fields[1], 16)}")  # noqa: PTH115 - a text
    except (OSError, ValueError):
        return f"waits in {name}"
    kind = target.partition(":[")[0]
    return f"waits in {name} of {f'a {kind}' if kind != target else target}"


def _read_state(pid: int) -> str:
    fields = _read_stat(pid)
    if fields[:1] == [b"D"]:
        # a short time in the kernel is normal: only a state that lasts is a finding
        time.sleep(KERNEL_STATE_POLL_SECONDS)
        fields = _read_stat(pid)
    state = KERNEL_STATES.get(fields[0], "") if fields else ""
    # The kernel function that blocks; "0" where the kernel doesn't reveal it.
    channel = (
        b"".join(_read_lines(pid, "wchan")).decode(errors="replace") if fields[:1] == [b"D"] else ""
    )
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
    # proc(5): the name in parentheses may contain spaces and parentheses; the state follows the
    # last one.
    return b" ".join(_read_lines(pid, "stat")).rpartition(b")")[2].split()


def _read_lines(pid: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().splitlines()
    except OSError:
        return []
