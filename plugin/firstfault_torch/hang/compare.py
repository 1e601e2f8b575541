"""Compares a stall with the agents of all other nodes, over the round's store."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from firstfault_torch.guard import BackgroundCall, call_with_timeout, logger, try_call
from firstfault_torch.protocol.stall_messages import (
    ComparisonClosed,
    NoReportElected,
    NumberRead,
    PeersLookedUp,
    ReportElected,
    StallCounted,
    StallReport,
)
from firstfault_torch.protocol.stalls import STALL_COUNT_KEY, get_stall_topic
from firstfault_torch.rounds.election import CollectedReports, VerdictElection
from firstfault_torch.rounds.report_packing import ElectedVerdict
from firstfault_torch.time_limits import STORE_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from firstfault_torch.rounds.peers import Peers

T = TypeVar("T")


class StallComparison:
    """What one agent asks the store about stalls, and its part in their elections.

    Args:
        own: group rank of this agent.
        nodes: number of nodes.
        peers: the agents of all other nodes, or None for a single node.
    """

    def __init__(self, own: int, nodes: int, peers: Peers | None) -> None:
        self._own = own
        self._nodes = nodes
        self._peers = peers
        self._connections: tuple[Any, Any] | None = None
        """The store, and a second connection on which an election waits. None before connecting and
        after the connection broke.
        """
        self._connect = BackgroundCall[tuple[Any, Any] | None](
            self._open_connections, None, STORE_TIMEOUT_SECONDS
        )
        """At most one attempt at a time: a frozen host would keep a thread for each."""
        self._election: VerdictElection | None = None
        """The present one."""

    def read_number(self) -> NumberRead:
        """Return the number of the next stall."""
        # Adding 0 reads the counter.
        return NumberRead(
            self._call_store(
                lambda store: int(store.add(STALL_COUNT_KEY, 0)), "asking for the number of a stall"
            )
        )

    def look_up_peers(self, number: int) -> PeersLookedUp:
        """Return whether other nodes have begun to compare this stall."""
        begun = VerdictElection(0, self._nodes, get_stall_topic(number)).has_begun
        return PeersLookedUp(bool(self._call_store(begun, "asking whether peers compare a stall")))

    def compare(
        self,
        number: int,
        files: Mapping[str, bytes],
        conclude: Callable[[CollectedReports], StallReport],
        seconds: float,
        stopped: threading.Event,
    ) -> ReportElected | NoReportElected:
        """Share this node's observations, and return the leader's report. Wait at most `seconds`
        for observations of peers.
        """
        connections = self._connections
        if connections is None:
            return NoReportElected()
        self._election = election = VerdictElection(self._own, self._nodes, get_stall_topic(number))
        for step in election.settle(connections, files, seconds, stopped):
            document = step.document if isinstance(step, ElectedVerdict) else b""
            own = b""
            # first: of thousands of ranks it may take seconds
            if isinstance(step, CollectedReports) and election.announce_publishing():
                own = json.dumps(asdict(conclude(step))).encode()
                # If this leader took too long, another one may have published: that document counts
                # on all nodes.
                document = election.publish(own, durable=True).document
            if document:
                self._election = None
                return ReportElected(parse_report(document), is_mine=document == own)
        return NoReportElected()

    def close(self) -> ComparisonClosed:
        """Let no agent wait for a report any more; return one that a leader has just published."""
        election, self._election = self._election, None
        if election is None or self._connections is None:
            return ComparisonClosed(None)
        # it also ends the thread that waits
        settled = election.cancel(self._connections[0])
        has_report = settled is not None and bool(settled.document)
        return ComparisonClosed(parse_report(settled.document) if settled and has_report else None)

    def count(self, number: int) -> StallCounted:
        """Count up the number of the next stall unless a peer has."""
        values = STALL_COUNT_KEY, str(number), str(number + 1)
        found = self._call_store(lambda store: store.compare_set(*values), "counting a stall")
        return StallCounted(int(found) if found is not None else None)

    def delete(self, numbers: Iterable[int]) -> None:
        """Delete what the comparisons of these stalls have left in the store."""

        def forget(store: Any) -> None:
            for number in numbers:
                VerdictElection.forget(store, get_stall_topic(number))

        self._call_store(forget, "deleting earlier stalls")

    def replace_connections(self) -> None:
        """Open other connections for the next question."""
        self._connections = None

    def end(self) -> None:
        """End a comparison from another thread, and let the peers continue without this node."""
        # Copies: the watching thread may unset both at the same time.
        election, connections = self._election, self._connections
        if election is not None:
            # The thread may be waiting for peers' observations: `interrupt` wakes it.
            election.interrupt()
            if connections is not None:
                cancel = partial(election.cancel, connections[0])
                call_with_timeout(cancel, STORE_TIMEOUT_SECONDS, "ending the comparison of a stall")

    def _open_connections(self) -> tuple[Any, Any] | None:
        peers = self._peers
        opened, error = (
            try_call(lambda: (peers.connect(), peers.connect()), Exception)
            if peers is not None
            else (None, None)
        )
        if error is not None:
            logger.info("can't connect to compare a stall: %s", error)
        return opened

    def _call_store(self, call: Callable[[Any], T], doing: str) -> T | None:
        """Return the result of a store operation, or None for a single node or a lost store."""
        if self._connections is None and self._peers is not None:
            self._connections = self._connect()
        if (connections := self._connections) is None:
            return None
        results = call_with_timeout(lambda: [call(connections[0])], STORE_TIMEOUT_SECONDS, doing)
        if results is None:
            # Broken, or its host is frozen, and then a thread may hold the connection for long: the
            # next call opens another one.
            self._connections = None
            return None
        return results[0]


def parse_report(document: bytes) -> StallReport:
    """Return the report that a leader has published."""
    fields = json.loads(document)
    ends_attempt = tuple(
        (int(group_rank), int(local)) for group_rank, local in fields.pop("workers_to_kill")
    )
    return StallReport(
        tuple(fields["lines"]),
        tuple(fields["ranks"]),
        fields["node"],
        fields["position"],
        fields["exit_stage"],
        ends_attempt,
        fields.get("is_shown"),
    )
