"""From what was read about an attempt to a verdict, a decision, and whether torch elastic restarts the workers.

Pure: no storage, no clock, no environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from firstfault import model
from firstfault.errors import FirstFaultError
from firstfault.evidence.diagnosis import Diagnosis, diagnose
from firstfault.model.job import pods_live
from firstfault.retry import RetryContext, RetryPolicy, decide, host_evidence, same_fault_again
from firstfault.strategies import DEFAULT_STRATEGY, AggregationStrategy, get_strategy, run_strategy
from firstfault.utils.loggers import logger_of
from firstfault.wire.json_schemas import from_json

logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """An attempt, judged once. Reports draw it and judge nothing again."""

    job: model.JobErrors
    verdict: model.Verdict
    decision: model.Decision
    diagnosis: Diagnosis
    """Of `job`; whatever the strategy made of it."""


def conclude(
    job: model.JobErrors,
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
    seal, sealed = _seal_of(job)
    if seal is not None and _overrules(seal, job, strategy):
        verdict = _verdict_of_seal(seal, sealed[0] if sealed is not None else None, job)
    else:
        verdict = run_strategy(chosen or strategy_of(job.seals), job, diagnosis)
    context = replace(context or RetryContext(pods_alive=pods_live(job)), engine=job.engine, progress=job.progress)
    is_sealed = seal is not None and (seal.digest, seal.strategy) == (verdict.digest, verdict.strategy)
    if policy is None and sealed is not None and is_sealed:
        # under the task's own policy, which this reader need not have
        decision = replace(sealed[1], enforced=context.pods_alive)
    else:
        decision = decide(verdict, policy, context)
    return Conclusion(job, verdict, decision, diagnosis)


def failed(job: model.JobErrors) -> bool:
    """Whether the attempt failed.

    An unreadable document counts, and so does a node that reported a failure and left no document.
    """
    reported = any(presence.phase is model.Phase.FAILED for presence in job.roster)
    return bool(job.failures or job.seals or job.coverage.unreadable or reported)


def strategy_of(seals: Sequence[model.Seal]) -> AggregationStrategy:
    """Return the strategy that the pods sealed with, if it can be loaded here; else the default one."""
    for seal in sorted(seals, key=lambda seal: seal.order):
        try:
            return get_strategy(seal.strategy)
        except FirstFaultError:
            continue  # a plug-in that is not installed here, or broken here
    return get_strategy(DEFAULT_STRATEGY)


def _seal_of(job: model.JobErrors) -> tuple[model.Seal | None, tuple[model.Verdict, model.Decision] | None]:
    """Return the valid seal that rests on the most documents, and its verdict and decision.

    Of an attempt without documents, one that another version sealed is taken all the same: Flyte's part is readable.
    """
    read = [(seal, from_json(seal.json)) for seal in job.seals]
    valid = [(seal, sealed) for seal, sealed in read if sealed is not None]
    invalid = [seal for seal, sealed in read if sealed is None]
    is_used = bool(invalid) and not valid and not job.failures
    if invalid:
        use = "only its code and message are used" if is_used else "it is ignored"
        more = f", as in {len(invalid) - 1} more" if len(invalid) > 1 else ""
        logger.warning("the verdict in %s is not valid, or of another version%s; %s", invalid[0].name, more, use)
    if valid:
        return valid[0]
    return (invalid[0] if is_used else None), None


def _overrules(seal: model.Seal, job: model.JobErrors, strategy: str | AggregationStrategy | None) -> bool:
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


def _verdict_of_seal(seal: model.Seal, verdict: model.Verdict | None, job: model.JobErrors) -> model.Verdict:
    if verdict is None:
        # sealed by another version; the part that Flyte reads is readable all the same
        what = (seal.code, seal.message, seal.kind, seal.origin)
        as_flyte_reads = model.WorkerError(*what, seal.fault_timestamp_ns, seal.worker, model.Place(node=seal.worker))
        verdict = run_strategy(get_strategy("earliest"), replace(job, failures=(as_flyte_reads,)))
    note = "no error documents were read; this is the verdict that the nodes sealed"
    notes = dict.fromkeys((*verdict.coverage.notes, *job.coverage.notes, note))
    return replace(verdict, coverage=replace(verdict.coverage, notes=tuple(notes), complete=False))


# --- whether workers are restarted ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestartContext:
    """What is known besides the verdict when the workers could be restarted."""

    round: int
    restarts_left: int
    """Of `max_restarts`, before this decision."""
    nodes_left: int = 1
    """Nodes whose agents live and stay."""
    min_nodes: int = 1
    """The fewest nodes with which the job runs: the minimum of `nnodes`."""
    previous_fingerprint: str = ""
    """Of the previous round's verdict; empty: there was none, or it is not known."""

    def for_policy(self, context: RetryContext) -> RetryContext:
        """Return what a retry policy gets to know."""
        return replace(
            context, restarts_left=self.restarts_left, previous_fingerprint=self.previous_fingerprint, pods_alive=True
        )


def decide_restart(verdict: model.Verdict, decision: model.Decision, context: RestartContext) -> tuple[bool, str]:
    """Return whether the workers are restarted after a round with this verdict, and why or why not.

    `decision` is the retry policy's, for `RestartContext.for_policy`.
    """
    restart, reason = decision.retry, decision.reason
    again = same_fault_again()(verdict, context.for_policy(RetryContext()))
    is_known = verdict.scope is not model.Scope.UNDETERMINED
    root = verdict.root
    # the same fingerprint does not show the same fault: the code asked for it, or another node was lost
    is_asked_for = root is not None and root.recoverable and root.origin is not model.Origin.SYSTEM
    may_repeat = is_asked_for or verdict.category in {"preemption", "node_lost"}
    if context.nodes_left < context.min_nodes:
        restart, reason = False, f"the job needs {context.min_nodes} nodes, and {context.nodes_left} are left"
    elif verdict.category == "gpu_hardware" or host_evidence()(verdict, RetryContext()):
        restart, reason = False, "the machine is at fault, and a restart would use it again"
    elif decision.retry and again and not may_repeat:
        restart, reason = False, again.reason
    elif not decision.retry and not is_known and again:
        reason = f"the cause is not known, and {again.reason}"
    elif not decision.retry and not is_known:
        restart, reason = True, "the cause is not known, and torch elastic restarts after any failure"
    return restart, reason


def record_of(conclusion: Conclusion, context: RestartContext) -> model.RestartRecord:
    """Return what is kept about a round that failed: its verdict in short, and the decision."""
    verdict = conclusion.verdict
    restart, reason = decide_restart(verdict, conclusion.decision, context)
    root = verdict.root
    sizes = [entry.place.world_size for entry in conclusion.job.roster]
    sizes += [failure.place.world_size for failure in conclusion.job.failures]
    return model.RestartRecord(
        kind=model.RestartKind.ROUND,
        number=context.round,
        headline=verdict.headline,
        restart=restart,
        reason=reason,
        rank=root.rank if root is not None else next(iter(verdict.ranks), None),
        node=verdict.node or "",
        fingerprint=verdict.fingerprint,
        category=verdict.category,
        timestamp_ns=verdict.timestamp_ns,
        world_size_before=max(sizes, default=0) or None,
    )


def with_unused_restarts(
    decision: model.Decision, verdict: model.Verdict, refused: model.RestartRecord, max_restarts: int
) -> model.Decision:
    """Return the decision on an attempt; its reason also tells why a restart was `refused` although some were left."""
    used = verdict.root.place.restart_count if verdict.root is not None else 0
    count = f"{max(max_restarts - used, 0)} of {max_restarts} restarts (max_restarts) were not used"
    why = f"for the same reason, {count}" if refused.reason == decision.reason else f"{count}: {refused.reason}"
    return replace(decision, reason=f"{decision.reason}; {why}")
