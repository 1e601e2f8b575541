"""Whether an attempt without a failure in its logs has succeeded:
only what it printed at its end proves that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from firstfault.credentials import redact
from firstfault.utils.text import one_line
from firstfault_logs.attempts import find_progress
from firstfault_logs.completion.noise import drop_ignored_exceptions, find_doubts
from firstfault_logs.completion.proof import MIN_STEPS_RESUMED, CompletionProof
from firstfault_logs.completion.words import JOB_FAILED, JOB_SUCCEEDED, is_success_report
from firstfault_logs.framing.lines import TRACEBACK
from firstfault_logs.launchers import ReportKind

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt


def has_final_success(
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
