"""Options for recording and concluding: the fields of `Elastic` and `PyTorch` that do not depend on Flyte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.strategies import DEFAULT_STRATEGY

if TYPE_CHECKING:
    from firstfault.retry import RetryPolicy
    from firstfault_torch.inprocess import InProcessRestart

__all__ = ["Options"]


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
