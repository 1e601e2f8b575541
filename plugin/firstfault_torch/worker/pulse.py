"""Whether this process makes progress, found without its main thread: cheap each time,
with stacks once it stops.

The first answer costs a healthy training next to nothing: torch's recorders count each group's
collectives, and the frames of the main thread are there anyway. The second one is asked for when no
worker of the node has made progress.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from typing import Any

from firstfault.utils.frames import get_current_frames
from firstfault_torch import watchdog
from firstfault_torch.compat.torch_worker import collective_counts
from firstfault_torch.guard import BackgroundCall
from firstfault_torch.node.channel import to_message
from firstfault_torch.time_limits import (
    FLIGHT_RECORDER_TIMEOUT_SECONDS,
    SNAPSHOT_FLIGHT_RECORDER_TIMEOUT_SECONDS,
)
from firstfault_torch.worker.process_state import get_thread_failures, read_collective_progress

_MAX_STACKS_BYTES = 12 * 1024
"""Bytes of the end of all threads' stacks: the main thread's comes last."""
_read_counts = BackgroundCall[tuple[int, int]](
    collective_counts, (-1, -1), seconds=FLIGHT_RECORDER_TIMEOUT_SECONDS
)
"""A recorder doesn't answer while a call of CUDA holds its lock."""


def pulse() -> dict[str, Any]:
    """Return how many collectives have begun and ended in this process,
    and where its main thread is.

    The counts cover all groups together, and are -1 if unknown. ``at`` is equal if the main thread
    is at the same place.
    """
    # A thread that is blocked in the recorder stays behind, and the next question doesn't start
    # another one.
    begun, ended = _read_counts()
    # documented, for debuggers
    frame = get_current_frames().get(threading.main_thread().ident or 0)
    # The main thread may run on while this one walks its frames. A mixture of two moments is
    # harmless: it differs from the place before, which is progress.
    at: list[tuple[int, int]] = []
    while frame is not None:
        at.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return {"begun": begun, "ended": ended, "at": hash(tuple(at))}


def snapshot() -> dict[str, Any]:
    """Return the state of this process as `firstfault_torch.node.channel.to_message` does,
    with its stacks.

    ``block`` is the name of the watchdog's block in which it is, or that it pauses.
    """
    with os.fdopen(
        os.memfd_create("firstfault-stacks"), "w+b", buffering=0
    ) as file:  # no disk may be full
        # this thread has the GIL, so no Python code runs while the stacks are written
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(max(file.tell() - _MAX_STACKS_BYTES, 0))
        stack = file.read().decode(errors="replace")
    return {
        **to_message(
            read_collective_progress(SNAPSHOT_FLIGHT_RECORDER_TIMEOUT_SECONDS),
            get_thread_failures(),
        ),
        "stack": stack,
        "block": watchdog.current_block(),
    }
