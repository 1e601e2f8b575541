"""Records when worker processes end."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from firstfault_torch import time_limits
from firstfault_torch.agent.deaths import WorkerExit
from firstfault_torch.descriptors import KeptDescriptor
from firstfault_torch.guard import start_daemon, suppress_internal_errors


class ExitWatch:
    """Records when each of a node's worker processes ends, in order of local rank,
    and calls `wake` from its thread.

    It only watches: torch waits for the processes and reads their exit codes.
    """

    def __init__(self, processes: Sequence[Any], wake: Callable[[], None] = lambda: None) -> None:
        self._processes = list(processes)
        self._wake = wake
        self._descriptors = contextlib.ExitStack()
        descriptors = [_open_end_descriptor(process, self._descriptors) for process in processes]
        self._waiting = {item: index for index, item in enumerate(descriptors) if item is not None}
        # Only the watching thread writes it, and only adds; readers copy it in one call, so no lock
        # is needed.
        self._ended: dict[int, tuple[int, int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # without a thread a death has the time at which the agent looks
        with suppress_internal_errors("watching when workers end"):
            seconds = time_limits.THREAD_START_TIMEOUT_SECONDS
            self._thread = start_daemon(self._watch, "firstfault-deaths", seconds)

    @property
    def noticed(self) -> frozenset[int]:
        """The local ranks of processes known to have ended; any thread may ask."""
        return frozenset(self._ended)

    def ended(self) -> list[WorkerExit]:
        """Return all processes that ended, earliest first; of those noticed together,
        the ones that SIGTERM ended last.

        torch may have stopped them because of an earlier death before the watching thread ran.
        """
        found = []
        noticed = dict(self._ended)
        now = (time.time_ns(), time.monotonic_ns())
        for local_rank, process in enumerate(self._processes):
            # This reaps the process. It may have ended so recently that the watching thread hasn't
            # run yet: then the death has the time of this look.
            code = process.exitcode
            if code is None:
                continue
            wall_ns, monotonic_ns = noticed.get(local_rank, now)
            found.append(WorkerExit(local_rank, process.pid, code, wall_ns, monotonic_ns))
        return sorted(
            found,
            key=lambda worker_exit: (
                worker_exit.monotonic_ns,
                worker_exit.signal == "SIGTERM",
                worker_exit.local_rank,
            ),
        )

    def stop(self) -> None:
        """End the watching thread, which must not run when the agent forks again."""
        self._stop.set()
        if self._thread is None:
            self._descriptors.close()
        else:
            # The thread closes the descriptors itself: closed here, their numbers could be reused
            # while it still polls. It notices the event at the end of a poll, so twice that time is
            # enough.
            self._thread.join(timeout=2 * time_limits.EXIT_WATCH_POLL_SECONDS)

    def _watch(self) -> None:
        waiting = self._waiting
        with self._descriptors:
            while waiting and not self._stop.is_set():
                ready = multiprocessing.connection.wait(
                    list(waiting), timeout=time_limits.EXIT_WATCH_POLL_SECONDS
                )
                # One time for all that are ready. If this thread was late, their order is unknown,
                # and `ended` sorts them by signal.
                now = (time.time_ns(), time.monotonic_ns())
                for descriptor in ready:
                    # A descriptor of an ended process stays readable: waiting for it again would
                    # spin.
                    index = waiting.pop(descriptor)
                    self._ended[index] = now
                if ready:
                    # After the deaths are stored: the main thread clears the event before it looks.
                    self._wake()


def _open_end_descriptor(process: Any, opened: contextlib.ExitStack) -> Any:
    """Return an object that becomes readable when the process ends; `opened` may close it.

    The fallback, for a kernel or sandbox without pidfds, is multiprocessing's sentinel. The
    process's own children inherit that pipe: while a data loader lives, it doesn't become readable.
    """
    # A pidfd becomes readable when the process is a zombie, and reading it reaps nothing: torch can
    # still do that.
    try:
        descriptor = KeptDescriptor(os.pidfd_open(process.pid))
    except (OSError, AttributeError):  # AttributeError: Python was built with old kernel headers
        return process.sentinel
    opened.callback(descriptor.close)
    return descriptor.number
