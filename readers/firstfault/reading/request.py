"""What to read of an attempt, and how long to wait for its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.layout import Layout
from firstfault.model import JobErrors, NodePresence, ReadingNeeds, Seal
from firstfault.reading.additional_sources import merge_sources
from firstfault.reading.assemble import Snapshot, assemble

if TYPE_CHECKING:
    import threading


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for the nodes, and conditions that end the wait early."""

    seconds: float = 0.0
    """0 means not to wait."""
    expected_nodes: int | None = None
    """Number of nodes to wait for, or None for the number in the roster."""
    enough: Callable[[Sequence[NodePresence]], bool] | None = None
    """Called with the roster on each poll; True ends the wait as if every node had reported."""
    shutdown_requested: threading.Event | None = None
    """Ends the wait when set."""


@dataclass(frozen=True, slots=True)
class Request:
    """The options for reading an attempt."""

    layout: Layout
    find_needs: Callable[[Sequence[Seal]], ReadingNeeds]
    """Returns what the strategy needs to read; the seals may name the strategy."""
    patience: Patience = Patience()
    fresh: bool = False
    """Whether to open every document, instead of the copies in the pods' bundles."""
    notes: tuple[str, ...] = ()
    """Notes for the coverage: which files aren't read, and why."""
    additional: Snapshot | None = None
    """The snapshot of logs and flight recorder dumps of the same job."""

    def job_of(self, snapshot: Snapshot) -> JobErrors:
        """Assemble a snapshot, merged with `additional` and the notes."""
        known = (
            merge_sources(snapshot, self.additional) if self.additional is not None else snapshot
        )
        with_notes = replace(known, notes=(*known.notes, *self.notes)) if self.notes else known
        return assemble(with_notes, expected_nodes=self.patience.expected_nodes)
