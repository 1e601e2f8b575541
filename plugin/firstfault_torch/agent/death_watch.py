"""Which of a node's workers ended, when, and with which exit code or signal.

torch elastic polls its workers and keeps one failure per node. `DeathWatch` waits on one descriptor per process, which
becomes readable the moment the process ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from firstfault_torch.budgets import WAKE_S
from firstfault_torch.guard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Death:
    """One worker process that ended."""

    local_rank: int
    pid: int
    exit_code: int
    """As in multiprocessing: negative for a signal."""
    wall_ns: int
    monotonic_ns: int

    @property
    def signal(self) -> str:
        """Name of the signal that killed it; empty if it exited."""
        return signal_name(-self.exit_code) if self.exit_code < 0 else ""


class DeathWatch:
    """Records the moment at which each of a node's worker processes ends.

    It only watches: torch waits for the processes and reads their exit codes.

    Args:
        processes: in order of local rank.
        wake: called from the watching thread when one has ended.
    """

    def __init__(self, processes: Sequence[Any], wake: Callable[[], None] = lambda: None) -> None:
        self._processes = list(processes)
        self._wake = wake
        self._descriptors = contextlib.ExitStack()
        descriptors = [_descriptor(process, self._descriptors) for process in processes]
        self._waiting = {item: index for index, item in enumerate(descriptors) if item is not None}
        self._ended: dict[int, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # without a thread a death has the time at which the agent looks
        with guarded("watching when workers end"):
            thread = threading.Thread(target=self._watch, name="firstfault-deaths", daemon=True)
            thread.start()
            self._thread = thread

    def ended(self) -> list[Death]:
        """Return all processes that ended, earliest first."""
        found = []
        for local_rank, process in enumerate(self._processes):
            code = process.exitcode
            if code is None:
                continue
            wall_ns, monotonic_ns = self._ended.get(local_rank) or (time.time_ns(), time.monotonic_ns())
            found.append(Death(local_rank, process.pid, code, wall_ns, monotonic_ns))
        return sorted(found, key=lambda death: (death.monotonic_ns, death.local_rank))

    def stop(self) -> None:
        """End the watching thread, which must not run when the agent forks again."""
        self._stop.set()
        if self._thread is None:
            self._descriptors.close()
        else:
            self._thread.join(timeout=2 * WAKE_S)

    def _watch(self) -> None:
        waiting = self._waiting
        with self._descriptors:
            while waiting and not self._stop.is_set():
                ready = multiprocessing.connection.wait(list(waiting), timeout=WAKE_S)
                now = (time.time_ns(), time.monotonic_ns())
                for descriptor in ready:
                    index = waiting.pop(descriptor)
                    self._ended[index] = now
                if ready:
                    self._wake()


def _descriptor(process: Any, opened: contextlib.ExitStack) -> Any:
    """Return what becomes readable when the process ends; `opened` closes it if need be.

    The fallback, for a kernel or sandbox without pidfds, is multiprocessing's sentinel. The process's own children
    inherit that pipe: while a data loader lives, it does not become readable.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except (OSError, AttributeError):  # AttributeError: Python was built with old kernel headers
        return process.sentinel
    opened.callback(os.close, descriptor)
    return descriptor


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, "SIG64" for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
