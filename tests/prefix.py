"""Fixtures of the agent's and the plugin's tests: an output prefix in a temporary folder, and its documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from firstfault.model import DocumentRef, NodePresence, WorkerError
from firstfault.wire.documents import decode, decode_presence
from firstfault_torch.context import Recording
from tests.recordings import recording_at


@dataclass(frozen=True)
class Prefix:
    """An attempt's output prefix on disk."""

    folder: Path

    @property
    def uri(self) -> str:
        """The prefix as a task gets it."""
        return str(self.folder)

    @property
    def errors(self) -> Path:
        """The folder of error documents; it need not exist."""
        return self.folder / "firstfault" / "errors"

    def recording(self, deadline_seconds: float = 5.0) -> Recording:
        """Return a recording into this prefix."""
        return recording_at(self.uri, deadline_seconds)

    def failures(self) -> list[WorkerError]:
        """Return the decoded error documents, by name."""
        documents = [decode(path.read_bytes(), DocumentRef(path.name)) for path in sorted(self.errors.glob("*.pb"))]
        return [document for document in documents if isinstance(document, WorkerError)]

    def roster(self) -> list[NodePresence]:
        """Return the roster's entries, by name."""
        folder = self.folder / "firstfault" / "roster"
        return [decode_presence(path.read_bytes(), path.name) for path in sorted(folder.glob("*.pb"))]


@pytest.fixture
def prefix(tmp_path: Path) -> Prefix:
    """Return an empty output prefix."""
    return Prefix(tmp_path / "attempt")
