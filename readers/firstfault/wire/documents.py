"""Encodes and decodes documents and roster entries, as the tables of `firstfault.wire.fields` describe them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from firstfault.errors import BadDocumentError
from firstfault.model import DocumentRef, NodePresence, Place, Seal, WorkerError, Writer
from firstfault.text import clean
from firstfault.wire.fields import CONTAINER_ERROR, FAILURE, MAX_SECONDS, MAX_WORKERS, PRESENCE, SEAL
from firstfault_proto.v1 import errors_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

SCHEMA_VERSION = 1
"""Rises by one with each release that adds to the messages."""
MAX_DOCUMENT_BYTES = 2 * 1024 * 1024
"""Largest document that a reader accepts; Flyte's own limit."""
_EXPENDABLE = (
    "exception.members",
    "exception.notes",
    "thread_failures",
    "stack_dumps",
    "exception.causes",
    "exception.bases",
    "exception.frames",
)
"""Parts of a failure to leave out of a document that is too large, in this order."""
_MAX_STOCK_TEXT = 100 * 1024
"""Characters of a text in a file of Flyte's own; flyteadmin keeps as many."""
_NANO = 1_000_000_000


# --- failures -------------------------------------------------------------------------------------------------------


def encode(error: WorkerError) -> bytes:
    """Return the bytes of a document about `error`.

    They parse as ``flyteidl.core.ErrorDocument`` too. Texts are cut and redacted here, for all writers.
    """
    document = pb.WorkerErrorDocument(
        error=_container_error(error, error.timestamp_ns),
        failure=FAILURE.write(error, schema_version=SCHEMA_VERSION),
    )
    data = _bytes(document)
    for part in _EXPENDABLE:
        if len(data) <= MAX_DOCUMENT_BYTES:
            break
        _leave_out(document.failure, part)
        data = _bytes(document)
    return data


def decode(data: bytes, ref: DocumentRef) -> WorkerError | Seal:
    """Return the failure in a document of ours or of Flyte's own, or a sealed verdict.

    Credentials in a file of Flyte's own are removed here, for all readers.

    Raises:
        BadDocumentError: the document is empty, not protobuf, or has no error.
    """
    if not data:
        raise BadDocumentError(f"{ref.name} is empty (0 bytes); its upload was interrupted")
    document = _parsed(pb.WorkerErrorDocument(), data, ref.name, "an error document")
    if not document.HasField("error"):
        raise BadDocumentError(f"{ref.name} has no error; it is truncated or has another format")
    if document.HasField("verdict"):
        return _seal_from_pb(document, ref)
    return _ours(document, ref) if document.HasField("failure") else _stock(document, ref)


def _ours(document: pb.WorkerErrorDocument, ref: DocumentRef) -> WorkerError:
    found = FAILURE.values(document.failure)
    found["timestamp_ns"] = found["timestamp_ns"] or _timestamp_from_pb(document.error)
    newer = document.failure.schema_version > SCHEMA_VERSION
    return WorkerError(**CONTAINER_ERROR.values(document.error), **found, documents=(ref,), newer=newer)


def _stock(document: pb.WorkerErrorDocument, ref: DocumentRef) -> WorkerError:
    """Return the failure in a file of Flyte's own, whose writer removed no credentials."""
    found = CONTAINER_ERROR.values(document.error)
    found |= {name: clean(found[name], _MAX_STOCK_TEXT) for name in ("code", "message", "worker")}
    place = Place(node=found["worker"])
    timestamp_ns = _timestamp_from_pb(document.error)
    return WorkerError(**found, timestamp_ns=timestamp_ns, place=place, writer=Writer.STOCK, documents=(ref,))


def _leave_out(failure: pb.WorkerFailure, part: str) -> None:
    owner, _, name = part.rpartition(".")
    # ClearField on a missing exception would create one
    if not owner or failure.HasField("exception"):
        (failure.exception if owner else failure).ClearField(name)


# --- sealed verdicts ------------------------------------------------------------------------------------------------


def encode_seal(seal: Seal) -> bytes:
    """Return the bytes of the ``error.pb`` that gives a pod's verdict to Flyte."""
    verdict = SEAL.write(seal, schema_version=SCHEMA_VERSION)
    return _bytes(pb.WorkerErrorDocument(error=_container_error(seal, seal.fault_timestamp_ns), verdict=verdict))


def _seal_from_pb(document: pb.WorkerErrorDocument, ref: DocumentRef) -> Seal:
    seal: Seal = SEAL.read(
        document.verdict,
        **CONTAINER_ERROR.values(document.error),
        name=ref.name,
        fault_timestamp_ns=_timestamp_from_pb(document.error),
        newer=document.verdict.schema_version > SCHEMA_VERSION,
    )
    return seal


# --- roster ---------------------------------------------------------------------------------------------------------


def encode_presence(presence: NodePresence) -> bytes:
    """Return the bytes of a roster entry."""
    local = max(presence.place.local_rank or 0, 0)
    workers = [{"global_rank": rank, "local_rank": local + index} for index, rank in enumerate(presence.ranks)]
    return _bytes(pb.RosterEntry(**PRESENCE.write(presence, workers=workers, schema_version=SCHEMA_VERSION)))


def decode_presence(data: bytes, name: str) -> NodePresence:
    """Return a roster entry.

    Raises:
        BadDocumentError: `data` is not a roster entry, has an unknown phase, or lists more workers than a node has.
    """
    entry = _parsed(pb.RosterEntry(), data, name, "a roster entry")
    workers = max(len(entry.workers), len(entry.receipts))
    if workers > MAX_WORKERS:
        raise BadDocumentError(f"{name} is not a roster entry: it lists {workers:,} workers of one node")
    ranks = tuple(worker.global_rank for worker in entry.workers)
    presence: NodePresence = PRESENCE.read(entry, ranks=ranks, newer=entry.schema_version > SCHEMA_VERSION)
    if presence.phase is None:
        raise BadDocumentError(f"{name} is not a roster entry: its phase is unknown to this version")
    return presence


# --- parts ----------------------------------------------------------------------------------------------------------


def _parsed(message: Any, data: bytes, name: str, kind: str) -> Any:
    # a listing gave the size, but an object may have been overwritten since
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BadDocumentError(f"{name} has {len(data)} bytes, more than the limit of {MAX_DOCUMENT_BYTES}")
    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadDocumentError(f"{name} is not {kind}: {error}") from error
    return message


def _bytes(message: pb.WorkerErrorDocument | pb.RosterEntry) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _container_error(value: WorkerError | Seal, timestamp_ns: int | None) -> dict[str, Any]:
    if timestamp_ns is None:
        return CONTAINER_ERROR.write(value)
    seconds, nanos = divmod(timestamp_ns, _NANO)
    return CONTAINER_ERROR.write(value, timestamp={"seconds": seconds, "nanos": nanos})


def _timestamp_from_pb(error: Any) -> int | None:
    """Return nanoseconds since the Unix epoch; None if unset, zero or out of a Timestamp's range."""
    if not error.HasField("timestamp"):
        return None
    stamp: Timestamp = error.timestamp
    in_range = 0 <= stamp.seconds <= MAX_SECONDS and 0 <= stamp.nanos < _NANO
    return (stamp.seconds * _NANO + stamp.nanos or None) if in_range else None
