"""The live view of a running job: collectives per second of each node. Costs
nothing while nobody watches.

``firstfault watch --live`` can't reach the agents, so it creates an empty file in the roster's
folder, which the first agent lists anyway (on one node, a local folder). That agent requests the
peers' states over the liveness connections, and writes all of them as one file.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from firstfault.errors import FirstFaultError
from firstfault.layout import LIVE, find_watch_end_ms
from firstfault.recorder.client import RecorderClient
from firstfault.store import is_remote
from firstfault_torch.guard import try_call
from firstfault_torch.time_limits import WORKER_QUERY_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from concurrent.futures import Future

    from firstfault_torch.agent.place_factory import PlaceFactory
    from firstfault_torch.agent.reporter import Reporter
    from firstfault_torch.protocol.stall_progress import ProgressTracker
    from firstfault_torch.rounds.peers import Peers


class LiveProgress:
    """Publishes this node's progress; the first agent also publishes the progress of all nodes.

    Args:
        reporter: writes the view.
        places: this node's ranks.
        peers: the agents of all other nodes, or None for a single node.
        tracker: progress of this node's workers, updated before each `publish`.
    """

    def __init__(
        self,
        reporter: Reporter,
        places: PlaceFactory,
        peers: Peers | None,
        tracker: ProgressTracker,
    ) -> None:
        self._reporter = reporter
        self._places = places
        self._peers = peers
        self._tracker = tracker
        self._before: tuple[float, int] | None = None
        self._state: dict[str, Any] = {}
        self._put: Future[Any] | None = None

    def publish(self, now: float) -> None:
        """Update this node's state; as the first agent write all nodes'
        states if somebody watches.
        """
        peers = self._peers
        self._state = self._now(now)
        if peers is not None:
            # A peer's question is answered in the thread of the liveness connections, between two
            # polls.
            peers.liveness.state = self.line
        if self._places.of().group_rank or not self._is_watched():
            return
        # The answers to the last poll's request: this poll doesn't wait, because a peer may be
        # frozen.
        others = dict(peers.liveness.states) if peers is not None else {}
        if peers is not None:
            peers.liveness.request_states()  # answers arrive before the next poll
        nodes = [
            self._state,
            *(parsed for _, line in sorted(others.items()) if (parsed := _parse(line))),
        ]
        view = {"round": self._reporter.node_context.round, "time": time.time(), "nodes": nodes}
        if self._put is None or self._put.done():  # otherwise the storage is slow: skip this poll
            self._put = self._reporter.put(LIVE, json.dumps(view).encode())

    def line(self) -> bytes:
        """Return this node's state, for the first agent."""
        return json.dumps(self._state).encode()

    def _now(self, now: float) -> dict[str, Any]:
        places = self._places
        begun = self._tracker.enqueued
        most = max(begun.values(), default=0)
        before, self._before = self._before, (now, most)
        rate = (
            (most - before[1]) / (now - before[0])
            if before is not None and now > before[0]
            else 0.0
        )
        waits = {rank: now - since for rank, since in self._tracker.moved.items()}
        behind = min(begun, key=lambda rank: begun[rank], default=None)
        longest = max(waits, key=lambda rank: waits[rank], default=None)
        return {
            "node": places.of().node,
            "collectives": most,
            "per_second": round(max(rate, 0.0), 2),
            "least": begun[behind] if behind is not None else 0,
            "behind": places.rank_of(behind) if behind is not None else None,
            "waited_seconds": round(waits[longest], 1) if longest is not None else 0.0,
            "waits": places.rank_of(longest) if longest is not None else None,
        }

    def _is_watched(self) -> bool:
        """Whether somebody watches: a file in the roster's folder,
        by the last poll's listing or on this machine.
        """
        peers, node_context = self._peers, self._reporter.node_context
        names: list[str] | None = []
        if peers is not None and peers.roster is not None:
            names = peers.roster.names
        elif node_context.files is not None and not is_remote(node_context.output_prefix):
            list_names = partial(
                RecorderClient(node_context.files).roster, WORKER_QUERY_TIMEOUT_SECONDS
            )
            names, _ = try_call(list_names, FirstFaultError)
        return find_watch_end_ms(names or ()) > time.time() * 1000


def _parse(line: bytes) -> dict[str, Any] | None:
    found, _ = try_call(partial(json.loads, line), ValueError)
    return found if isinstance(found, dict) else None
