"""A root cause that left no error document of its own: other evidence implies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstfault.model import WorkerError

__all__ = ["InferredRoot"]


@dataclass(frozen=True, slots=True)
class InferredRoot:
    """A rank or node that reported no fault of its own, and why it is likely to be the root cause."""

    why: str
    weight: int
    """Number of independent reasons."""
    rank: int | None = None
    node: str = ""
    failure: WorkerError | None = None
    """Its agent's document about stopping it; None: there is none."""
    category: str = "hang"
    confidence: str = "medium"
    rule: str = "hang"
    """The rule that found it, for the verdict."""
