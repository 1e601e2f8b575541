"""Reports the failures of the agent itself: a signal that terminates its process, or an error of its own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import SignalException

from firstfault.model import TERMINATED, TERMINATED_BY
from firstfault_torch.agent.death_documents import about_agent
from firstfault_torch.context import Moment
from firstfault_torch.error_classes import ErrorClass
from firstfault_torch.guard import guarded
from firstfault_torch.rounds.failure_broadcast import FirstFailure

if TYPE_CHECKING:
    from firstfault_torch.agent.node_round import AgentSettings, NodeRound
    from firstfault_torch.agent.signals import SignalReceived


class OwnFailures:
    """Writes the documents about an agent, and tells the other agents.

    Args:
        node: the agent's.
        settings: the agent's.
    """

    def __init__(self, node: NodeRound, settings: AgentSettings) -> None:
        self._node = node
        self._settings = settings
        self._signal_reported = threading.Event()
        self.waits_at_exit = False
        """Whether this node's workers have succeeded, and it waits for the other nodes."""
        self.finished = False
        """Whether all nodes have succeeded; a signal is not a failure then."""

    def report_signal(self, received: SignalReceived) -> None:
        """Report at once that this node is terminated; called from the thread that receives signals."""
        try:
            if self.finished:
                return
            node = self._node
            node.reporter.hurry()
            error = SignalException("terminated", sigval=received.number)
            node.reporter.write(about_agent(error, ErrorClass.PREEMPTION, node.places.of(), received.moment))
            others_suffice = node.places.nodes - 1 >= self._settings.min_nodes
            if self.waits_at_exit or not others_suffice:
                self._tell(f"{TERMINATED_BY} {received.number.name}")
        finally:
            self._signal_reported.set()

    def record(self, error: BaseException, error_class: ErrorClass) -> None:
        """Write a document about a failure of the agent itself, and finish the node's report."""
        node = self._node
        preempted = error_class is ErrorClass.PREEMPTION
        with guarded("stopping the workers"):
            node.stop_workers(TERMINATED if preempted else "its agent had failed")
        if preempted and self._settings.signals.is_listening:
            self._signal_reported.wait(node.reporter.recording.upload_deadline_seconds)
        else:
            node.reporter.write(about_agent(error, error_class, node.places.of(), Moment.now()))
        if not preempted:
            self._tell(f"{type(error).__name__} in its agent")
        node.finish_report()
        if node.peers is not None and preempted:
            node.peers.leave(node.reporter.report.copies)

    def _tell(self, what: str) -> None:
        place = self._node.places.of()
        if self._node.peers is not None:
            self._node.peers.broadcast.send(FirstFailure(what, place.node, place.group_rank))
