"""Options for recording and concluding: the fields of `Elastic` and `PyTorch` that do not depend on Flyte."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.errors import UsageError
from firstfault.strategies import DEFAULT_STRATEGY

if TYPE_CHECKING:
    from firstfault.retry import RetryPolicy
    from firstfault_torch.inprocess import InProcessRestart

__all__ = ["Options", "Watchdog"]


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Turns the watchdog on: workers may set deadlines (`firstfault_torch.watchdog`), and are killed if they miss one.

    Raises:
        firstfault.errors.UsageError: `heartbeat_timeout` is no number of seconds above 0.
    """

    heartbeat_timeout: float | None = None
    """Longest time between two calls of ``watchdog.ping()``, seconds. None: pings set no deadline."""

    def __post_init__(self) -> None:
        """Check the field."""
        seconds = self.heartbeat_timeout
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            raise UsageError(
                f"Watchdog.heartbeat_timeout must be a number of seconds above 0, or None for no heartbeat, "
                f"not {seconds!r}"
            )


@dataclass(frozen=True, slots=True)
class Options:
    """Time limits, strategy and retry policy."""

    strategy: str = DEFAULT_STRATEGY
    """Name of the strategy that finds the root cause."""
    settle_seconds: float = 10.0
    """Longest wait for the other nodes' reports after a failure on this node."""
    upload_deadline_seconds: float = 5.0
    """Longest time a failing process waits for its error document to be durable."""
    stop_seconds: float = 2.0
    """Time for workers to end after SIGTERM before they are killed."""
    retry_policy: RetryPolicy | None = None
    """None: firstfault's default."""
    in_process_restart: InProcessRestart | None = None
    """How workers restart in their processes after a fault; None: they do not."""
    retries: int | None = None
    """How often the engine may run the job again; None: not known."""
    restarts_follow_policy: bool = True
    """Whether the retry policy also decides on each of torch's `max_restarts`. False: torch restarts after any
    failure."""
    watchdog: Watchdog | None = None
    """Deadlines for the workers; None: off."""
