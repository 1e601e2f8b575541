"""A job whose ranks compute their assignments one after another, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault_torch.inprocess.rank_assignment import RankAssignmentCtx, RankDiscarded
from firstfault_torch.inprocess.state import Mode, State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from firstfault_torch.inprocess.rank_assignment import RankAssignment


class Waiting(Exception):  # noqa: N818 - not an error
    """Not all ranks have sent their text; the caller tries again later."""


class Exchanges:
    """The store of one rank assignment. A rank that would have to wait gets `Waiting`."""

    def __init__(self) -> None:
        self.texts: dict[str, dict[int, str]] = {}

    def exchange(self, name: str, rank: int, value: str, ranks: Collection[int]) -> dict[int, str]:
        """Return the texts of `ranks`, or raise `Waiting`."""
        assert rank in ranks
        texts = self.texts.setdefault(name, {})
        texts[rank] = value
        if not all(number in texts for number in ranks):
            raise Waiting
        return {number: texts[number] for number in ranks}

    def count(self) -> int:
        """Return how many texts were sent."""
        return sum(map(len, self.texts.values()))


class World:
    """The ranks of a job.

    Args:
        size: how many there are.
        assignment: returns the rank assignment of one rank.
    """

    def __init__(self, size: int, assignment: Callable[[], RankAssignment]) -> None:
        self.states = {rank: State(rank, size) for rank in range(size)}
        self.assignments = {rank: assignment() for rank in range(size)}
        self.discarded: dict[int, str] = {}
        """The message of each rank that left, by initial rank."""

    def assign(self, terminated: Collection[int] = ()) -> dict[int, State]:
        """Compute the next state of every rank, and return those of the ranks that stay, by initial rank."""
        store = Exchanges()
        waiting, self.states, states = dict(self.states), {}, self.states
        while waiting:
            before = len(waiting), store.count()
            for initial, state in list(waiting.items()):
                try:
                    ctx = self.assignments[initial](RankAssignmentCtx(state, store, set(terminated)))
                except Waiting:
                    continue
                except RankDiscarded as error:
                    self.discarded[initial] = str(error)
                else:
                    assert ctx.terminated_ranks == set()
                    self.states[initial] = ctx.state
                del waiting[initial]
            assert (len(waiting), store.count()) != before, f"ranks {list(waiting)} wait for ever"
        assert all(states[initial].initial_rank == initial for initial in states)
        self.states = dict(sorted(self.states.items()))
        return self.states

    def active_ranks(self) -> list[int | None]:
        """Return the active rank of each initial rank; None for those that are not active."""
        size = len(self.assignments)
        return [self.states[rank].active_rank if rank in self.states else None for rank in range(size)]

    def check(self) -> None:
        """Check that all ranks agree on the sizes, and that ranks and active ranks have no gaps."""
        ranks = sorted(state.rank for state in self.states.values() if state.rank is not None)
        assert ranks == list(range(len(self.states)))
        active = sorted(state.active_rank for state in self.states.values() if state.active_rank is not None)
        assert active == list(range(len(active)))
        for state in self.states.values():
            assert (state.world_size, state.active_world_size) == (len(ranks), len(active))
            assert state.mode is (Mode.INACTIVE if state.active_rank is None else Mode.ACTIVE)
