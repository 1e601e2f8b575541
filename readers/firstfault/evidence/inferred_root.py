"""A root cause that left no error of its own: other evidence implies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstfault.model import WorkerError

__all__ = ["InferredRoot"]


@dataclass(frozen=True, slots=True)
class InferredRoot:
    """Somebody who said nothing, and why it is likely to be the root cause."""

    why: str
    weight: int
    """Independent reasons for it."""
    rank: int | None = None
    node: str = ""
    failure: WorkerError | None = None
    """What its agent wrote when it stopped it."""
    category: str = "hang"
