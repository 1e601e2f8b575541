"""The worker processes of a node from their agent's side: asking them, stopping them, whether they can finish."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from firstfault_torch.agent.agent_failures import Observation
from firstfault_torch.guard import guarded
from firstfault_torch.node.stack_dumps import ask_for_stacks
from firstfault_torch.node.worker_state import from_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault_torch.context import Recording
    from firstfault_torch.node.channel import AgentChannel

__all__ = ["EXIT_S", "observe", "stop_processes"]

_ASKING_S = 0.3
"""Longest wait for the workers' answers and stacks, seconds; one that holds the interpreter's lock answers nothing."""
EXIT_S = 8.0
"""How long a worker that has failed may take to end by itself, seconds: its exit handlers may have logs to upload."""
_POLL_S = 0.01


def observe(channel: AgentChannel | None, recording: Recording, pids: dict[int, int]) -> dict[int, Observation]:
    """Return where living workers stand, and what only they know, by local rank; within a fraction of a second.

    An exception that is still inside the task function is not in it: the worker writes a document of its own. One after
    the other: faulthandler reads the frames of all threads without the interpreter's lock, and a worker in which
    another thread runs meanwhile, to answer the other question, may die of it.
    """
    files = recording.files
    if channel is None or files is None or not pids:
        return {}
    stacks: dict[int, str] = {}
    with guarded("asking workers for their stacks"):
        stacks = ask_for_stacks(files, recording.round, pids, _ASKING_S)
    answers = channel.ask(recording.round, pids, _ASKING_S)
    return {rank: Observation(stacks.get(rank, ""), *from_message(answers.get(rank, {}))) for rank in pids}


def stop_processes(
    processes: Sequence[Any], sent: signal.Signals, *, spare: frozenset[int] = frozenset(), seconds: float
) -> None:
    """End all processes: by the signal, and what is left after `seconds` by SIGKILL.

    Args:
        processes: in order of local rank.
        sent: the signal.
        spare: local ranks that have failed and end by themselves; their exit handlers have EXIT_S.
        seconds: for all the others together.
    """
    others = [process for rank, process in enumerate(processes) if rank not in spare]
    for process in others:
        if process.exitcode is None:
            _send(process, sent)
    began = time.monotonic()
    _end(others, began + seconds, seconds)
    _end(processes, began + max(seconds, EXIT_S), seconds)


def _end(processes: Sequence[Any], deadline: float, seconds: float) -> None:
    """Wait until processes have ended, and end those that have not by the deadline.

    One in uninterruptible sleep does not even hear SIGKILL: after `seconds` it is left to torch, which gives it up.
    """
    _wait(processes, deadline)
    left = [process for process in processes if process.exitcode is None]
    for process in left:
        _send(process, signal.SIGKILL)
    _wait(left, time.monotonic() + seconds)


def _wait(processes: Sequence[Any], deadline: float) -> None:
    while time.monotonic() < deadline and any(process.exitcode is None for process in processes):
        time.sleep(_POLL_S)


def _send(process: Any, number: signal.Signals) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        return  # it has just ended
