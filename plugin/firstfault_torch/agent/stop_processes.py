"""Asks worker processes for stacks and state, and stops them and what they started."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from firstfault.recorder.folder import get_stack_size, get_stack_tail
from firstfault.recorder.orphans import kill_orphan_processes
from firstfault_torch import time_limits
from firstfault_torch.agent.deaths import WorkerSnapshot
from firstfault_torch.guard import suppress_internal_errors
from firstfault_torch.node.channel import AgentChannel, from_message, handled_from_message
from firstfault_torch.node.stacks import ask_for_stacks
from firstfault_torch.node_context import NodeContext

worker_sessions: set[int] = set()
"""Process ids of workers that are programs and lead a session. Workers that are functions stay in
this process's session.
"""


def collect_snapshots(
    channel: AgentChannel | None, node_context: NodeContext, pids: dict[int, int]
) -> dict[int, WorkerSnapshot]:
    """Return stacks and state of living workers by local rank, within a fraction of a second.

    An exception that is still inside the task function isn't included: the worker documents it
    itself. Stacks and state are requested one after another: faulthandler reads the frames of all
    threads without the GIL, and may crash a worker that runs another thread at that moment.
    """
    files = node_context.files
    if channel is None or files is None or not pids:
        return {}
    earlier_sizes = {
        rank: get_stack_size(files.worker(node_context.round, rank).stacks) for rank in pids
    }
    stacks: dict[int, str] = {}
    with suppress_internal_errors("asking workers for their stacks"):
        stacks = ask_for_stacks(
            files,
            node_context.round,
            pids,
            time_limits.WORKER_QUERY_TIMEOUT_SECONDS,
        )
    answers = channel.ask(pids, time_limits.WORKER_QUERY_TIMEOUT_SECONDS)
    # If the program replaced the handler, the worker gets no signal, and writes its stacks before
    # it answers. So its file is complete once the answer has arrived.
    for rank in answers.keys() - stacks.keys():
        stacks[rank] = get_stack_tail(
            files.worker(node_context.round, rank).stacks, earlier_sizes[rank]
        )
    found = {rank: answers.get(rank, {}) for rank in pids}
    return {
        rank: WorkerSnapshot(
            stacks.get(rank, ""), *from_message(answer), handled_from_message(answer)
        )
        for rank, answer in found.items()
    }


class GracePeriod:
    """The moment before which no healthy worker is killed; any thread may move it,
    but only later.
    """

    def __init__(self) -> None:
        self.earliest_kill_time = -math.inf
        """By the monotonic clock."""

    def lengthen(self, seconds: float) -> None:
        """Let healthy workers have at least `seconds` from now on."""
        if seconds > 0:
            self.earliest_kill_time = max(self.earliest_kill_time, time.monotonic() + seconds)


class ProcessStop:
    """Stops processes by a signal, and by SIGKILL those that still run when their time is over.

    Args:
        processes: in order of local rank.
        sent: the signal.
        spare: local ranks that have failed; they get no signal and have EXIT_S to exit by
            themselves.
        leaving: local ranks with a recorded exception that is on its way out; they get no signal,
            and no more time.
        seconds: for all remaining processes together.
        grace: may be lengthened while the stop runs.
        find_extra_seconds: asked once before a healthy process is killed; returns for how long it
            may still run.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        processes: Sequence[Any],
        sent: signal.Signals,
        *,
        spare: frozenset[int] = frozenset(),
        leaving: frozenset[int] = frozenset(),
        seconds: float,
        grace: GracePeriod | None = None,
        find_extra_seconds: Callable[[], float] = float,
    ) -> None:
        self._processes = processes
        self._sent = sent
        self._spare = spare
        self._leaving = leaving
        self._seconds = seconds
        self._grace = grace or GracePeriod()
        self._find_extra_seconds = find_extra_seconds
        self._began = time.monotonic()
        self._signalled: set[int] = set()
        self._ended = False

    @property
    def kill_time(self) -> float:
        """When healthy processes are killed, by the monotonic clock; it may still move later."""
        return max(self._began + self._seconds, self._grace.earliest_kill_time)

    @property
    def _last_kill_time(self) -> float:
        return max(self._began + time_limits.FAILED_WORKER_EXIT_GRACE_SECONDS, self.kill_time)

    def run(self) -> None:
        """Stop the processes; to be called again if an exception of a signal
        handler has interrupted it.
        """
        # A process gets the signal once: its handler may be saving a checkpoint, and a second
        # signal would interrupt that and begin another one.
        if self._ended:
            return
        for rank, process in enumerate(self._processes):
            # Checked right before each signal: `exitcode` polls with waitpid. While it is None the
            # process isn't reaped, so the kernel can't have given its number to another process.
            if (
                rank not in self._spare | self._leaving | self._signalled
                and process.exitcode is None
            ):
                _send(process, self._sent)
                self._signalled.add(rank)
        # Siblings first: a failed worker may spend seconds in its exit handlers, but a sibling that
        # ignores the signal must not get that longer time. Both limits count from the same moment,
        # so the total is the longer one.
        others = [
            process for rank, process in enumerate(self._processes) if rank not in self._spare
        ]
        if self._wait(others, lambda: self.kill_time):
            self._grace.lengthen(self._find_extra_seconds())
        self._end(others, lambda: self.kill_time)
        self._end(self._processes, lambda: self._last_kill_time)
        self._ended = True

    def _end(self, processes: Sequence[Any], get_deadline: Callable[[], float]) -> None:
        """Wait for processes to end, and kill those that still run at the deadline.

        SIGKILL doesn't end a process in uninterruptible sleep: after a while it is left to torch,
        which gives up on it.
        """
        for process in self._wait(processes, get_deadline):
            if process.exitcode is None:
                _send(process, signal.SIGKILL)
        given_up = time.monotonic() + self._seconds
        self._wait(processes, lambda: given_up)

    def _wait(self, processes: Sequence[Any], get_deadline: Callable[[], float]) -> list[Any]:
        """Return the processes that still run at the deadline, which may move during the wait."""
        while (
            left := [one for one in processes if one.exitcode is None]
        ) and time.monotonic() < get_deadline():
            time.sleep(time_limits.STOP_POLL_SECONDS)
        return left


def _send(process: Any, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may just have ended
        (
            process.send_signal(number)
            if hasattr(process, "send_signal")
            else os.kill(process.pid, number)
        )


def kill_orphans(node_context: NodeContext, seconds: float) -> None:
    """End the processes that this node's workers started, after the workers have ended;
    not those in other sessions.

    They get SIGTERM, and SIGKILL after `seconds`.
    """
    if node_context.files is not None:
        with suppress_internal_errors("ending the processes that workers have left"):
            kill_orphan_processes(node_context.files.path, seconds, frozenset(worker_sessions))
