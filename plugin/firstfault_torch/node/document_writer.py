"""Makes a document durable: writes it into the node's spool, uploads it, and returns a receipt.

The node's recorder uploads it; without one (a `PyTorch` pod), or if it has died, this process does.
A document is in the spool before its upload begins, so that the agent can finish an upload that the
failed process could not.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from firstfault.errors import FirstFaultError, ObjectNotFoundError, RecorderUnavailableError
from firstfault.layout import ERRORS, ROSTER, error_key_for, roster_key_for
from firstfault.model import NodePresence, Receipt, WorkerError
from firstfault.recorder.client import ALREADY_EXISTS, RecorderClient, Target
from firstfault.recorder.folder import NodeFolder
from firstfault.recorder.process import RecorderProcess, start_recorder
from firstfault.recorder.spool import Spool, SpooledDocument
from firstfault.store import open_store
from firstfault.utils.run_sync import run_sync
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, encode, encode_presence
from firstfault_start import is_in_worker
from firstfault_torch.guard import (
    call_with_timeout,
    log_failed_upload,
    logger,
    suppress_internal_errors,
    try_call,
)
from firstfault_torch.node_context import NodeContext
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, get_limit
from firstfault_torch.time_limits import (
    MIN_SPOOL_TIMEOUT_SECONDS,
    RECEIPT_TIMEOUT_SECONDS,
    STOP_GRACE_SECONDS,
)


@contextlib.contextmanager
def node_recorder(
    node_context: NodeContext, left_seconds: float = STOP_GRACE_SECONDS
) -> Iterator[NodeContext]:
    """Run a recorder for the duration of the block; yield the recording with its folder,
    or unchanged if it fails.

    If this process dies, the recorder kills what its workers leave after `left_seconds`.
    """
    process: RecorderProcess | None = None
    with suppress_internal_errors("starting the recorder"):
        deadline = node_context.upload_deadline_seconds
        process = start_recorder(
            node_context.output_prefix, deadline_seconds=deadline, left_seconds=left_seconds
        )
    try:
        yield (
            replace(node_context, node_folder=str(process.folder.path))
            if process is not None
            else node_context
        )
    finally:
        if process is not None:
            with suppress_internal_errors("ending the recorder"):
                process.end()


def end_node_recorder(node_context: NodeContext) -> None:
    """End the node's recorder, from a thread that is about to end the process."""
    if node_context.files is not None:
        with suppress_internal_errors("ending the recorder"):
            seconds = get_limit(ExitStep.RECORDER, Hurry.LEAVING_NOW)
            RecorderClient(node_context.files).end(seconds)


def open_worker_spool(
    node_context: NodeContext, local_rank: int | None, error_file: str | None
) -> Spool | None:
    """Return a worker's spool in the node's folder, else next to torch's error.json;
    None if no agent started it.
    """
    files = _get_folder(node_context)
    if files is not None and local_rank is not None:
        return files.worker(node_context.round, local_rank).spool
    if error_file and error_file != os.devnull:
        return Spool(Path(error_file).parent / "firstfault")
    return None


def spool_for_agent(node_context: NodeContext) -> Spool | None:
    """Return the agent's own spool, None without a node's folder."""
    files = _get_folder(node_context)
    return files.agent_spool if files is not None else None


def _get_folder(node_context: NodeContext) -> NodeFolder | None:
    """Return the node's files, or None without a folder or after the recorder removed it."""
    files = node_context.files
    return files if files is not None and files.exists else None


def record_error(
    error: WorkerError,
    node_context: NodeContext,
    spool: Spool | None,
    deadline_seconds: float,
    *,
    held: bool = False,
) -> tuple[bytes, Receipt]:
    """Make a document durable, waiting at most `deadline_seconds`; return it with its receipt.

    The receipt counts from the failure's `monotonic_ns`, the moment of the fault. The spool keeps
    it until it is uploaded; None where no agent would pick it up. A document that is `held` is only
    spooled; the agent uploads it if the node fails.
    """
    deadline = time.monotonic() + deadline_seconds
    target = Target(document_path(error_key_for(error)), error.monotonic_ns, error.rank)
    data = encode(error)
    file = None
    # On the disk before the upload begins: if this process is killed during the upload, its agent
    # finds the document.
    if spool is not None:
        wait = max(deadline_seconds, MIN_SPOOL_TIMEOUT_SECONDS)
        file = call_with_timeout(
            lambda: spool.add(target.name, data),
            wait,
            "spooling an error document",
            local=True,
        )
    if held:
        return data, target.failed("held back until the node fails")
    return data, _upload(target, file, data, node_context, deadline)


def document_path(name: str) -> str:
    """Return where a document lies, below the output prefix."""
    return f"{ERRORS}/{name}"


def as_entry(presence: NodePresence) -> tuple[str, bytes]:
    """Return a roster entry's path below the output prefix, new and unique, and its bytes."""
    return f"{ROSTER}/{roster_key_for(presence)}", encode_presence(presence)


def put_document(
    document: SpooledDocument,
    data: bytes,
    error: WorkerError,
    node_context: NodeContext,
    deadline_seconds: float,
) -> Receipt:
    """Upload a document of another process's spool within the deadline;
    log and receipt report a failed upload.
    """
    target = Target(document_path(document.name), error.monotonic_ns, error.rank)
    return _upload(target, document.path, data, node_context, time.monotonic() + deadline_seconds)


def put_on_node(path: str, data: bytes, node_context: NodeContext, seconds: float) -> bool:
    """Write a file below the output prefix, through the node's recorder if there is one;
    return whether it is durable.

    It waits for at most `seconds`, and never raises; a failure is logged.
    """
    return _upload_file(Target(path), data, node_context, seconds).durable


def create_on_node(path: str, data: bytes, node_context: NodeContext, seconds: float) -> Receipt:
    """Write a file as `put_on_node` does, unless there is one; return the receipt.

    Its error is `firstfault.recorder.client.ALREADY_EXISTS` if there is one.
    """
    return _upload_file(Target(path, only_new=True), data, node_context, seconds)


def _upload_file(target: Target, data: bytes, node_context: NodeContext, seconds: float) -> Receipt:
    files = _get_folder(node_context)
    file = None
    if files is not None:
        add = partial(files.roster_and_verdict_spool.add, target.name, data)
        file = call_with_timeout(add, MIN_SPOOL_TIMEOUT_SECONDS, "spooling a file", local=True)
    receipt = _upload(target, file, data, node_context, time.monotonic() + seconds)
    is_over = receipt.durable or receipt.error == ALREADY_EXISTS
    if files is not None and file is not None and is_over:
        # Nobody reads it again, and a job may write such a file each hour for a month.
        files.roster_and_verdict_spool.remove(target.name)
    return receipt


def get_file(output_prefix: str, path: str) -> bytes | None:
    """Return a document below the output prefix, or None if there is none.

    Raises:
        firstfault.errors.StoreError: it can't be read.
    """

    async def get() -> bytes:
        # workers may be forked after this
        async with open_store(output_prefix, may_fork=True) as store:
            return await store.get(path, limit=MAX_DOCUMENT_BYTES)

    try:
        return run_sync(get())
    except ObjectNotFoundError:
        return None


def put_file(output_prefix: str, path: str, data: bytes) -> None:
    """Write one object below the output prefix.

    Raises:
        firstfault.errors.StoreError: it could not be written.
    """
    _write_file(output_prefix, Target(path), data)


def _write_file(output_prefix: str, target: Target, data: bytes) -> bool:
    async def put() -> bool:
        # workers may be forked after this, and restarts fork again
        async with open_store(output_prefix, may_fork=True) as store:
            return await target.write(store, data)

    return run_sync(put())


def _upload(
    target: Target,
    file: Path | None,
    data: bytes,
    node_context: NodeContext,
    deadline: float,
) -> Receipt:
    """Let the node's recorder upload `file`; without one, or without the file,
    this process uploads `data`.

    A failed upload is logged. The receipt lies next to the file, written by the process that
    uploads.
    """
    files = _get_folder(node_context)
    receipt = None
    if files is not None and file is not None:
        try:
            # It may report a timeout and still finish later: the recorder then writes the receipt
            # into the spool.
            receipt = RecorderClient(files).put(target, file, max(deadline - time.monotonic(), 0.0))
        except RecorderUnavailableError as error:
            logger.debug("no recorder on this node; this process uploads: %s", error)
    if receipt is None:
        # The recorder may have died in the middle of the same upload: it has the same name and
        # content, so a second one does no harm.
        own = receipt = _by_this_process(
            target,
            data,
            node_context,
            max(deadline - time.monotonic(), 0.0),
        )
        if file is not None:
            spool = Spool(file.parent)
            call_with_timeout(
                lambda: spool.add_receipt(own),
                RECEIPT_TIMEOUT_SECONDS,
                "writing a receipt",
                local=True,
            )
    # The agent of a worker tries again, and logs it for all workers of its node.
    if not receipt.durable and receipt.error != ALREADY_EXISTS and not is_in_worker():
        log_failed_upload(node_context.output_prefix, receipt.error)
    return receipt


def _by_this_process(
    target: Target,
    data: bytes,
    node_context: NodeContext,
    seconds: float,
) -> Receipt:
    asked = threading.Event()

    def upload() -> tuple[bool | None, BaseException | None]:
        # set by the thread itself: whether a thread could start can't be seen from a missing answer
        asked.set()
        return try_call(lambda: _write_file(node_context.output_prefix, target, data), Exception)

    answer = call_with_timeout(upload, seconds, "uploading an error document")
    if answer is not None:
        is_written, error = answer
        if error is None:
            return target.done() if is_written else target.refused()
        return target.failed(
            str(error) if isinstance(error, FirstFaultError) else f"{type(error).__name__}: {error}"
        )
    if asked.is_set() or not seconds:  # without any time a thread may not have begun
        return target.failed(f"the storage did not answer within {seconds:.1f} s")
    return target.failed("the system allows no further thread")
