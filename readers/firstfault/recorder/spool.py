"""The spool: a folder for each process of a node, with its documents and their receipts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from firstfault.model import Receipt
from firstfault.untrusted_json import parse_json

if TYPE_CHECKING:
    from pathlib import Path

_DOCUMENT = ".pb"
_HELD = ".held"
_PART = ".part"
_RECEIPT = ".receipt.json"
_WITHDRAWN = ".withdrawn"
_MAX_DELAY_NS = 2**63 - 1
_MAX_RANK = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SpooledDocument:
    """A document in the spool, with its receipt."""

    path: Path
    receipt: Receipt | None
    """None: no upload has finished."""
    withdrawn: bool = False
    """The writer withdrew the document: it must not be uploaded."""

    @property
    def name(self) -> str:
        """The object's name in the storage."""
        return self.path.name.removesuffix(_HELD)

    @property
    def held(self) -> bool:
        """Whether the recorder uploads it only if the agent dies."""
        return self.path.name.endswith(_HELD)

    @property
    def is_durable(self) -> bool:
        """Whether it is in the storage."""
        return self.receipt is not None and self.receipt.durable


class Spool:
    """The folder of one process's documents.

    Args:
        folder: created on the first write. Its parent must exist: late writers must not recreate the node's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        """The folder of the documents; created by the first write."""
        return self._folder

    def add(self, name: str, data: bytes, *, held: bool = False) -> Path:
        """Write a document atomically and return its file.

        Args:
            name: the object's name in the storage, ending with ``.pb``.
            data: its bytes.
            held: the recorder uploads it only if the agent dies.

        Raises:
            OSError: the file could not be written.
        """
        return self._write(f"{name}{_HELD if held else ''}", data)

    def add_receipt(self, receipt: Receipt) -> None:
        """Write the receipt of a document.

        Raises:
            OSError: the file could not be written.
        """
        before = self._receipt(receipt.name)
        if before is not None and before.durable and not receipt.durable:
            return  # a slow first try that failed after a second one
        self._write(f"{receipt.name}{_RECEIPT}", json.dumps(asdict(receipt)).encode())

    def withdraw(self, name: str) -> None:
        """Mark a document, which may not exist yet, as withdrawn: the recorder will not upload it.

        Raises:
            OSError: the file could not be written.
        """
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"{name}{_WITHDRAWN}").touch()

    def documents(self, *, held: bool = False) -> list[SpooledDocument]:
        """Return the documents in the spool, by name; `held` ones only on request."""
        if not self._folder.is_dir():
            return []
        paths = {path.name: path for path in self._folder.glob(f"*{_DOCUMENT}")}
        if held:
            for path in self._folder.glob(f"*{_DOCUMENT}{_HELD}"):
                # a released document exists under its own name as well
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
            content = parse_json((self._folder / f"{name}{_RECEIPT}").read_text(encoding="utf-8"))
            durable, error = content["durable"], content["error"]
            delay, rank = content["fault_to_durable_ns"], content["rank"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not isinstance(durable, bool) or not isinstance(error, str):
            return None
        if not _is_number(delay, _MAX_DELAY_NS) or not _is_number(rank, _MAX_RANK):
            return None
        return Receipt(name, durable, delay, error, rank)


def _is_number(value: object, largest: int) -> bool:
    """Whether a value is None or a number that a roster entry can hold."""
    return value is None or (type(value) is int and 0 <= value <= largest)
