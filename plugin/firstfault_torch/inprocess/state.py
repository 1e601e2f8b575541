"""A rank's place in the job: its rank, the world size, the iteration, and how the function ended."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping


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
        active_rank: the rank that the wrapped function sees; None if the rank is not active.
        active_world_size: the world size that the wrapped function sees; None before the first rank assignment.
        initial_rank: the rank when the wrapped function was called; `rank` if not given.
        initial_world_size: the world size when the wrapped function was called; `world_size` if not given.
        iteration: how often the function was restarted, from 0.
        mode: what the rank does in this iteration.
        fn_exception: the exception that the wrapped function raised in this iteration, with its traceback and causes;
            None if it raised none.
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
        for name, value in (("initial_rank", self.rank), ("initial_world_size", self.world_size)):
            if getattr(self, name) < 0:
                object.__setattr__(self, name, value)

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> State:
        """Return the state of a rank before its first rank assignment.

        Args:
            environment: has ``RANK`` (0 if absent) and ``WORLD_SIZE`` (1 if absent).

        Raises:
            ValueError: one of them is not a number, or the rank is not below the world size.
        """
        rank = _number("RANK", environment.get("RANK", "0"))
        world_size = _number("WORLD_SIZE", environment.get("WORLD_SIZE", "1"))
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK is {rank} and WORLD_SIZE is {world_size}; RANK must be from 0 to WORLD_SIZE - 1")
        return cls(rank=rank, world_size=world_size)

    def distributed_variables(self) -> dict[str, str]:
        """Return the environment variables with which an active rank calls the function; none if it is not active."""
        if self.active_rank is None or self.active_world_size is None:
            return {}
        return {"RANK": str(self.active_rank), "WORLD_SIZE": str(self.active_world_size)}

    def next(self) -> State:
        """Return the state of the next iteration: its number is higher, and the exception of the last one is gone."""
        return dataclasses.replace(self, iteration=self.iteration + 1, fn_exception=None)


FrozenState = State
"""NVRx's name for the state that hooks get."""


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a number") from None
