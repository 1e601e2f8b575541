"""An attempt's output prefix in a temporary folder, with functions that write into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.execution_pb2 import ExecutionError
from hypothesis import settings

from firstfault.layout import error_key_for, roster_key_for
from firstfault.model import NodePresence, WorkerError
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.store.fsspec_store import FsspecStore
from firstfault.wire.documents import encode, encode_presence
from tests.prefix import Prefix
from tests.readers.commands import run
from tests.readers.recorders import agent, gate, out, short, start

__all__ = ["agent", "gate", "out", "run", "short", "start"]

# the same examples on every machine, and no time limit on one that is busy
settings.register_profile(
    "readers",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
)
settings.load_profile("readers")


class Attempt(Prefix):
    """An output prefix, with functions that write into it."""

    def at(self, name: str | int) -> Attempt:
        """Return the attempt in a folder of this one."""
        return Attempt(self.folder / str(name))

    def put(self, path: str, data: bytes = b"") -> str:
        """Write a file below the prefix, atomically as object storage does, and return its name."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = self.folder.with_name(f"{self.folder.name} beside")
        beside.write_bytes(data)
        beside.replace(target)
        return target.name

    def write(self, *errors: WorkerError) -> list[str]:
        return [
            self.put(f"firstfault/errors/{error_key_for(error)}", encode(error)) for error in errors
        ]

    def join(self, *entries: NodePresence) -> list[str]:
        """Write roster entries and return their names."""
        return [
            self.put(f"firstfault/roster/{roster_key_for(entry)}", encode_presence(entry))
            for entry in entries
        ]

    def write_flyte_error(self, name: str, **fields: Any) -> str:
        """Write a file as Flyte's own entrypoint does, with flyteidl's own message."""
        return self.put(name, flyte_error_document(**fields))

    def reader(self, **options: Any) -> MultiErrorFileOutputReader:
        return MultiErrorFileOutputReader(self.uri, **options)


def flyte_error_document(*, seconds: int | None = None, **fields: Any) -> bytes:
    """Return flyteidl's ErrorDocument: a user error "red" that says "hi", unless told otherwise."""
    values = {
        "code": "red",
        "message": "hi",
        "kind": ContainerError.NON_RECOVERABLE,
        "origin": ExecutionError.USER,
        **fields,
    }
    error = ContainerError(**values)
    if seconds is not None:
        error.timestamp.seconds = seconds
    return ErrorDocument(error=error).SerializeToString()


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """An empty output prefix."""
    return Attempt(tmp_path / "out")


@pytest.fixture
def requested_paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths that are requested from the storage."""
    paths: list[str] = []
    get = FsspecStore.get

    async def counted(self: FsspecStore, path: str, **options: Any) -> bytes:
        paths.append(path)
        return await get(self, path, **options)

    monkeypatch.setattr(FsspecStore, "get", counted)
    return paths


@pytest.fixture(autouse=True)
def _no_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    # the command line remembers --debug in the environment
    monkeypatch.delenv("FIRSTFAULT_DEBUG", raising=False)
