"""How an attempt ended, and whether a job had finished before its first failure:
then a failure of its teardown takes nothing away.

The proof is whole or none: one rank that hadn't returned makes any failure an ordinary one.
"""

from __future__ import annotations

from firstfault.model import JobErrors, Outcome, Phase, Subject, Verdict, WorkerError, Writer
from firstfault.model.failure import INTERRUPTED, TEARDOWN
from firstfault.model.job import nodes_done
from firstfault.utils.text import counted


def classify_outcome(
    verdict: Verdict | None, job: JobErrors | None = None, *, has_outputs: bool = False
) -> Outcome:
    """Return how an attempt ended.

    Args:
        verdict: the one that counts for the caller, or None if nothing shows a failure.
        job: what was read, or None if only the verdict is known, for example on a node that got
            the verdict from a peer.
        has_outputs: whether Flyte's outputs are in the storage.
    """
    if verdict is None:
        has_succeeded = has_outputs or (job is not None and job.all_succeeded)
        return Outcome.SUCCEEDED if has_succeeded else Outcome.UNKNOWN
    # The proof doesn't depend on the strategy. What the nodes published counts more: an engine may
    # have acted on it.
    is_proven = job is not None and not job.seals and bool(prove_completion(job))
    if verdict.category == TEARDOWN or is_proven:
        return Outcome.TEARDOWN_FAILED
    return Outcome.INTERRUPTED if verdict.category == INTERRUPTED else Outcome.FAILED


def prove_completion(job: JobErrors) -> str:
    """Return a sentence that proves that the job had finished before its first failure, or an empty
    string without such a proof.

    A log has its own proof (`JobErrors.completion`). Under firstfault every rank of every node must
    have returned from its function, or have run its program to its end, before its agent knew of
    any failure.
    """
    if job.completion or not job.failures:
        return job.completion
    ranks = {rank for entry in job.roster for rank in entry.finished_ranks}
    ranks |= {
        rank for entry in job.roster if entry.phase is Phase.SUCCEEDED for rank in entry.ranks
    }
    size = max(place.world_size for place in job.places)
    # The number of ranks comes first: a damaged document may claim any size.
    is_whole = 0 < size <= len(ranks) and all(rank in ranks for rank in range(size))
    is_whole = is_whole and nodes_done(job.roster, job.coverage.expected)
    # A node may be lost or terminated after its ranks had returned: its agent's failure has its own
    # verdict.
    if not is_whole or any(failure.subject is not Subject.WORKER for failure in job.failures):
        return ""
    if not all(map(_is_teardown_end, job.failures)):
        return ""
    return (
        "its rank had returned before it"
        if size == 1
        else f"all {counted(size, 'rank')} had returned before it"
    )


def find_teardown_failures(job: JobErrors) -> list[WorkerError]:
    """Return the failures of processes that ended on their own, earliest first;
    those without a time come last.
    """
    own = [
        failure for failure in job.failures if not failure.stopped_by_agent and _has_failed(failure)
    ]
    return sorted(
        own, key=lambda item: (item.timestamp_ns or 1 << 62, -1 if item.rank is None else item.rank)
    )


def describe_teardown_end(failure: WorkerError) -> str:
    """Return how a process ended in its teardown, "SIGABRT" or "exit code 1", or an empty string if
    only its text is known.
    """
    return failure.signal or (f"exit code {failure.exit_code}" if failure.exit_code else "")


def _is_teardown_end(failure: WorkerError) -> bool:
    """Whether a worker's failure is an end after its return:
    it raised nothing but the exit of its program.

    An error without a process's end, such as that of Flyte's entrypoint which couldn't convert the
    outputs, isn't: the results may be lost.
    """
    is_exit = failure.exception is None or _is_bare_exit(failure)
    is_end = (
        bool(describe_teardown_end(failure))
        or _is_bare_exit(failure)
        or bool(failure.stopped_by_agent)
    )
    is_own = failure.writer is not Writer.STOCK
    return is_exit and is_end and is_own and failure.expired is None and not failure.recoverable


def _is_bare_exit(failure: WorkerError) -> bool:
    raised = failure.exception
    return raised is not None and raised.type == "SystemExit" and not raised.causes


def _has_failed(failure: WorkerError) -> bool:
    """Whether a process failed: one that ran to its end may have left a document about that."""
    is_unknown = failure.exit_code is None and not _is_bare_exit(failure)
    return bool(describe_teardown_end(failure)) or is_unknown
