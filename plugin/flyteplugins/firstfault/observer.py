"""Records the exception of a task of Flyte 2 in its worker,
before ``a0`` turns it into text and exits with 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import firstfault_start
from firstfault.decision_mode import ACT, OBSERVE, read_decision_mode

_PROGRAM = "a0"
_SCRIPT_TASK = "python_script.execute_script"
"""The task of ``flyte run python-script``: it starts the script as a program."""


class FailureObserver:
    """An observer for `flyte._observe`, which Flyte calls around each task function."""

    def __init__(self) -> None:
        self._has_begun = False

    @contextmanager
    def task_span(self, info: Any, recorder: Any) -> Iterator[None]:
        """Record the exception that has left the task function of this process."""
        # The first task is the pod's. It may run further tasks in this process, and retry or handle
        # their exceptions.
        is_inner, self._has_begun = self._has_begun, True
        if info.name == _SCRIPT_TASK:
            # the script is this worker's program, and records its own exception first
            os.environ[firstfault_start.WORKER_VARIABLE] = str(os.getpid())
        handled = sys.exc_info()[1]
        yield
        if not is_inner:
            _record(recorder.error or _find_in_flight(handled))

    def step_span(self, _info: Any, _recorder: Any) -> AbstractContextManager[None]:
        """Do nothing: a step's exception leaves the task function, or the task handles it."""
        return nullcontext()


def _find_in_flight(handled: BaseException | None) -> BaseException | None:
    """Return the exception that is leaving the task although Flyte doesn't report it,
    such as CancelledError.

    Flyte reports subclasses of Exception alone. For KeyboardInterrupt this is the last place to see
    it: a0's command line turns it into an exit. A SystemExit is recorded where the program calls
    it.

    `handled`: the one that was handled around the task before it began.
    """
    error = sys.exc_info()[1]
    return None if error is handled or isinstance(error, SystemExit) else error


def _record(error: BaseException | None) -> None:
    from firstfault_torch.torchrun.script import (  # noqa: PLC0415 - only a failure needs it
        record_exception,
    )

    if error is not None:
        record_exception(error)


def register() -> None:
    """Observe the task if an agent has started this ``a0``. Flyte calls this
    before it loads the task.
    """
    if [os.getpid()] == firstfault_start.IN_PROGRAM and Path(sys.argv[0]).name == _PROGRAM:
        from flyte._internal.runtime import io  # noqa: PLC0415 - loaded by then
        from flyte._observe import register_observer  # noqa: PLC0415 - as above

        register_observer(FailureObserver())
        upload = io.upload_error

        # Outside of the task function, such as for outputs of a wrong type, a0 uploads the error
        # and exits with 0, and only on rank 0. Flyte looks the function up when it handles the
        # exception.
        async def record_and_upload(*arguments: Any, **options: Any) -> str:
            if (error := sys.exc_info()[1]) is not None:
                _handle_outside_of_task(error)
            return str(await upload(*arguments, **options))

        io.upload_error = record_and_upload


def _handle_outside_of_task(error: BaseException) -> None:
    """Record an error after which a0 exits with 0. The agent fails the attempt, unlike Flyte."""
    mode = read_decision_mode()
    if mode == ACT:
        _record(error)
    elif mode == OBSERVE:
        from firstfault_torch.guard import logger  # noqa: PLC0415 - only a failure needs it

        logger.warning("observed: would have failed the attempt, whose pods exit with 0: %s", error)
