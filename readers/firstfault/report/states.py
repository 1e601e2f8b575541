"""States of ranks and nodes in a report."""

from __future__ import annotations

import enum


class State(str, enum.Enum):
    """What happened to a rank or a node; reports print the value, never color alone."""

    ROOT = "root cause"
    SUSPECT = "suspect"
    VICTIM = "victim"
    STOPPED = "stopped"
    """By its own agent, after another rank had failed."""
    UNCLEAR = "unclear"
    """It failed, as the cause or as a victim."""
    UNREPORTED = "no report"
    FINISHED = "finished"

    @property
    def slug(self) -> str:
        """The name in style sheets and filters."""
        return self.name.lower()
