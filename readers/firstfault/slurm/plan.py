"""What to do with a failed job of Slurm. Pure: no Slurm, no storage, no environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from firstfault.conclude import Judgment
from firstfault.model.job import Action
from firstfault.retry import HOST_CATEGORIES, RetryContext, host_evidence
from firstfault.slurm.job import JobInfo
from firstfault.utils.text import describe_used_up

_PREEMPTED = "PREEMPTED"
_NOT_FAILED_STATES = {"CANCELLED", "COMPLETED"}
_COMPLETING, _FAILED_REASONS = "COMPLETING", {"TimeLimit", "NonZeroExitCode"}
"""A job that ends, whatever the reason: if it was canceled, Slurm gives none."""


class RequeuePlan(NamedTuple):
    """What to do with a failed job."""

    judgment: Judgment
    """The judgment of the step that decides."""
    stop_reason: str
    """Empty if the job is requeued."""
    is_counted: bool
    bad_node: str
    """A node of the job that is proven faulty, or empty if there is none."""

    def describe(self, job_id: str, exclude: str, *, is_observed: bool) -> str:
        """Return one line about the plan."""
        without = f", without {exclude}" if exclude else ""
        reason = self.stop_reason or self.judgment.decision.reason
        if is_observed:
            negation = "not " if self.stop_reason else ""
            return f"observed: would {negation}have requeued job {job_id}{without}: {reason}"
        return f"job {job_id} {'stops' if self.stop_reason else f'is requeued{without}'}: {reason}"


def make_plan(
    job: JobInfo,
    judgments: Sequence[Judgment],
    count: int,
    max_requeues: int,
) -> RequeuePlan:
    """Return what to do with a job.

    Args:
        job: Slurm's data about it.
        judgments: of the steps that failed in its last start, in their order; at least one.
        count: how many requeues have counted so far.
        max_requeues: how many may count.
    """
    # The script tolerated an earlier step's failure, as in `srun eval.py || true`, and will do so
    # again.
    judgment = judgments[-1]
    proven = [
        one
        for one in judgments
        if one.verdict.category in HOST_CATEGORIES and host_evidence()(one.verdict, RetryContext())
    ]
    # SIGTERM may come from `timeout`, from scancel, or from sbatch's --signal before the time
    # limit: only Slurm's word shows that it was a preemption. A node may be lost again and again.
    is_free = job.state == _PREEMPTED or (
        judgment in proven and judgment.decision.action is Action.SYSTEM
    )
    is_canceled = job.state == _COMPLETING and job.reason not in _FAILED_REASONS
    stop_reason = ""
    if is_canceled or job.state in _NOT_FAILED_STATES:
        stop_reason = (  # to its agents, a user's scancel looks like a preemption
            f"Slurm shows it as {job.state}"
        )
    elif judgment.decision.action is Action.STOP:
        stop_reason = judgment.decision.reason
    elif not is_free and count >= max_requeues:
        stop_reason = describe_used_up(max_requeues, "requeue")
    bad_node = next((one.verdict.node or "" for one in reversed(proven)), "")
    return RequeuePlan(judgment, stop_reason, not is_free, bad_node)
