"""The state that only the worker itself can read: the progress of its collectives, and its dead threads."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from firstfault.model import CollectiveProgress, ThreadFailure
from firstfault_torch.capture import capture
from firstfault_torch.compat.torch_worker import flight_recorder
from firstfault_torch.guard import guarded

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["collective_progress", "thread_failures", "watch_threads"]

_MAX_THREADS = 10
_failures: list[ThreadFailure] = []


def watch_threads() -> Callable[[], None]:
    """Record exceptions that end a thread of this process, and report them as before; return a function that undoes it.

    They do not end the process, but may be why it waits for ever.
    """
    before = threading.excepthook

    def record(args: threading.ExceptHookArgs) -> None:
        with guarded("recording a thread's exception"):
            # SystemExit ends a thread on purpose; Python does not report it either
            if args.exc_type is not SystemExit and args.exc_value is not None and len(_failures) < _MAX_THREADS:
                name = args.thread.name if args.thread is not None else "unknown"
                _failures.append(ThreadFailure(name, time.time_ns(), capture(args.exc_value)))
        before(args)

    threading.excepthook = record

    def undo() -> None:
        if threading.excepthook is record:
            threading.excepthook = before

    return undo


def thread_failures() -> tuple[ThreadFailure, ...]:
    """Return the exceptions that have ended threads of this process, at most 10."""
    return tuple(_failures)


def collective_progress() -> tuple[CollectiveProgress, ...]:
    """Return each process group's last collectives from torch's flight recorder; empty if it has none."""
    dump = flight_recorder()
    try:
        trace = json.loads(dump()) if dump is not None else {}
    except (RuntimeError, ValueError):
        return ()
    names = _last_operations(trace.get("entries") or ())
    found = []
    for group, status in sorted((trace.get("pg_status") or {}).items()):
        with contextlib.suppress(KeyError, ValueError, TypeError):
            enqueued, completed = int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
            if enqueued > 0:
                description, operation = names.get(str(group), (str(group), ""))
                found.append(CollectiveProgress(description, operation, enqueued, max(completed, 0)))
    return tuple(found)


def _last_operations(entries: Any) -> dict[str, tuple[str, str]]:
    """Return process group number to description and last operation."""
    found: dict[str, tuple[str, str]] = {}
    for entry in entries:
        with contextlib.suppress(KeyError, TypeError, IndexError):
            group = entry["process_group"]
            found[str(entry["pg_id"])] = (str(group[1] or group[0]), str(entry["profiling_name"]))
    return found
