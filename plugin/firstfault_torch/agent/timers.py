"""The agent's side of the watchdog: keeps the deadlines of its workers,
and reports which have expired.

It takes the place of torch's FileTimerServer, which sends the signal for the worker to its own
process too, compares deadlines with the wall clock, and reads its FIFO once a second. It
understands torch's clients.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from firstfault.recorder.folder import NodeFolder
from firstfault_torch import time_limits
from firstfault_torch.guard import logger, run_loop, start_daemon, suppress_internal_errors
from firstfault_torch.watchdog import Watchdog
from firstfault_torch.watchdog.timers import (
    HEARTBEAT_VARIABLE,
    TIMERS_VARIABLE,
    TORCH_ENABLED_VARIABLE,
    TORCH_FILE_VARIABLE,
    Timer,
    parse_line,
)

_CHUNK_BYTES = 64 * 1024
_ANCESTORS = 8
"""Generations between a process that sets a deadline and its worker."""


def resolve_watchdog(
    asked: Watchdog | None, environment: Mapping[str, str] = os.environ
) -> Watchdog | None:
    """Return the watchdog that the user requested, also by torch's variable, or None."""
    if asked is None and environment.get(TORCH_ENABLED_VARIABLE) == "1":
        return Watchdog()
    return asked


def open_timers(
    files: NodeFolder | None, round_: int, environment: Mapping[str, str] = os.environ
) -> TimerServer | None:
    """Return a server for a round's workers, or warn and return None if no FIFO could be made.

    It tries the path that the user gave to torch, then the node's folder.
    """
    users = environment.get(TORCH_FILE_VARIABLE)
    paths = [Path(users)] if users else []
    paths += [files.deadlines_fifo(round_)] if files is not None else []
    problems: list[str] = []
    for path in paths:
        try:
            return TimerServer(path)
        except OSError as error:
            problems.append(str(error))
    why = "; ".join(problems) or "the node has no folder"
    logger.warning("the watchdog is off on this node: can't create a FIFO (%s)", why)
    return None


class TimerServer:
    """Reads the deadlines of one round's workers from a FIFO,
    which replaces an earlier one and is removed by `stop`.

    Raises:
        OSError: the FIFO can't be made, or another kind of file is there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._timers: dict[tuple[int, str], Timer] = {}
        self._expired: Callable[[dict[int, Timer]], None] = lambda _: None
        self._pids: frozenset[int] = frozenset()
        self._rest = b""
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._progress = time.time()
        if path.exists() and not path.is_fifo():
            raise FileExistsError(f"{path} exists already, and isn't a FIFO")
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        try:
            # also for writing: without a writer the FIFO would be readable for ever
            self._fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            path.unlink()
            raise
        self._stop_reader, self._stop_writer = os.pipe()
        _living.add(self)

    def environment(self, asked: Watchdog) -> dict[str, str]:
        """Return the variables for the workers."""
        timeout = "" if asked.heartbeat_timeout is None else str(asked.heartbeat_timeout)
        paths = dict.fromkeys((TIMERS_VARIABLE, TORCH_FILE_VARIABLE), str(self.path))
        return {**paths, HEARTBEAT_VARIABLE: timeout}

    def start(self, pids: Iterable[int], expired: Callable[[dict[int, Timer]], None]) -> None:
        """Watch the workers with these process ids, after they were forked:
        they must not inherit the thread's locks.

        The thread calls `expired` with the expired deadline of each worker, by process id.
        """
        self._pids = frozenset(pids)
        self._expired = expired
        self._thread = start_daemon(
            self._run, "firstfault-timers", time_limits.THREAD_START_TIMEOUT_SECONDS
        )

    def stop(self) -> None:
        """End the watch, and remove the FIFO. torch's agent calls it, too,
        when it stops the workers.
        """
        if self._stopped.is_set() or self not in _living:
            return
        # The event first: the thread may be about to report an expired deadline. Then the hang-up
        # of the pipe wakes it.
        self._stopped.set()
        _living.discard(self)
        os.close(self._stop_writer)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(time_limits.WATCHDOG_JOIN_TIMEOUT_SECONDS)
        elif self._thread is None:
            self._close()
        with contextlib.suppress(OSError):
            if self.path.is_fifo():
                self.path.unlink()

    def get_last_progress_time(self) -> int:
        """Return the Unix time of the watch's last check, in seconds, for torch's health check."""
        return int(self._progress if self._thread is not None else time.time())

    def forget(self) -> None:
        """Close a forked child's copies: a FIFO must not have a reader when the agent is gone."""
        for descriptor in (self._fifo, self._stop_reader, self._stop_writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # --- the watching thread ----------------------------------------------------------------------

    def _run(self) -> None:
        self._polled = time.monotonic()
        poll = select.poll()
        try:
            poll.register(self._fifo, select.POLLIN)
            poll.register(self._stop_reader, select.POLLIN | select.POLLHUP)
            run_loop(partial(self._watch, poll), "watching the workers' deadlines")
        finally:
            self._close()

    def _watch(self, poll: select.poll) -> bool:
        """Wait for the next deadline or line, and handle expired deadlines;
        return whether to continue.
        """
        if self._stopped.is_set():
            return False
        seconds = self._sleep_s()
        poll.poll(seconds * 1000)
        before = self._polled
        self._polled = time.monotonic()
        # Before the deadlines are compared: the worker may have ended its block in time, while this
        # thread slept.
        self._read()
        if self._polled - before > seconds + time_limits.FROZEN_WATCHDOG_SECONDS:
            self._postpone(self._polled - before)
        self._progress = time.time()
        expired = self._take_expired(self._polled)
        # `stop` may have been called since the check above: these workers are being stopped for
        # another reason.
        if expired and not self._stopped.is_set():
            with suppress_internal_errors("ending a worker at its deadline"):
                self._expired(expired)
        return True

    def _sleep_s(self) -> float:
        deadlines = [
            timer.deadline for timer in self._timers.values() if timer.deadline is not None
        ]
        if not deadlines:
            return time_limits.IDLE_WATCHDOG_POLL_SECONDS
        return max(0.0, min(min(deadlines) - time.monotonic(), time_limits.WATCHDOG_POLL_SECONDS))

    def _postpone(self, seconds: float) -> None:
        """Move all deadlines, because the workers may have been frozen together with this agent."""
        logger.warning(
            "postponing the watchdog's deadlines by %.1f s: the agent was frozen", seconds
        )
        for key, timer in self._timers.items():
            if timer.deadline is not None:
                self._timers[key] = replace(timer, deadline=timer.deadline + seconds)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._fifo, _CHUNK_BYTES)
            except BlockingIOError:
                return
            # A writer's line arrives whole, but this read may end in the middle of one.
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                try:
                    self._register(parse_line(line))
                except ValueError as error:
                    logger.warning("the watchdog received an invalid line: %s", error)

    def _register(self, timer: Timer) -> None:
        key = (timer.pid, timer.number)
        if timer.deadline is None:
            self._timers.pop(key, None)
        else:
            self._timers[key] = timer

    def _take_expired(self, now: float) -> dict[int, Timer]:
        """Return the earliest expired deadline of each worker,
        and forget all deadlines of those workers.
        """
        expired: dict[int, Timer] = {}
        timers = self._timers.values()
        due = [timer for timer in timers if timer.deadline is not None and timer.deadline <= now]
        for timer in sorted(due, key=lambda timer: timer.deadline or 0.0):
            worker = self._find_worker(timer.pid)
            if not timer.kills:
                logger.warning(
                    "process %d exceeded %r (not killed: kill=False)", timer.pid, timer.scope
                )
            elif worker is None:
                logger.warning(
                    "process %d exceeded %r (not killed: not a worker of this node)",
                    timer.pid,
                    timer.scope,
                )
            else:
                expired.setdefault(worker, timer)
        # The worker is killed once: its later deadlines would expire while it is being asked for
        # its stacks.
        gone = {timer.pid for timer in due if timer.kills}
        for timer in due:
            del self._timers[timer.pid, timer.number]
        self._timers = {key: timer for key, timer in self._timers.items() if timer.pid not in gone}
        return expired

    def _find_worker(self, pid: int) -> int | None:
        """Return the worker that is this process or one of its ancestors. Return None if no worker
        is, or if it has ended.
        """
        for _ in range(_ANCESTORS):
            if pid in self._pids:
                return pid
            try:
                pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                return None
        return None

    def _close(self) -> None:
        for descriptor in (self._fifo, self._stop_reader):
            os.close(descriptor)


_living: weakref.WeakSet[TimerServer] = weakref.WeakSet()


def _forget_all() -> None:
    for server in list(_living):
        server.forget()
    _living.clear()


os.register_at_fork(after_in_child=_forget_all)
