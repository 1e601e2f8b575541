"""Records the exception of a task of Flyte 2 in its worker, before ``a0`` turns it into text and exits with 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import firstfault_start

_SCRIPT_TASK = "execute_script"
"""The task of ``flyte run python-script``: it starts the script as a program."""


class FailureObserver:
    """An observer for `flyte._observe`, which Flyte calls around the task function."""

    @contextmanager
    def task_span(self, info: Any, recorder: Any) -> Iterator[None]:
        """Record the exception that has left the task function."""
        if info.name.rpartition(".")[2] == _SCRIPT_TASK:
            # the script is this worker's program, and records its own exception first
            os.environ[firstfault_start.WORKER_VARIABLE] = str(os.getpid())
        yield
        if recorder.error is not None:
            from firstfault_torch.torchrun.script import fails  # noqa: PLC0415 - only a failure needs it

            fails(recorder.error)

    def step_span(self, info: Any, recorder: Any) -> AbstractContextManager[None]:
        """Do nothing: a step's exception leaves the task function, or the task handles it."""
        del info, recorder
        return nullcontext()


def register() -> None:
    """Observe tasks if an agent has started this process; the entry point of ``flyte.plugins.types``, for its time."""
    if firstfault_start.IN_PROGRAM:
        from flyte._observe import register_observer  # noqa: PLC0415 - loaded by then

        register_observer(FailureObserver())
