"""Asks worker processes for stacks and state, and stops them and what they started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
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
"""Those that workers lead which are programs, by process id; workers that are functions are in this process's."""


def collect_snapshots(
    channel: AgentChannel | None, node_context: NodeContext, pids: dict[int, int]
) -> dict[int, WorkerSnapshot]:
    """Return stacks and state of living workers by local rank, within a fraction of a second.

    An exception that is still inside the task function isn't included: the worker documents it itself. Stacks and
    state are requested one after another: faulthandler reads the frames of all threads without the GIL, and may crash
    a worker that runs another thread at that moment.
    """
    files = node_context.files
    if channel is None or files is None or not pids:
        return {}
    earlier_sizes = {rank: get_stack_size(files.worker(node_context.round, rank).stacks) for rank in pids}
    stacks: dict[int, str] = {}
    with suppress_internal_errors("asking workers for their stacks"):
        stacks = ask_for_stacks(files, node_context.round, pids, time_limits.WORKER_QUERY_TIMEOUT_SECONDS)
    answers = channel.ask(pids, time_limits.WORKER_QUERY_TIMEOUT_SECONDS)
    # If the program replaced the handler, the worker gets no signal, and writes its stacks before it answers. So its
    # file is complete once the answer has arrived.
    for rank in answers.keys() - stacks.keys():
        stacks[rank] = get_stack_tail(files.worker(node_context.round, rank).stacks, earlier_sizes[rank])
    found = {rank: answers.get(rank, {}) for rank in pids}
    return {
        rank: WorkerSnapshot(stacks.get(rank, ""), *from_message(answer), handled_from_message(answer))
        for rank, answer in found.items()
    }


def stop_processes(
    processes: Sequence[Any],
    sent: signal.Signals,
    *,
    spare: frozenset[int] = frozenset(),
    leaving: frozenset[int] = frozenset(),
    seconds: float,
) -> None:
    """Stop all processes by the signal, and by SIGKILL those that still run after `seconds`.

    Args:
        processes: in order of local rank.
        sent: the signal.
        spare: local ranks that have failed; they get no signal and have EXIT_S to exit by themselves.
        leaving: local ranks with a recorded exception that is on its way out; they get no signal, and no more time.
        seconds: for all remaining processes together.
    """
    others = [process for rank, process in enumerate(processes) if rank not in spare]
    for rank, process in enumerate(processes):
        # Checked right before each signal: `exitcode` polls with waitpid. While it is None the process isn't reaped, so
        # the kernel can't have given its number to another process.
        if rank not in spare | leaving and process.exitcode is None:
            _send(process, sent)
    # Siblings first: a failed worker may spend seconds in its exit handlers, but a sibling that ignores the signal must
    # not get that longer time. Both limits count from the same moment, so the total is the longer one.
    began = time.monotonic()
    _end(others, began + seconds, seconds)
    _end(processes, began + max(seconds, time_limits.FAILED_WORKER_EXIT_GRACE_SECONDS), seconds)


def _end(processes: Sequence[Any], deadline: float, seconds: float) -> None:
    """Wait for processes to end, and kill those that still run at the deadline.

    SIGKILL doesn't end a process in uninterruptible sleep: after `seconds` it is left to torch, which gives up on it.
    """

    def wait(until: float) -> list[Any]:
        while (left := [one for one in processes if one.exitcode is None]) and time.monotonic() < until:
            time.sleep(time_limits.STOP_POLL_SECONDS)
        return left

    for process in wait(deadline):
        _send(process, signal.SIGKILL)
    wait(time.monotonic() + seconds)


def _send(process: Any, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may just have ended
        process.send_signal(number) if hasattr(process, "send_signal") else os.kill(process.pid, number)


def kill_orphans(node_context: NodeContext, seconds: float) -> None:
    """End the processes that this node's workers started, after the workers have ended; not those in other sessions.

    They get SIGTERM, and SIGKILL after `seconds`.
    """
    if node_context.files is not None:
        with suppress_internal_errors("ending the processes that workers have left"):
            kill_orphan_processes(node_context.files.path, seconds, frozenset(worker_sessions))
