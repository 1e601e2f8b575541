"""The last stage: the failures of each attempt as `WorkerError`s, and all that a reader of the job
needs as a `Snapshot`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from firstfault import model
from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.model.failure import (
    CANCELLED,
    CTRL_C,
    DIED,
    HANGUP,
    LAST_LINES_OF_SUCCESS,
    OF_LOGS,
    PREEMPTED,
    REQUEUED,
    UNSEEN,
)
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy, run_strategy
from firstfault.utils.stored_text import clean, clean_end
from firstfault_logs.assignment import Assignment
from firstfault_logs.completion.outcome import (
    explain_missing_proof,
    find_teardown_ends,
    has_recovered,
)
from firstfault_logs.completion.proof import CompletionProof, find_completion
from firstfault_logs.completion.words import is_success_report
from firstfault_logs.launchers import ReportKind
from firstfault_logs.processes import (
    LOST_WITH_NODE,
    MAX_TEXT_CHARACTERS,
    NO_EXIT_STATUS,
    Process,
    Processes,
    ReportedEnds,
)
from firstfault_logs.stops import mark_remaining, mark_stops

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.launchers import LauncherReport
    from firstfault_logs.tracebacks import Traceback

_MAX_LOG_TAIL_CHARACTERS = 32 * 1024
_NODE_FAILURE = "node failure"
_CODES_BY_REASON = {
    "cancelled": CANCELLED,
    "job requeue": REQUEUED,
    "preemption": PREEMPTED,
    "preempted": PREEMPTED,
}
_RECOVERABLE = "FlyteRecoverableException"

Place = tuple[str, int, int]
"""A file, and the numbers of the first and the last line in it."""


class AttemptReading(NamedTuple):
    """What the logs of one attempt show."""

    documents: list[model.WorkerError]
    """One for each failed or stopped process, node and launcher; empty if nothing failed."""
    notes: list[str]
    """What couldn't be read."""
    proof: CompletionProof | None = None
    """Proof of its completion. It may exist although documents are of its teardown."""


def build_snapshot(attempts: Sequence[Attempt], notes: Sequence[str], cut: str) -> Snapshot:
    """Return the failures and restarts of a job.

    Args:
        attempts: in order.
        notes: what is special about the logs, or couldn't be read.
        cut: the sentence that a log is cut, or "".
    """
    readings = [_read_attempt(attempt, number) for number, attempt in enumerate(attempts)]
    documents = [reading.documents for reading in readings]
    last_documents, last_notes, proof = readings[-1]
    notes = (*notes, *last_notes)
    why = "" if last_documents else explain_missing_proof(attempts[-1], proof)
    if why:
        notes = (*notes, cut, why) if cut else (*notes, why)
    completion = ""
    if proof is not None and not why:
        completion = proof.describe() if last_documents else proof.describe_with_noise()
    place = model.Place(
        round=len(documents) - 1, node="the log", group_world_size=1, engine=OF_LOGS
    )
    phase = model.Phase.JOINED if why else model.Phase.SUCCEEDED
    # without it, the failure of an earlier attempt would be the outcome of the job
    is_listed = not last_documents and (not why or any(documents))
    # a rank that only lines of an earlier start name is named, too
    labels = (stream.label.rank for attempt in attempts for stream in attempt.streams.values())
    named = attempts[-1].size.named_ranks | {rank for rank in labels if rank is not None}
    return Snapshot(
        tuple(document for every in documents for document in every),
        roster=(model.NodePresence(phase, place),) if is_listed else (),
        notes=tuple(notes),
        restarts=tuple(_list_restarts(documents)),
        completion=completion,
        size=_build_size(attempts[-1], last_documents),
        named_ranks=tuple(sorted(named)),
    )


def _list_restarts(
    attempts: Sequence[Sequence[model.WorkerError]],
) -> Iterator[model.RestartRecord]:
    """Yield a record for each attempt but the last."""
    for number, documents in enumerate(attempts[:-1]):
        if documents:
            verdict = run_strategy(
                get_strategy(DEFAULT_STRATEGY), assemble(Snapshot(tuple(documents)))
            )
            yield model.RestartRecord(
                model.RestartKind.ROUND,
                number,
                verdict.headline,
                restart=True,
                reason="its launcher started it again",
                rank=verdict.ranks[0] if len(verdict.ranks) == 1 else None,
                node=verdict.node or "",
            )


def _build_size(attempt: Attempt, documents: Iterable[model.WorkerError]) -> model.JobSize:
    """Return the size of the job, as far as its logs prove it."""
    machines = {entry.host for _, node, entry in attempt.entries if not node}
    machines |= {report.node or report.ip for _, _, report in attempt.reports}
    for stream in attempt.streams.values():
        machines |= (
            {stream.label.ip} if stream.label.ip else {stream.label.node} - attempt.size.vague_names
        )
    return attempt.size.build_size(
        {item.rank for item in documents if item.rank is not None}, machines
    )


def _read_attempt(attempt: Attempt, round_: int) -> AttemptReading:
    """Return what failed in an attempt, or nothing if the job succeeded after all failures."""
    processes = Processes(attempt)
    reported_ends = ReportedEnds(attempt, processes)
    reported_ends.take_reports()
    assignment = Assignment(attempt, processes)
    assignment.run()
    mark_stops(attempt, processes)
    agents = [_describe_launcher_failure(traceback) for traceback in assignment.launcher_failures]
    agents += _describe_launcher_reports(attempt, processes, assignment.launcher_failures)
    _forget_shutdown_errors(attempt, processes)
    proof = find_completion(attempt)
    if not agents and not any(process.has_failed for process in processes.all):
        reported_ends.take_launcher_ends()
        if not any(process.has_failed for process in processes.all):
            agents += _find_canceled_step(attempt, proof)
    failed = [process for process in processes.all if process.has_failed]
    if not failed and not agents:
        return AttemptReading([], assignment.notes, proof)
    ends = find_teardown_ends(attempt, proof, failed, assignment.launcher_failures)
    if ends is None and has_recovered(attempt, proof, failed):
        return AttemptReading([], assignment.notes, proof)
    if ends is None:
        proof = None
        mark_remaining(attempt, processes, failed)
    shown = [process for process in processes.all if process.rank is not None or process.has_failed]
    documents = [*map(_describe_process, shown if ends is None else ends), *agents]
    ranks = [process.rank for process in processes.all if process.rank is not None]
    # a number of ranks that no line states isn't a size: "all 2 ranks" may be two of many
    stated = max(attempt.world_size, attempt.size.stated_ranks)
    world = stated if stated > max(ranks, default=-1) else 0
    nodes = {process.node for process in processes.all} | {agent.worker for agent in agents}
    size = len(nodes - {""}) or 1
    places = [
        replace(item.place, round=round_, world_size=world, group_world_size=size)
        for item in documents
    ]
    completed = [replace(item, place=place) for item, place in zip(documents, places, strict=True)]
    return AttemptReading(completed, assignment.notes, proof)


def _forget_shutdown_errors(attempt: Attempt, processes: Processes) -> None:
    """Forget errors that were printed below the job's success report, unless the process ended."""
    if not any(process.own_error for process in processes.all):
        return
    successes: dict[str, int] = {}
    for stream in attempt.streams.values():
        for record in stream.tail if not stream.label.is_process else ():
            if is_success_report(record.text):
                successes[stream.file] = max(successes.get(stream.file, 0), record.number)
    for process in processes.all:
        is_below = all(first > successes.get(file, first) for file, first, _ in process.lines)
        if (
            is_below
            and process.raised is None
            and not process.has_ended
            and not process.launcher_text
        ):
            process.own_error = ""


# --- launchers and nodes --------------------------------------------------------------------------


def _describe_launcher_reports(
    attempt: Attempt, processes: Processes, launcher_failures: Sequence[Traceback]
) -> Iterator[model.WorkerError]:
    """Yield a document for each lost node and each terminated launcher."""
    done: set[str] = set()
    out_of_memory: set[str] = set()
    has_failed = any(process.has_failed for process in processes.all)
    deaths = [
        (file, first)
        for process in processes.all
        if process.is_oom
        for file, first, _ in process.lines
    ]
    deaths += [(file, report.number) for file, _, report in attempt.reports if report.exit_code]
    deaths += [(traceback.stream.file, traceback.lines[0]) for traceback in launcher_failures]
    first_deaths: dict[str, int] = {}
    for file, number in deaths:
        first_deaths[file] = min(number, first_deaths.get(file, number))
    lost_nodes = {report.node for _, _, report in attempt.reports if report.kind is ReportKind.LOST}
    # the scheduler's line about the job has the time, and another one the node
    of_failure = (report for _, _, report in attempt.reports if report.reason == _NODE_FAILURE)
    noticed_ns = next((report.time_ns for report in of_failure if report.time_ns is not None), None)
    # a time limit is the reason of the signals that it sends
    for file, node, report in sorted(
        attempt.reports, key=lambda entry: "limit" not in entry[2].reason
    ):
        name = "" if report.is_of_job else report.node or report.ip or processes.resolve_node(node)
        if report.kind is ReportKind.TERMINATED and report.reason == _NODE_FAILURE and lost_nodes:
            continue  # another line names the lost node; this one has the node that reports it
        if report.kind is ReportKind.LOST:
            category, code = "node_lost", "SYSTEM:NodeLost"
        elif (
            report.kind is ReportKind.OOM
            and report.pid is None
            and not has_failed
            and name not in out_of_memory
        ):
            out_of_memory.add(name)
            category, code = "host_oom", "SYSTEM:OutOfMemory"
        elif (
            report.kind is ReportKind.TERMINATED
            and report.reason in {"", "cancelled"}
            and first_deaths.get(file, 1 << 62) < report.number
        ):
            continue  # somebody or a service manager ends the rest after one process has ended
        elif (
            report.kind is ReportKind.TERMINATED
            and done.isdisjoint({name, ""})
            and (name or not done)
        ):
            done.add("" if report.is_of_job else name)
            category, code = _classify_termination(report)
        else:
            continue
        document = _describe_launcher(
            name,
            (file, report.number, report.number),
            category,
            code,
            report.text,
        )
        found_ns = noticed_ns if report.kind is ReportKind.LOST and len(lost_nodes) == 1 else None
        yield replace(document, timestamp_ns=report.time_ns or found_ns)


def _find_canceled_step(
    attempt: Attempt, proof: CompletionProof | None
) -> Iterator[model.WorkerError]:
    """Yield a document for a job's step that was canceled.

    Slurm also cancels a step after one of its tasks failed, so this is the reason only if nothing
    else is.
    """
    ends = {
        ReportKind.ENDED,
        ReportKind.OOM,
        ReportKind.LOST,
        ReportKind.TERMINATED,
        ReportKind.RESTARTED,
    }
    canceled = [
        entry
        for entry in attempt.reports
        if entry[2].reason and entry[2].kind is ReportKind.REST_STOPPED
    ]
    if not canceled or any(report.kind in ends for _, _, report in attempt.reports):
        return
    file, _, report = canceled[0]
    if explain_missing_proof(attempt, proof):
        place = (file, report.number, report.number)
        document = _describe_launcher("", place, *_classify_termination(report), report.text)
        yield replace(document, timestamp_ns=report.time_ns)


def _classify_termination(report: LauncherReport) -> tuple[str, str]:
    """Return the category and the code of a termination from outside."""
    if "limit" in report.reason:
        return "preemption", model.TIME_LIMIT
    if report.reason == _NODE_FAILURE:
        return "node_lost", f"SYSTEM:{report.signal or 'Terminated'}"
    if report.reason in _CODES_BY_REASON:
        return "preemption", _CODES_BY_REASON[report.reason]
    if report.signal == "SIGHUP":
        return "interrupted", HANGUP
    is_interrupted = "SIGINT" in f"{report.signal} {report.text} {report.reason}".upper()
    code = CTRL_C if "^C" in report.text else f"SYSTEM:{report.signal or 'Terminated'}"
    return "interrupted" if is_interrupted else "preemption", code


def _describe_launcher_failure(traceback: Traceback) -> model.WorkerError:
    """Describe a launcher that failed itself."""
    name = get_short_name(traceback.exception)
    file = traceback.exception.frames[-1].file
    category = "rendezvous" if "Rendezvous" in name or "/rendezvous/" in file else "platform"
    place = (traceback.stream.file, *traceback.lines)
    document = _describe_launcher(
        traceback.stream.label.node,
        place,
        category,
        f"SYSTEM:{name}",
        traceback.text,
    )
    return replace(document, exception=traceback.exception, timestamp_ns=traceback.time_ns)


def _describe_launcher(
    node: str,
    place: Place,
    category: str,
    code: str,
    message: str,
) -> model.WorkerError:
    return model.WorkerError(
        code,
        clean(message, MAX_TEXT_CHARACTERS),
        model.Kind.NON_RECOVERABLE,
        model.Origin.SYSTEM,
        worker=node,
        place=model.Place(node=node, engine=OF_LOGS),
        writer=model.Writer.AGENT,
        subject=model.Subject.AGENT,
        category=category,
        documents=tuple(_refer_to({place})),
    )


# --- processes ------------------------------------------------------------------------------------


def _describe_process(process: Process) -> model.WorkerError:
    raised, message = process.raised, process.message
    if raised is not None and process.hardware_error:
        raised = replace(
            raised, message=f"{process.hardware_error} ({raised.message.partition(chr(10))[0]})"
        )
    what = process.signal or ("Error" if message else "Exit" if process.has_ended else "Silent")
    what = get_short_name(raised) if raised is not None else what
    is_recoverable = raised is not None and get_short_name(raised) == _RECOVERABLE
    sent_signals: tuple[model.SentSignal, ...] = ()
    if process.stopped and raised is None:
        is_unseen = process.stopped in {NO_EXIT_STATUS, LAST_LINES_OF_SUCCESS, LOST_WITH_NODE}
        signal = UNSEEN if is_unseen else process.stop_signal
        sent_signals = (model.SentSignal(signal, process.stopped),)
    is_own_report = raised is not None or message or process.reports_own_end
    return model.WorkerError(
        DIED if message and message == process.launcher_text else f"USER:{what}",
        clean(process.raised_text or message, MAX_TEXT_CHARACTERS),
        model.Kind.RECOVERABLE if is_recoverable else model.Kind.NON_RECOVERABLE,
        model.Origin.USER if raised is not None else model.Origin.UNKNOWN,
        # an exception may be much older than the end of its process
        timestamp_ns=process.time_ns or (process.launcher_time_ns if raised is None else None),
        worker=process.node,
        place=model.Place(
            rank=process.rank,
            local_rank=process.local_rank,
            node=process.node,
            host=process.host,
            ip=process.ip,
            pid=process.pid or 0,
            engine=OF_LOGS,
        ),
        writer=model.Writer.WORKER if is_own_report else model.Writer.AGENT,
        exception=raised,
        exit_code=process.exit_code,
        signal=process.signal if raised is None else "",
        sent_signals=sent_signals,
        log_tail=clean_end(process.text, _MAX_LOG_TAIL_CHARACTERS),
        category="gpu_hardware" if process.hardware_error else "",
        resources=model.Resources(oom_kill=1) if process.is_oom else model.Resources(),
        documents=tuple(_refer_to(process.lines)),
    )


def _refer_to(places: Iterable[Place]) -> Iterator[model.DocumentRef]:
    """Yield a reference for each place: "slurm-4711.out:3-9"."""
    for file, first, last in sorted(places):
        yield model.DocumentRef(f"{file}:{first}" + (f"-{last}" if last > first else ""), file)
