"""What the recorder tells about the end of a rank that no agent started, and that left no exception.

No process that firstfault runs is its parent, so the signal that ended it is not known. The stacks tell of two: a fatal
signal (SIGSEGV, SIGABRT) and SIGTERM each write them to a file of its own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.model import TERMINATED_ALONE, SentSignal, StackDump, WorkerError

if TYPE_CHECKING:
    from pathlib import Path

    from firstfault.recorder.folder import NodeFolder

_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
}
"""By faulthandler's words."""
_MAX_BYTES = 64 * 1024


def with_its_end(failure: WorkerError, folder: NodeFolder) -> WorkerError:
    """Return the failure of a rank with the signal that ended it; without stacks it stays a SIGKILL."""
    round_, local_rank = failure.place.round, failure.place.local_rank or 0
    fatal, asked = _tail(folder.fatal_stacks(round_, local_rank)), _tail(folder.stacks(round_, local_rank))
    found = _FATAL.search(fatal)
    signal = _SIGNALS.get(found[1], "") if found else "SIGTERM" if asked else ""
    if signal:
        sent = (SentSignal(signal, TERMINATED_ALONE),) if signal == "SIGTERM" else ()
        failure = replace(
            failure,
            code="USER:Stopped" if sent else f"USER:{signal}",
            message=f"rank {failure.rank} was {'terminated' if sent else 'killed'} by {signal}",
            signal=signal,
            sent_signals=sent,
            stack_dumps=(StackDump(failure.place.pid, failure.rank, fatal if found else asked),),
        )
    return replace(failure, fingerprint=fingerprint_of(failure))


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_MAX_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""
