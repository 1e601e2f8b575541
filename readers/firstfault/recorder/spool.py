"""The spool: the folders of a node in which documents wait until they are durable, and what became of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.model import Receipt

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Spool", "SpooledDocument"]

_DOCUMENT = ".pb"
_HELD = ".held"
_PART = ".part"
_RECEIPT = ".receipt.json"
_WITHDRAWN = ".withdrawn"


@dataclass(frozen=True, slots=True)
class SpooledDocument:
    """A document in the spool and what became of it."""

    path: Path
    receipt: Receipt | None
    """None: nobody has finished uploading it."""
    withdrawn: bool = False
    """Its writer has taken it back: it is not to be uploaded."""

    @property
    def name(self) -> str:
        """The object's name in the storage."""
        return self.path.name.removesuffix(_HELD)

    @property
    def held(self) -> bool:
        """Whether it is to be uploaded only if the agent dies."""
        return self.path.name.endswith(_HELD)

    @property
    def is_durable(self) -> bool:
        """Whether the storage has it."""
        return self.receipt is not None and self.receipt.durable


class Spool:
    """A folder of the node in which one process's documents wait for their upload.

    Args:
        folder: made when it is needed, in one that exists: a spool does not make a node's folder again that is gone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        """Where the documents lie; made when the first one is added."""
        return self._folder

    def add(self, name: str, data: bytes, *, held: bool = False) -> Path:
        """Put a document in, whole, and return its file.

        Args:
            name: the object's name in the storage, ending with ``.pb``.
            data: its bytes.
            held: keep it back; it is uploaded only if the agent dies.

        Raises:
            OSError: it could not be written.
        """
        return self._write(f"{name}{_HELD if held else ''}", data)

    def add_receipt(self, receipt: Receipt) -> None:
        """Say what became of a document.

        Raises:
            OSError: it could not be written.
        """
        content = {
            "durable": receipt.durable,
            "fault_to_durable_ns": receipt.fault_to_durable_ns,
            "error": receipt.error,
            "rank": receipt.rank,
        }
        self._write(f"{receipt.name}{_RECEIPT}", json.dumps(content).encode())

    def withdraw(self, name: str) -> None:
        """Take a document back, whether or not it is there yet: the recorder will not upload it by itself.

        Raises:
            OSError: it could not be written.
        """
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"{name}{_WITHDRAWN}").touch()

    def documents(self, *, held: bool = False) -> list[SpooledDocument]:
        """Return what is in the spool, by name; `held` documents only if they are asked for."""
        if not self._folder.is_dir():
            return []
        paths = {path.name: path for path in self._folder.glob(f"*{_DOCUMENT}")}
        if held:
            for path in self._folder.glob(f"*{_DOCUMENT}{_HELD}"):
                # one that was released meanwhile lies there under its own name as well
                paths.setdefault(path.name.removesuffix(_HELD), path)
        return [self._document(name, path) for name, path in sorted(paths.items())]

    def _write(self, name: str, data: bytes) -> Path:
        self._folder.mkdir(exist_ok=True)
        part = self._folder / f"{name}{_PART}"
        part.write_bytes(data)
        return part.replace(self._folder / name)

    def _document(self, name: str, path: Path) -> SpooledDocument:
        return SpooledDocument(path, self._receipt(name), (self._folder / f"{name}{_WITHDRAWN}").exists())

    def _receipt(self, name: str) -> Receipt | None:
        try:
            content = json.loads((self._folder / f"{name}{_RECEIPT}").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return Receipt(name, content["durable"], content["fault_to_durable_ns"], content["error"], content["rank"])
