"""Concludes an attempt: the verdict, the retry decision,
and whether torch elastic restarts the workers.

Pure: no storage, no clock, no environment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from firstfault import model
from firstfault.evidence.diagnosis import Diagnosis, diagnose
from firstfault.model.job import pods_live
from firstfault.retry import RetryContext, RetryPolicy, decide, find_machine, is_gpu_gone
from firstfault.strategies import AggregationStrategy, get_strategy, run_strategy
from firstfault.strategies.registry import find_sealed_strategy
from firstfault.utils.loggers import get_logger
from firstfault.wire.json_schemas import from_json

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Judgment:
    """A verdict and the decision on it. They always belong together:
    a reason never explains another verdict.
    """

    verdict: model.Verdict
    decision: model.Decision
    is_sealed: bool = False
    """Whether the nodes of the attempt published both."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The verdict and the decision on an attempt. Reports print it and decide nothing again."""

    job: model.JobErrors
    verdict: model.Verdict
    decision: model.Decision
    """On this verdict."""
    diagnosis: Diagnosis
    """The diagnosis of `job`, whatever strategy the verdict is from."""
    sealed: Judgment | None = None
    """The judgment that the nodes published, even if this reader's differs; None if unreadable."""


def find_judgment(conclusion: Conclusion) -> Judgment:
    """Return the verdict and the decision that a scheduler follows when it acts on the attempt.

    These are what the nodes published. The nodes had more information than a reader: the task's
    retry policy, the previous attempt's verdict, how long the attempt had trained. Schedulers that
    don't read the verdict have the exit code. Without a sealed verdict, the reader's own counts.
    """
    return conclusion.sealed or Judgment(conclusion.verdict, conclusion.decision)


def conclude(
    job: model.JobErrors,
    *,
    strategy: str | AggregationStrategy | None = None,
    policy: RetryPolicy | None = None,
    context: RetryContext | None = None,
) -> Conclusion | None:
    """Return the verdict on an attempt and the decision; None if the attempt didn't fail.

    Args:
        job: what was read.
        strategy: a name or a callable. With None it's the strategy of the sealed verdict, or
            `DEFAULT_STRATEGY` if nothing is sealed.
        policy: the retry policy. With None it's the sealed decision if the verdict is the sealed
            one, and firstfault's default policy otherwise.
        context: the policy's input in addition to the verdict, or None to derive it from `job`.

    Raises:
        StrategyError: the strategy is unknown, raised, or didn't return a verdict.
    """
    # an unknown strategy is an error even if the attempt didn't fail
    chosen_strategy = get_strategy(strategy) if strategy is not None else None
    if not job.has_failed:
        return None
    seal, sealed = _find_valid_seal(job)
    diagnosis = diagnose(job)
    if seal is not None and _sealed_verdict_wins(seal, job, strategy):
        verdict = _restore_sealed_verdict(seal, sealed[0] if sealed is not None else None, job)
    else:
        verdict = run_strategy(chosen_strategy or find_sealed_strategy(job.seals), job, diagnosis)
    context = replace(
        context or RetryContext(pods_alive=pods_live(job)), engine=job.engine, progress=job.progress
    )
    verdict = replace(verdict, machine=find_machine(verdict))
    published = _restore_judgment(sealed, verdict, job, context) if sealed is not None else None
    is_sealed = seal is not None and (seal.digest, seal.strategy) == (
        verdict.digest,
        verdict.strategy,
    )
    # A reader of another version that blames another rank for the same documents doesn't overrule
    # the nodes.
    if (
        policy is None
        and published is not None
        and is_sealed
        and (strategy is None or published.verdict is verdict)
    ):
        return Conclusion(job, published.verdict, published.decision, diagnosis, published)
    return Conclusion(job, verdict, decide(verdict, policy, context), diagnosis, published)


def _find_valid_seal(
    job: model.JobErrors,
) -> tuple[model.Seal | None, tuple[model.Verdict, model.Decision] | None]:
    """Return the valid seal that rests on the most documents, with its verdict and decision.

    Without any document, a seal of another version is returned without them: the part that Flyte
    reads is readable.
    """
    # Several pods may write a seal, each with the documents that it could read in time. They are
    # sorted: the seal that rests on the most documents is first.
    parsed = [(seal, from_json(seal.json)) for seal in job.seals]
    valid = [(seal, sealed) for seal, sealed in parsed if sealed is not None]
    invalid = [seal for seal, sealed in parsed if sealed is None]
    is_used = bool(invalid) and not valid and not job.failures
    if invalid:
        use = "only its code and message are used" if is_used else "it is ignored"
        more = f", as in {len(invalid) - 1} more" if len(invalid) > 1 else ""
        logger.warning(
            "the verdict in %s is not valid, or of another version%s; %s",
            invalid[0].name,
            more,
            use,
        )
    if valid:
        return valid[0]
    return (invalid[0] if is_used else None), None


def _sealed_verdict_wins(
    seal: model.Seal, job: model.JobErrors, strategy: str | AggregationStrategy | None
) -> bool:
    """Whether the sealed verdict wins because documents that it rests on are gone."""
    if not job.failures:
        return True
    if strategy not in {None, seal.strategy} or seal.count <= job.document_count:
        return False
    # Any process of the job can write a seal that claims a large number of documents. If no
    # document is missing, the claim is wrong.
    is_whole = bool(job.roster) and job.coverage.complete
    if is_whole:
        text = (
            "judging anew: the verdict in %s claims %d documents, and the attempt has %d;"
            " schedulers still follow it"
        )
        logger.warning(text, seal.name, seal.count, job.document_count)
    return not is_whole


def _restore_judgment(
    sealed: tuple[model.Verdict, model.Decision],
    verdict: model.Verdict,
    job: model.JobErrors,
    context: RetryContext,
) -> Judgment:
    """Return what the nodes published; with this reader's verdict if that is the same,
    because it has the root cause.

    The pods decided with the task's own retry policy, a Python object that this reader doesn't
    have.
    """
    published, decision = sealed
    if context.has_enforcer:  # a pod may have been lost since; other engines don't read the files
        decision = replace(decision, enforced=context.pods_alive)
    is_same_fault = (
        verdict.digest == published.digest or verdict.fingerprint == published.fingerprint
    )
    if is_same_fault and _is_same_cause(published, verdict):
        return Judgment(verdict, decision, is_sealed=True)
    ranks = set(published.ranks)
    fingerprint = published.fingerprint
    candidates = (
        failure for failure in job.failures if fingerprint and failure.fingerprint == fingerprint
    )
    roots = (
        item
        for item in candidates
        if item.rank in ranks or (not ranks and item.node == published.node)
    )
    return Judgment(replace(published, root=next(roots, None)), decision, is_sealed=True)


def _is_same_cause(one: model.Verdict, other: model.Verdict) -> bool:
    """Whether two verdicts blame the same ranks or node for the same kind of fault."""
    causes = [
        (verdict.scope, verdict.ranks, verdict.node, verdict.category) for verdict in (one, other)
    ]
    return causes[0] == causes[1]


def _restore_sealed_verdict(
    seal: model.Seal, verdict: model.Verdict | None, job: model.JobErrors
) -> model.Verdict:
    if verdict is None:
        # sealed by another version: only the fields that Flyte reads have the same meaning in every
        # version
        fields = (
            seal.code,
            seal.message,
            seal.kind,
            seal.origin,
            seal.fault_timestamp_ns,
            seal.worker,
        )
        failure = model.WorkerError(*fields, model.Place(node=seal.worker))
        verdict = run_strategy(get_strategy("earliest"), replace(job, failures=(failure,)))
    note = "no error documents were read; this is the verdict that the nodes sealed"
    notes = dict.fromkeys((*verdict.coverage.notes, *job.coverage.notes, note))
    return replace(verdict, coverage=replace(verdict.coverage, notes=tuple(notes), complete=False))


# --- whether workers are restarted ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RestartContext:
    """The input of `decide_restart` in addition to the verdict."""

    round: int
    restarts_left: int
    """How many of `max_restarts` are left, before this decision."""
    nodes_left: int = 1
    """Number of nodes with an agent that is alive and stays in the job."""
    min_nodes: int = 1
    """The minimum of `nnodes`."""
    previous_fingerprint: str = ""
    """Fingerprint of the previous round's verdict; empty if unknown or in the first round."""
    previous_node: str = ""
    """Node of that verdict's root cause."""
    lifetime_seconds: float = 0.0
    """Upper limit of the time from the start of the round's workers to the failure; 0 if unknown.
    """

    def to_retry_context(self, context: RetryContext) -> RetryContext:
        """Return the context for a retry policy that is asked about this restart."""
        return replace(
            context,
            restarts_left=self.restarts_left,
            previous_fingerprint=self.previous_fingerprint,
            previous_machine=self.previous_node,
            lifetime_seconds=self.lifetime_seconds,
            pods_alive=True,
        )


def decide_restart(
    verdict: model.Verdict, decision: model.Decision, context: RestartContext
) -> tuple[bool, str]:
    """Return whether to restart the workers after a round with this verdict, and the reason.

    torch restarts after any failure. That is taken away only with proof that the restart would
    fail, too.

    `decision` is the retry policy's, with the context of `RestartContext.to_retry_context`.
    """
    # The only refusal without a proof. torch's rendezvous would wait for 10 minutes or more for a
    # node that may never come, while the remaining nodes hold their GPUs; the scheduler can restart
    # all nodes at once.
    if context.nodes_left < context.min_nodes:
        return False, f"the job needs {context.min_nodes} nodes, and {context.nodes_left} are left"
    # Contained errors of a GPU's memory may be gone after a restart, but not a GPU that the driver
    # has lost.
    if is_gpu_gone(verdict):
        return False, "the GPU is gone, and a restart would need it"
    if decision.action is model.Action.STOP:
        return False, decision.reason
    if decision.retry:
        return True, decision.reason
    return True, f"{decision.reason}, and torch elastic restarts after any failure"


def build_restart_record(conclusion: Conclusion, context: RestartContext) -> model.RestartRecord:
    """Return the record of a failed round: a summary of its verdict, and the decision."""
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


UNUSED_RESTARTS = "(max_restarts) left unused"
"""In a decision's reason, behind the number of restarts."""


def explain_unused_restarts(
    decision: model.Decision,
    verdict: model.Verdict,
    refused: model.RestartRecord,
    max_restarts: int,
) -> model.Decision:
    """Add to a decision's reason why the agents refused to restart although some of
    `max_restarts` were left.
    """
    used = verdict.root.place.restart_count if verdict.root is not None else 0
    count = f"{max(max_restarts - used, 0)} of {max_restarts} restarts {UNUSED_RESTARTS}"
    why = (
        f"for the same reason, {count}"
        if refused.reason == decision.reason
        else f"{count}: {refused.reason}"
    )
    return replace(decision, reason=f"{decision.reason}; {why}")
