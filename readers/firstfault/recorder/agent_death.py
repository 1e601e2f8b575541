"""The agent's death: waits for it, then uploads the document about it, the spooled documents and the roster entry."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.layout import ERRORS, ROSTER, RosterKey, error_key_for, roster_key_for
from firstfault.model import DocumentRef, Receipt, Resources, WorkerError, Writer
from firstfault.recorder.budgets import AGENT_POLL_S
from firstfault.recorder.client import Target
from firstfault.recorder.folder import DOCUMENT, PRESENCE
from firstfault.recorder.uploads import log_line

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from firstfault.model import NodePresence
    from firstfault.recorder.folder import NodeFolder
    from firstfault.recorder.memory import MemoryWatch
    from firstfault.recorder.spool import Spool, SpooledDocument
    from firstfault.recorder.uploads import Uploads


async def agent_gone(pid: int) -> None:
    """Return when the parent process `pid` has ended; at once if it already has.

    Uses pidfd_open(2), and polls ten times a second where that is missing or forbidden.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        await _polled(pid)
        return
    try:
        await _readable(descriptor, pid)
    finally:
        os.close(descriptor)


async def _readable(descriptor: int, pid: int) -> None:
    # checked after opening: if `pid` is still our parent, the number was not reused for another process
    if os.getppid() != pid:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)


async def _polled(pid: int) -> None:
    while os.getppid() == pid:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(AGENT_POLL_S)


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
        target = Target(f"{ERRORS}/{error_key_for(failure)}", monotonic_ns, failure.rank)
        receipt = await self._bounded(target, self.uploads.put(target, encode(failure)))
        return [_Upload(receipt, failure.place.round)]

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
        target = Target(f"{ROSTER}/{roster_key_for(presence)}")
        await self._bounded(target, self.uploads.put(target, encode_presence(presence)))

    async def _receipt(
        self, where: str, spool: Spool, document: SpooledDocument, failure: WorkerError | None
    ) -> Receipt:
        """Return the receipt of a spooled document; upload it first if it needs that."""
        rank, monotonic_ns = (failure.rank, failure.monotonic_ns) if failure is not None else (None, None)
        if document.withdrawn:
            return Receipt(document.name, durable=document.is_durable, rank=rank, withdrawn=True)
        if document.receipt is not None and document.is_durable:
            return document.receipt
        target = Target(f"{where}/{document.name}", monotonic_ns, rank)
        return await self._bounded(target, self.uploads.put_file(target, document.path, spool))

    async def _bounded(self, target: Target, upload: Coroutine[None, None, Receipt]) -> Receipt:
        try:
            receipt = await asyncio.wait_for(upload, self.deadline_seconds)
        except asyncio.TimeoutError:
            receipt = target.failed(f"the storage did not answer within {self.deadline_seconds:.1f} s")
        if not receipt.durable:
            log_line(f"{target.name} was not uploaded: {receipt.error}")
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
