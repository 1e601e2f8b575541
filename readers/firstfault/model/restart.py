"""Restarts within an attempt: what was decided after each failed round, and why."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class RestartKind(str, enum.Enum):
    """What is restarted."""

    ROUND = "round"
    """torch elastic's worker group: all worker processes of all nodes."""
    IN_PROCESS = "in-process"
    """The training function, in worker processes that live on."""


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """A failure within an attempt, and the decision whether to restart. Empty fields and None are not known."""

    kind: RestartKind
    number: int
    """Of the round or iteration that failed, from 0."""
    headline: str
    """The verdict's."""
    restart: bool
    """False: the attempt ended."""
    reason: str
    rank: int | None = None
    """The root cause's global rank."""
    node: str = ""
    """The root cause's node."""
    fingerprint: str = ""
    category: str = ""
    is_agreed: bool = True
    """False: the agents reached no decision, and torch elastic restarted."""
    timestamp_ns: int | None = None
    """When the root cause failed."""
    lost_seconds: float | None = None
    """From the failure until the worker processes were started again."""
    world_size_before: int | None = None
    """Ranks."""
    world_size_after: int | None = None
    """Ranks after the restart."""
