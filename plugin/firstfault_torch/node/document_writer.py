"""Makes a document durable: writes it into the node's spool, uploads it, and returns a receipt.

The node's recorder uploads it; without one (a `PyTorch` pod), or if it has died, this process does. A document is in
the spool before its upload begins, so that the agent can finish an upload that the failed process could not.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from firstfault.errors import FirstFaultError, ObjectNotFoundError
from firstfault.layout.keys import error_key_for, roster_key_for
from firstfault.layout.paths import ERRORS, ROSTER
from firstfault.model import Receipt, Resources, WorkerError
from firstfault.recorder import (
    Recorder,
    RecorderProcess,
    RecorderUnavailableError,
    Spool,
    SpooledDocument,
    start_recorder,
)
from firstfault.store import join, open_store
from firstfault.sync import run_sync
from firstfault.wire.documents import MAX_DOCUMENT_BYTES, encode, encode_presence
from firstfault_torch.budgets import ENDING_RECORDER_S, RECEIPT_S, SPOOL_S
from firstfault_torch.guard import bounded, caught, guarded, logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firstfault.model import NodePresence
    from firstfault_torch.context import Recording
    from firstfault_torch.node.files import NodeFiles

__all__ = [
    "as_entry",
    "ask_recorder",
    "document_path",
    "end_node_recorder",
    "get_file",
    "node_recorder",
    "put_document",
    "put_file",
    "put_on_node",
    "record_error",
    "spool_for_agent",
    "spool_of",
]


@contextlib.contextmanager
def node_recorder(recording: Recording) -> Iterator[Recording]:
    """Run a recorder for the duration of the block; yield the recording with its folder, or unchanged if it fails."""
    process: RecorderProcess | None = None
    with guarded("starting the recorder"):
        process = start_recorder(recording.output_prefix, deadline_seconds=recording.upload_deadline_seconds)
    try:
        yield replace(recording, node_folder=str(process.folder.path)) if process is not None else recording
    finally:
        if process is not None:
            with guarded("ending the recorder"):
                process.end()


def end_node_recorder(recording: Recording) -> None:
    """End the node's recorder, from a thread that is about to end the process."""
    if recording.files is not None:
        with guarded("ending the recorder"):
            Recorder(recording.files.recorder).end(ENDING_RECORDER_S)


def spool_of(recording: Recording, local_rank: int | None, error_file: str | None) -> Spool | None:
    """Return a worker's spool in the node's folder, else beside torch's error.json; None if no agent started it."""
    files = _files(recording)
    if files is not None and local_rank is not None:
        return files.worker_spool(recording.round, local_rank)
    if error_file and error_file != os.devnull:
        return Spool(Path(error_file).parent / "firstfault")
    return None


def spool_for_agent(recording: Recording) -> Spool | None:
    """Return the agent's own spool, None without a node's folder."""
    files = _files(recording)
    return files.agent_spool if files is not None else None


def _files(recording: Recording) -> NodeFiles | None:
    """Return the node's files; None without a folder or after the recorder has removed it."""
    files = recording.files
    return files if files is not None and files.exists else None


def record_error(
    error: WorkerError, recording: Recording, spool: Spool | None, deadline_seconds: float, *, held: bool = False
) -> Receipt:
    """Make a document durable, waiting at most `deadline_seconds`; never raises.

    Args:
        error: the failure; its `monotonic_ns` is the moment of the fault, from which the receipt counts.
        recording: where, and by which recorder.
        spool: keeps it until it is uploaded; None where no agent would pick it up.
        deadline_seconds: counted from now.
        held: only spool it; the agent uploads it if the node fails.
    """
    deadline = time.monotonic() + deadline_seconds
    name, data = error_key_for(error), encode(error)
    path = None
    if spool is not None:
        wait = max(deadline_seconds, SPOOL_S)
        path = bounded(lambda: spool.add(name, data, held=held), wait, "spooling an error document", local=True)
    if held:
        return Receipt(name, durable=False, error="held back until the node fails", rank=error.rank)
    left = max(deadline - time.monotonic(), 0)
    if path is not None:
        receipt = _document_by_recorder(name, path, recording, error.monotonic_ns, error.rank, left)
        if receipt is not None:
            return receipt
        left = max(deadline - time.monotonic(), 0)
    receipt = _upload_directly(name, data, recording.output_prefix, error.monotonic_ns, error.rank, left)
    if spool is not None:
        bounded(lambda: spool.add_receipt(receipt), RECEIPT_S, "writing a receipt", local=True)
    return receipt


def document_path(name: str) -> str:
    """Return where a document lies, below the output prefix."""
    return f"{ERRORS}/{name}"


def as_entry(presence: NodePresence) -> tuple[str, bytes]:
    """Return a roster entry's path below the output prefix, new and unique, and its bytes."""
    return f"{ROSTER}/{roster_key_for(presence)}", encode_presence(presence)


def put_document(
    document: SpooledDocument,
    recording: Recording,
    fault_monotonic_ns: int | None,
    rank: int | None,
    deadline_seconds: float,
) -> Receipt:
    """Upload what another process spooled, within `deadline_seconds`; log and receipt report a failed upload."""
    deadline = time.monotonic() + deadline_seconds
    receipt = _document_by_recorder(document.name, document.path, recording, fault_monotonic_ns, rank, deadline_seconds)
    if receipt is not None:
        return receipt
    data, left = document.path.read_bytes(), max(deadline - time.monotonic(), 0)
    return _upload_directly(document.name, data, recording.output_prefix, fault_monotonic_ns, rank, left)


def put_on_node(path: str, data: bytes, recording: Recording, seconds: float) -> bool:
    """Write a file below the output prefix, through the node's recorder if there is one; return whether it is durable.

    It never raises; a failure is logged.

    Args:
        path: below the output prefix.
        data: the file's bytes.
        recording: where, and by which recorder.
        seconds: longest wait.
    """
    files = _files(recording)
    if files is not None:
        spool = files.outgoing_spool
        file = bounded(lambda: spool.add(path.rsplit("/", 1)[-1], data), SPOOL_S, "spooling a file", local=True)
        receipt = _put_by_recorder(path, file, recording, seconds) if file is not None else None
        if receipt is not None:
            return receipt.durable

    def put() -> bool:
        put_file(recording.output_prefix, path, data)
        return True

    return bounded(put, seconds, f"writing {path}") is True


def ask_recorder(recording: Recording) -> Resources:
    """Return the recorder's data on the container's memory.

    Raises:
        firstfault.recorder.RecorderUnavailableError: there is none.
    """
    if recording.files is None:
        raise RecorderUnavailableError("this node has no recorder")
    seen = Recorder(recording.files.recorder).resources()
    return Resources(
        oom_kill=seen.get("oom_kill"),
        memory_peak_bytes=seen.get("memory_peak_bytes"),
        memory_limit_bytes=seen.get("memory_limit_bytes"),
        memory_used_bytes=seen.get("memory_used_bytes"),
        watermark_ns=seen.get("watermark_ns"),
    )


def get_file(output_prefix: str, path: str) -> bytes | None:
    """Return a document below the output prefix; None if there is none.

    Raises:
        firstfault.errors.StoreError: it cannot be read.
    """

    async def get() -> bytes:
        async with open_store(output_prefix) as store:
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

    async def put() -> None:
        # workers may be forked after this, and restarts fork again
        async with open_store(output_prefix, may_fork=True) as store:
            await store.put(path, data)

    run_sync(put())


def _document_by_recorder(  # noqa: PLR0913, PLR0917 - a document, its place and its clock
    name: str,
    path: Path,
    recording: Recording,
    fault_monotonic_ns: int | None,
    rank: int | None,
    deadline_seconds: float,
) -> Receipt | None:
    """Return the receipt, None if there is no recorder to ask."""
    receipt = _put_by_recorder(document_path(name), path, recording, deadline_seconds, fault_monotonic_ns, rank)
    if receipt is not None and not receipt.durable:
        _log_failed_upload(recording.output_prefix, name, receipt.error)
    return receipt


def _put_by_recorder(  # noqa: PLR0913, PLR0917 - as above
    target: str,
    file: Path,
    recording: Recording,
    deadline_seconds: float,
    fault_monotonic_ns: int | None = None,
    rank: int | None = None,
) -> Receipt | None:
    files = _files(recording)
    if files is None:
        return None
    try:
        return Recorder(files.recorder).put(
            target, file, deadline_seconds=deadline_seconds, fault_monotonic_ns=fault_monotonic_ns, rank=rank
        )
    except RecorderUnavailableError as error:
        logger.debug("no recorder on this node; this process uploads: %s", error)
        return None


def _upload_directly(  # noqa: PLR0913, PLR0917 - as above
    name: str,
    data: bytes,
    output_prefix: str,
    fault_monotonic_ns: int | None,
    rank: int | None,
    deadline_seconds: float,
) -> Receipt:
    failures: list[str] = []
    asked = threading.Event()

    def upload() -> int | None:
        asked.set()
        _, error = caught(lambda: put_file(output_prefix, document_path(name), data), Exception)
        if error is None:
            return time.monotonic_ns()
        failures.append(str(error) if isinstance(error, FirstFaultError) else f"{type(error).__name__}: {error}")
        return None

    done = bounded(upload, deadline_seconds, "uploading an error document")
    if done is not None:
        took = done - fault_monotonic_ns if fault_monotonic_ns else None
        return Receipt(name, durable=True, fault_to_durable_ns=took, rank=rank)
    late = f"the storage did not answer within {deadline_seconds:.1f} s"
    reason = failures[0] if failures else late if asked.is_set() else "the system allows no further thread"
    _log_failed_upload(output_prefix, name, reason)
    return Receipt(name, durable=False, error=reason, rank=rank)


def _log_failed_upload(output_prefix: str, name: str, reason: str) -> None:
    logger.warning("error document %s was not uploaded: %s", join(output_prefix, ERRORS, name), reason)
