"""Polls the roster in the storage, to find failures of nodes that could not notify this one.

Agents notify each other through the store they share, whose host may be frozen or gone. A failed node's roster entry in
the storage is there all the same. The node's recorder lists the roster, because it has a connection to the storage.

Two runs may share one output prefix: containers that were restarted within an attempt, or a program that was run again.
Their rounds have the same numbers, so a failure of the earlier run must not end the later one.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from firstfault.errors import FirstFaultError
from firstfault.layout.keys import RosterKey
from firstfault.model import Phase
from firstfault.recorder import Recorder
from firstfault.recorder.budgets import ROSTER_ANSWER_S
from firstfault_torch.budgets import ROSTER_JOIN_S, ROSTER_POLL_S
from firstfault_torch.guard import guarded, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from firstfault_torch.context import Recording
    from firstfault_torch.node.files import NodeFiles

_POLLS_PER_SECOND = 3.0
"""Of all nodes of a job together: the nodes of a large job poll less often."""


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
        self._incarnation = recording.incarnation
        self._before: frozenset[RosterKey] | None = None
        self._own = group_rank
        self._every_s = max(ROSTER_POLL_S, nodes / _POLLS_PER_SECOND)
        self._patience_s = patience_seconds
        self._on_failure = on_failure
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="firstfault-roster", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop polling, and end the thread unless it waits for the storage."""
        self._ended.set()
        self._thread.join(ROSTER_JOIN_S)

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
            names = self._recorder.roster(ROSTER_ANSWER_S)
        except FirstFaultError as error:
            logger.debug("the roster could not be listed: %s", error)
            return []
        parsed = map(RosterKey.parse, names)
        keys = [key for key in parsed if key is not None and key.round == self._round]
        failed = {key.group_rank for key in self._of_this_run(keys) if key.phase is Phase.FAILED}
        return sorted(group_rank for group_rank in failed if group_rank is not None and group_rank != self._own)

    def _of_this_run(self, keys: Sequence[RosterKey]) -> list[RosterKey]:
        """Return the keys without those of an earlier run in the same output prefix.

        A newer incarnation of the same group rank tells them, except if the nodes' clocks differ and the group ranks
        are now those of other nodes. So if this node finds another incarnation in its own place, it also leaves out
        what the first listing has.
        """
        newest: dict[int | None, int] = {}
        for key in keys:
            newest[key.group_rank] = max(newest.get(key.group_rank, 0), key.incarnation)
        if self._before is None:
            is_shared = any(key.group_rank == self._own and key.incarnation != self._incarnation for key in keys)
            self._before = frozenset(keys) if is_shared else frozenset()
        return [key for key in keys if key.incarnation >= newest[key.group_rank] and key not in self._before]
