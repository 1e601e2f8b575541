"""What a person sees of a running job: how fast each node advances. Nothing is sent or written while no person asks.

``firstfault watch --live`` leaves a file beside the roster, which the first agent lists anyway; on one node it lists a
local folder for this. That agent asks the others over the connections that exist, and writes all answers as one file.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from firstfault.errors import FirstFaultError
from firstfault.layout import LIVE, watched_until_ms
from firstfault.recorder.folder import Recorder
from firstfault.store import is_remote
from firstfault_torch.guard import try_call
from firstfault_torch.time_limits import WORKER_QUERY_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from concurrent.futures import Future

    from firstfault_torch.agent.node_round import NodeRound
    from firstfault_torch.hang.progress import ProgressTracker


class LiveView:
    """Tells how a node advances, and as the first agent how all do.

    Args:
        node: of the round.
        still: what its agent sees of its workers; it looks before each `tell`.
    """

    def __init__(self, node: NodeRound, still: ProgressTracker) -> None:
        self._node = node
        self._still = still
        self._before: tuple[float, int] | None = None
        self._state: dict[str, Any] = {}
        self._put: Future[Any] | None = None

    def tell(self, now: float) -> None:
        """Take the present state, and as the first agent write those of all nodes if a person watches."""
        peers = self._node.peers
        self._state = self._now(now)
        if peers is not None:
            peers.liveness.state = self.line
        if self._node.places.of().group_rank or not self._is_watched():
            return
        others = dict(peers.liveness.states) if peers is not None else {}
        if peers is not None:
            peers.liveness.request_states()  # for the next look
        nodes = [self._state, *(parsed for _, line in sorted(others.items()) if (parsed := _parsed(line)))]
        view = {"round": self._node.reporter.node_context.round, "time": time.time(), "nodes": nodes}
        if self._put is None or self._put.done():  # else the storage is slow
            self._put = self._node.reporter.put(LIVE, json.dumps(view).encode())

    def line(self) -> bytes:
        """Return this node's state for the first agent."""
        return json.dumps(self._state).encode()

    def _now(self, now: float) -> dict[str, Any]:
        places = self._node.places
        begun = self._still.begun
        most = max(begun.values(), default=0)
        before, self._before = self._before, (now, most)
        rate = (most - before[1]) / (now - before[0]) if before is not None and now > before[0] else 0.0
        waits = {rank: now - since for rank, since in self._still.moved.items()}
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
        """Whether a person watches, by names in the roster's folder: of the poll's last listing, or on this machine."""
        peers, node_context = self._node.peers, self._node.reporter.node_context
        names: list[str] | None = []
        if peers is not None and peers.roster is not None:
            names = peers.roster.names
        elif node_context.files is not None and not is_remote(node_context.output_prefix):
            names, _ = try_call(
                partial(Recorder(node_context.files).roster, WORKER_QUERY_TIMEOUT_SECONDS), FirstFaultError
            )
        return watched_until_ms(names or ()) > time.time() * 1000


def _parsed(line: bytes) -> dict[str, Any] | None:
    found, _ = try_call(partial(json.loads, line), ValueError)
    return found if isinstance(found, dict) else None
