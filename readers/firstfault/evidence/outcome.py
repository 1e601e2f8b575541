"""How an attempt ended: the only place that decides this."""

from __future__ import annotations

from firstfault.evidence.completion import prove_completion
from firstfault.model import JobErrors, Outcome, Verdict
from firstfault.model.failure import INTERRUPTED, TEARDOWN


def classify_outcome(
    verdict: Verdict | None, job: JobErrors | None = None, *, has_outputs: bool = False
) -> Outcome:
    """Return how an attempt ended.

    Args:
        verdict: the one that counts for the caller; None: nothing shows a failure.
        job: what was read; None: only the verdict is known, as to a node that gets it from a peer.
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
