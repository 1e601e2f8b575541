"""Whether torch elastic restarts the workers within an attempt, by the verdict on the round and the retry policy.

Pure: no storage, no clock, no environment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from firstfault.model import Origin, RestartKind, RestartRecord, Scope
from firstfault.retry import RetryContext, host_evidence, is_again

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion
    from firstfault.model import Decision, Verdict


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


class RestartDecision(NamedTuple):
    """Whether to restart, and why or why not."""

    restart: bool
    reason: str


def decide_restart(verdict: Verdict, decision: Decision, context: RestartContext) -> RestartDecision:
    """Return whether the workers are restarted after a round with this verdict.

    `decision` is the retry policy's, for `RestartContext.for_policy`.
    """
    again, reason = is_again(verdict, context.for_policy(RetryContext())), decision.reason
    is_known, restart = verdict.scope is not Scope.UNDETERMINED, decision.retry
    root = verdict.root
    # the same fingerprint does not show the same fault: the code asked for it, or another node was lost
    is_asked_for = root is not None and root.recoverable and root.origin is not Origin.SYSTEM
    may_repeat = is_asked_for or verdict.category in {"preemption", "node_lost"}
    if context.nodes_left < context.min_nodes:
        restart, reason = False, f"the job needs {context.min_nodes} nodes, and {context.nodes_left} are left"
    elif verdict.category == "gpu_hardware" or host_evidence()(verdict, RetryContext()):
        restart, reason = False, "the machine is at fault, and a restart would use it again"
    elif decision.retry and again and not may_repeat:
        restart, reason = False, "the previous round failed with the same fault"
    elif not decision.retry and not is_known and again:
        reason = "the cause is not known, and the previous round failed with the same fault"
    elif not decision.retry and not is_known:
        restart, reason = True, "the cause is not known, and torch elastic restarts after any failure"
    return RestartDecision(restart, reason)


def record_of(conclusion: Conclusion, context: RestartContext) -> RestartRecord:
    """Return what is kept about a round that failed: its verdict in short, and the decision."""
    verdict = conclusion.verdict
    decided = decide_restart(verdict, conclusion.decision, context)
    root = verdict.root
    sizes = [entry.place.world_size for entry in conclusion.job.roster]
    sizes += [failure.place.world_size for failure in conclusion.job.failures]
    return RestartRecord(
        kind=RestartKind.ROUND,
        number=context.round,
        headline=verdict.headline,
        restart=decided.restart,
        reason=decided.reason,
        rank=root.rank if root is not None else next(iter(verdict.ranks), None),
        node=verdict.node or "",
        fingerprint=verdict.fingerprint,
        category=verdict.category,
        timestamp_ns=verdict.timestamp_ns,
        world_size_before=max(sizes, default=0) or None,
    )


def with_unused_restarts(decision: Decision, verdict: Verdict, refused: RestartRecord, max_restarts: int) -> Decision:
    """Return the decision on an attempt; its reason also tells why a restart was `refused` although some were left."""
    used = verdict.root.place.restart_count if verdict.root is not None else 0
    count = f"{max(max_restarts - used, 0)} of {max_restarts} restarts (max_restarts) were not used"
    why = f"for the same reason, {count}" if refused.reason == decision.reason else f"{count}: {refused.reason}"
    return replace(decision, reason=f"{decision.reason}; {why}")
