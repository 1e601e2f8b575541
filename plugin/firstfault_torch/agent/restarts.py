"""Decides with its peers whether torch restarts the workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from firstfault.conclude import RestartContext
from firstfault.decision_mode import ACT, read_decision_mode
from firstfault.layout import ROSTER, restart_record_name
from firstfault.model import Place, RestartKind, RestartRecord
from firstfault.wire.json_schemas import restart_from_json, restart_to_json
from firstfault_torch.agent.reporter import Reporter
from firstfault_torch.agent.settings import AgentSettings
from firstfault_torch.guard import logger, suppress_internal_errors
from firstfault_torch.protocol.notices import FailureNotice
from firstfault_torch.protocol.restart_vote import EndRound, FollowDecision
from firstfault_torch.rounds.election import CollectedReports
from firstfault_torch.rounds.peers import Peers

_OBSERVED = "observed: would not have restarted the workers: "
"""Begins the reason of a restart that is refused in the mode "act"."""
_NO_AGREEMENT = (
    "the agents reached no decision in time, and torch elastic restarts after any failure"
)


class Restarts:
    """Decides on the restarts of one attempt, with its peers, and keeps a record of each."""

    def __init__(self, settings: AgentSettings, reporter: Reporter) -> None:
        self._decide = settings.decide_restart
        self._min_nodes = settings.min_nodes
        self._seconds = settings.options.settle_seconds
        self._reporter = reporter
        self.restart_refusal: RestartRecord | None = None
        """The decision against a restart, which ended the attempt."""
        self._previous: RestartRecord | None = None
        """The decision on the round before."""
        self._began = time.monotonic()
        """When the round's workers were started, at the latest."""
        self._written: tuple[str, RestartRecord] | None = None
        """The record that this node has written about the last round, and its path."""

    @property
    def ask(self) -> bool:
        """Whether the agents decide instead of torch."""
        return self._decide is not None

    def can_continue_without_node(self, nodes: int) -> bool:
        """Whether the job can continue if one of this many nodes is lost."""
        return nodes - 1 >= self._min_nodes

    def decide_restart(
        self,
        place: Place,
        restarts_left: int,
        peers: Peers | None,
        first: FailureNotice,
    ) -> RestartRecord | None:
        """Store and return the agents' decision, or None if a node fails permanently first.

        Waits for other nodes, as `VerdictElection.settle` does. Without `peers` this is the only
        node, or the agents aren't connected.
        """
        nodes = place.group_world_size or 1
        group_rank = place.group_rank or 0
        judge = partial(self._judge, nodes, restarts_left)
        found: tuple[RestartRecord | None, bool] | None = None, False
        if nodes > 1 and peers is not None:
            found = self._vote(peers, judge)
        elif nodes == 1:
            found = judge(CollectedReports(dict(self._reporter.report.copies))), True
        if found is None:
            return None
        record, is_mine = found
        if record is None:
            record, is_mine = self._without_agreement(first), first.group_rank == group_rank
        self._previous = record if record.is_agreed else None
        if record.reason.startswith(_OBSERVED):
            if is_mine:  # one line for the job
                logger.warning("%s", record.reason)
        elif record.is_agreed:
            logger.info(
                "%s: %s",
                "restarting the workers" if record.restart else "not restarting",
                record.reason,
            )
        else:
            logger.warning("restarting the workers: %s", record.reason)
        if is_mine or not self._reporter.node_context.identity.is_folder_shared:
            path = f"{ROSTER}/{restart_record_name(record.kind.value, record.number, group_rank)}"
            self._written = (path, record) if record.restart else None
            self._reporter.put(path, restart_to_json(record))
        self.restart_refusal = None if record.restart else record
        if not record.restart and peers is not None:
            peers.mark_fatal(first, broadcast=is_mine)
        return record

    def began_again(self, world_size: int) -> None:
        """Complete the record of the last round: the workers run again, with `world_size` ranks."""
        self._began = time.monotonic()
        if self._written is None:
            return
        # taken before the write: a later round must not complete this record again
        path, record = self._written
        self._written = None
        lost = (
            None
            if record.timestamp_ns is None
            else max(time.time_ns() - record.timestamp_ns, 0) / 1e9
        )
        complete = replace(record, lost_seconds=lost, world_size_after=world_size or None)
        self._reporter.put(path, restart_to_json(complete))

    def _vote(
        self, peers: Peers, judge: Callable[[CollectedReports], RestartRecord | None]
    ) -> tuple[RestartRecord | None, bool] | None:
        """Return the agents' decision, None without one, and whether this agent made it; None if a
        node has failed for good.
        """

        def judge_encoded(reports: CollectedReports) -> bytes:
            judged = judge(reports)
            return restart_to_json(judged) if judged is not None else b""

        result = peers.vote_on_restart(self._reporter.report.copies, self._seconds, judge_encoded)
        if isinstance(result, EndRound):
            return None
        if isinstance(result, FollowDecision):
            return restart_from_json(result.decision), result.is_own
        return None, False

    def _judge(
        self,
        nodes: int,
        restarts_left: int,
        reports: CollectedReports,
    ) -> RestartRecord | None:
        node_context = self._reporter.node_context
        context = RestartContext(
            round=node_context.round,
            restarts_left=restarts_left,
            nodes_left=nodes - len(reports.lost),
            min_nodes=self._min_nodes,
            previous_fingerprint=self._previous.fingerprint if self._previous is not None else "",
            previous_node=self._previous.node if self._previous is not None else "",
            lifetime_seconds=time.monotonic() - self._began,
        )
        with suppress_internal_errors("judging the round"):
            record = (
                self._decide(node_context, reports, context) if self._decide is not None else None
            )
            if record is not None and not record.restart and read_decision_mode() != ACT:
                return replace(record, restart=True, reason=f"{_OBSERVED}{record.reason}")
            return record
        return None

    def _without_agreement(self, first: FailureNotice) -> RestartRecord:
        return RestartRecord(
            kind=RestartKind.ROUND,
            number=self._reporter.node_context.round,
            headline=first.reason,
            restart=True,
            reason=_NO_AGREEMENT,
            rank=first.rank,
            node=first.node,
            is_agreed=False,
            timestamp_ns=time.time_ns(),
        )
