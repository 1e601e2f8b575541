"""Describes an exception in a worker process, and writes the document about it before the deadline."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from firstfault.exceptions.first_cause import frames_to, own_frames
from firstfault.exceptions.tracebacks import format_exception
from firstfault.model import Subject, SystemState, Writer
from firstfault.wire.documents import encode
from firstfault_torch.capture import bare, before_exit, capture, safe_text
from firstfault_torch.error_classes import ErrorClass, failure_record
from firstfault_torch.error_file import ERROR_FILE_VARIABLE, error_file_data, write_error_file
from firstfault_torch.guard import bounded, guarded
from firstfault_torch.node.document_writer import record_error, spool_of
from firstfault_torch.worker.in_flight import is_clean_exit, moment_of
from firstfault_torch.worker.introspection import collective_progress, gpu_uuid, thread_failures
from firstfault_torch.worker.system_state import system_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault.model import ExceptionInfo, Place, Receipt, WorkerError
    from firstfault_torch.context import Recording
    from firstfault_torch.engine import Engine

T = TypeVar("T")


def describe_and_record(  # noqa: PLR0913 - keywords
    error: BaseException,
    recording: Recording,
    place: Place,
    engine: Engine,
    *,
    in_flight: bool = False,
    held: bool = False,
) -> tuple[bytes, Receipt]:
    """Write a document about `error`, and torch's error.json; return the document and its receipt.

    Bounded by the upload deadline, of which half may go into reading the exception: its ``__str__`` is the user's code
    and may block.

    Args:
        error: the exception.
        recording: where and how.
        place: this process's.
        engine: names the exception.
        in_flight: it has not left the task function yet; torch's error.json is left alone.
        held: keep the document on the node; the agent uploads it if the node fails.
    """
    began = time.monotonic_ns()
    wall_ns, monotonic_ns = moment_of(error)
    deadline_ns = began + int(recording.upload_deadline_seconds * 1e9)
    source = error if is_clean_exit(error) else before_exit(error)
    half = recording.upload_deadline_seconds / 2
    exception = bounded(partial(_read, source, error, in_flight=in_flight), half, "reading an exception", local=True)
    if exception is None:
        exception = replace(bare(source), message="<no text: reading the exception took too long>")
    place = replace(place, gpu=_asked(gpu_uuid, "", "the GPU"))
    failure = replace(
        describe(source, exception, place, engine),
        timestamp_ns=wall_ns,
        monotonic_ns=monotonic_ns,
        in_flight=in_flight,
        collectives=_asked(collective_progress, (), "the collectives"),
        thread_failures=thread_failures(),
        system=_asked(partial(system_state, source, exception), SystemState(), "limits"),
    )
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if error_file and not in_flight and not held:
        with guarded("writing torch's error.json"):
            write_error_file(error_file, error_file_data(exception.type, exception.message, failure.message, wall_ns))
    failure = replace(failure, upload_delay_ns=time.monotonic_ns() - monotonic_ns)
    left = (deadline_ns - time.monotonic_ns()) / 1e9
    spool = spool_of(recording, place.local_rank, error_file)
    data = encode(failure)
    return data, record_error(failure, recording, spool, left, held=held, data=data)


def _asked(call: Callable[[], T], default: T, about: str) -> T:
    """Return what `call` returns; the default if it raises."""
    with guarded(f"asking for {about}"):
        return call()
    return default


def _read(source: BaseException, error: BaseException, *, in_flight: bool) -> ExceptionInfo:
    exception = capture(source, in_flight=in_flight)
    if source is error:
        return exception
    if not own_frames(exception):  # a library caught it, as argparse does: the program's line is in the exit
        exception = replace(exception, frames=frames_to((capture(error, in_flight=in_flight), exception)))
    return replace(exception, notes=(*exception.notes, f"The program then called sys.exit({safe_text(error)})."))


def describe(error: BaseException, exception: ExceptionInfo, place: Place, engine: Engine) -> WorkerError:
    """Return the failure record of an exception in this process, without its time."""
    name = engine.name_error(error, exception)
    left = {"category": "exit"} if isinstance(error, SystemExit) else {}
    return failure_record(
        ErrorClass.RECOVERABLE if name.recoverable else ErrorClass.WORKER_FAILURE,
        place,
        code=name.code,
        message=format_exception(exception),
        writer=Writer.WORKER,
        subject=Subject.WORKER,
        exception=exception,
        **left,
    )
