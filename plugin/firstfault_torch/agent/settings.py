"""What an agent needs besides torch's own settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firstfault.conclude import RestartContext
from firstfault.model import RestartRecord
from firstfault_torch.agent.signals import SignalWatch
from firstfault_torch.node_context import NodeContext
from firstfault_torch.options import Options
from firstfault_torch.rounds.election import CollectedReports


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent needs in addition to torch's own settings."""

    options: Options
    signals: SignalWatch
    """Receives the signals to this process."""
    min_nodes: int = 1
    """Fewest nodes with which the job continues."""
    decide_restart: DecideRestart | None = None
    """Judges a failed round before torch restarts the workers. If None, torch decides alone."""
    load: Callable[[], object] = lambda: None
    """Called once the workers have started: imports what a failure needs."""


DecideRestart = Callable[[NodeContext, CollectedReports, RestartContext], RestartRecord | None]
"""Judges a round by the agents' reports. Returns the decision, or None if that failed."""
