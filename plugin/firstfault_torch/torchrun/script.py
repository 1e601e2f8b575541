"""Records the exception or exit that ends a worker that is a program. `firstfault_start` imports and calls it."""

from __future__ import annotations

import os

from firstfault_torch.compat.torch_worker import has_process_group
from firstfault_torch.engine import PlainEngine
from firstfault_torch.guard import guarded
from firstfault_torch.worker.recording import WorkerMonitor, current_monitor, monitor_of, record_end


def watch() -> None:
    """Begin to watch this process: its agent may ask it for its state."""
    with guarded("preparing to record"):
        _monitor()


def fails(error: BaseException) -> None:
    """Make a document about the exception that ends this process durable."""
    with guarded("recording an exception"):
        record_end(_monitor(), error, os.getppid())


def exits() -> None:
    """Record that this process ends by itself: if it still has a process group, its peers may wait for it."""
    with guarded("recording an exit"):
        if has_process_group():
            _monitor().exits(SystemExit(), is_kept=False)


def _monitor() -> WorkerMonitor:
    return current_monitor() or monitor_of(PlainEngine(), is_program=True)
