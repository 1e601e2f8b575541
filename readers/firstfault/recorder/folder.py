"""The folder that the processes of one node share with their recorder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from firstfault.recorder.spool import Spool

if TYPE_CHECKING:
    from pathlib import Path

SOCKET = "recorder.sock"
_LAST_WORDS = "last-words"
_REMOVALS = 5
"""Most attempts to remove the folder."""
DOCUMENT = "document.pb"
"""In `NodeFolder.last_words`: the error document about the agent's death, without a time."""
PRESENCE = "presence.pb"
"""In `NodeFolder.last_words`: the agent's last roster entry (phase failed), without receipts and time."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a recorder."""

    output_prefix: str
    """URI below which the recorder uploads."""
    deadline_seconds: float
    """Longest upload of each document after the agent's death, seconds."""
    agent_pid: int
    """The process that started the recorder; the recorder ends with it."""
    listener: int
    """Descriptor of the listening socket, inherited from the agent."""


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """The node's folder: the socket, the settings and the spools."""

    path: Path

    @property
    def socket(self) -> Path:
        """The socket on which the recorder listens."""
        return self.path / SOCKET

    @property
    def settings(self) -> Path:
        """The file of the recorder's settings (JSON)."""
        return self.path / "settings.json"

    @property
    def last_words(self) -> Spool:
        """`DOCUMENT` and `PRESENCE`: written at the start of each round, uploaded if the agent dies."""
        return self.spool(_LAST_WORDS)

    def spool(self, name: str) -> Spool:
        """Return a process's spool: ``0-1`` for round 0 and local rank 1, or ``agent``."""
        return Spool(self._spools / name)

    def spools(self) -> list[Spool]:
        """Return the spools of all processes, by name, without `last_words`."""
        names = sorted(path.name for path in self._spools.iterdir()) if self._spools.is_dir() else []
        return [self.spool(name) for name in names if name != _LAST_WORDS]

    def open_stderr(self) -> list[int]:
        """Return descriptors of the FIFOs that take stderr from the workers, to read from."""
        found = []
        for path in self.path.glob("stderr-*.fifo"):
            with contextlib.suppress(OSError):
                found.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return found

    @property
    def _spools(self) -> Path:
        return self.path / "spool"

    def set_up(self, settings: Settings) -> None:
        """Create the folder's contents and write the recorder's settings.

        Raises:
            OSError: a file could not be written.
        """
        self._spools.mkdir()
        self.settings.write_text(json.dumps(asdict(settings)), encoding="utf-8")

    def read_settings(self) -> Settings:
        """Return the recorder's settings.

        Raises:
            OSError: the file could not be read.
        """
        return Settings(**json.loads(self.settings.read_text(encoding="utf-8")))

    def remove(self) -> None:
        """Remove the folder and its contents. Late writers find no folder, and do not recreate it."""
        # rename first: a file that is added during the removal would keep the folder
        gone = self.path.with_name(f"{self.path.name}.gone")
        with contextlib.suppress(OSError):
            self.path.rename(gone)
        for path in (gone, self.path):
            # a writer that had found the folder before may add a file during the removal
            for _ in range(_REMOVALS):
                shutil.rmtree(path, ignore_errors=True)
                if not path.exists():
                    break
