"""Documents and roster entries, to and from bytes. The only module that knows protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyteidl.core import errors_pb2, execution_pb2
from google.protobuf.message import DecodeError

from firstfault.errors import BadDocumentError
from firstfault.model import (
    DocumentRef,
    ExceptionInfo,
    FrameInfo,
    Kind,
    NodePresence,
    Origin,
    Phase,
    Place,
    Receipt,
    Resources,
    Seal,
    SentSignal,
    Subject,
    WorkerError,
    Writer,
)
from firstfault.text import clean
from firstfault_proto.v1 import errors_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "SCHEMA_VERSION",
    "decode",
    "decode_presence",
    "encode",
    "encode_presence",
    "encode_seal",
]

SCHEMA_VERSION = 1
MAX_DOCUMENT_BYTES = 2 * 1024 * 1024
"""What a reader takes into memory for one document; Flyte's own limit (2 MiB)."""
_MAX_MESSAGE = 64 * 1024
"""Characters of ContainerError.message; Flyte's admin keeps 100 KB."""
_MAX_TEXT = 16 * 1024
_MAX_LOG_TAIL = 32 * 1024
_MAX_LINE = 500
_MAX_NAMES = 50
_MAX_CAUSES = 10
_MAX_FRAMES = 100
_MAX_DEPTH = 4
"""Exceptions within exceptions; protobuf's own readers give up at 100 messages within messages."""
_LEFT_OUT_FIRST = ("members", "notes", "causes", "bases", "frames")
"""Parts of an exception that a document too large for a reader goes without, in this order."""
_NANO = 1_000_000_000
_MAX_COUNT = 2**32 - 1
_MAX_SECONDS = 253_402_300_799
"""The last second of the year 9999, the end of google.protobuf.Timestamp."""

_WRITERS = {Writer.WORKER: pb.WRITER_WORKER, Writer.AGENT: pb.WRITER_AGENT, Writer.RECORDER: pb.WRITER_RECORDER}
_WRITERS_BACK = {number: writer for writer, number in _WRITERS.items()}
_SUBJECTS = {Subject.WORKER: pb.SUBJECT_WORKER, Subject.AGENT: pb.SUBJECT_AGENT}
_SUBJECTS_BACK = {number: subject for subject, number in _SUBJECTS.items()}
_PHASES = {Phase.JOINED: pb.PHASE_JOINED, Phase.FAILED: pb.PHASE_FAILED, Phase.SUCCEEDED: pb.PHASE_SUCCEEDED}
_PHASES_BACK = {number: phase for phase, number in _PHASES.items()}


# --- failures -------------------------------------------------------------------------------------------------------


def encode(error: WorkerError) -> bytes:
    """Return the bytes of a document about `error`.

    They parse as ``flyteidl.core.ErrorDocument`` too. Texts are capped and redacted here, so that no writer can forget.
    """
    failure = pb.WorkerFailure(
        schema_version=SCHEMA_VERSION,
        writer=_WRITERS.get(error.writer, pb.WRITER_UNSPECIFIED),
        subject=_SUBJECTS[error.subject],
        place=_place_to_pb(error.place),
        wall_time_ns=error.timestamp_ns or 0,
        monotonic_ns=error.monotonic_ns or 0,
        boot_id=clean(error.boot_id, _MAX_LINE),
        upload_delay_ns=error.upload_delay_ns or 0,
        exit_code=error.exit_code,
        signal=clean(error.signal, _MAX_LINE),
        sent_signals=[
            pb.SentSignal(signal=clean(sent.signal, _MAX_LINE), reason=clean(sent.reason, _MAX_LINE))
            for sent in error.sent_signals[:_MAX_NAMES]
        ],
        category=clean(error.category, _MAX_LINE),
        fingerprint=clean(error.fingerprint, _MAX_LINE),
        log_tail=clean(error.log_tail, _MAX_LOG_TAIL),
        versions={clean(name, _MAX_LINE): clean(text, _MAX_LINE) for name, text in error.versions[:_MAX_NAMES]},
    )
    if error.exception is not None:
        failure.exception.CopyFrom(_exception_to_pb(error.exception))
    resources = error.resources
    if resources != Resources():
        failure.resources.CopyFrom(
            pb.ResourceEvidence(
                oom_kill=resources.oom_kill,
                memory_peak_bytes=resources.memory_peak_bytes,
                memory_limit_bytes=resources.memory_limit_bytes,
            )
        )
    container_error = _container_error(
        error.code, error.message, error.kind, error.origin, error.timestamp_ns, error.worker
    )
    return _fitted(pb.WorkerErrorDocument(error=container_error, failure=failure))


def decode(data: bytes, ref: DocumentRef) -> WorkerError | Seal:
    """Return what a document says: ours, Flyte's own, or a sealed verdict.

    Raises:
        BadDocumentError: empty, not protobuf, or without an error in it.
    """
    if not data:
        raise BadDocumentError(f"{ref.name} is empty (0 bytes); its upload was cut off")
    document = pb.WorkerErrorDocument()
    try:
        document.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadDocumentError(f"{ref.name} is not an error document: {error}") from error
    if not document.HasField("error"):
        raise BadDocumentError(f"{ref.name} holds no error; it is truncated or of another format")
    if document.HasField("verdict"):
        return _seal_from_pb(document, ref)
    return _error_from_pb(document, ref)


def _fitted(document: pb.WorkerErrorDocument) -> bytes:
    """The document's bytes, not more than a reader takes: one that is refused for its size says nothing at all."""
    data = _bytes(document)
    for part in _LEFT_OUT_FIRST:
        if len(data) <= MAX_DOCUMENT_BYTES:
            break
        document.failure.exception.ClearField(part)
        data = _bytes(document)
    return data


def _error_from_pb(document: pb.WorkerErrorDocument, ref: DocumentRef) -> WorkerError:
    error, failure = document.error, document.failure
    ours = document.HasField("failure")
    timestamp_ns = failure.wall_time_ns or _timestamp_from_pb(error)
    return WorkerError(
        code=error.code,
        message=error.message,
        kind=_kind_from_pb(error.kind),
        origin=_origin_from_pb(error.origin),
        timestamp_ns=timestamp_ns,
        worker=error.worker,
        place=_place_from_pb(failure.place) if ours else Place(node=error.worker),
        writer=_WRITERS_BACK.get(failure.writer, Writer.STOCK) if ours else Writer.STOCK,
        subject=_SUBJECTS_BACK.get(failure.subject, Subject.WORKER),
        exception=_exception_from_pb(failure.exception) if failure.HasField("exception") else None,
        exit_code=failure.exit_code if failure.HasField("exit_code") else None,
        signal=failure.signal,
        sent_signals=tuple(SentSignal(sent.signal, sent.reason) for sent in failure.sent_signals),
        category=failure.category,
        fingerprint=failure.fingerprint,
        log_tail=failure.log_tail,
        resources=_resources_from_pb(failure.resources),
        monotonic_ns=failure.monotonic_ns or None,
        boot_id=failure.boot_id,
        upload_delay_ns=failure.upload_delay_ns or None,
        versions=tuple(sorted(failure.versions.items())),
        documents=(ref,),
    )


# --- sealed verdicts ------------------------------------------------------------------------------------------------


def encode_seal(seal: Seal) -> bytes:
    """Return the bytes of the ``error.pb`` by which a pod hands its verdict to Flyte."""
    return _bytes(
        pb.WorkerErrorDocument(
            error=_container_error(
                seal.code, seal.message, seal.kind, seal.origin, seal.fault_timestamp_ns, seal.worker
            ),
            verdict=pb.SealedVerdict(
                schema_version=SCHEMA_VERSION,
                wall_time_ns=seal.timestamp_ns,
                digest=seal.digest,
                document_count=seal.count,
                strategy=seal.strategy,
                json=seal.json,
                node=seal.node,
            ),
        )
    )


def _seal_from_pb(document: pb.WorkerErrorDocument, ref: DocumentRef) -> Seal:
    error, verdict = document.error, document.verdict
    return Seal(
        name=ref.name,
        digest=verdict.digest,
        count=verdict.document_count,
        strategy=verdict.strategy,
        json=verdict.json,
        timestamp_ns=verdict.wall_time_ns,
        node=verdict.node,
        code=error.code,
        message=error.message,
        kind=_kind_from_pb(error.kind),
        origin=_origin_from_pb(error.origin),
        fault_timestamp_ns=_timestamp_from_pb(error),
        worker=error.worker,
    )


# --- roster ---------------------------------------------------------------------------------------------------------


def encode_presence(presence: NodePresence) -> bytes:
    """Return the bytes of a roster entry."""
    local = max(presence.place.local_rank or 0, 0)
    entry = pb.RosterEntry(
        schema_version=SCHEMA_VERSION,
        phase=_PHASES[presence.phase],
        place=_place_to_pb(presence.place),
        workers=[
            pb.RosterWorker(global_rank=rank, local_rank=local + index) for index, rank in enumerate(presence.ranks)
        ],
        wall_time_ns=presence.timestamp_ns or 0,
        receipts=[
            pb.DocumentReceipt(
                key=receipt.name,
                durable=receipt.durable,
                fault_to_durable_ns=receipt.fault_to_durable_ns or 0,
                error=clean(receipt.error, _MAX_LINE),
                global_rank=receipt.rank,
            )
            for receipt in presence.receipts
        ],
    )
    return _bytes(entry)


def decode_presence(data: bytes, name: str) -> NodePresence:
    """Return a roster entry.

    Raises:
        BadDocumentError: these bytes are none.
    """
    entry = pb.RosterEntry()
    try:
        entry.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadDocumentError(f"{name} is not a roster entry: {error}") from error
    if entry.phase not in _PHASES_BACK:
        raise BadDocumentError(f"{name} is not a roster entry: it names no phase that this version knows")
    return NodePresence(
        phase=_PHASES_BACK[entry.phase],
        place=_place_from_pb(entry.place),
        ranks=tuple(worker.global_rank for worker in entry.workers),
        receipts=tuple(
            Receipt(
                name=receipt.key,
                durable=receipt.durable,
                fault_to_durable_ns=receipt.fault_to_durable_ns or None,
                error=receipt.error,
                rank=receipt.global_rank if receipt.HasField("global_rank") else None,
            )
            for receipt in entry.receipts
        ),
        timestamp_ns=entry.wall_time_ns or None,
    )


# --- parts ----------------------------------------------------------------------------------------------------------


def _bytes(message: pb.WorkerErrorDocument | pb.RosterEntry) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _container_error(  # noqa: PLR0913, PLR0917 - the message has six fields
    code: str, message: str, kind: Kind, origin: Origin, timestamp_ns: int | None, worker: str
) -> errors_pb2.ContainerError:
    error = errors_pb2.ContainerError(
        code=clean(code, _MAX_LINE),
        message=clean(message, _MAX_MESSAGE),
        kind=errors_pb2.ContainerError.Kind.Value(kind.value),
        origin=execution_pb2.ExecutionError.ErrorKind.Value(origin.value),
        worker=clean(worker, _MAX_LINE),
    )
    if timestamp_ns is not None:
        error.timestamp.seconds, error.timestamp.nanos = divmod(timestamp_ns, _NANO)
    return error


def _timestamp_from_pb(error: errors_pb2.ContainerError) -> int | None:
    """None if unset, not after the epoch (an empty message means that), or beyond what a Timestamp may hold."""
    if not error.HasField("timestamp"):
        return None
    stamp: Timestamp = error.timestamp
    in_range = 0 <= stamp.seconds <= _MAX_SECONDS and 0 <= stamp.nanos < _NANO
    return (stamp.seconds * _NANO + stamp.nanos or None) if in_range else None


def _kind_from_pb(number: int) -> Kind:
    return Kind.RECOVERABLE if number == errors_pb2.ContainerError.RECOVERABLE else Kind.NON_RECOVERABLE


def _origin_from_pb(number: int) -> Origin:
    known = {execution_pb2.ExecutionError.USER: Origin.USER, execution_pb2.ExecutionError.SYSTEM: Origin.SYSTEM}
    return known.get(number, Origin.UNKNOWN)


def _place_to_pb(place: Place) -> pb.Place:
    return pb.Place(
        attempt=_count_to_pb(place.attempt),
        round=_count_to_pb(place.round),
        incarnation=max(place.incarnation, 0),
        restart_count=_count_to_pb(place.restart_count),
        global_rank=_rank_to_pb(place.rank),
        local_rank=_rank_to_pb(place.local_rank),
        group_rank=_rank_to_pb(place.group_rank),
        world_size=_count_to_pb(place.world_size),
        group_world_size=_count_to_pb(place.group_world_size),
        role=clean(place.role, _MAX_LINE),
        node=clean(place.node, _MAX_LINE),
        host=clean(place.host, _MAX_LINE),
        ip=clean(place.ip, _MAX_LINE),
        pid=_count_to_pb(place.pid),
    )


def _count_to_pb(number: int) -> int:
    return min(max(number, 0), _MAX_COUNT)


def _rank_to_pb(rank: int | None) -> int | None:
    """None for what is no rank: torch has -1 before the rendezvous, and that must not cost the document."""
    return rank if rank is not None and 0 <= rank <= _MAX_COUNT else None


def _place_from_pb(place: pb.Place) -> Place:
    return Place(
        attempt=place.attempt,
        round=place.round,
        incarnation=place.incarnation,
        restart_count=place.restart_count,
        rank=place.global_rank if place.HasField("global_rank") else None,
        local_rank=place.local_rank if place.HasField("local_rank") else None,
        group_rank=place.group_rank if place.HasField("group_rank") else None,
        world_size=place.world_size,
        group_world_size=place.group_world_size,
        role=place.role,
        node=place.node,
        host=place.host,
        ip=place.ip,
        pid=place.pid,
    )


def _resources_from_pb(resources: pb.ResourceEvidence) -> Resources:
    def read(name: str) -> int | None:
        return int(getattr(resources, name)) if resources.HasField(name) else None

    return Resources(read("oom_kill"), read("memory_peak_bytes"), read("memory_limit_bytes"))


def _exception_to_pb(exception: ExceptionInfo, depth: int = 1) -> pb.ExceptionRecord:
    deeper = _MAX_CAUSES if depth < _MAX_DEPTH else 0
    frames = exception.frames
    omitted = exception.frames_omitted
    if len(frames) > _MAX_FRAMES:
        omitted += len(frames) - _MAX_FRAMES
        frames = frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]
    return pb.ExceptionRecord(
        type=clean(exception.type, _MAX_LINE),
        bases=[clean(base, _MAX_LINE) for base in exception.bases[:_MAX_NAMES]],
        message=clean(exception.message, _MAX_TEXT),
        frames=[
            pb.Frame(
                file=clean(frame.file, _MAX_LINE),
                line=max(frame.line, 0),
                function=clean(frame.function, _MAX_LINE),
                code=clean(frame.code, _MAX_LINE),
            )
            for frame in frames
        ],
        notes=[clean(note, _MAX_TEXT) for note in exception.notes[:_MAX_NAMES]],
        causes=[_exception_to_pb(cause, depth + 1) for cause in exception.causes[:deeper]],
        relation=clean(exception.relation, _MAX_LINE),
        frames_omitted=omitted,
        members=[_exception_to_pb(member, depth + 1) for member in exception.members[:deeper]],
    )


def _exception_from_pb(record: pb.ExceptionRecord) -> ExceptionInfo:
    return ExceptionInfo(
        type=record.type,
        message=record.message,
        bases=tuple(record.bases),
        frames=tuple(FrameInfo(frame.file, frame.line, frame.function, frame.code) for frame in record.frames),
        notes=tuple(record.notes),
        causes=tuple(_exception_from_pb(cause) for cause in record.causes),
        relation=record.relation,
        frames_omitted=record.frames_omitted,
        members=tuple(_exception_from_pb(member) for member in record.members),
    )
