"""What a completion, or its absence, makes of an attempt's failures: the job may have handled or
outlived them, or they are of its teardown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from firstfault.credentials import redact
from firstfault.utils.text import one_line
from firstfault_logs.attempts import find_progress
from firstfault_logs.completion.noise import (
    drop_ignored_exceptions,
    drop_teardown_noise,
    find_doubts,
    is_at_exit,
)
from firstfault_logs.completion.proof import MAX_LATER_LINES, MIN_STEPS_RESUMED, CompletionProof
from firstfault_logs.completion.words import (
    JOB_FAILED,
    JOB_SUCCEEDED,
    CompletionKind,
    is_noise,
    is_success_report,
)
from firstfault_logs.framing.files import are_outputs_of_one_job
from firstfault_logs.framing.lines import TRACEBACK
from firstfault_logs.launchers import LauncherReport, ReportKind

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.framing.labels import LogRecord
    from firstfault_logs.processes import Process
    from firstfault_logs.tracebacks import Traceback


_ENDS = {ReportKind.ENDED, ReportKind.LOST, ReportKind.TERMINATED, ReportKind.OOM}


def find_teardown_ends(
    attempt: Attempt,
    completion: CompletionProof | None,
    failed: Sequence[Process],
    launcher_failures: Sequence[Traceback],
) -> list[Process] | None:
    """Return the processes that ended with an error after the job had finished.

    Below the words of a completion, only a launcher's report of an error is a failure. What the
    processes print themselves while they end is noise.

    Returns:
        None if a failure isn't of the teardown: then none is, because the job may have failed.
    """
    # a counter at its end shows that the steps are done, but not that their results are saved
    if completion is None or completion.kind is CompletionKind.COUNTER:
        return None
    reported = [
        process for process in failed if _is_end_reported(process) or not _is_noise(process)
    ]
    begins = [
        (file, first)
        for process in failed
        if not _is_finalizer(process)
        for file, first, _ in process.lines
    ]
    begins += [
        (file, report.number) for file, _, report in attempt.reports if _is_end(report, completion)
    ]
    begins += [(file, entry.number) for file, _, entry in attempt.entries]
    begins += [(traceback.stream.file, traceback.lines[0]) for traceback in launcher_failures]
    if any(_is_elsewhere(file, first, completion) for file, first in begins):
        return None
    above = _list_lines_above(attempt, completion)
    if not all(_is_of_teardown(process, completion, above) for process in failed):
        return None
    return reported


def _is_elsewhere(file: str, first: int, completion: CompletionProof) -> bool:
    """Whether a failure that begins in this line isn't below a completion, as far as the logs show.

    Schedulers write what a job and its launcher print to two files; the words of the end are in one
    of them.
    """
    if file == completion.file:
        return first < completion.number
    return not are_outputs_of_one_job(file, completion.file)


def _is_end(report: LauncherReport, completion: CompletionProof) -> bool:
    """Whether a report is about an end with an error; without a code or a signal,
    a process may have been stopped.
    """
    if report.kind is ReportKind.TERMINATED and completion.kind is CompletionKind.STATUS:
        return False  # announced before the end of the job, which then came in time
    return report.kind in _ENDS and (
        report.kind is not ReportKind.ENDED or bool(report.exit_code or report.signal)
    )


def _is_of_teardown(
    process: Process, completion: CompletionProof, above: Sequence[LogRecord]
) -> bool:
    """Whether a process can't have failed in the job's work:
    a program's own exception may be of a later part of it.
    """
    if completion.kind is CompletionKind.STATUS:
        return True
    if process.exit_code:
        # the words are of one rank, and another one may have reported an error before it left
        own = {record for one in process.streams for record in list(one.tail)[-MAX_LATER_LINES:]}
        lines = sorted({*own, *above}, key=lambda record: record.number)
        return _is_noise(process) and not find_doubts(drop_teardown_noise(lines))
    return _is_noise(process)


def _list_lines_above(attempt: Attempt, completion: CompletionProof) -> list[LogRecord]:
    """Return the last lines above a completion in its file,
    and those of the other output of its job.
    """
    begin = completion.number - MAX_LATER_LINES
    streams = (stream for stream in attempt.streams.values() if stream.file == completion.file)
    above = [
        record
        for one in streams
        for record in one.tail
        if begin <= record.number < completion.number
    ]
    others = (
        one for one in attempt.streams.values() if are_outputs_of_one_job(one.file, completion.file)
    )
    return [*above, *(record for one in others for record in list(one.tail)[-MAX_LATER_LINES:])]


def _is_end_reported(process: Process) -> bool:
    """Whether a launcher reports that a process ended with an error."""
    return (
        process.exit_code is not None
        or process.is_oom
        or bool(process.signal and not process.reports_own_end)
    )


def _is_finalizer(process: Process) -> bool:
    """Whether a process, which isn't reported to have ended,
    printed an exception of its finalizers.
    """
    return process.raised is not None and _is_noise(process) and not _is_end_reported(process)


def _is_noise(process: Process) -> bool:
    """Whether a process printed no exception,
    or only one of a function that runs when a program ends.
    """
    return process.raised is None or is_at_exit([frame.function for frame in process.raised.frames])


def has_recovered(
    attempt: Attempt, completion: CompletionProof | None, failed: Sequence[Process]
) -> bool:
    """Whether lines below all failures show that the job handled or outlived them."""
    last_failures: dict[str, int] = {}
    places = [(file, end) for process in failed for file, _, end in process.lines]
    places += [
        (file, report.number)
        for file, _, report in attempt.reports
        if report.kind is not ReportKind.GPU
    ]
    for file, number in places:
        last_failures[file] = max(last_failures.get(file, 0), number)
    is_uncaught = any(process.is_ended_by_exception for process in failed)
    return _has_final_success(attempt, last_failures, is_uncaught=is_uncaught) or _has_outlived(
        attempt, completion, last_failures
    )


def _has_final_success(
    attempt: Attempt, last_failures: Mapping[str, int], *, is_uncaught: bool
) -> bool:
    """Whether lines after all failures prove that the job succeeded,
    so the program or its launcher handled them.

    Args:
        attempt: the last one of the job.
        last_failures: by file, the number of the last line about a failure.
        is_uncaught: whether an exception ended a process, so only its job's script or launcher may
            have printed what follows.
    """
    if any(report.kind is ReportKind.SUCCEEDED for _, _, report in attempt.reports):
        return True
    deaths = any(
        report.kind in {ReportKind.ENDED, ReportKind.LOST, ReportKind.TERMINATED}
        for _, _, report in attempt.reports
    )
    has_ended = deaths or bool(attempt.entries)
    for file, last_failure in last_failures.items():
        streams = [
            stream for stream in attempt.streams.values() if stream.file == file and stream.tail
        ]
        later = sorted(
            (record for one in streams for record in one.tail if record.number > last_failure),
            key=lambda record: record.number,
        )
        proofs = [at for at, record in enumerate(later) if is_success_report(record.text)]
        if not proofs or find_doubts(drop_ignored_exceptions(later[proofs[-1] + 1 :])):
            return False
        # steps below all failures: a training needs all its ranks, so it was restarted
        has_resumed = (
            sum(find_progress(record) is not None for record in later[: proofs[-1]])
            >= MIN_STEPS_RESUMED
        )
        last, proven = later[proofs[-1]], {later[at].label.number for at in proofs}
        texts = (
            *(report.text for _, _, report in attempt.reports),
            *(record.text for record in later),
        )
        has_failed = any(map(JOB_FAILED.search, texts))
        is_of_job = JOB_SUCCEEDED.search(last.text) is not None and not has_failed
        if last.label.is_process:
            # each process continued
            processes = {stream.label.number for stream in streams if stream.label.is_process}
            is_proven = proven >= processes and (has_resumed or is_of_job or not is_uncaught)
        else:
            by_torch = (record for stream in streams for record in stream.by_torch)
            has_ended |= is_uncaught or any(TRACEBACK in record.text for record in by_torch)
            is_proven = has_resumed or is_of_job or not has_ended
        if not is_proven:
            return False
    return bool(last_failures)


def _has_outlived(
    attempt: Attempt, completion: CompletionProof | None, last_failures: Mapping[str, int]
) -> bool:
    """Whether the job was started again after all failures, which the log doesn't report,
    and then finished.

    Either it printed several further steps, or its log went on for long and ends with a status of
    success.
    """
    if completion is None or last_failures.keys() != {completion.file}:
        return False
    last_failure = last_failures[completion.file]
    if completion.number < last_failure:
        return False
    streams = [stream for stream in attempt.streams.values() if stream.file == completion.file]
    has_resumed = any(stream.has_steps_after(last_failure) for stream in streams)
    if has_resumed and completion.kind >= CompletionKind.RESULT:
        return True
    if completion.kind is not CompletionKind.STATUS:
        return False
    lines = (record for stream in streams for record in stream.tail)
    between = (one for one in lines if last_failure < one.number < completion.number)
    return sum(not is_noise(record.text) for record in between) > MAX_LATER_LINES


def explain_missing_proof(attempt: Attempt, proof: CompletionProof | None) -> str:
    """Return why an attempt without a failure may not have succeeded, or "" if it has."""
    streams = [stream for stream in attempt.streams.values() if stream.tail]
    if any(report.kind is ReportKind.SUCCEEDED for _, _, report in attempt.reports):
        return ""
    if not streams:
        is_started = bool(attempt.reports) or attempt.is_torchrun
        return (
            "the job was restarted, and nothing shows how that ended"
            if is_started
            else "it has no text"
        )
    last = max((stream.tail[-1] for stream in streams), key=lambda record: record.number)
    quoted = f"the log ends with {one_line(redact(last.text.strip()), 100)!r}"
    files, of_training = (
        {stream.file for stream in streams},
        {one.file for one in streams if one.progress is not None},
    )
    if len(files) > 1 and len(of_training) * 2 < len(files):
        number = "none" if not of_training else f"only {len(of_training)}"
        return (
            f"no line reports a failure, and {number} of {len(files)} files has the steps of a"
            " training"
        )
    if proof is None:
        return f"can't tell whether the job succeeded: {quoted}"
    if proof.doubt:
        return (
            "can't tell whether the job succeeded: it reports"
            f" {one_line(redact(proof.doubt.strip()), 100)!r}"
        )
    return ""
