"""From an exception in a training process to its document."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from firstfault.exceptions.exceptions_in_text import format_exception
from firstfault.exceptions.first_cause import find_own_frames, join_frames
from firstfault.model import (
    CollectiveProgress,
    ExceptionInfo,
    HandledException,
    Place,
    Receipt,
    Resources,
    Subject,
    SystemState,
    WorkerError,
    Writer,
)
from firstfault.model.failure import CTRL_C
from firstfault.recorder.client import RecorderClient
from firstfault_torch import time_limits
from firstfault_torch.engine import Engine
from firstfault_torch.failures import torch_error_file
from firstfault_torch.failures.capture import (
    capture,
    describe_type,
    find_exception_behind_exit,
    safe_text,
)
from firstfault_torch.failures.failure_records import ErrorClass, failure_record
from firstfault_torch.guard import call_with_timeout, suppress_internal_errors
from firstfault_torch.node.document_writer import open_worker_spool, record_error
from firstfault_torch.node_context import NodeContext
from firstfault_torch.places import is_in_foreground
from firstfault_torch.worker import process_state
from firstfault_torch.worker.handled_exceptions import HandledExceptions, list_within
from firstfault_torch.worker.in_flight import get_moment, is_clean_exit

T = TypeVar("T")


class ExceptionDocuments:
    """The documents about exceptions of this process.

    `handled` lists the exceptions that the program handled before, or is None if they are unknown.
    """

    def __init__(
        self,
        engine: Engine,
        node_context: NodeContext,
        handled: HandledExceptions | None = None,
    ) -> None:
        self._engine = engine
        self._node_context = node_context
        self._handled = handled

    def write(
        self,
        error: BaseException,
        place: Place,
        *,
        in_flight: bool = False,
        held: bool = False,
    ) -> tuple[bytes, Receipt]:
        """Write a document about `error` and torch's error.json. Return document and receipt.

        Bounded by the upload deadline. Half of it may go into reading the exception: its
        ``__str__`` is the user's code and may block. An exception that is `in_flight` hasn't left
        the task function yet; torch's error.json is left alone. A document that is `held` stays on
        the node; the agent uploads it if the node fails.
        """
        began = time.monotonic_ns()
        process_state.release_files()
        wall_ns, monotonic_ns = get_moment(error)
        deadline_ns = began + int(self._node_context.upload_deadline_seconds * 1e9)
        source = error if is_clean_exit(error) else find_exception_behind_exit(error)
        half = self._node_context.upload_deadline_seconds / 2
        read = partial(_read, source, error, in_flight=in_flight)
        exception = call_with_timeout(read, half, "reading an exception", local=True)
        if exception is None:
            exception = replace(
                describe_type(source), message="<no text: reading the exception took too long>"
            )
        place = replace(place, gpu=_asked(process_state.read_gpu_uuid, "", "the GPU"))
        system = _asked(
            partial(process_state.measure_system_state, source, exception), SystemState(), "limits"
        )
        resources = Resources()
        if system != SystemState() and self._node_context.files is not None:
            ask = partial(
                RecorderClient(self._node_context.files).resources,
                time_limits.CONTAINER_MEMORY_TIMEOUT_SECONDS,
            )
            resources = _asked(ask, resources, "the container's memory")
        no_state: tuple[tuple[CollectiveProgress, ...], tuple[int, ...]] = ((), ())
        progress, calls = _asked(
            process_state.read_collectives_and_call_times, no_state, "the collectives"
        )
        failure = replace(
            _describe(source, exception, place, self._engine),
            timestamp_ns=wall_ns,
            monotonic_ns=monotonic_ns,
            in_flight=in_flight,
            collectives=progress,
            thread_failures=process_state.get_thread_failures(),
            handled_exceptions=self._list_handled(error, calls, may_read_frames=not in_flight),
            resources=resources,
            system=system,
        )
        error_file = os.environ.get(torch_error_file.ERROR_FILE_VARIABLE)
        if error_file and not in_flight and not held:
            with suppress_internal_errors("writing torch's error.json"):
                data = torch_error_file.error_file_data(
                    exception.type,
                    exception.message,
                    failure.message,
                    wall_ns,
                )
                torch_error_file.write_error_file(error_file, data)
        failure = replace(failure, upload_delay_ns=time.monotonic_ns() - monotonic_ns)
        left = (deadline_ns - time.monotonic_ns()) / 1e9
        spool = open_worker_spool(self._node_context, place.local_rank, error_file)
        return record_error(failure, self._node_context, spool, left, held=held)

    def withdraw(self, name: str, place: Place) -> None:
        """Withdraw a document: the program has handled its exception."""
        error_file = os.environ.get(torch_error_file.ERROR_FILE_VARIABLE)
        spool = open_worker_spool(self._node_context, place.local_rank, error_file)
        if spool is not None:
            spool.withdraw(name)

    def _list_handled(
        self,
        error: BaseException,
        calls: Sequence[int],
        *,
        may_read_frames: bool,
    ) -> tuple[HandledException, ...]:
        if self._handled is None:
            return ()
        return list_within(
            time_limits.UPLOAD_DEADLINE_SECONDS,
            self._handled,
            error,
            calls,
            may_read_frames=may_read_frames,
        )


def _asked(call: Callable[[], T], default: T, about: str) -> T:
    """Return what `call` returns, or the default if it raises."""
    with suppress_internal_errors(f"asking for {about}"):
        return call()
    return default


def _read(source: BaseException, error: BaseException, *, in_flight: bool) -> ExceptionInfo:
    exception = capture(source, in_flight=in_flight)
    if source is error:
        return exception
    # a library caught it, as argparse does: the program's line is in the exit
    if not find_own_frames(exception):
        exception = replace(
            exception, frames=join_frames((capture(error, in_flight=in_flight), exception))
        )
    note = f"The program then called sys.exit({safe_text(error)})."
    return replace(exception, notes=(*exception.notes, note))


def _describe(
    error: BaseException,
    exception: ExceptionInfo,
    place: Place,
    engine: Engine,
) -> WorkerError:
    """Return the failure record of an exception in this process, without its time."""
    name = engine.name_error(error, exception)
    left = {"category": "exit"} if isinstance(error, SystemExit) else {}
    return failure_record(
        ErrorClass.RECOVERABLE_EXCEPTION if name.recoverable else ErrorClass.WORKER_FAILURE,
        place,
        code=CTRL_C if isinstance(error, KeyboardInterrupt) and is_in_foreground() else name.code,
        message=format_exception(exception),
        writer=Writer.WORKER,
        subject=Subject.WORKER,
        exception=exception,
        **left,
    )
