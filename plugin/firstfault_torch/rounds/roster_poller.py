"""Polls the roster for failures that the failure broadcast missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from firstfault.errors import FirstFaultError
from firstfault.layout import RosterKey
from firstfault.model import Phase
from firstfault.recorder.client import RecorderClient
from firstfault.recorder.time_limits import ROSTER_LISTING_TIMEOUT_SECONDS
from firstfault_torch import time_limits
from firstfault_torch.guard import logger, run_loop, start_daemon
from firstfault_torch.node_context import NodeContext

_POLLS_PER_SECOND = 2.8
"""For all nodes of a job together, except the first: nodes of a large job poll less often."""


class RosterPoller:
    """Polls the roster every few seconds; create it after forking the workers,
    because it starts a thread.

    The failure broadcast goes through the store. If the store's host is frozen or gone, the roster
    in the storage still shows the failure. When another node's failure has been there for
    `patience_seconds`, a thread calls `on_failure` once with that node's group rank: until then the
    node may be restarting.
    """

    def __init__(
        self,
        recorder: RecorderClient,
        node_context: NodeContext,
        group_rank: int,
        patience_seconds: float,
        on_failure: Callable[[int], None],
    ) -> None:
        self._recorder = recorder
        self._round = node_context.round
        self._incarnation = node_context.incarnation
        self._before: frozenset[RosterKey] | None = None
        self._own = group_rank
        self.names: list[str] = []
        """File names in the last listing."""
        many = node_context.group_world_size / _POLLS_PER_SECOND if group_rank else 0.0
        self._every_s = max(time_limits.ROSTER_POLL_SECONDS, many)
        self._patience_s = patience_seconds
        self._on_failure = on_failure
        self._seen: dict[int, float] = {}
        """When each failed node was first listed, by group rank, seconds of the monotonic clock."""
        self._ended = threading.Event()
        poll = partial(run_loop, self._poll, "polling the roster")
        self._thread = start_daemon(
            poll, "firstfault-roster", time_limits.THREAD_START_TIMEOUT_SECONDS
        )

    def end(self) -> None:
        """Stop polling and join the thread, unless it is waiting for the storage."""
        self._ended.set()
        self._thread.join(time_limits.ROSTER_JOIN_TIMEOUT_SECONDS)

    def _poll(self) -> bool:
        """Wait, then list the roster; return whether to continue."""
        if self._ended.wait(self._every_s):
            return False
        now = time.monotonic()
        for group_rank in self._failed():
            since = self._seen.setdefault(group_rank, now)
            if now - since >= self._patience_s and since < now:
                self._on_failure(group_rank)
                return False
        return True

    def _failed(self) -> list[int]:
        try:
            names = self.names = self._recorder.roster(ROSTER_LISTING_TIMEOUT_SECONDS)
        except FirstFaultError as error:
            logger.debug("the roster could not be listed: %s", error)
            return []
        parsed = map(RosterKey.parse, names)
        keys = [key for key in parsed if key is not None and key.round == self._round]
        failed = {key.group_rank for key in self._of_this_run(keys) if key.phase is Phase.FAILED}
        return sorted(
            group_rank
            for group_rank in failed
            if group_rank is not None and group_rank != self._own
        )

    def _of_this_run(self, keys: Sequence[RosterKey]) -> list[RosterKey]:
        """Return the keys except those of an earlier run with the same output prefix."""
        # A newer incarnation of the same group rank shows which keys are old, unless clocks differ
        # and the group ranks belong to other nodes now. So if a different incarnation has this
        # node's own group rank, all keys of the first listing count as old.
        newest: dict[int | None, int] = {}
        for key in keys:
            newest[key.group_rank] = max(newest.get(key.group_rank, 0), key.incarnation)
        if self._before is None:
            is_shared = any(
                key.group_rank == self._own and key.incarnation != self._incarnation for key in keys
            )
            self._before = frozenset(keys) if is_shared else frozenset()
        return [
            key
            for key in keys
            if key.incarnation >= newest[key.group_rank] and key not in self._before
        ]
