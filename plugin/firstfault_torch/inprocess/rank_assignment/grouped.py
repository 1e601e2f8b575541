"""A rank assignment that removes whole groups of ranks, such as hosts that lost a rank."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import TYPE_CHECKING

from firstfault_torch.inprocess.rank_assignment.base import RankAssignment, key_of, rank_and_terminated

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable

    from firstfault_torch.inprocess.rank_assignment.base import RankAssignmentCtx
    from firstfault_torch.inprocess.state import State

__all__ = ["FilterCountGroupedByKey"]


class FilterCountGroupedByKey(RankAssignment):
    """Marks the ranks of a group as terminated, unless the number of its healthy ranks meets a condition.

    It only adds to the terminated ranks. Another rank assignment must remove them, so it stands last in a chain:
    ``Compose(ShiftRanks(), FilterCountGroupedByKey(lambda _: socket.gethostname(), lambda count: count == 8))`` removes
    hosts with fewer than eight healthy ranks. The ranks tell each other their keys through the store.

    All processes must create their instances in the same order, because the order names the exchange of keys.

    Args:
        key_or_fn: the key of this rank's group: a text, or a function that returns it for the state of this rank.
        condition: returns True if a group with this number of healthy ranks is kept. It must return the same on all
            ranks.
        timeout: has no effect: the wrapper's barrier timeout bounds the wait for the other ranks.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        key_or_fn: str | Callable[[State], str],
        condition: Callable[[int], bool],
        timeout: dt.timedelta | None = None,
    ) -> None:
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        self._number = next(self._numbers)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Exchange keys, and return the terminated ranks with those of the groups that are not kept.

        A rank that is terminated takes no part; for it, the terminated ranks stay as they are.

        Raises:
            TimeoutError: the one of in-process restart: not all healthy ranks sent their key in time.
            ValueError: a terminated rank is outside the world.
        """
        rank, terminated = rank_and_terminated(ctx)
        if rank in terminated:
            return ctx
        healthy = [number for number in range(ctx.state.world_size) if number not in terminated]
        name = f"{type(self).__name__}.{self._number}.{ctx.exchanges}"
        keys = ctx.store.exchange(name, rank, key_of(self.key_or_fn, ctx.state), healthy)
        counts = Counter(keys[number] for number in healthy)
        kept = {key for key, count in counts.items() if self.condition(count)}
        removed = {number for number in healthy if keys[number] not in kept}
        return dataclasses.replace(ctx, terminated_ranks=terminated | removed, exchanges=ctx.exchanges + 1)
