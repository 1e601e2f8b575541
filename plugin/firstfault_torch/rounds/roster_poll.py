"""Polls the roster in the storage, to find failures of nodes that could not notify this one.

Agents notify each other through the store they share, whose host may be frozen or gone. A failed node's roster entry in
the storage is there all the same. The node's recorder lists the roster, because it has a connection to the storage.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from firstfault.errors import FirstFaultError
from firstfault.layout.keys import RosterKey
from firstfault.model import Phase
from firstfault.recorder import Recorder
from firstfault_torch.guard import guarded, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault_torch.context import Recording
    from firstfault_torch.node.files import NodeFiles

__all__ = ["RosterPoll"]

_POLLS_PER_S = 3.0
"""Of all nodes of a job together: the nodes of a large job poll less often."""
_LEAST_S = 5.0
_ANSWER_S = 10.0


class RosterPoll:
    """Polls the roster every few seconds. Make it after the workers were forked.

    Args:
        recording: with the round to look for.
        files: the node's.
        group_rank: this node's.
        nodes: of the round.
        patience_seconds: how long a failure must be in the roster before `on_failure` is called.
        on_failure: called once, with a group rank, from a thread.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        recording: Recording,
        files: NodeFiles,
        *,
        group_rank: int,
        nodes: int,
        patience_seconds: float,
        on_failure: Callable[[int], None],
    ) -> None:
        self._recorder = Recorder(files.recorder)
        self._round = recording.round
        self._own = group_rank
        self._every_s = max(_LEAST_S, nodes / _POLLS_PER_S)
        self._patience_s = patience_seconds
        self._on_failure = on_failure
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="firstfault-roster", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop polling, and end the thread unless it waits for the storage."""
        self._ended.set()
        self._thread.join(1)

    def _poll(self) -> None:
        with guarded("polling the roster"):
            seen: dict[int, float] = {}
            while not self._ended.wait(self._every_s):
                now = time.monotonic()
                for group_rank in self._failed():
                    since = seen.setdefault(group_rank, now)
                    if now - since >= self._patience_s and since < now:
                        self._on_failure(group_rank)
                        return

    def _failed(self) -> list[int]:
        try:
            names = self._recorder.roster(_ANSWER_S)
        except FirstFaultError as error:
            logger.debug("the roster could not be listed: %s", error)
            return []
        keys = [key for key in map(RosterKey.parse, names) if key is not None]
        failed = {key.group_rank for key in keys if key.round == self._round and key.phase is Phase.FAILED}
        return sorted(group_rank for group_rank in failed if group_rank is not None and group_rank != self._own)
