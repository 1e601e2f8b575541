"""One process's folder of documents and their receipts."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from firstfault.model import Receipt
from firstfault.utils.text import parse_json

_RECEIPT = ".receipt.json"
_WITHDRAWN = ".withdrawn"


@dataclass(frozen=True, slots=True)
class SpooledDocument:
    """A document in the spool, with its receipt."""

    path: Path
    receipt: Receipt | None
    """None if no upload has finished."""
    withdrawn: bool = False
    """The writer withdrew the document: it must not be uploaded."""

    @property
    def name(self) -> str:
        """The object's name in the storage."""
        return self.path.name

    @property
    def is_durable(self) -> bool:
        """Whether it is in the storage."""
        return self.receipt is not None and self.receipt.durable

    @property
    def settled(self) -> Receipt | None:
        """The receipt of a durable or withdrawn document, or None if it must be uploaded."""
        if self.withdrawn:
            return Receipt(self.name, durable=self.is_durable, withdrawn=True)
        return self.receipt if self.is_durable else None


@dataclass(frozen=True, slots=True)
class Spool:
    """The folder of one process's documents."""

    folder: Path
    """Created by the first write. Its parent must exist:
    late writers must not recreate the node's folder.
    """

    def add(self, name: str, data: bytes) -> Path:
        """Write a file atomically and return its path. The name of a document's file is the
        object's name with ``.pb``.

        Raises:
            OSError: the file could not be written.
        """
        self.folder.mkdir(exist_ok=True)
        # A rename is atomic: if this process is killed while it writes, the recorder finds no
        # partial document.
        part = self.folder / f"{name}.part"
        part.write_bytes(data)
        return part.replace(self.folder / name)

    def add_receipt(self, receipt: Receipt) -> None:
        """Write the receipt of a document.

        Raises:
            OSError: the file could not be written.
        """
        before = self._read_receipt(receipt.name)
        if before is not None and before.durable and not receipt.durable:
            # of two concurrent uploads, the slower one failed after the faster one had succeeded
            return
        self.add(f"{receipt.name}{_RECEIPT}", json.dumps(asdict(receipt)).encode())

    def withdraw(self, name: str) -> None:
        """Mark a document, which may not exist yet, as withdrawn: the recorder will not upload it.

        Raises:
            OSError: the file could not be written.
        """
        self.folder.mkdir(exist_ok=True)
        # A mark, not a removal: the document may be written only after this, or an upload may be
        # reading it right now.
        (self.folder / f"{name}{_WITHDRAWN}").touch()

    def remove(self, name: str) -> None:
        """Remove a document and its receipt, if they are there."""
        for file in (name, f"{name}{_RECEIPT}"):
            with contextlib.suppress(OSError):
                (self.folder / file).unlink()

    def documents(self) -> list[SpooledDocument]:
        """Return the documents in the spool, by name."""
        return [
            SpooledDocument(
                path,
                self._read_receipt(path.name),
                path.with_name(f"{path.name}{_WITHDRAWN}").exists(),
            )
            for path in sorted(self.folder.glob("*.pb"))
        ]

    def _read_receipt(self, name: str) -> Receipt | None:
        try:
            return Receipt(
                **parse_json((self.folder / f"{name}{_RECEIPT}").read_text(encoding="utf-8"))
            )
        except (OSError, ValueError, TypeError):
            return None
