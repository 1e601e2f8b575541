"""A rank's state, and which rank each surviving process has after a fault,
and which of them are active.

Every process computes its own rank from the same inputs: its state, and the set of terminated
ranks. So all parts must be deterministic. `Compose` chains them: ``Compose(MaxActiveWorldSize(8),
ShiftRanks())`` closes the gaps, then activates at most eight ranks.
"""

from __future__ import annotations

import abc
import dataclasses
import datetime as dt
import enum
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from firstfault_inprocess.exception import RestartError, check_limit


class Mode(enum.Enum):
    """What a rank does in the current iteration."""

    INITIALIZED = enum.auto()
    """no rank assignment has run yet"""
    ACTIVE = enum.auto()
    """the rank calls the wrapped function"""
    INACTIVE = enum.auto()
    """the rank waits as a reserve"""


@dataclasses.dataclass(frozen=True)
class State:
    """The state of one rank. Each process has its own.

    Attributes:
        rank: this rank among all ranks that are left.
        world_size: number of ranks that are left, active or not.
        active_rank: the rank that the wrapped function sees; None if the rank isn't active.
        active_world_size: the world size that the wrapped function sees; None before the first rank
            assignment.
        initial_rank: the rank when the wrapped function was called; `rank` if not given.
        initial_world_size: the world size when the wrapped function was called; `world_size` if not
            given.
        iteration: how often the function was restarted, from 0.
        mode: what the rank does in this iteration.
        fn_exception: the exception that the wrapped function raised in this iteration, with its
            traceback and causes; None if it raised none.
    """

    rank: int
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int = -1
    initial_world_size: int = -1
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None

    def __post_init__(self) -> None:
        # The class is frozen, so its own initialization has to go around __setattr__.
        for name, value in (("initial_rank", self.rank), ("initial_world_size", self.world_size)):
            if getattr(self, name) < 0:
                object.__setattr__(self, name, value)

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> State:
        """Return the state of a rank before its first rank assignment.

        Args:
            environment: has ``RANK`` (0 if absent) and ``WORLD_SIZE`` (1 if absent).

        Raises:
            ValueError: one of them isn't a number, or the rank isn't below the world size.
        """
        rank = _parse_number("RANK", environment.get("RANK", "0"))
        world_size = _parse_number("WORLD_SIZE", environment.get("WORLD_SIZE", "1"))
        if not 0 <= rank < world_size:
            raise ValueError(
                f"RANK is {rank} and WORLD_SIZE is {world_size}; RANK must be from 0 to"
                " WORLD_SIZE - 1"
            )
        return cls(rank=rank, world_size=world_size)

    def distributed_variables(self) -> dict[str, str]:
        """Return the environment variables with which an active rank calls the function;
        none if it isn't active.
        """
        if self.active_rank is None or self.active_world_size is None:
            return {}
        return {"RANK": str(self.active_rank), "WORLD_SIZE": str(self.active_world_size)}

    def next(self) -> State:
        """Return the state of the next iteration: its number is higher,
        and the exception of the last one is gone.
        """
        return dataclasses.replace(self, iteration=self.iteration + 1, fn_exception=None)


FrozenState = State
"""NVRx's name for the state that hooks get."""


def _parse_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a number") from None


@dataclasses.dataclass
class RankAssignmentCtx:
    """Input and output of a rank assignment.

    Attributes:
        state: the state of this rank.
        store: torch's store of the ranks, with a separate prefix for each iteration.
        terminated_ranks: ranks that are gone, numbered as `state.rank`, so each is below
            `state.world_size`. A rank assignment that removes them returns an empty set.
        exchange: takes this rank, a short text, and the ranks that take part, this one included;
            returns the text of each. All of them call it equally often. It raises a
            `BarrierTimeout` if one of them doesn't within `barrier_timeout`. By default no other
            rank takes part.
    """

    state: State
    store: Any
    terminated_ranks: set[int]
    exchange: Callable[[int, str, Collection[int]], dict[int, str]] = lambda rank, text, _: {
        rank: text
    }


class RankDiscarded(RestartError):  # noqa: N818 - the name is part of the shared vocabulary
    """This rank has no place in the next iteration: it is terminated,
    or the rank assignment removed it.
    """


class RankAssignment(abc.ABC):
    """Gives ranks to the surviving processes, and selects which are active.

    An active rank calls the wrapped function. An inactive rank waits as a reserve. `Compose` chains
    several; see each class for what it can be chained with.
    """

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the next state of this rank and the ranks still to be removed;
        `ctx` stays as it is.

        All ranks call it with the same `terminated_ranks`.

        Raises:
            RankDiscarded: this rank leaves the job.
        """


class RankFilter(RankAssignment):
    """A rank assignment that keeps all ranks, and only selects which are active.

    In a chain, filters run after the parts that change ranks, so they are written before them:
    ``Compose(MaxActiveWorldSize(8), ShiftRanks())``.
    """


# --- closing gaps ---------------------------------------------------------------------------------


class ShiftRanks(RankAssignment):
    """Closes gaps by moving all higher ranks down. The ranks keep their order.

    With rank 1 of four terminated, 0, 2, 3 become 0, 1, 2.
    """

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the new rank and world size; raise as `RankAssignment` does."""
        rank, terminated = ctx.state.rank, ctx.terminated_ranks
        if rank in terminated:
            raise RankDiscarded(f"rank {rank} is terminated")
        world_size = ctx.state.world_size - len(terminated)
        state = dataclasses.replace(
            ctx.state, rank=self._new_rank(rank, world_size, terminated), world_size=world_size
        )
        return dataclasses.replace(ctx, state=state, terminated_ranks=set())

    @staticmethod
    # FillGaps needs it
    def _new_rank(rank: int, world_size: int, terminated: AbstractSet[int]) -> int:  # noqa: ARG004
        return rank - sum(gone < rank for gone in terminated)


class FillGaps(ShiftRanks):
    """Fills gaps with the highest ranks. All ranks below the new world size keep their numbers.

    With rank 1 of four terminated, 0, 2, 3 become 0, 2, 1. Several ranks fill the gaps in ascending
    order.
    """

    @staticmethod
    def _new_rank(rank: int, world_size: int, terminated: AbstractSet[int]) -> int:
        if rank < world_size:
            return rank
        # The ranks above the new world size that are left, in order, take the gaps below it: there
        # are as many of both.
        index = sum(number not in terminated for number in range(world_size, rank))
        return sorted(gone for gone in terminated if gone < world_size)[index]


# --- filters --------------------------------------------------------------------------------------


class ActivateAllRanks(RankFilter):
    """Makes every rank active. No other filter can be chained with it."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the state of an active rank."""
        return _activate(ctx, ctx.state.world_size)


class MaxActiveWorldSize(RankFilter):
    """Makes the lowest ranks active, up to a number, None for no limit;
    the remaining ones are reserves.

    Raises:
        ValueError: the number is below 1.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        check_limit("max_active_world_size", max_active_world_size, 1)
        self.max_active_world_size = max_active_world_size

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the state of an active or a reserve rank."""
        size = _active_world_size(ctx)
        return _activate(
            ctx,
            size if self.max_active_world_size is None else min(size, self.max_active_world_size),
        )


class ActiveWorldSizeDivisibleBy(RankFilter):
    """Makes the largest number of lowest ranks active that is a multiple of a number;
    the remaining ones are reserves.

    If fewer ranks are left than the number, such as the ranks of one model replica, none is active.

    Raises:
        ValueError: the number is below 1.
    """

    def __init__(self, divisor: int = 1) -> None:
        check_limit("divisor", divisor, 1)
        self.divisor = divisor

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the state of an active or a reserve rank."""
        size = _active_world_size(ctx)
        return _activate(ctx, size - size % self.divisor)


def _active_world_size(ctx: RankAssignmentCtx) -> int:
    """Return how many ranks the filters before this one, and the iterations before, left active."""
    state = ctx.state
    return (
        state.world_size
        if state.active_world_size is None
        else min(state.active_world_size, state.world_size)
    )


def _activate(ctx: RankAssignmentCtx, active_world_size: int) -> RankAssignmentCtx:
    rank = ctx.state.rank
    is_active = rank < active_world_size
    state = dataclasses.replace(
        ctx.state,
        mode=Mode.ACTIVE if is_active else Mode.INACTIVE,
        active_rank=rank if is_active else None,
        active_world_size=active_world_size,
    )
    return dataclasses.replace(ctx, state=state)


# --- groups ---------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class FilterCountGroupedByKey(RankAssignment):
    """Marks the ranks of a group as terminated,
    unless the number of its healthy ranks meets a condition.

    It only adds to the terminated ranks. Another rank assignment must remove them, so put it last
    in a chain: ``Compose(ShiftRanks(), FilterCountGroupedByKey(lambda _: socket.gethostname(),
    lambda count: count == 8))`` removes hosts with fewer than eight healthy ranks. The ranks
    exchange their keys through the store.

    Args:
        key_or_fn: the key of this rank's group: a text, or a function that returns it for the state
            of this rank.
        condition: returns True if a group with this number of healthy ranks is kept. It must return
            the same on all ranks.
        timeout: has no effect: the wrapper's barrier timeout bounds the wait for the remaining
            ranks.
    """

    key_or_fn: str | Callable[[State], str]
    condition: Callable[[int], bool]
    timeout: dt.timedelta | None = None

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Exchange keys, and return the terminated ranks with those of the groups that aren't kept.

        A rank that is terminated takes no part; for it, the terminated ranks stay as they are.

        Raises:
            BarrierTimeout: not all healthy ranks sent their key in time.
        """
        rank, terminated = ctx.state.rank, ctx.terminated_ranks
        if rank in terminated:
            return ctx
        healthy = [number for number in range(ctx.state.world_size) if number not in terminated]
        key = self.key_or_fn(ctx.state) if callable(self.key_or_fn) else self.key_or_fn
        # Only healthy ranks write and wait: a terminated one will never write its key.
        keys = ctx.exchange(rank, str(key), healthy)
        counts = Counter(keys[number] for number in healthy)
        kept = {key for key, count in counts.items() if self.condition(count)}
        removed = {number for number in healthy if keys[number] not in kept}
        return dataclasses.replace(ctx, terminated_ranks=terminated | removed)
