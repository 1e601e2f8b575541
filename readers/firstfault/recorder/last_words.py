"""What the recorder says in the stead of an agent that has died: its last words, and all that its node left behind."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.layout.keys import RosterKey, error_key_for, roster_key_for
from firstfault.layout.paths import ERRORS, ROSTER
from firstfault.model import DocumentRef, Receipt, Resources, WorkerError, Writer
from firstfault.recorder.folder import DOCUMENT, PRESENCE
from firstfault.recorder.uploads import say

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from firstfault.model import NodePresence
    from firstfault.recorder.folder import NodeFolder
    from firstfault.recorder.memory import MemoryWatch
    from firstfault.recorder.spool import Spool, SpooledDocument
    from firstfault.recorder.uploads import Uploads

__all__ = ["LastWords", "speak_for_agent"]


@dataclass(frozen=True, slots=True)
class _Told:
    """A document of the node and what became of it."""

    receipt: Receipt
    round: int | None
    """In which it happened; None: it is not known."""


@dataclass(frozen=True, slots=True)
class LastWords:
    """Says what an agent that has died cannot say any more.

    Args:
        folder: the node's.
        uploads: where to.
        deadline_seconds: for each document.
    """

    folder: NodeFolder
    uploads: Uploads
    deadline_seconds: float

    async def about_agent(self, resources: Resources, wall_ns: int, monotonic_ns: int) -> list[_Told]:
        """Write the document about the agent's death, which was noticed at this moment; nothing if it left none."""
        data = _read(self.folder, DOCUMENT)
        if data is None:
            return []
        from firstfault.wire.documents import decode, encode  # noqa: PLC0415 - heavy, and most runs never need it

        failure = decode(data, DocumentRef(DOCUMENT))
        if not isinstance(failure, WorkerError):
            raise TypeError(f"{DOCUMENT} among the last words is no error document")
        failure = replace(
            failure, timestamp_ns=wall_ns, monotonic_ns=monotonic_ns, writer=Writer.RECORDER, resources=resources
        )
        name = error_key_for(failure)
        upload = self.uploads.put(
            f"{ERRORS}/{name}", encode(failure), fault_monotonic_ns=monotonic_ns, rank=failure.rank
        )
        return [_Told(await self._bounded(name, failure.rank, upload), failure.place.round)]

    async def spooled(self, spool: Spool, document: SpooledDocument) -> list[_Told]:
        """Upload a document that its writer could not, and return what became of it."""
        if RosterKey.parse(document.name) is not None:
            await self._receipt(ROSTER, spool, document, None)
            return []
        failure = _failure(document)
        receipt = await self._receipt(ERRORS, spool, document, failure)
        return [_Told(receipt, failure.place.round if failure is not None else None)]

    async def presence(self, told: list[_Told]) -> None:
        """Say in the roster that this node is done; nothing if the agent left no entry."""
        data = _read(self.folder, PRESENCE)
        if data is None:
            return
        from firstfault.wire.documents import decode_presence, encode_presence  # noqa: PLC0415 - as above

        presence = _with_receipts(decode_presence(data, PRESENCE), told)
        name = roster_key_for(presence)
        await self._bounded(name, None, self.uploads.put(f"{ROSTER}/{name}", encode_presence(presence)))

    async def _receipt(
        self, where: str, spool: Spool, document: SpooledDocument, failure: WorkerError | None
    ) -> Receipt:
        """Return what became of a spooled document, after an upload if it needs one."""
        rank, monotonic_ns = (failure.rank, failure.monotonic_ns) if failure is not None else (None, None)
        if document.withdrawn:
            return Receipt(document.name, durable=document.is_durable, rank=rank, withdrawn=True)
        if document.receipt is not None and document.is_durable:
            return document.receipt
        upload = self.uploads.put_file(
            f"{where}/{document.name}", document.path, spool, fault_monotonic_ns=monotonic_ns, rank=rank
        )
        return await self._bounded(document.name, rank, upload)

    async def _bounded(self, name: str, rank: int | None, upload: Coroutine[None, None, Receipt]) -> Receipt:
        try:
            receipt = await asyncio.wait_for(upload, self.deadline_seconds)
        except asyncio.TimeoutError:
            late = f"the storage did not answer within {self.deadline_seconds:.1f} s"
            receipt = Receipt(name, durable=False, error=late, rank=rank)
        if not receipt.durable:
            say(f"{name} was not uploaded: {receipt.error}")
        return receipt


async def speak_for_agent(words: LastWords, memory: MemoryWatch) -> None:
    """Upload what the agent wanted said about its death, what its node has spooled, and that the node is done.

    In this order, at once: where the agent was the container's first process, the kernel is ending this one too.
    """
    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    resources = Resources(**memory.report())
    spooled = [
        words.spooled(spool, document) for spool in words.folder.spools() for document in spool.documents(held=True)
    ]
    outcomes = await asyncio.gather(
        words.about_agent(resources, wall_ns, monotonic_ns), *spooled, return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            say(f"a document of an agent that died was not uploaded: {type(outcome).__name__}: {outcome}")
    await words.presence([told for outcome in outcomes if isinstance(outcome, list) for told in outcome])


def _with_receipts(presence: NodePresence, told: list[_Told]) -> NodePresence:
    """Return the entry as of now, with a receipt for each document of its round."""
    of_this_round = tuple(item.receipt for item in told if item.round in {None, presence.place.round})
    return replace(presence, receipts=of_this_round, timestamp_ns=time.time_ns())


def _failure(document: SpooledDocument) -> WorkerError | None:
    """Return what a document says; None if nothing that can be read: it is uploaded all the same."""
    from firstfault.errors import BadDocumentError  # noqa: PLC0415
    from firstfault.wire.documents import decode  # noqa: PLC0415 - heavy, and most runs never need it

    try:
        failure = decode(document.path.read_bytes(), DocumentRef(document.name))
    except (OSError, BadDocumentError):
        return None
    return failure if isinstance(failure, WorkerError) else None


def _read(folder: NodeFolder, name: str) -> bytes | None:
    try:
        return (folder.last_words.folder / name).read_bytes()
    except OSError:
        return None
