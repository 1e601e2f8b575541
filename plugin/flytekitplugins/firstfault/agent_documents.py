"""What an agent says: about a worker that died without a document, and about itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.fingerprint import fingerprint_of
from firstfault.model import ExceptionInfo, SentSignal, Subject, WorkerError, Writer
from firstfault.report.text import format_exception
from flytekitplugins.firstfault.capture import capture
from flytekitplugins.firstfault.deaths import signal_name
from flytekitplugins.firstfault.environment import boot_id, versions
from flytekitplugins.firstfault.taxonomy import CONSEQUENCES, Sort
from flytekitplugins.firstfault.torch_files import read_error_file, read_traceback

if TYPE_CHECKING:
    from firstfault.model import Place
    from flytekitplugins.firstfault.deaths import Death
    from flytekitplugins.firstfault.in_flight import Moment

__all__ = ["LastWords", "about_agent", "about_death", "last_words", "lost_agent"]


@dataclass(frozen=True, slots=True)
class LastWords:
    """What torch kept of an exception that our own recording did not see."""

    exception: ExceptionInfo
    traceback: str


def last_words(error_file: str, traceback_file: str) -> LastWords | None:
    """Return what a worker left in torch elastic's error.json, else in torch.multiprocessing's traceback file."""
    word = read_error_file(error_file)
    if word is not None:
        extra = word.get("extraInfo")
        text = str((extra.get("py_callstack") if isinstance(extra, dict) else "") or word.get("message", ""))
        return LastWords(_exception_from(str(word.get("message", ""))), text)
    text = read_traceback(traceback_file)
    if not text:
        return None
    return LastWords(_exception_from(text.strip().splitlines()[-1]), text)


def about_death(death: Death, place: Place, stopped: str, words: LastWords | None) -> WorkerError:
    """Return the failure that a worker's death is.

    Args:
        death: what the agent saw.
        place: the worker's.
        stopped: why the agent itself had stopped it; empty if it had not.
        words: what torch kept of its exception.
    """
    consequence = CONSEQUENCES[Sort.WORKER_FAILURE]
    who = f"rank {place.rank} (pid {death.pid})"
    if words is not None:
        code, message = consequence.code, words.traceback
    elif stopped:
        code, message = "USER:Stopped", f"{who} was stopped by its agent with {death.signal}: {stopped}"
    elif death.signal:
        code = f"USER:{death.signal}"
        message = f"{who} was ended by {death.signal}, which its agent had not sent; exit code {death.exit_code}"
    else:
        code, message = "USER:ExitCode", f"{who} exited with code {death.exit_code} without an exception"
    failure = WorkerError(
        code=code,
        message=message,
        kind=consequence.kind,
        origin=consequence.origin,
        timestamp_ns=death.wall_ns,
        worker=place.node,
        place=place,
        writer=Writer.AGENT,
        subject=Subject.WORKER,
        exception=words.exception if words is not None else None,
        exit_code=death.exit_code,
        signal=death.signal,
        sent_signals=(SentSignal(death.signal, stopped),) if stopped else (),
        monotonic_ns=death.monotonic_ns,
        boot_id=boot_id(),
        upload_delay_ns=time.monotonic_ns() - death.monotonic_ns,
        versions=versions(),
    )
    return replace(failure, fingerprint=fingerprint_of(failure))


def about_agent(error: BaseException, sort: Sort, place: Place, moment: Moment) -> WorkerError:
    """Return the failure that an error in the agent process is; a signal to the agent is an exit, not an exception."""
    consequence = CONSEQUENCES[sort]
    signal_number = getattr(error, "sigval", None) if sort is Sort.PREEMPTION else None
    exception = capture(error) if signal_number is None else None
    name = signal_name(signal_number) if signal_number is not None else ""
    told = f"the agent of {place.node} was told to go by {name}: preemption, drain, a time limit, or a person"
    failure = WorkerError(
        code=consequence.code,
        message=format_exception(exception) if exception is not None else told,
        kind=consequence.kind,
        origin=consequence.origin,
        timestamp_ns=moment.wall_ns,
        worker=place.node,
        place=place,
        writer=Writer.AGENT,
        subject=Subject.AGENT,
        exception=exception,
        signal=name,
        category=consequence.category,
        monotonic_ns=moment.monotonic_ns,
        boot_id=boot_id(),
        versions=versions(),
    )
    return replace(failure, fingerprint=fingerprint_of(failure))


def lost_agent(place: Place) -> WorkerError:
    """Return the failure that an agent's sudden death is, as one of its workers saw it; without its time."""
    consequence = CONSEQUENCES[Sort.LOST_AGENT]
    failure = WorkerError(
        code=consequence.code,
        message=f"died without a word (pid {place.pid}); its workers were told to go",
        kind=consequence.kind,
        origin=consequence.origin,
        worker=place.node,
        place=place,
        writer=Writer.WORKER,
        subject=Subject.AGENT,
        category=consequence.category,
        boot_id=boot_id(),
        versions=versions(),
    )
    return replace(failure, fingerprint=fingerprint_of(failure))


def _exception_from(text: str) -> ExceptionInfo:
    """Torch's texts are ``Type: message``."""
    kind, _, message = text.partition(": ")
    return ExceptionInfo(type=kind or "unknown", message=message)
