"""How the workers of a node ended: what `launch_agent` returns."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstfault_torch.agent.reporter import NodeReport
    from firstfault_torch.agent.restarts import RefusedRestart
    from firstfault_torch.context import Recording
    from firstfault_torch.rounds.failure_broadcast import FirstFailure
    from firstfault_torch.rounds.peers import Peers


class PeerFailedError(Exception):
    """Another node failed; this node's workers were stopped because of it.

    Args:
        failure: the notice from the other node.
    """

    def __init__(self, failure: FirstFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """How a node's last round ended, with results or with an error."""

    recording: Recording
    """With the number of the round."""
    report: NodeReport
    """What this node has written about the round."""
    results: dict[int, Any] | None = None
    """What the workers returned, by global rank; empty if the job finished without this node. None: it failed."""
    error: Exception | None = None
    """What torch raised: ChildFailedError, SignalException, or an error of the agent itself; PeerFailedError if another
    node failed. None: the workers succeeded."""
    group_rank: int = 0
    """This node's."""
    refused: RefusedRestart | None = None
    """The decision against a restart that ended the attempt; None: there was none."""
    peers: Peers | None = None
    """The other agents; None: there are none, or the round had not begun."""

    def forget_agent(self) -> None:
        """Let the agent end, whose frames the error's traceback holds: a later fork must not inherit its store."""
        if self.error is not None:
            traceback.clear_frames(self.error.__traceback__)
