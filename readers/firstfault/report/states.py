"""States of ranks and nodes in a report."""

from __future__ import annotations

import enum


class State(str, enum.Enum):
    """What happened to a rank or a node; reports show the value."""

    ROOT = "root cause"
    SUSPECT = "suspect"
    VICTIM = "victim"
    STOPPED = "stopped by its agent"
    UNCLEAR = "failed, cause or victim"
    UNREPORTED = "sent no report"
    FINISHED = "finished"

    @property
    def mark(self) -> str:
        """One ASCII character: reports never use colour alone to distinguish states."""
        return _MARKS[self]

    @property
    def slug(self) -> str:
        """The name in style sheets and filters."""
        return self.name.lower()


# in the order of `State`; `strict` makes the import fail if a new state has no mark
_MARKS = dict(zip(State, "X!vs~?+", strict=True))
