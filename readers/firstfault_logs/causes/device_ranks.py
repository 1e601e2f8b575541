"""Find the rank of an unlabeled traceback from the GPU that its exception names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.processes import Processes
    from firstfault_logs.tracebacks import Traceback

_MAX_GPUS_PER_NODE = 16


@cache
def _own_device() -> re.Pattern[str]:
    """Match the number of the GPU of the process that raised an exception."""
    return re.compile(
        r"\bthread for device (?P<thread>\d{1,2})\b"
        r"|\bGPU (?P<gpu>\d{1,2})(?:;| has a total capacity)"
        r"|\bdevice='?cuda:(?P<tensor>\d{1,2})\b"
    )


def find_ranks_by_device(
    attempt: Attempt,
    processes: Processes,
    tracebacks: Sequence[Traceback],
) -> dict[int, Traceback]:
    """Return the last traceback of each rank that a GPU's number identifies.

    By convention, the process with local rank 3 uses GPU 3. If each process sees only its own GPU,
    all numbers are 0, so several numbers, or one above 0, show that the convention holds.
    """
    by_device: dict[int, Traceback] = {}
    for traceback in tracebacks:
        if (device := _find_device(traceback)) is None:
            return {}
        by_device[device] = _trim_message(traceback, tracebacks)
    world = max(attempt.world_size, 1 + max((one.rank or 0 for one in processes.all), default=0))
    if not by_device or by_device.keys() == {0} or max(by_device) >= min(world, _MAX_GPUS_PER_NODE):
        return {}
    ranks: dict[int, Traceback] = {}
    for device, traceback in by_device.items():
        first = attempt.find_first_rank((traceback.stream.file, traceback.stream.label.node))
        if first is None and (world > _MAX_GPUS_PER_NODE or attempt.size.nodes > 1):
            return {}
        ranks[(first or 0) + device] = traceback
    return ranks


def _trim_message(traceback: Traceback, tracebacks: Sequence[Traceback]) -> Traceback:
    """Return a traceback without lines of other processes below it,
    which the same exception of a peer doesn't have.
    """
    message, frames = traceback.exception.message, traceback.exception.frames
    shorter = [
        other.exception.message
        for other in tracebacks
        if other.exception.frames == frames and message.startswith(f"{other.exception.message}\n")
    ]
    if not shorter:
        return traceback
    return replace(traceback, exception=replace(traceback.exception, message=min(shorter, key=len)))


def _find_device(traceback: Traceback) -> int | None:
    devices = {
        int(number)
        for match in _own_device().finditer(traceback.text)
        for number in match.groups()
        if number is not None
    }
    return devices.pop() if len(devices) == 1 else None
