"""An attempt's output prefix in a temporary folder, and what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from firstfault.layout import ERRORS, ROSTER
from firstfault.model import DocumentRef, NodePresence, WorkerError
from firstfault.wire.documents import decode, decode_presence

if TYPE_CHECKING:
    from firstfault_torch.node_context import NodeContext


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
        return self.folder / ERRORS

    def node_context(self, deadline_seconds: float = 5.0) -> NodeContext:
        """Return a recording into this prefix."""
        from tests.recordings import (  # noqa: PLC0415 - the library's tests have no torch
            make_node_context,
        )

        return make_node_context(self.uri, deadline_seconds)

    def files(self, where: str = ERRORS) -> dict[str, bytes]:
        """Return the documents or roster entries in one of its folders, by name."""
        return {path.name: path.read_bytes() for path in sorted((self.folder / where).glob("*.pb"))}

    def failures(self) -> list[WorkerError]:
        documents = [decode(data, DocumentRef(name)) for name, data in self.files().items()]
        return [document for document in documents if isinstance(document, WorkerError)]

    def roster(self) -> list[NodePresence]:
        return [decode_presence(data, name) for name, data in self.files(ROSTER).items()]


@pytest.fixture
def prefix(tmp_path: Path) -> Prefix:
    return Prefix(tmp_path / "attempt")
