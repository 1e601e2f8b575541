"""Hooks that run at the start of each iteration, before the wrapped function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault_torch.inprocess.compose import Hook
from firstfault_torch.inprocess.exception import RestartAbort

if TYPE_CHECKING:
    from firstfault_torch.inprocess.state import State


class Initialize(Hook):
    """Runs on each rank at the start of each iteration, the first one included.

    If it raises an `Exception`, all ranks restart. If it raises another `BaseException`, such as `RestartAbort`, the
    wrapped call ends.
    """


class RetryController(Initialize):
    """Gives up when the iterations are used up or too few ranks are left.

    Args:
        max_iterations: how often the function may be called, the first call included; None for no limit.
        min_world_size: fewest ranks that must be left, active or not.
        min_active_world_size: fewest ranks that must be active.

    Raises:
        ValueError: `max_iterations` is below 1, or another limit is below 0.
    """

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        if max_iterations is not None and max_iterations < 1:
            raise ValueError(f"max_iterations is {max_iterations}; it must be at least 1, or None for no limit")
        for name, limit in (("min_world_size", min_world_size), ("min_active_world_size", min_active_world_size)):
            if limit < 0:
                raise ValueError(f"{name} is {limit}; it must be at least 0")
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: State) -> State:
        """Return `state` if the function may be called again.

        Raises:
            RestartAbort: it may not; the message names each limit that was met, with its numbers.
        """
        reasons = []
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            plural = "iteration was" if state.iteration == 1 else "iterations were"
            reasons.append(f"{state.iteration} of at most {self.max_iterations} {plural} used (max_iterations)")
        if state.world_size < self.min_world_size:
            reasons.append(_too_few(state.world_size, "left", self.min_world_size, "min_world_size"))
        active = state.active_world_size
        if active is not None and active < self.min_active_world_size:
            reasons.append(_too_few(active, "active", self.min_active_world_size, "min_active_world_size"))
        if reasons:
            raise RestartAbort("no further restart: " + "; ".join(reasons))
        return state


def _too_few(number: int, state: str, needed: int, limit: str) -> str:
    ranks = "rank is" if number == 1 else "ranks are"
    return f"only {number} {ranks} {state}, at least {needed} {'is' if needed == 1 else 'are'} needed ({limit})"
