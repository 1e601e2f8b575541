"""Uploads after the agent's death: the document about it, the spooled documents and the roster entry."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.layout.keys import RosterKey, error_key_for, roster_key_for
from firstfault.layout.paths import ERRORS, ROSTER
from firstfault.model import DocumentRef, Receipt, Resources, WorkerError, Writer
from firstfault.recorder.folder import DOCUMENT, PRESENCE
from firstfault.recorder.uploads import log_line

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from firstfault.model import NodePresence
    from firstfault.recorder.folder import NodeFolder
    from firstfault.recorder.memory import MemoryWatch
    from firstfault.recorder.spool import Spool, SpooledDocument
    from firstfault.recorder.uploads import Uploads

__all__ = ["DeadAgent", "report_agent_death"]


@dataclass(frozen=True, slots=True)
class _Upload:
    """The receipt of a document and the round of its failure."""

    receipt: Receipt
    round: int | None
    """None if the document could not be read."""


@dataclass(frozen=True, slots=True)
class DeadAgent:
    """Uploads the documents of an agent that has died.

    Args:
        folder: the node's folder.
        uploads: where to upload.
        deadline_seconds: longest upload of each document.
    """

    folder: NodeFolder
    uploads: Uploads
    deadline_seconds: float

    async def about_agent(self, resources: Resources, wall_ns: int, monotonic_ns: int) -> list[_Upload]:
        """Upload the document about the agent's death at this moment; do nothing if the agent left none."""
        data = _read(self.folder, DOCUMENT)
        if data is None:
            return []
        from firstfault.wire.documents import decode, encode  # noqa: PLC0415 - heavy, and most runs never need it

        failure = decode(data, DocumentRef(DOCUMENT))
        if not isinstance(failure, WorkerError):
            raise TypeError(f"{DOCUMENT} of the agent is not an error document")
        failure = replace(
            failure, timestamp_ns=wall_ns, monotonic_ns=monotonic_ns, writer=Writer.RECORDER, resources=resources
        )
        name = error_key_for(failure)
        upload = self.uploads.put(
            f"{ERRORS}/{name}", encode(failure), fault_monotonic_ns=monotonic_ns, rank=failure.rank
        )
        return [_Upload(await self._bounded(name, failure.rank, upload), failure.place.round)]

    async def spooled(self, spool: Spool, document: SpooledDocument) -> list[_Upload]:
        """Upload a spooled document that is not uploaded yet; return its receipt, nothing for a roster entry."""
        if RosterKey.parse(document.name) is not None:
            await self._receipt(ROSTER, spool, document, None)
            return []
        failure = _failure(document)
        receipt = await self._receipt(ERRORS, spool, document, failure)
        return [_Upload(receipt, failure.place.round if failure is not None else None)]

    async def presence(self, uploaded: list[_Upload]) -> None:
        """Upload the roster entry of this node; do nothing if the agent left none."""
        data = _read(self.folder, PRESENCE)
        if data is None:
            return
        from firstfault.wire.documents import decode_presence, encode_presence  # noqa: PLC0415 - as above

        presence = _with_receipts(decode_presence(data, PRESENCE), uploaded)
        name = roster_key_for(presence)
        await self._bounded(name, None, self.uploads.put(f"{ROSTER}/{name}", encode_presence(presence)))

    async def _receipt(
        self, where: str, spool: Spool, document: SpooledDocument, failure: WorkerError | None
    ) -> Receipt:
        """Return the receipt of a spooled document; upload it first if it needs that."""
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
            log_line(f"{name} was not uploaded: {receipt.error}")
        return receipt


async def report_agent_death(agent: DeadAgent, memory: MemoryWatch) -> None:
    """Upload the document about the agent's death and all spooled documents at once, then the roster entry.

    There is little time: if the agent was the container's first process, the kernel is killing this one too.
    """
    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    resources = Resources(**memory.report())
    spooled = [
        agent.spooled(spool, document) for spool in agent.folder.spools() for document in spool.documents(held=True)
    ]
    outcomes = await asyncio.gather(
        agent.about_agent(resources, wall_ns, monotonic_ns), *spooled, return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            log_line(f"a document of the dead agent was not uploaded: {type(outcome).__name__}: {outcome}")
    await agent.presence([item for outcome in outcomes if isinstance(outcome, list) for item in outcome])


def _with_receipts(presence: NodePresence, uploaded: list[_Upload]) -> NodePresence:
    """Return the entry with the current time and the receipts of its round."""
    of_this_round = tuple(item.receipt for item in uploaded if item.round in {None, presence.place.round})
    return replace(presence, receipts=of_this_round, timestamp_ns=time.time_ns())


def _failure(document: SpooledDocument) -> WorkerError | None:
    """Return the decoded document; None if it cannot be read."""
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
