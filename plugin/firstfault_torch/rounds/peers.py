"""Exchanges failure notices with the other agents of a round."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from firstfault.model import DIED_SILENTLY
from firstfault_torch.compat.torch_agent import master_address
from firstfault_torch.guard import bounded, guarded
from firstfault_torch.rounds.failure_broadcast import FailureBroadcast, FirstFailure
from firstfault_torch.rounds.liveness import Liveness
from firstfault_torch.rounds.roster_poll import RosterPoll
from firstfault_torch.rounds.round_store import round_store
from firstfault_torch.rounds.settlement import Settlement

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from torch.distributed.elastic.agent.server.api import WorkerGroup

    from firstfault_torch.context import Recording
    from firstfault_torch.rounds.failure_broadcast import RoundOutcome
    from firstfault_torch.rounds.settlement import Reports, SettledDocument

__all__ = ["Peers"]

_CLOSING_S = 2.0
"""Longest wait for a listener to end, and for the rendezvous to be closed."""
_COMING_BACK_S = 60.0
"""How long a failure in the roster may be ignored while the workers can restart."""


class Peers:
    """Listens to the other agents of one round. Make it after the workers were forked: connecting takes locks.

    Args:
        group: this node's workers, with the round's store.
        recording: of the round.
        copies: what this node has written so far.
        interval: seconds between two looks at the workers.
        can_restart: whether the workers may be started again after a failure.
        others_suffice: whether the agents decide on a restart also if one of them has died; the others are enough.
        wake: called from a thread when the round's outcome is known.
        gave_up: set by a signal to this process; ends waits.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        group: WorkerGroup,
        recording: Recording,
        copies: Mapping[str, bytes],
        *,
        interval: float,
        can_restart: bool,
        others_suffice: bool = False,
        wake: Callable[[], None],
        gave_up: threading.Event,
    ) -> None:
        self._group = group
        self._gave_up = gave_up
        own, node = group.group_rank or 0, recording.identity.node
        nodes = group.group_world_size or 1
        self._others_suffice = others_suffice
        self._settlement = Settlement(own, nodes)
        self._agreement = Settlement(own, nodes, "restart")
        store = round_store(group.store, recording.round)
        self.broadcast = FailureBroadcast(store, own, wake, self._heard)
        with guarded("telling the other agents that this node has joined"):
            self._settlement.join(store, copies)
        self._liveness: Liveness | None = Liveness(store, own, node, master_address(group)[0], self._report_dead_agent)
        self._roster_poll: RosterPoll | None = None
        if recording.files is not None:
            patience = interval + (_COMING_BACK_S if can_restart else 0)
            self._roster_poll = RosterPoll(
                recording,
                recording.files,
                group_rank=own,
                nodes=nodes,
                patience_seconds=patience,
                on_failure=self._take_from_roster,
            )

    @property
    def outcome(self) -> RoundOutcome | None:
        """How the round ended; None until it has."""
        return self.broadcast.outcome

    def notify(self, failure: FirstFailure) -> None:
        """Tell the other agents of this node's failure; a fatal one also closes the rendezvous."""
        self.broadcast.send(failure)
        if failure.fatal:
            # in the background: this node's workers are stopped meanwhile
            bounded(self._group.spec.rdzv_handler.set_closed, 0, "closing the rendezvous")

    def end_for_good(self, failure: FirstFailure, *, tell: bool) -> None:
        """Take a failure for fatal, because the agents have decided against a restart.

        Args:
            failure: that asked.
            tell: also tell agents that were not there when this was decided: they may be on their way to a new round.
        """
        if tell:
            self.notify(replace(failure, fatal=True, asks=False))
        self.broadcast.end_for_good(failure)

    def close_rendezvous(self) -> None:
        """Close the rendezvous, so that no node waits in it for this one."""
        bounded(self._group.spec.rdzv_handler.set_closed, _CLOSING_S, "closing the rendezvous")

    def agree(
        self, copies: Mapping[str, bytes], conclude: Callable[[Reports], bytes | None], seconds: float
    ) -> SettledDocument | None:
        """Settle with the other agents on what one of them concludes about a restart.

        None: the store is lost, or a node failed for good meanwhile. An empty document: none of them concluded in time.
        """
        connections = self.broadcast.connections_to_agree()
        if connections is None:
            return None
        settled = self._agreement.settle(
            connections,
            copies,
            conclude,
            lambda: True,
            seconds=seconds,
            leaving=self._gave_up.is_set(),
            give_up=self._gave_up,
        )
        if settled is None:
            # this also ends the waiting thread: the next round may fork, and the connection is needed again
            settled = self._agreement.abandon(connections[0])
        if settled is None or not settled.document:
            self._look_for_a_fatal_failure()
        return None if self.broadcast.is_fatal else settled

    def leave(self, copies: Mapping[str, bytes]) -> None:
        """Say in a decision on a restart, if the agents take one, that this node leaves."""
        outcome = self.broadcast.outcome
        if outcome is None or outcome.failure is None or not outcome.failure.asks:
            return
        connections = self.broadcast.connections_to_agree()
        if connections is not None:
            self._agreement.leave(connections[0], copies)

    def settle(
        self,
        copies: Mapping[str, bytes],
        conclude: Callable[[Reports], bytes | None],
        publish: Callable[[], bool],
        seconds: float,
    ) -> SettledDocument | None:
        """Settle on one verdict with the other agents; None if the store is lost. See `Settlement.settle`."""
        connections = self.broadcast.connections()
        if connections is None:
            return None
        return self._settlement.settle(
            connections,
            copies,
            conclude,
            publish,
            seconds=seconds,
            leaving=self._gave_up.is_set(),
            give_up=self._gave_up,
        )

    def stop_listening(self) -> None:
        """Close the connections to the other agents, and stop polling the roster."""
        listeners: tuple[Any, ...] = (self._liveness, self._roster_poll)
        self._liveness = self._roster_poll = None
        for listener in listeners:
            if listener is not None:
                bounded(listener.end, _CLOSING_S, "ending the connections to the other agents", self._gave_up)

    def end(self) -> None:
        """End the round and its threads: the next round may fork."""
        self.stop_listening()
        self.broadcast.end()

    def _heard(self, store: Any, failure: FirstFailure) -> None:
        """Tell the other agents that this one knows of a failure, and so lives."""
        if failure.fatal:
            self._agreement.interrupt(failure.reason)
        (self._agreement if failure.asks else self._settlement).heard(store)

    def _look_for_a_fatal_failure(self) -> None:
        """Learn now why the agents did not agree: one that already knows of a fatal failure ends it for all."""
        failure = self.broadcast.fatal_failure()
        if failure is not None:
            self.broadcast.accept(failure)

    def _report_dead_agent(self, group_rank: int, node: str) -> None:
        """Tell the other agents that one of them died."""
        asks = self._others_suffice
        self.broadcast.send(FirstFailure(DIED_SILENTLY, node, group_rank, fatal=not asks, asks=asks))

    def _take_from_roster(self, group_rank: int) -> None:
        """Accept a failure that another node wrote into the roster but did not broadcast."""
        what = "its roster entry says so; it sent no failure notice"
        self.broadcast.accept(FirstFailure(what, f"node {group_rank}", group_rank))
