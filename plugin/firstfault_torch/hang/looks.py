"""What an agent sees of its workers while they stand still: their answers, and what the kernel tells of them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstfault.model import Progress
from firstfault_torch.time_limits import KERNEL_STATE_POLL_SECONDS

_STEADY = 3
"""Looks with progress after which a training has begun; its first steps may compile for long."""
_FIRST = 3
"""So many times longer the first steps may take."""
_STATES = {b"T": "is stopped by a signal (SIGSTOP)", b"t": "is held by a debugger", b"D": "is blocked in the kernel"}
_MOST_CHILDREN = 3
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Standstill:
    """Tells from look to look since when no worker of a node has made progress in its collectives."""

    since: float
    """Seconds of the monotonic clock."""
    looks: int = 0
    """With progress, so far."""
    first: float | None = None
    """When the first of them was."""
    moved: dict[int, float] = field(default_factory=dict)
    """By local rank: when its collectives last made progress, seconds of the monotonic clock."""
    _counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    _places: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By local rank: where the main thread is, and since when."""
    _answered: dict[int, float] = field(default_factory=dict)
    has_moved: bool = False
    """Whether there was progress at the last look."""

    def look(self, now: float, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the workers' answers to `PULSE`, by local rank; one that does not answer makes no progress."""
        self.has_moved = False
        for rank, answer in answers.items():
            counts = int(answer.get("begun", -1)), int(answer.get("ended", -1))
            if counts[0] >= 0 and self._counts.get(rank) != counts:  # below 0: its recorder did not answer
                self.has_moved |= self._counts.get(rank, (0, 0)) != counts
                self._counts[rank], self.moved[rank] = counts, now
            self._answered[rank] = now
            if self._places.get(rank, (None,))[0] != answer.get("at"):
                self._places[rank] = answer.get("at", 0), now
        if self.has_moved:
            self.looks += 1
            self.since = now
            self.first = now if self.first is None else self.first

    def skip(self, seconds: float) -> None:
        """Leave out a time in which this agent did not run: the pod or the machine was frozen."""
        self.since += seconds
        self.first = None if self.first is None else self.first + seconds
        self._places = {rank: (at, since + seconds) for rank, (at, since) in self._places.items()}

    def seconds(self, now: float) -> float:
        """Return how long no worker has made progress; of the first steps a third."""
        return (now - self.since) / (1 if self.looks >= _STEADY else _FIRST)

    def progress(self) -> Progress:
        """Return how far the workers came."""
        seconds = self.since - self.first if self.first is not None else 0.0
        return Progress(max(self.begun.values(), default=0), max(seconds, 0.0))

    @property
    def begun(self) -> dict[int, int]:
        """How many collectives each worker has begun, by local rank."""
        return {rank: begun for rank, (begun, _) in self._counts.items()}

    def silent(self, local_rank: int, now: float) -> float:
        """Return how long a worker has not answered."""
        return now - self._answered.get(local_rank, self.since)

    def stood(self, local_rank: int, now: float) -> float | None:
        """Return how long a worker's main thread has been at the same place at least; None: it does not answer."""
        place = self._places.get(local_rank)
        return now - place[1] if place is not None else None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a worker and the processes that it started have used so far."""

    cpu_seconds: float
    io_bytes: int


def usage(pid: int) -> Usage:
    """Return what a process and its descendants have used; zero where /proc does not tell."""
    cpu = read = 0
    for each in (pid, *_descendants(pid)):
        fields = _stat(each)
        cpu += sum(map(int, fields[11:13])) if len(fields) > 12 else 0  # noqa: PLR2004 - proc(5): utime, stime
        read += sum(int(line.split()[1]) for line in _lines(each, "io") if line[:6] in {b"rchar:", b"wchar:"})
    return Usage(cpu / _TICKS, read)


def told_by_kernel(pid: int) -> list[str]:
    """Return what the kernel tells of a worker that does not run, and of the processes that it started."""
    found = [_state(pid)]
    tracer = next((line.split()[1] for line in _lines(pid, "status") if line.startswith(b"TracerPid:")), b"0")
    found += ["is held by a debugger"] if tracer != b"0" and not found[0] else []
    for child in _descendants(pid):
        state = "has ended" if _stat(child)[:1] == [b"Z"] else _state(child)
        found += [f"its process {child} ({_name(child)}) {state}"] if state else []
    return list(filter(None, found))[:_MOST_CHILDREN]


def _state(pid: int) -> str:
    fields = _stat(pid)
    if fields[:1] == [b"D"]:
        time.sleep(KERNEL_STATE_POLL_SECONDS)  # a moment in the kernel is usual
        fields = _stat(pid)
    said = _STATES.get(fields[0], "") if fields else ""
    channel = b"".join(_lines(pid, "wchan")).decode(errors="replace") if fields[:1] == [b"D"] else ""
    return f"{said} ({channel})" if channel.strip("0") else said


def _name(pid: int) -> str:
    return b"".join(_lines(pid, "comm")).decode(errors="replace")


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    try:
        tasks = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    for task in tasks:
        for child in b" ".join(_lines(pid, f"task/{task}/children")).split():
            found += [int(child), *_descendants(int(child))]
    return found


def _stat(pid: int) -> list[bytes]:
    return b" ".join(_lines(pid, "stat")).rpartition(b")")[2].split()


def _lines(pid: int, name: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().splitlines()
    except OSError:
        return []
