"""What the recorder uploads when its node's agent has died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace

from firstfault import model
from firstfault.errors import BadDocumentError
from firstfault.layout import ERRORS, ROSTER, error_key_for, roster_key_for
from firstfault.model.failure import fatal_error
from firstfault.recorder.client import Target
from firstfault.recorder.container_memory import MemoryWatch
from firstfault.recorder.folder import (
    DEATH_DOCUMENT,
    DEATH_ROSTER_ENTRY,
    NodeFolder,
    get_stack_tail,
)
from firstfault.recorder.folder_keeper import FolderKeeper
from firstfault.recorder.spool import Spool, SpooledDocument
from firstfault.recorder.uploads import Uploads, log_line


def load_document_writer() -> None:
    """Import what writes documents, and compile its patterns."""
    import firstfault.wire.documents  # noqa: F401, PLC0415 - heavy, seldom needed
    from firstfault import credentials  # noqa: PLC0415 - as above

    credentials.compile_patterns()


class AgentDeathReport:
    """The documents about a dead agent: its last words, the spooled documents, the roster entry.

    Each upload may take `deadline_seconds`.
    """

    def __init__(
        self,
        folder: NodeFolder,
        keeper: FolderKeeper,
        memory: MemoryWatch,
        uploads: Uploads,
        deadline_seconds: float,
    ) -> None:
        self._folder = folder
        self._keeper = keeper
        self._memory = memory
        self._uploads = uploads
        self._deadline_seconds = deadline_seconds

    async def upload(self) -> None:
        """Upload the document about the agent's death and all spooled documents at once,
        then the roster entry.

        There is little time: if the agent was the container's first process, the kernel is killing
        this one too.
        """
        words = self._folder.last_words.folder
        uploads = [
            self._upload_spooled(spool, item)
            for spool in self._folder.spools()
            for item in spool.documents()
        ]
        if data := self._keeper.read(words / DEATH_DOCUMENT):
            uploads.insert(0, self._upload_death(data, time.time_ns(), time.monotonic_ns()))
        uploaded = []
        for outcome in await asyncio.gather(*uploads, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log_line(
                    f"a document of the dead agent was not uploaded: {type(outcome).__name__}:"
                    f" {outcome}"
                )
            else:
                uploaded.append(outcome)
        # The roster entry lists the receipts, so it comes last. If this process is killed first,
        # readers find documents without an entry.
        if (data := self._keeper.read(words / DEATH_ROSTER_ENTRY)) is None:
            return
        from firstfault.wire.documents import (  # noqa: PLC0415 - as above
            decode_presence,
            encode_presence,
        )

        presence = decode_presence(data, DEATH_ROSTER_ENTRY)
        receipts = tuple(
            receipt for receipt, round_ in uploaded if round_ in {None, presence.place.round}
        )
        presence = replace(presence, receipts=receipts, timestamp_ns=time.time_ns())
        target = Target(f"{ROSTER}/{roster_key_for(presence)}")
        await self._in_time(target, self._uploads.put(target, encode_presence(presence)))

    async def _upload_death(
        self,
        data: bytes,
        wall_ns: int,
        monotonic_ns: int,
    ) -> tuple[model.Receipt, int | None]:
        """Upload the document about the agent's death at this moment; return receipt and round."""
        from firstfault.wire.documents import decode, encode  # noqa: PLC0415 - as above

        failure = decode(data, model.DocumentRef(DEATH_DOCUMENT))
        resources = self._memory.report()
        if not isinstance(failure, model.WorkerError):
            raise TypeError(f"{DEATH_DOCUMENT} of the agent is not an error document")
        failure = replace(
            failure,
            timestamp_ns=wall_ns,
            monotonic_ns=monotonic_ns,
            writer=model.Writer.RECORDER,
            resources=resources,
        )
        if failure.subject is model.Subject.WORKER:  # a rank that no agent has started
            failure = _add_fatal_signal(failure, self._folder)
        target = Target(f"{ERRORS}/{error_key_for(failure)}", monotonic_ns, failure.rank)
        return (
            await self._in_time(target, self._uploads.put(target, encode(failure))),
            failure.place.round,
        )

    async def _upload_spooled(
        self, spool: Spool, document: SpooledDocument
    ) -> tuple[model.Receipt, int | None]:
        """Upload a spooled document if it needs that; return its receipt,
        and its round if it could be read.
        """
        failure = _decode_failure(document)
        receipt = document.settled
        if receipt is None:
            rank, monotonic_ns = (
                (failure.rank, failure.monotonic_ns) if failure is not None else (None, None)
            )
            target = Target(f"{ERRORS}/{document.name}", monotonic_ns, rank)
            receipt = await self._in_time(target, self._uploads.put(target, document.path, spool))
        return receipt, failure.place.round if failure is not None else None

    async def _in_time(
        self, target: Target, upload: Coroutine[None, None, model.Receipt]
    ) -> model.Receipt:
        seconds = self._deadline_seconds
        try:
            receipt = await asyncio.wait_for(upload, seconds)
        except asyncio.TimeoutError:
            receipt = target.failed(f"the storage did not answer within {seconds:.1f} s")
        if not receipt.durable:
            log_line(f"{target.name} was not uploaded: {receipt.error}")
        return receipt


def _decode_failure(document: SpooledDocument) -> model.WorkerError | None:
    """Return the decoded document; None if it can't be read."""
    from firstfault.wire.documents import decode  # noqa: PLC0415 - as above

    try:
        failure = decode(document.path.read_bytes(), model.DocumentRef(document.name))
    except (OSError, BadDocumentError):
        return None
    return failure if isinstance(failure, model.WorkerError) else None


def _add_fatal_signal(failure: model.WorkerError, folder: NodeFolder) -> model.WorkerError:
    """Add the signal that ended a rank without an agent, if the rank left no exception.

    The rank's parent is a launcher, so its exit code is unknown here. A fatal signal (SIGSEGV,
    SIGABRT) and SIGTERM each leave stacks in a separate file. Without such a file the failure stays
    a SIGKILL, which leaves no trace.
    """
    from firstfault.exceptions.fingerprint import (  # noqa: PLC0415 - heavy, seldom needed
        compute_fingerprint,
    )

    files = folder.worker(failure.place.round, failure.place.local_rank or 0)
    fatal = get_stack_tail(files.fatal_stacks)
    asked = get_stack_tail(files.stacks)
    signal = fatal_error(fatal)[1] if fatal else "SIGTERM" if asked else ""
    if signal:
        sent = (model.SentSignal(signal, model.TERMINATED_ALONE),) if signal == "SIGTERM" else ()
        failure = replace(
            failure,
            code="USER:Stopped" if sent else f"USER:{signal}",
            message=f"rank {failure.rank} was {'terminated' if sent else 'killed'} by {signal}",
            signal=signal,
            sent_signals=sent,
            stack_dumps=(model.StackDump(failure.place.pid, failure.rank, fatal or asked),),
        )
    return replace(failure, fingerprint=compute_fingerprint(failure))
