"""Encodes and decodes documents, seals and roster entries,
as `firstfault.wire.fields` describes them, and bundles.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from firstfault.errors import BadDocumentError
from firstfault.exceptions.flytekit_files import find_output_error
from firstfault.model import DocumentRef, NodePresence, Place, Seal, WorkerError, Writer
from firstfault.utils.stored_text import clean
from firstfault.wire.fields import (
    CONTAINER_ERROR,
    FAILURE,
    MAX_SECONDS,
    MAX_WORKERS,
    PRESENCE,
    SEAL,
)
from firstfault_proto.v1 import errors_pb2 as pb

SCHEMA_VERSION = 1
"""Incremented by each release that adds to the messages."""
MAX_DOCUMENT_BYTES = 2 * 1024 * 1024
"""Largest document that a reader accepts; Flyte's own limit."""
EXPENDABLE_PARTS = (
    "exception.members",
    "exception.notes",
    "thread_failures",
    "handled_exceptions",
    "stack_dumps",
    "exception.causes",
    "exception.bases",
    "exception.frames",
)
"""Parts of a failure to drop from a document that is too large, in this order."""
MAX_STOCK_TEXT_CHARACTERS = 100 * 1024
"""For a text in a file of Flyte's own; flyteadmin's limit."""
NS_PER_SECOND = 1_000_000_000
BUNDLE_COMPRESSION_LEVEL = 3
MAX_BUNDLE_BYTES = 64 * 1024 * 1024
"""Largest uncompressed bundle that a reader accepts: a small bundle may be a zip bomb."""
MAX_BUNDLE_INDEX_BYTES = 4 * 1024 * 1024
BUNDLE_FILL_RATIO = 0.9
"""Share of the size budget to fill at first, because files compress differently."""


# --- failures -------------------------------------------------------------------------------------


def encode(error: WorkerError) -> bytes:
    """Return the bytes of a document about `error`.

    They also parse as ``flyteidl.core.ErrorDocument``. Texts are cut and redacted here, for all
    writers.
    """
    document = pb.WorkerErrorDocument(
        error=_build_container_error(error, error.timestamp_ns),
        failure=FAILURE.write(error, schema_version=SCHEMA_VERSION),
    )
    data = _serialize(document)
    for part in EXPENDABLE_PARTS:
        if len(data) <= MAX_DOCUMENT_BYTES:
            break
        owner, _, name = part.rpartition(".")
        # ClearField on a missing exception would create one
        if not owner or document.failure.HasField("exception"):
            (document.failure.exception if owner else document.failure).ClearField(name)
        data = _serialize(document)
    return data


def decode(data: bytes, ref: DocumentRef) -> WorkerError | Seal:
    """Return the failure in a document of firstfault's or Flyte's, or a sealed verdict.

    Credentials in a file of Flyte's own are removed here, for all readers.

    Raises:
        BadDocumentError: the document is empty, not protobuf, or has no error.
    """
    if not data:
        raise BadDocumentError(f"{ref.name} is empty (0 bytes); its upload was interrupted")
    document = _parse_message(pb.WorkerErrorDocument(), data, ref.name, "an error document")
    if not document.HasField("error"):
        raise BadDocumentError(f"{ref.name} has no error; it is truncated or has another format")
    common = CONTAINER_ERROR.read_attributes(document.error)
    time_ns = _timestamp_from_pb(document.error)
    if document.HasField("verdict"):
        newer = document.verdict.schema_version > SCHEMA_VERSION
        seal: Seal = SEAL.read(
            document.verdict,
            **common,
            name=ref.name,
            fault_timestamp_ns=time_ns,
            newer=newer,
        )
        return seal
    if document.HasField("failure"):
        attributes = FAILURE.read_attributes(document.failure)
        attributes["timestamp_ns"] = attributes["timestamp_ns"] or time_ns
        newer = document.failure.schema_version > SCHEMA_VERSION
        return WorkerError(**common, **attributes, documents=(ref,), newer=newer)
    # flytekit doesn't remove credentials from its files
    common |= {
        name: clean(common[name], MAX_STOCK_TEXT_CHARACTERS)
        for name in ("code", "message", "worker")
    }
    place = Place(node=common["worker"])
    return WorkerError(
        **common,
        timestamp_ns=time_ns,
        place=place,
        writer=Writer.STOCK,
        exception=find_output_error(common["message"]),
        documents=(ref,),
    )


# --- sealed verdicts ------------------------------------------------------------------------------


def encode_seal(seal: Seal) -> bytes:
    """Return the bytes of the ``error.pb`` with a pod's verdict for Flyte."""
    verdict = SEAL.write(seal, schema_version=SCHEMA_VERSION)
    error = _build_container_error(seal, seal.fault_timestamp_ns)
    return _serialize(pb.WorkerErrorDocument(error=error, verdict=verdict))


# --- roster ---------------------------------------------------------------------------------------


def encode_presence(presence: NodePresence) -> bytes:
    """Return the bytes of a roster entry."""
    local = max(presence.place.local_rank or 0, 0)
    workers = [
        {"global_rank": rank, "local_rank": local + index}
        for index, rank in enumerate(presence.ranks)
    ]
    return _serialize(
        pb.RosterEntry(**PRESENCE.write(presence, workers=workers, schema_version=SCHEMA_VERSION))
    )


def decode_presence(data: bytes, name: str) -> NodePresence:
    """Return a roster entry.

    Raises:
        BadDocumentError: `data` isn't a roster entry, has an unknown phase, or lists more workers
            than a node has.
    """
    entry = _parse_message(pb.RosterEntry(), data, name, "a roster entry")
    workers = max(len(entry.workers), len(entry.receipts))
    if workers > MAX_WORKERS:
        raise BadDocumentError(
            f"{name} is not a roster entry: it lists {workers:,} workers of one node"
        )
    ranks = tuple(worker.global_rank for worker in entry.workers)
    presence: NodePresence = PRESENCE.read(
        entry, ranks=ranks, newer=entry.schema_version > SCHEMA_VERSION
    )
    if presence.phase is None:
        raise BadDocumentError(
            f"{name} is not a roster entry: its phase is unknown to this version"
        )
    return presence


# --- bundles --------------------------------------------------------------------------------------


def pack(files: Mapping[str, bytes]) -> bytes:
    """Pack files, by path, into one value: agents send their files to the leader
    of an election this way.
    """
    index = json.dumps([[path, len(data)] for path, data in files.items()], separators=(",", ":"))
    return zlib.compress(
        b"".join([index.encode(), b"\n", *files.values()]), BUNDLE_COMPRESSION_LEVEL
    )


def pack_within(files: Mapping[str, bytes], limit: int) -> bytes:
    """Pack as `pack` does, dropping the last files if the value would exceed `limit` bytes."""
    chosen = list(files.items())
    while len(bundle := pack(dict(chosen))) > limit and chosen:
        size_budget = (
            sum(len(data) for _, data in chosen) * limit * BUNDLE_FILL_RATIO // len(bundle)
        )
        sizes_so_far = itertools.accumulate(len(data) for _, data in chosen)
        chosen = chosen[: min(sum(end <= size_budget for end in sizes_so_far), len(chosen) - 1)]
    return bundle


def unpack(value: bytes) -> dict[str, bytes]:
    """Return the files of a value that `pack` made.

    Raises:
        BadDocumentError: it is something else, damaged, or larger than 64 MiB.
    """
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(value, MAX_BUNDLE_BYTES)
    except zlib.error as error:
        raise BadDocumentError(f"not a bundle of files: {error}") from error
    start = content.find(b"\n", 0, MAX_BUNDLE_INDEX_BYTES) + 1
    if not start:
        raise BadDocumentError("a bundle of files has too long an index")
    files = {}
    try:
        for path, size in json.loads(content[: start - 1]):
            # a negative size could read one file an unlimited number of times
            if (
                isinstance(size, bool)
                or not isinstance(size, int)
                or not 0 <= size <= len(content) - start
            ):
                # reported like json's errors
                raise ValueError("a file in it has an impossible size")  # noqa: TRY301
            end = start + size
            str(path).encode()  # raises for lone surrogates: no store has such a name
            files[str(path)] = content[start:end]
            start = end
    except (ValueError, TypeError, RecursionError) as error:
        raise BadDocumentError(f"not a bundle of files: {error}") from error
    if not decompressor.eof or start != len(content):
        raise BadDocumentError("a bundle of files is damaged: its index does not match its content")
    return files


# --- parts ----------------------------------------------------------------------------------------


def _parse_message(message: Any, data: bytes, name: str, kind: str) -> Any:
    # a listing gave the size, but an object may have been overwritten since
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BadDocumentError(
            f"{name} has {len(data)} bytes, more than the limit of {MAX_DOCUMENT_BYTES}"
        )
    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadDocumentError(f"{name} is not {kind}: {error}") from error
    return message


def _serialize(message: pb.WorkerErrorDocument | pb.RosterEntry) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _build_container_error(value: WorkerError | Seal, timestamp_ns: int | None) -> dict[str, Any]:
    if timestamp_ns is None:
        return CONTAINER_ERROR.write(value)
    seconds, nanos = divmod(timestamp_ns, NS_PER_SECOND)
    return CONTAINER_ERROR.write(value, timestamp={"seconds": seconds, "nanos": nanos})


def _timestamp_from_pb(error: Any) -> int | None:
    """Return nanoseconds since the Unix epoch; None if unset,
    zero or out of a Timestamp's range.
    """
    if not error.HasField("timestamp"):
        return None
    stamp: Timestamp = error.timestamp
    in_range = 0 <= stamp.seconds <= MAX_SECONDS and 0 <= stamp.nanos < NS_PER_SECOND
    return (stamp.seconds * NS_PER_SECOND + stamp.nanos or None) if in_range else None
