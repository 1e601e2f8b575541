"""Rank filters: they keep all ranks and select which are active."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from firstfault_torch.inprocess.rank_assignment.base import RankFilter, rank_and_terminated
from firstfault_torch.inprocess.state import Mode

if TYPE_CHECKING:
    from firstfault_torch.inprocess.rank_assignment.base import RankAssignmentCtx

__all__ = ["ActivateAllRanks", "ActiveWorldSizeDivisibleBy", "MaxActiveWorldSize"]


class ActivateAllRanks(RankFilter):
    """Makes every rank active. No other filter can be chained with it."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the state of an active rank."""
        return _activate(ctx, ctx.state.world_size)


class MaxActiveWorldSize(RankFilter):
    """Makes the lowest ranks active, up to a number; the others are reserves.

    Args:
        max_active_world_size: most active ranks; None for no limit.

    Raises:
        ValueError: the number is below 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None and max_active_world_size < 1:
            raise ValueError(
                f"max_active_world_size is {max_active_world_size}; it must be at least 1, or None for no limit"
            )
        self.max_active_world_size = max_active_world_size

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the state of an active or a reserve rank."""
        size = _active_world_size(ctx)
        return _activate(ctx, size if self.max_active_world_size is None else min(size, self.max_active_world_size))


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Makes as many of the lowest ranks active as a number divides; the others are reserves.

    If fewer ranks are left than the number, none is active.

    Args:
        divisor: the number, such as the ranks of one model replica.

    Raises:
        ValueError: the number is below 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        if divisor < 1:
            raise ValueError(f"divisor is {divisor}; it must be at least 1")
        self.divisor = divisor

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the state of an active or a reserve rank."""
        size = _active_world_size(ctx)
        return _activate(ctx, size - size % self.divisor)


def _active_world_size(ctx: RankAssignmentCtx) -> int:
    """Return how many ranks the filters before this one, and the iterations before, left active."""
    state = ctx.state
    return state.world_size if state.active_world_size is None else min(state.active_world_size, state.world_size)


def _activate(ctx: RankAssignmentCtx, active_world_size: int) -> RankAssignmentCtx:
    rank, _ = rank_and_terminated(ctx)
    is_active = rank < active_world_size
    state = dataclasses.replace(
        ctx.state,
        mode=Mode.ACTIVE if is_active else Mode.INACTIVE,
        active_rank=rank if is_active else None,
        active_world_size=active_world_size,
    )
    return dataclasses.replace(ctx, state=state)
