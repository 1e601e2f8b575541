"""The files in a node's folder; only this module and the recorder's `NodeFolder` make names in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.recorder import NodeFolder, Spool

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """Paths in the folder that the agent, its workers and the recorder of one node share."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether the folder is there. The recorder removes it when it ends, and late writers must not recreate it."""
        return self.path.is_dir()

    @property
    def recorder(self) -> NodeFolder:
        """The recorder's part."""
        return NodeFolder(self.path)

    @property
    def agent_spool(self) -> Spool:
        """Documents of the agent itself."""
        return self.recorder.spool("agent")

    @property
    def outgoing_spool(self) -> Spool:
        """Roster entries and the verdict; not among the spools: the recorder uploads those as error documents."""
        return Spool(self.path / "outgoing")

    @property
    def agent_socket(self) -> Path:
        """The agent's socket."""
        return self.path / "agent.line"

    def worker_spool(self, round_: int, local_rank: int) -> Spool:
        """Return the spool of a worker's documents."""
        return self.recorder.spool(f"{round_}-{local_rank}")

    def worker_socket(self, round_: int, local_rank: int) -> Path:
        """Return a worker's socket."""
        return self.path / f"worker-{round_}-{local_rank}.line"

    def stderr_fifo(self, round_: int, local_rank: int) -> Path:
        """Return the FIFO that takes a worker's stderr to its agent."""
        return self.path / f"stderr-{round_}-{local_rank}.fifo"

    def stacks(self, round_: int, local_rank: int) -> Path:
        """Return the file of the stacks that a worker writes when it is asked."""
        return self.path / f"stacks-{round_}-{local_rank}.txt"

    def stacks_ready(self, round_: int, local_rank: int) -> Path:
        """Return the file that exists once a worker may be asked for its stacks."""
        return self.path / f"stacks-{round_}-{local_rank}.ready"

    def fatal_stacks(self, round_: int, local_rank: int) -> Path:
        """Return the file of the stacks that a fatal signal leaves."""
        return self.path / f"fatal-{round_}-{local_rank}.txt"

    def timers(self, round_: int) -> Path:
        """Return the FIFO of the watchdog's deadlines."""
        return self.path / f"timers-{round_}.fifo"

    def decks(self, round_: int) -> Path:
        """Return the file that keeps rank 0's decks."""
        return self.path / f"decks-{round_}.json"
