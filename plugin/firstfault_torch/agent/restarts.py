"""Asks whether the workers are restarted, before torch's agent spends one of its restarts.

torch restarts the worker group after any failure. Here the agents of the round agree on its verdict first; one of them
applies the retry policy, and all of them follow its decision. If they cannot agree, torch restarts the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from firstfault.layout import ROSTER, restart_record_name
from firstfault.model import RestartKind, RestartRecord
from firstfault.restart import RestartContext
from firstfault.wire.json_schemas import restart_from_json, restart_to_json
from firstfault_torch.context import Recording
from firstfault_torch.guard import guarded, logger
from firstfault_torch.rounds.settlement import Reports, SettledDocument

if TYPE_CHECKING:
    from firstfault.model import Place
    from firstfault_torch.agent.reporter import Reporter
    from firstfault_torch.rounds.failure_broadcast import FirstFailure
    from firstfault_torch.rounds.peers import Peers

DecideRestart = Callable[[Recording, Reports, RestartContext], RestartRecord | None]
"""Judges a round by the agents' reports; returns the decision, None if that failed."""
_NO_AGREEMENT = "the agents reached no decision in time, and torch elastic restarts after any failure"


class RefusedRestart(NamedTuple):
    """A decision against a restart."""

    record: RestartRecord
    max_restarts: int
    """Torch's."""


class Restarts:
    """Decides on the restarts of one attempt, with the other agents, and keeps a record of each.

    Args:
        decide: judges a round; None: torch's way.
        reporter: writes the records.
        min_nodes: fewest nodes with which the job continues.
        seconds: longest wait for the other agents' reports.
        max_restarts: torch's.
    """

    def __init__(
        self, decide: DecideRestart | None, reporter: Reporter, min_nodes: int, seconds: float, max_restarts: int
    ) -> None:
        self._decide = decide
        self._reporter = reporter
        self._min_nodes = min_nodes
        self._seconds = seconds
        self._max_restarts = max_restarts
        self.refused: RefusedRestart | None = None
        """The decision against a restart, which ended the attempt."""
        self._previous_fingerprint = ""
        self._written: tuple[str, RestartRecord] | None = None
        """The record that this node has written about the last round, and its path."""

    @property
    def ask(self) -> bool:
        """Whether the agents decide; False: torch does."""
        return self._decide is not None

    def others_suffice(self, nodes: int) -> bool:
        """Whether the job continues if one of so many nodes is lost."""
        return nodes - 1 >= self._min_nodes

    def decided(
        self, place: Place, restarts_left: int, peers: Peers | None, first: FirstFailure
    ) -> RestartRecord | None:
        """Return what the agents have decided about the round, and keep it; None if a node failed for good meanwhile.

        With other nodes the call waits for them; see `Settlement.settle`.

        Args:
            place: this agent's.
            restarts_left: on this node.
            peers: None: there is no other node, or the agents are not connected.
            first: the failure that ended the round.
        """
        nodes, group_rank = place.group_world_size or 1, place.group_rank or 0
        judge = partial(self._judged, nodes, restarts_left)
        found: tuple[RestartRecord, bool] | None = None
        if nodes > 1 and peers is not None:
            found = self._agreed(peers, judge)
        elif nodes == 1 and (judged := judge(Reports(dict(self._reporter.report.copies)))) is not None:
            found = judged, True
        if found is None and peers is not None and peers.broadcast.is_fatal:
            return None
        record, is_mine = found or (self._without_agreement(first), first.group_rank == group_rank)
        if record.is_agreed:
            logger.info("%s: %s", "restarting the workers" if record.restart else "not restarting", record.reason)
            self._previous_fingerprint = record.fingerprint
        else:
            logger.warning("restarting the workers: %s", record.reason)
        if is_mine or not self._reporter.recording.identity.is_folder_shared:
            path = f"{ROSTER}/{restart_record_name(record.kind.value, record.number, group_rank)}"
            self._written = (path, record) if record.restart else None
            self._reporter.put(path, restart_to_json(record))
        self.refused = None if record.restart else RefusedRestart(record, self._max_restarts)
        if not record.restart and peers is not None:
            peers.end_for_good(first, tell=is_mine)
        return record

    def began_again(self, world_size: int) -> None:
        """Complete the record of the last round: the workers run again, so many ranks as `world_size`."""
        if self._written is None:
            return
        path, record = self._written
        self._written = None
        lost = None if record.timestamp_ns is None else max(time.time_ns() - record.timestamp_ns, 0) / 1e9
        complete = replace(record, lost_seconds=lost, world_size_after=world_size or None)
        self._reporter.put(path, restart_to_json(complete))

    def _agreed(
        self, peers: Peers, judge: Callable[[Reports], RestartRecord | None]
    ) -> tuple[RestartRecord, bool] | None:
        """Return the decision of all agents, and whether this one took it; None if they have not agreed."""
        own = document = b""
        for step in peers.agree(self._reporter.report.copies, self._seconds):
            if isinstance(step, SettledDocument):
                document = step.document
                break
            judged = judge(step)
            own = restart_to_json(judged) if judged is not None else b""
            if own and peers.agreement.claim():
                document = peers.agreement.hand_over(own, durable=True).document
                break
        record = restart_from_json(document) if document and not peers.broadcast.is_fatal else None
        return (record, own == document) if record is not None else None

    def _judged(self, nodes: int, restarts_left: int, reports: Reports) -> RestartRecord | None:
        recording = self._reporter.recording
        context = RestartContext(
            round=recording.round,
            restarts_left=restarts_left,
            nodes_left=nodes - len(reports.lost),
            min_nodes=self._min_nodes,
            previous_fingerprint=self._previous_fingerprint,
        )
        with guarded("judging the round"):
            return self._decide(recording, reports, context) if self._decide is not None else None
        return None

    def _without_agreement(self, first: FirstFailure) -> RestartRecord:
        return RestartRecord(
            kind=RestartKind.ROUND,
            number=self._reporter.recording.round,
            headline=first.reason,
            restart=True,
            reason=_NO_AGREEMENT,
            rank=first.rank,
            node=first.node,
            is_agreed=False,
            timestamp_ns=time.time_ns(),
        )
