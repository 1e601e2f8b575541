"""Rank assignments that remove the terminated ranks and close the gaps they leave."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING

from firstfault_torch.inprocess.rank_assignment.base import RankAssignment, RankDiscarded, rank_and_terminated

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from firstfault_torch.inprocess.rank_assignment.base import RankAssignmentCtx

__all__ = ["FillGaps", "ShiftRanks"]


class _CloseGaps(RankAssignment):
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the new rank and world size.

        Raises:
            RankDiscarded: this rank is terminated.
            ValueError: a terminated rank is outside the world.
        """
        rank, terminated = rank_and_terminated(ctx)
        if rank in terminated:
            raise RankDiscarded(f"rank {rank} is terminated")
        world_size = ctx.state.world_size - len(terminated)
        state = dataclasses.replace(ctx.state, rank=self._new_rank(rank, world_size, terminated), world_size=world_size)
        return dataclasses.replace(ctx, state=state, terminated_ranks=set())

    @staticmethod
    @abc.abstractmethod
    def _new_rank(rank: int, world_size: int, terminated: AbstractSet[int]) -> int:
        """Return the new number of a healthy rank, below `world_size`, the new world size."""


class ShiftRanks(_CloseGaps):
    """Closes gaps by moving all higher ranks down. The ranks keep their order.

    With rank 1 of four terminated, 0, 2, 3 become 0, 1, 2.
    """

    @staticmethod
    def _new_rank(rank: int, world_size: int, terminated: AbstractSet[int]) -> int:  # noqa: ARG004 - FillGaps needs it
        return rank - sum(gone < rank for gone in terminated)


class FillGaps(_CloseGaps):
    """Fills gaps with the highest ranks. All ranks below the new world size keep their numbers.

    With rank 1 of four terminated, 0, 2, 3 become 0, 2, 1. Several ranks fill the gaps in ascending order.
    """

    @staticmethod
    def _new_rank(rank: int, world_size: int, terminated: AbstractSet[int]) -> int:
        if rank < world_size:
            return rank
        index = sum(number not in terminated for number in range(world_size, rank))
        return sorted(gone for gone in terminated if gone < world_size)[index]
