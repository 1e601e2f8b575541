"""Asks the worker processes of a node for their state, and stops them."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from firstfault.recorder.left_processes import end_left_processes
from firstfault_torch.agent.death_documents import Observation
from firstfault_torch.budgets import ASKING_S, EXIT_S, STOP_POLL_S
from firstfault_torch.guard import guarded
from firstfault_torch.node.channel import from_message
from firstfault_torch.node.stack_dumps import ask_for_stacks, written_stacks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault_torch.context import Recording
    from firstfault_torch.node.channel import AgentChannel


def observe(channel: AgentChannel | None, recording: Recording, pids: dict[int, int]) -> dict[int, Observation]:
    """Return stacks and state of living workers by local rank, within a fraction of a second.

    An exception that is still inside the task function is not included: the worker documents it itself. Stacks and
    state are asked for one after the other: faulthandler reads the frames of all threads without the GIL, and may crash
    a worker in which another thread runs meanwhile.
    """
    files = recording.files
    if channel is None or files is None or not pids:
        return {}
    stacks: dict[int, str] = {}
    with guarded("asking workers for their stacks"):
        stacks = ask_for_stacks(files, recording.round, pids, ASKING_S)
    answers = channel.ask(recording.round, pids, ASKING_S)
    for rank in answers.keys() - stacks.keys():
        stacks[rank] = written_stacks(files, recording.round, rank)
    return {rank: Observation(stacks.get(rank, ""), *from_message(answers.get(rank, {}))) for rank in pids}


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
        leaving: local ranks whose exception is on record and on its way out; they get no signal, and no more time.
        seconds: for all the others together.
    """
    others = [process for rank, process in enumerate(processes) if rank not in spare]
    for rank, process in enumerate(processes):
        if rank not in spare | leaving and process.exitcode is None:
            _send(process, sent)
    began = time.monotonic()
    _end(others, began + seconds, seconds)
    _end(processes, began + max(seconds, EXIT_S), seconds)


def _end(processes: Sequence[Any], deadline: float, seconds: float) -> None:
    """Wait for processes to end, and kill those that still run at the deadline.

    SIGKILL does not end a process in uninterruptible sleep: after `seconds` it is left to torch, which gives up on it.
    """
    _wait(processes, deadline)
    left = [process for process in processes if process.exitcode is None]
    for process in left:
        _send(process, signal.SIGKILL)
    _wait(left, time.monotonic() + seconds)


def _wait(processes: Sequence[Any], deadline: float) -> None:
    while time.monotonic() < deadline and any(process.exitcode is None for process in processes):
        time.sleep(STOP_POLL_S)


def _send(process: Any, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return  # it has just ended


def end_what_workers_left(recording: Recording, seconds: float) -> None:
    """End the processes that this node's workers started, after the workers have ended; not those in other sessions.

    Args:
        recording: of the node.
        seconds: how long they may take after SIGTERM before they are killed.
    """
    if recording.files is not None:
        with guarded("ending the processes that workers have left"):
            end_left_processes(recording.files.path, seconds)
