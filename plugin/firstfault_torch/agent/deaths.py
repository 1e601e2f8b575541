"""Failure records about the ends of worker processes, and about errors of the agent."""

from __future__ import annotations

import linecache
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from firstfault import model
from firstfault.exceptions.exceptions_in_text import format_exception
from firstfault.exceptions.stack_position import add_raise_point, add_source_lines
from firstfault.model.failure import CTRL_C, STOPS
from firstfault_torch.failures.capture import capture
from firstfault_torch.failures.failure_records import ErrorClass, failure_record
from firstfault_torch.failures.torch_error_file import read_error_file, read_traceback
from firstfault_torch.guard import call_with_timeout
from firstfault_torch.node_context import Moment
from firstfault_torch.places import is_in_foreground, read_time_limit
from firstfault_torch.time_limits import SOURCE_LINES_TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """One worker process that ended."""

    local_rank: int
    pid: int
    exit_code: int
    """As in multiprocessing, the exit code is negative after a signal."""
    wall_ns: int
    monotonic_ns: int

    @property
    def signal(self) -> str:
        """Name of the signal that killed the worker; empty if the worker exited."""
        return signal_name(-self.exit_code) if self.exit_code < 0 else ""


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, "SIG64" for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


@dataclass(frozen=True, slots=True)
class TorchKeptException:
    """What torch kept of an exception that firstfault didn't record."""

    exception: model.ExceptionInfo
    traceback: str


def read_torch_exception(error_file: str, traceback_file: str) -> TorchKeptException | None:
    """Return the exception in torch elastic's error.json,
    else the one in torch.multiprocessing's traceback file.
    """
    content = read_error_file(error_file)
    if content is not None:
        line = str(content.get("message", ""))
        extra = content.get("extraInfo")
        text = str((extra.get("py_callstack") if isinstance(extra, dict) else "") or line)
    else:
        text = read_traceback(traceback_file)
        if not text:
            return None
        line = text.strip().splitlines()[-1]
    kind, _, message = line.partition(": ")
    return TorchKeptException(model.ExceptionInfo(type=kind or "unknown", message=message), text)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """What an agent learned about a worker before it stopped it."""

    stack: str = ""
    """The stacks of all its threads."""
    collectives: tuple[model.CollectiveProgress, ...] = ()
    thread_failures: tuple[model.ThreadFailure, ...] = ()
    raised_at: model.FrameInfo | None = None
    """Where an exception in flight was raised that Python didn't show yet, or None without one."""
    handled_exceptions: tuple[model.HandledException, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpiredWorker:
    """The deadline for which the agent killed a worker, and what it learned before."""

    deadline: model.ExpiredDeadline
    observation: WorkerSnapshot


@dataclass(frozen=True, slots=True)
class WorkerStop:
    """Why an agent stopped its workers, and what they answered before."""

    reason: str
    began_ns: int
    """By the monotonic clock."""
    sent: str = "SIGTERM"
    """The signal."""
    failed_first: frozenset[int] = frozenset()
    """Local ranks of the workers that failed first; the agent stopped all others because of them.
    """
    caused_by: model.CausedBy | None = None
    observations: Mapping[int, WorkerSnapshot] = field(default_factory=dict)
    """By local rank."""
    killed_ns: int | None = None
    """When the agent began to send SIGKILL, or None. An earlier SIGKILL isn't the agent's."""

    def ended(self, worker_exit: WorkerExit) -> bool:
        """Whether this stop ended a worker; never one of `failed_first`,
        even if it died after the stop began.

        A stopped process may also exit on its own, or crash in its clean-up.
        """
        # A SIGKILL before this agent sends any is somebody else's, such as the OOM killer's during
        # the grace period.
        by_us = True
        if worker_exit.signal == "SIGKILL" and self.killed_ns is not None:
            by_us = worker_exit.monotonic_ns >= self.killed_ns
        return (
            by_us
            and worker_exit.local_rank not in self.failed_first
            and worker_exit.monotonic_ns >= self.began_ns
        )


_TEARDOWN_SIGNALS = STOPS | {"SIGKILL"}
"""Signals that stop workers: the one that the agent received itself, else SIGTERM; then SIGKILL."""


@dataclass(frozen=True, slots=True)
class ExitEvidence:
    """What is known of a worker after its death."""

    kept: TorchKeptException | None = None
    """The exception that torch kept."""
    resources: model.Resources = field(default_factory=model.Resources)
    """The container's memory."""
    fatal_stack: str = ""
    """What faulthandler wrote at a fatal signal."""
    log_tail: str = ""
    """The end of the worker's stderr."""
    seen: WorkerSnapshot = field(default_factory=WorkerSnapshot)
    """What the worker answered before torch aborted it."""


def describe_exit(
    worker_exit: WorkerExit,
    place: model.Place,
    *,
    stop: WorkerStop | None = None,
    traces: ExitEvidence | None = None,
    expiry: ExpiredWorker | None = None,
) -> model.WorkerError:
    """Return the failure record of a worker's death. `stop` and `expiry` say why the agent ended
    the worker, and are None if it didn't.
    """
    traces = traces or ExitEvidence()
    # A worker that was killed at a deadline may die after a stop began: the deadline is the reason.
    ended_by = stop if stop is not None and stop.ended(worker_exit) and expiry is None else None
    # what torch kept of a stopped worker is what the training made of the signal, such as a
    # handler's exception
    kept = traces.kept if ended_by is None else None
    seen = traces.seen
    if expiry is not None:
        seen = expiry.observation
    elif stop is not None:
        seen = stop.observations.get(worker_exit.local_rank, seen)
    stack = traces.fatal_stack or seen.stack
    if stack:  # without source lines if the program's files can't be read in time
        read = partial(add_source_lines, stack, linecache.getline)
        stack = (
            call_with_timeout(
                read,
                SOURCE_LINES_TIMEOUT_SECONDS,
                "reading source lines",
                local=True,
            )
            or stack
        )
    if seen.raised_at is not None and not traces.fatal_stack:
        stack = add_raise_point(stack, seen.raised_at)
    code, message = _code_and_message(
        worker_exit,
        place,
        ended_by.reason if ended_by is not None else "",
        kept,
    )
    category = (
        "host_oom"
        if worker_exit.signal == "SIGKILL" and ended_by is None and traces.resources.oom_kill
        else ""
    )
    sent: tuple[model.SentSignal, ...] = ()
    if ended_by is not None:
        name = worker_exit.signal if worker_exit.signal in _TEARDOWN_SIGNALS else ended_by.sent
        sent = (model.SentSignal(name, ended_by.reason),)
    if expiry is not None:
        category = "hang"
        if kept is None:
            code, message = _describe_hang(place, expiry.deadline)
    return failure_record(
        ErrorClass.WORKER_FAILURE,
        place,
        code=code,
        message=message,
        timestamp_ns=worker_exit.wall_ns,
        writer=model.Writer.AGENT,
        subject=model.Subject.WORKER,
        exception=kept.exception if kept is not None else None,
        exit_code=worker_exit.exit_code,
        signal=worker_exit.signal,
        sent_signals=sent,
        category=category,
        monotonic_ns=worker_exit.monotonic_ns,
        upload_delay_ns=time.monotonic_ns() - worker_exit.monotonic_ns,
        resources=traces.resources,
        log_tail=traces.log_tail,
        stack_dumps=(model.StackDump(worker_exit.pid, place.rank, stack),) if stack else (),
        collectives=seen.collectives,
        thread_failures=seen.thread_failures,
        handled_exceptions=seen.handled_exceptions,
        caused_by=ended_by.caused_by if ended_by is not None else None,
        expired=expiry.deadline if expiry is not None else None,
    )


def _describe_hang(place: model.Place, expired: model.ExpiredDeadline) -> tuple[str, str]:
    """Return code and message of a worker that didn't keep a deadline."""
    since = "its last ping was" if expired.heartbeat else "the block began"
    where = f"; {since} at {expired.since}" if expired.since else ""
    return (
        "USER:Hang",
        f"rank {place.rank} did not keep a deadline: {expired.text}{where}; its agent killed it",
    )


def _code_and_message(
    worker_exit: WorkerExit,
    place: model.Place,
    stopped: str,
    kept: TorchKeptException | None,
) -> tuple[str, str]:
    who = f"rank {place.rank}"
    if kept is not None:
        return ErrorClass.WORKER_FAILURE.value.code, kept.traceback
    if stopped and worker_exit.signal and worker_exit.signal not in _TEARDOWN_SIGNALS:
        return (
            "USER:Stopped",
            f"{who} was killed by {worker_exit.signal} while its agent stopped it: {stopped}",
        )
    if stopped:
        return (
            "USER:Stopped",
            f"{who} was stopped by its agent with {worker_exit.signal or 'a signal'}: {stopped}",
        )
    if worker_exit.signal:
        text = (
            f"{who} was killed by {worker_exit.signal}, which its agent did not send; exit code"
            f" {worker_exit.exit_code}"
        )
        return f"USER:{worker_exit.signal}", text
    if worker_exit.exit_code == 0:
        return "USER:ExitCode", f"{who} exited with code 0 before its training returned"
    return "USER:ExitCode", f"{who} exited with code {worker_exit.exit_code} without an exception"


def describe_agent_failure(
    error: BaseException,
    error_class: ErrorClass,
    place: model.Place,
    moment: Moment,
) -> model.WorkerError:
    """Return the failure record of an error in the agent process;
    one about a signal has no exception.
    """
    signal_number = getattr(error, "sigval", None) if error_class is ErrorClass.PREEMPTION else None
    exception = capture(error) if signal_number is None else None
    name = signal_name(signal_number) if signal_number is not None else ""
    limit = read_time_limit() if name else ""
    terminated = f"the agent of {place.node} was terminated ({name})"
    changed: dict[str, Any] = {}
    if limit:
        terminated = f"the attempt reached its time limit of {limit} s; {terminated}"
        changed = {
            "code": model.TIME_LIMIT,
            "kind": model.Kind.NON_RECOVERABLE,
            "origin": model.Origin.USER,
        }
    elif name == "SIGINT":
        error_class = ErrorClass.INTERRUPTION
        by_keys = is_in_foreground()
        terminated = (
            f"the agent of {place.node} was interrupted ({'Ctrl-C, ' if by_keys else ''}{name})"
        )
        # in a pod it may be the image's STOPSIGNAL
        by_platform = (
            {"kind": model.Kind.RECOVERABLE, "origin": model.Origin.SYSTEM}
            if place.engine == "flyte"
            else {}
        )
        changed = {"code": CTRL_C} if by_keys else by_platform
    else:
        terminated += ": preemption, drain, a time limit, or a person"
    return failure_record(
        error_class,
        place,
        **changed,
        message=format_exception(exception) if exception is not None else terminated,
        timestamp_ns=moment.wall_ns,
        writer=model.Writer.AGENT,
        subject=model.Subject.AGENT,
        exception=exception,
        signal=name,
        monotonic_ns=moment.monotonic_ns,
    )
