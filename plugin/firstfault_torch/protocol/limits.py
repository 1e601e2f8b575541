"""The time limits of an election."""

from __future__ import annotations

from dataclasses import dataclass

from firstfault_torch import time_limits
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of an election in seconds; `firstfault_torch.time_limits` explains each."""

    acknowledgment: float
    """After this an agent that acknowledged nothing isn't waited for."""
    first_pause: float
    """Seconds between two checks of who has reported, doubled each time."""
    longest_pause: float
    leader: float
    """For another agent's conclusion."""
    publishing: float
    """For the upload of an agent that has concluded."""
    hurried_settle: float
    """These count from a request to shut down."""
    hurried_leader: float
    hurried_publishing: float


def build_limits(nodes: int) -> Limits:
    """Return the limits of an election of this many nodes."""
    more_for_leader = time_limits.LEADER_TIMEOUT_SECONDS_PER_NODE * nodes
    return Limits(
        acknowledgment=time_limits.ACKNOWLEDGMENT_TIMEOUT_SECONDS,
        first_pause=time_limits.ARRIVALS_POLL_SECONDS,
        longest_pause=time_limits.MAX_ARRIVALS_POLL_SECONDS,
        leader=time_limits.LEADER_TIMEOUT_SECONDS + more_for_leader,
        publishing=time_limits.LEADER_PUBLISH_TIMEOUT_SECONDS,
        hurried_settle=get_limit(ExitStep.SETTLE, Hurry.TERMINATED),
        hurried_leader=get_limit(ExitStep.LEADERS, Hurry.TERMINATED),
        hurried_publishing=get_limit(ExitStep.LEADER_PUBLISHES, Hurry.TERMINATED),
    )
