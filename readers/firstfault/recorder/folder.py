"""The folder that the processes of one node share with their recorder."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from firstfault.recorder.spool import Spool

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DOCUMENT", "PRESENCE", "SOCKET", "NodeFolder", "Settings"]

SOCKET = "recorder.sock"
_LAST_WORDS = "last-words"
DOCUMENT = "document.pb"
"""Among the last words: what to say about the agent's death, an error document without its time."""
PRESENCE = "presence.pb"
"""Among the last words: the agent's last roster entry, phase failed, without receipts and time."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a recorder is started with."""

    output_prefix: str
    """URI below which everything is uploaded."""
    deadline_seconds: float
    """For each document of an agent that died."""
    agent_pid: int
    """The process that started it, and with which it ends."""
    listener: int
    """Descriptor of the listening socket, inherited from the agent."""


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """The node's folder and what lies in it."""

    path: Path

    @property
    def socket(self) -> Path:
        """Where the recorder listens."""
        return self.path / SOCKET

    @property
    def settings(self) -> Path:
        """What the recorder was started with, as JSON."""
        return self.path / "settings.json"

    @property
    def last_words(self) -> Spool:
        """What is to be said when the agent dies: `DOCUMENT` and `PRESENCE`, written at the start of each round."""
        return self.spool(_LAST_WORDS)

    def spool(self, name: str) -> Spool:
        """Return a process's spool: ``0-1`` for round 0 and local rank 1, or ``agent``."""
        return Spool(self._spools / name)

    def spools(self) -> list[Spool]:
        """Return every spool in which there may be documents, by name; the last words are none."""
        names = sorted(path.name for path in self._spools.iterdir()) if self._spools.is_dir() else []
        return [self.spool(name) for name in names if name != _LAST_WORDS]

    @property
    def _spools(self) -> Path:
        return self.path / "spool"

    def set_up(self, settings: Settings) -> None:
        """Make what lies in the folder, and leave the settings for the recorder.

        Raises:
            OSError: they could not be written.
        """
        self._spools.mkdir()
        self.settings.write_text(json.dumps(asdict(settings)), encoding="utf-8")

    def read_settings(self) -> Settings:
        """Return what the recorder was started with.

        Raises:
            OSError: they could not be read.
        """
        return Settings(**json.loads(self.settings.read_text(encoding="utf-8")))

    def remove(self) -> None:
        """Remove the folder and all that is in it; whoever is about to write finds no folder, and makes none."""
        # under another name first: a file that is added while the rest is removed would keep the folder
        gone = self.path.with_name(f"{self.path.name}.gone")
        with contextlib.suppress(OSError):
            self.path.rename(gone)
        for path in (gone, self.path):
            shutil.rmtree(path, ignore_errors=True)
