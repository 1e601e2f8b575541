"""Recording one failure: spool it on the node, upload it, leave a receipt.

A document is written into the node's spool before its upload begins, so that whatever could not be uploaded by the
process that died is uploaded by its agent. The receipt says what became of it.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from firstfault.aio import run_sync
from firstfault.errors import FirstFaultError
from firstfault.keys import error_key_for
from firstfault.model import Receipt
from firstfault.places import ERRORS
from firstfault.store import join, open_store
from firstfault.wire import encode
from flytekitplugins.firstfault.guard import bounded, logger

if TYPE_CHECKING:
    from firstfault.model import WorkerError

__all__ = ["Spool", "SpooledDocument", "put_file", "record_error"]

_RECEIPT = ".receipt.json"
_SPOOL_S = 0.5
"""Least time for writing into the spool, a local file."""
_NOTING_S = 0.5
"""Longest wait for a receipt to be noted on the node's disk, seconds; without it the agent uploads once more."""


@dataclass(frozen=True, slots=True)
class SpooledDocument:
    """A document in the spool and its receipt, None if nobody has finished uploading it."""

    path: Path
    receipt: Receipt | None

    @property
    def name(self) -> str:
        """The object's name under errors/."""
        return self.path.name


class Spool:
    """A folder of the node in which one process's documents wait for their upload.

    Args:
        folder: it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def beside(cls, error_file: str) -> Spool:
        """Return the spool of the worker whose torch ``error.json`` this is."""
        return cls(Path(error_file).parent / "firstfault")

    def add(self, name: str, data: bytes) -> Path:
        """Put a document in, whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f"{name}.part"
        part.write_bytes(data)
        return part.replace(self._folder / name)

    def add_receipt(self, receipt: Receipt) -> None:
        """Say what became of a document."""
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f"{receipt.name}{_RECEIPT}.part"
        content = {
            "durable": receipt.durable,
            "fault_to_durable_ns": receipt.fault_to_durable_ns,
            "error": receipt.error,
            "rank": receipt.rank,
        }
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(self._folder / f"{receipt.name}{_RECEIPT}")

    def documents(self) -> list[SpooledDocument]:
        """Return what is in the spool, by name."""
        if not self._folder.is_dir():
            return []
        return [SpooledDocument(path, self._receipt(path.name)) for path in sorted(self._folder.glob("*.pb"))]

    def _receipt(self, name: str) -> Receipt | None:
        try:
            content = json.loads((self._folder / f"{name}{_RECEIPT}").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return Receipt(name, content["durable"], content["fault_to_durable_ns"], content["error"], content["rank"])


def record_error(error: WorkerError, output_prefix: str, spool: Spool | None, deadline_seconds: float) -> Receipt:
    """Make a document durable, waiting at most `deadline_seconds`; never raises.

    Args:
        error: what to say; its `monotonic_ns` is the moment of the fault, from which the receipt counts.
        output_prefix: URI below which the errors/ folder lies.
        spool: where it waits meanwhile; None if there is nobody to pick it up.
        deadline_seconds: counted from now.
    """
    deadline = time.monotonic() + deadline_seconds
    name = error_key_for(error)
    data = encode(error)
    if spool is not None:
        bounded(lambda: spool.add(name, data), max(deadline_seconds, _SPOOL_S), "spooling an error document")
    receipt = put_document(
        name, data, output_prefix, error.monotonic_ns, error.rank, max(deadline - time.monotonic(), 0)
    )
    if spool is not None:
        bounded(lambda: spool.add_receipt(receipt), _NOTING_S, "noting an upload")
    return receipt


def put_document(  # noqa: PLR0913, PLR0917 - a document, its place and its clock
    name: str,
    data: bytes,
    output_prefix: str,
    fault_monotonic_ns: int | None,
    rank: int | None,
    deadline_seconds: float,
) -> Receipt:
    """Upload a document within `deadline_seconds` and return its receipt; a loss is logged and said in it."""
    failures: list[str] = []

    def upload() -> int | None:
        try:
            put_file(output_prefix, f"{ERRORS}/{name}", data)
        except Exception as error:  # noqa: BLE001 - a storage library may raise anything; it is why the document is lost
            failures.append(str(error) if isinstance(error, FirstFaultError) else f"{type(error).__name__}: {error}")
            return None
        return time.monotonic_ns()

    done = bounded(upload, deadline_seconds, "uploading an error document")
    if done is not None:
        took = done - fault_monotonic_ns if fault_monotonic_ns else None
        return Receipt(name, durable=True, fault_to_durable_ns=took, rank=rank)
    reason = failures[0] if failures else f"the storage did not answer within {deadline_seconds:.1f} s"
    logger.warning("error document %s was not uploaded: %s", join(output_prefix, ERRORS, name), reason)
    return Receipt(name, durable=False, error=reason, rank=rank)


def put_file(output_prefix: str, path: str, data: bytes) -> None:
    """Write one object below the output prefix.

    Raises:
        firstfault.errors.StoreError: it could not be written.
    """

    async def put() -> None:
        async with open_store(output_prefix) as store:
            await store.put(path, data)

    run_sync(put())


def spool_for(environment_file: str | None) -> Spool | None:
    """Return the spool of this worker process, None where no agent started it."""
    return Spool.beside(environment_file) if environment_file and environment_file != os.devnull else None
