"""What all rank assignments share: their input and output, their base classes, and their checks."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Protocol

from firstfault_torch.inprocess.exception import RestartError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from firstfault_torch.inprocess.state import State

__all__ = [
    "Exchange",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "first_few",
    "key_of",
    "rank_and_terminated",
]

_SHOWN_RANKS = 8


class Exchange(Protocol):
    """What a rank assignment needs of the store."""

    def exchange(self, name: str, rank: int, value: str, ranks: Collection[int]) -> dict[int, str]:
        """Give this rank's text to the others, and wait for theirs.

        Args:
            name: names the exchange. It is unique within one rank assignment; the store must keep the exchanges of
                different rank assignments apart.
            rank: this rank; it is one of `ranks`.
            value: its text, at most a few hundred characters.
            ranks: the ranks that take part. All of them give the same collection.

        Returns:
            The text of each of `ranks`.

        Raises:
            TimeoutError: the one of in-process restart: not all arrived within the barrier timeout.
        """


@dataclasses.dataclass
class RankAssignmentCtx:
    """Input and output of a rank assignment.

    Attributes:
        state: the state of this rank.
        store: exchanges texts with the other ranks.
        terminated_ranks: ranks that are gone, numbered as `state.rank`, so each is below `state.world_size`. A rank
            assignment that removes them returns an empty set.
        exchanges: how many exchanges this rank assignment made so far.
    """

    state: State
    store: Exchange
    terminated_ranks: set[int]
    exchanges: int = dataclasses.field(default=0, repr=False, compare=False)


class RankDiscarded(RestartError):  # noqa: N818 - the name is part of the shared vocabulary
    """This rank has no place in the next iteration: it is terminated, or the rank assignment removed it."""


class RankAssignment(abc.ABC):
    """Gives ranks to the surviving processes, and selects which are active.

    An active rank calls the wrapped function. An inactive rank waits as a reserve. `Compose` chains several; see each
    class for what it can be chained with.
    """

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Compute the next state of this rank. All ranks call it with the same `terminated_ranks`.

        Args:
            ctx: the state of this rank and the terminated ranks. It is not changed.

        Returns:
            The next state and the ranks that are still to be removed.

        Raises:
            RankDiscarded: this rank leaves the job.
            ValueError: a terminated rank is outside the world.
        """
        raise NotImplementedError


class RankFilter(RankAssignment):
    """A rank assignment that keeps all ranks, and only selects which are active.

    In a chain, filters run after the parts that change ranks, so they are written before them:
    ``Compose(MaxActiveWorldSize(8), ShiftRanks())``.
    """


def rank_and_terminated(ctx: RankAssignmentCtx) -> tuple[int, set[int]]:
    """Return this rank and the terminated ranks.

    Raises:
        RankDiscarded: this rank has no number any more.
        ValueError: a terminated rank is outside the world.
    """
    rank, world_size = ctx.state.rank, ctx.state.world_size
    if rank is None:
        raise RankDiscarded(f"initial rank {ctx.state.initial_rank} was terminated before")
    terminated = set(ctx.terminated_ranks)
    outside = [number for number in terminated if not 0 <= number < world_size]
    if outside:
        raise ValueError(
            f"terminated_ranks has {first_few(outside)}, but the world has the ranks 0 to {world_size - 1}"
        )
    return rank, terminated


def key_of(key_or_fn: str | Callable[[State], str], state: State) -> str:
    """Return the grouping key of a rank: a fixed text, or what a function returns for its state."""
    return str(key_or_fn(state) if callable(key_or_fn) else key_or_fn)


def first_few(ranks: Iterable[int]) -> str:
    """Return the lowest ranks as text, and how many more there are."""
    numbers = sorted(ranks)
    text = ", ".join(map(str, numbers[:_SHOWN_RANKS]))
    more = len(numbers) - _SHOWN_RANKS
    return f"{text} and {more} more" if more > 0 else text
