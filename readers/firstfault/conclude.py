"""From what was read about an attempt to a verdict and a decision. Pure: no storage, no clock, no environment."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.errors import FirstFaultError
from firstfault.evidence.diagnosis import Diagnosis, diagnose
from firstfault.model import Phase, Place, WorkerError
from firstfault.model.job import pods_live
from firstfault.retry import RetryContext, decide
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy, run_strategy
from firstfault.wire.json_schemas import decision_from_json, verdict_from_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.model import Decision, JobErrors, Seal, Verdict
    from firstfault.retry import RetryPolicy
    from firstfault.strategies import AggregationStrategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """An attempt, judged once. Reports draw it and judge nothing again."""

    job: JobErrors
    verdict: Verdict
    decision: Decision
    diagnosis: Diagnosis
    """Of `job`; whatever the strategy made of it."""


def conclude(
    job: JobErrors,
    *,
    strategy: str | AggregationStrategy | None = None,
    policy: RetryPolicy | None = None,
    context: RetryContext | None = None,
) -> Conclusion | None:
    """Return the verdict on an attempt and the decision; None if the attempt did not fail.

    Args:
        job: what was read.
        strategy: a name or a callable; None takes the one the pods sealed with, else `DEFAULT_STRATEGY`.
        policy: the retry policy. None takes the decision that the pods sealed if their verdict is the same one, else
            firstfault's default policy.
        context: what the policy may know; None makes one from `job`.

    Raises:
        StrategyError: the strategy is unknown, raised, or returned something else than a verdict.
    """
    chosen = get_strategy(strategy) if strategy is not None else None
    if not failed(job):
        return None
    diagnosis = diagnose(job)
    seal = _seal_of(job)
    if seal is not None and _overrules(seal, job, strategy):
        verdict = _verdict_of_seal(seal, job)
    else:
        verdict = run_strategy(chosen or strategy_of(job.seals), job, diagnosis)
    context = context or RetryContext(pods_alive=pods_live(job))
    decision = None
    is_sealed = seal is not None and (seal.digest, seal.strategy) == (verdict.digest, verdict.strategy)
    if policy is None and seal is not None and is_sealed:
        # sealed under the task's own policy, which this reader need not have
        decision = decision_from_json(seal.json)
        if decision is not None:
            decision = replace(decision, enforced=context.pods_alive)
    return Conclusion(job, verdict, decision or decide(verdict, policy, context), diagnosis)


def failed(job: JobErrors) -> bool:
    """Whether the attempt failed.

    An unreadable document counts, and so does a node that reported a failure and left no document.
    """
    reported = any(presence.phase is Phase.FAILED for presence in job.roster)
    return bool(job.failures or job.seals or job.coverage.unreadable or reported)


def strategy_of(seals: Sequence[Seal]) -> AggregationStrategy:
    """Return the strategy that the pods sealed with, if it can be loaded here; else the default one."""
    for seal in sorted(seals, key=lambda seal: seal.order):
        try:
            return get_strategy(seal.strategy)
        except FirstFaultError:
            continue  # a plug-in that is not installed here, or broken here
    return get_strategy(DEFAULT_STRATEGY)


def _seal_of(job: JobErrors) -> Seal | None:
    """Return the sealed verdict that rests on the most documents, without those that are not valid.

    Of an attempt without documents, one that another version sealed is taken all the same: Flyte's part is readable.
    """
    valid = [seal for seal in job.seals if verdict_from_json(seal.json) is not None]
    chosen = valid or ([] if job.failures else job.seals)
    if left := len(job.seals) - len(valid):
        use = "only its code and message are used" if chosen and not valid else "it is ignored"
        more = f", as in {left - 1} more" if left > 1 else ""
        first = next(seal.name for seal in job.seals if seal not in valid)
        logger.warning("the verdict in %s is not valid, or of another version%s; %s", first, more, use)
    return chosen[0] if chosen else None


def _overrules(seal: Seal, job: JobErrors, strategy: str | AggregationStrategy | None) -> bool:
    """Whether the sealed verdict is taken: the documents are gone, or it rests on more of them than are left."""
    if not job.failures:
        return True
    if strategy not in {None, seal.strategy} or seal.count <= job.document_count:
        return False
    is_whole = bool(job.roster) and job.coverage.complete
    if is_whole:
        text = (
            "the verdict in %s is ignored: it says that it rests on %d documents, but there are %d and none is missing"
        )
        logger.warning(text, seal.name, seal.count, job.document_count)
    return not is_whole


def _verdict_of_seal(seal: Seal, job: JobErrors) -> Verdict:
    verdict = verdict_from_json(seal.json)
    if verdict is None:
        # sealed by another version; the part that Flyte reads is readable all the same
        what = (seal.code, seal.message, seal.kind, seal.origin)
        as_flyte_reads = WorkerError(*what, seal.fault_timestamp_ns, seal.worker, Place(node=seal.worker))
        verdict = run_strategy(get_strategy("earliest"), replace(job, failures=(as_flyte_reads,)))
    note = "no error documents were read; this is the pods' sealed verdict"
    notes = dict.fromkeys((*verdict.coverage.notes, *job.coverage.notes, note))
    return replace(verdict, coverage=replace(verdict.coverage, notes=tuple(notes), complete=False))
