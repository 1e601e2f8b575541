"""After a fault, the surviving ranks have successive numbers,
and the filters select which of them are active.
"""

import dataclasses
import datetime as dt
import random
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from firstfault_inprocess.hooks import Compose
from firstfault_inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    MaxActiveWorldSize,
    Mode,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
    State,
)
from firstfault_inprocess.store import Iteration
from tests.waiting import SOON_S


class World:
    """The ranks of a job, with one rank assignment."""

    def __init__(
        self, size: int, assignment: Callable[[RankAssignmentCtx], RankAssignmentCtx]
    ) -> None:
        self.size = size
        self.states = {rank: State(rank, size) for rank in range(size)}
        self.assignment = assignment
        self.discarded: dict[int, str] = {}
        """The message of each rank that left, by initial rank."""

    def assign(self, terminated: Collection[int] = ()) -> dict[int, State]:
        """Compute the next state of every rank, and return those of the ranks that stay,
        by initial rank.
        """
        store = dist.HashStore()

        def of(state: State) -> RankAssignmentCtx | RankDiscarded:
            exchange = partial(
                Iteration(store, "world", 0, self.size).exchange, dt.timedelta(seconds=SOON_S)
            )
            try:
                return self.assignment(RankAssignmentCtx(state, store, set(terminated), exchange))
            except RankDiscarded as discarded:
                return discarded

        with ThreadPoolExecutor(self.size) as pool:
            found = dict(zip(self.states, pool.map(of, self.states.values()), strict=True))
        self.states = {}
        for initial, result in found.items():
            if isinstance(result, RankDiscarded):
                self.discarded[initial] = str(result)
            else:
                assert (result.terminated_ranks, result.state.initial_rank) == (set(), initial)
                self.states[initial] = result.state
        return self.states

    def active_ranks(self) -> list[int | None]:
        """Return the active rank of each initial rank; None for those that are not active."""
        return [
            self.states[rank].active_rank if rank in self.states else None
            for rank in range(self.size)
        ]

    def check(self) -> None:
        """Check that all ranks agree on the sizes, and that ranks and active ranks have no gaps."""
        ranks = sorted(state.rank for state in self.states.values())
        assert ranks == list(range(len(self.states)))
        active = sorted(
            state.active_rank for state in self.states.values() if state.active_rank is not None
        )
        assert active == list(range(len(active)))
        for state in self.states.values():
            assert (state.world_size, state.active_world_size) == (len(ranks), len(active))
            assert state.mode is (Mode.INACTIVE if state.active_rank is None else Mode.ACTIVE)


def context(
    rank: int,
    world_size: int,
    terminated: set[int] | None = None,
    **fields: Any,
) -> RankAssignmentCtx:
    """Return the input of a rank assignment that needs no store."""
    return RankAssignmentCtx(State(rank, world_size, **fields), None, terminated or set())


def new_ranks(
    assignment: RankAssignment, world_size: int, terminated: set[int]
) -> list[int | None]:
    """Return the new rank of each rank; None for those that leave."""
    ranks: list[int | None] = []
    for rank in range(world_size):
        try:
            ctx = assignment(context(rank, world_size, terminated))
        except RankDiscarded:
            ranks.append(None)
            continue
        assert ctx.state.world_size == world_size - len(terminated)
        assert ctx.terminated_ranks == set()
        ranks.append(ctx.state.rank)
    return ranks


@pytest.mark.parametrize(
    ("assignment", "terminated", "expected"),
    [
        (ShiftRanks(), {1, 4, 5}, [0, None, 1, 2, None, None, 3, 4]),
        (FillGaps(), {1, 4, 5}, [0, None, 2, 3, None, None, 1, 4]),
        (ShiftRanks(), {1, 2, 7}, [0, None, None, 1, 2, 3, 4, None]),
        (FillGaps(), {1, 2, 7}, [0, None, None, 3, 4, 1, 2, None]),
        (ShiftRanks(), set(), [*range(8)]),
        (FillGaps(), set(), [*range(8)]),
        (ShiftRanks(), set(range(8)), [None] * 8),
        (FillGaps(), set(range(8)), [None] * 8),
    ],
)
def test_shifting_keeps_the_order_and_filling_moves_the_highest(
    assignment: RankAssignment, terminated: set[int], expected: list[int | None]
) -> None:
    """ShiftRanks keeps the order of the ranks, FillGaps moves only the highest."""
    assert new_ranks(assignment, 8, terminated) == expected


def test_surviving_ranks_have_all_numbers_below_the_world_size() -> None:
    """Whatever ranks are terminated, the others have all numbers below the new world size,
    each once.
    """
    numbers = random.Random(1)
    for _ in range(300):
        size = numbers.randint(1, 24)
        terminated = set(numbers.sample(range(size), numbers.randint(0, size)))
        shifted, filled = (new_ranks(cls(), size, terminated) for cls in (ShiftRanks, FillGaps))
        left = [rank for rank in range(size) if rank not in terminated]
        assert [shifted[rank] for rank in left] == list(range(len(left)))
        assert sorted(filled[rank] for rank in left) == list(range(len(left)))  # type: ignore[type-var]
        assert all(filled[rank] == rank for rank in left if rank < len(left))
        moved = [filled[rank] for rank in left if rank >= len(left)]
        assert moved == sorted(moved)  # type: ignore[type-var]


@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()])
def test_closing_gaps_changes_only_rank_and_world_size(assignment: RankAssignment) -> None:
    """Only rank and world size change, and the input stays as it was; a terminated rank leaves."""
    error = ValueError()
    ctx = context(
        7,
        8,
        {2},
        iteration=4,
        active_rank=7,
        active_world_size=8,
        mode=Mode.ACTIVE,
        fn_exception=error,
    )
    before = dataclasses.replace(ctx.state)
    result = assignment(ctx)
    assert dataclasses.replace(result.state, rank=7, world_size=8) == before == ctx.state
    assert result.state.fn_exception is error
    assert ctx.terminated_ranks == {2}
    with pytest.raises(RankDiscarded, match="rank 2 is terminated"):
        assignment(context(2, 8, {2}))


@pytest.mark.timing
@pytest.mark.parametrize("assignment", [ShiftRanks(), FillGaps()])
def test_a_rank_of_a_large_world_finds_its_number_fast(assignment: RankAssignment) -> None:
    """A rank of 10,000 finds its number within a fraction of a second,
    also if half of them are terminated.
    """
    start = time.process_time()
    assignment(context(9_999, 10_000, set(range(0, 10_000, 2))))
    assert time.process_time() - start < 0.2


@pytest.mark.parametrize(
    ("assignment", "active_before", "expected"),
    [
        (ActivateAllRanks(), None, 8),
        (ActivateAllRanks(), 4, 8),
        (MaxActiveWorldSize(), None, 8),
        (MaxActiveWorldSize(3), None, 3),
        (MaxActiveWorldSize(9), None, 8),
        (MaxActiveWorldSize(5), 4, 4),
        (MaxActiveWorldSize(5), 9, 5),
        (ActiveWorldSizeDivisibleBy(), None, 8),
        (ActiveWorldSizeDivisibleBy(3), None, 6),
        (ActiveWorldSizeDivisibleBy(3), 5, 3),
        (ActiveWorldSizeDivisibleBy(9), None, 0),
        (Compose(ActiveWorldSizeDivisibleBy(4), MaxActiveWorldSize(7)), None, 4),
    ],
)
def test_filters_activate_the_lowest_ranks(
    assignment: RankAssignment, active_before: int | None, expected: int
) -> None:
    """The lowest ranks are active, as many as the filter and those before it admit."""
    for rank in range(8):
        state = assignment(context(rank, 8, active_world_size=active_before)).state
        assert (state.rank, state.world_size, state.active_world_size) == (rank, 8, expected)
        assert (state.mode, state.active_rank) == (
            (Mode.ACTIVE, rank) if rank < expected else (Mode.INACTIVE, None)
        )


def test_reserves_replace_terminated_ranks() -> None:
    """In a chain, reserves become active when active ranks are terminated,
    until too few are left.
    """
    chain = Compose(ActiveWorldSizeDivisibleBy(2), MaxActiveWorldSize(4), ShiftRanks())
    world = World(6, chain)
    world.assign()
    assert world.active_ranks() == [0, 1, 2, 3, None, None]
    world.assign({1})
    assert world.active_ranks() == [0, None, 1, 2, 3, None]
    world.assign({0, 1})
    assert world.active_ranks() == [None, None, None, 0, 1, None]
    world.check()
    assert world.discarded == {
        rank: f"rank {number} is terminated" for rank, number in {1: 1, 0: 0, 2: 1}.items()
    }


def test_a_group_below_its_condition_is_terminated() -> None:
    """The healthy ranks of a group that does not meet the condition are terminated too."""
    grouped = FilterCountGroupedByKey(
        lambda state: f"host {state.rank // 2}", lambda count: count == 2
    )
    world = World(8, Compose(ShiftRanks(), grouped))
    states = world.assign({1, 4, 5})
    assert {initial: state.rank for initial, state in states.items()} == {2: 0, 3: 1, 6: 2, 7: 3}
    assert sorted(world.discarded) == [0, 1, 4, 5]


def test_group_filters_only_add_terminated_ranks() -> None:
    """The filter changes no state; a rank that is terminated takes no part."""
    grouped = FilterCountGroupedByKey("one group", lambda count: count > 9, dt.timedelta(seconds=1))
    ctx = context(1, 4, {0, 2, 3})
    result = grouped(ctx)
    assert (result.state, result.terminated_ranks, ctx.terminated_ranks) == (
        ctx.state,
        {0, 1, 2, 3},
        {0, 2, 3},
    )
    ctx = context(0, 4, {0})
    assert grouped(ctx) is ctx


def test_a_filter_may_occur_twice_in_a_chain() -> None:
    """Each call is an exchange of its own, also of the same filter."""
    counts = []

    def is_pair(count: int) -> bool:
        counts.append(count)
        return count == 2

    grouped = FilterCountGroupedByKey(lambda state: str(state.rank // 2), is_pair)
    world = World(6, Compose(ShiftRanks(), grouped, ShiftRanks(), grouped))
    assert [state.rank for state in world.assign({0}).values()] == [0, 1, 2, 3]
    assert sorted(set(counts)) == [1, 2]
