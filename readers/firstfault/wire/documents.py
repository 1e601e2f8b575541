"""Encodes and decodes documents and roster entries. The only module that knows their protobuf messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from flyteidl.core import errors_pb2, execution_pb2
from google.protobuf.message import DecodeError

from firstfault.errors import BadDocumentError
from firstfault.model import (
    CausedBy,
    Collective,
    CollectiveProgress,
    DocumentRef,
    ExpiredDeadline,
    FileSystem,
    Kind,
    LogTail,
    NodePresence,
    NodeSetup,
    Origin,
    Phase,
    Place,
    Receipt,
    Resources,
    Seal,
    SentSignal,
    StackDump,
    Subject,
    SystemState,
    WorkerError,
    Writer,
)
from firstfault.text import clean, clean_end
from firstfault.wire.exceptions import (
    MAX_LINE,
    MAX_NAMES,
    Budget,
    exception_from_pb,
    exception_to_pb,
    interned,
    line_from_pb,
    long_to_pb,
    thread_to_pb,
    threads_from_pb,
)
from firstfault_proto.v1 import errors_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.timestamp_pb2 import Timestamp

T = TypeVar("T")

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
"""Rises by one with each release that adds to the messages."""
MAX_DOCUMENT_BYTES = 2 * 1024 * 1024
"""Largest document that a reader accepts; Flyte's own limit."""
_MAX_MESSAGE = 64 * 1024
"""Characters of ContainerError.message; flyteadmin keeps 100 KB."""
_MAX_LOG_TAIL = 32 * 1024
_MAX_ENTRYS_LOG = 2 * 1024
"""Characters of one worker's log in a roster entry."""
_MAX_LOGS = 8
"""Workers whose log is in a roster entry."""
_MAX_DUMP = 64 * 1024
_MAX_DUMPS = 64
_MAX_ALL_DUMPS = 1024 * 1024
"""Characters of all stack dumps together. Each gets an equal share, so that a hang's document has every process."""
_MAX_FILE_SYSTEMS = 8
_MAX_THREADS = 10
_MAX_ENTRIES = 10
"""Collectives of one process group."""
_MAX_MEMBERS = 16_384
"""Ranks of one process group."""
_MAX_WORKERS = 16_384
"""Workers of one node, and receipts: an entry with more was not written by an agent."""
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
_NANO = 1_000_000_000
_MAX_COUNT = 2**32 - 1
_MAX_SECONDS = 253_402_300_799
"""The last second of the year 9999, the end of google.protobuf.Timestamp."""

_WRITERS = {Writer.WORKER: pb.WRITER_WORKER, Writer.AGENT: pb.WRITER_AGENT, Writer.RECORDER: pb.WRITER_RECORDER}
_WRITERS_BACK = {pb.WRITER_UNSPECIFIED: Writer.STOCK, **{number: writer for writer, number in _WRITERS.items()}}
_SUBJECTS = {Subject.WORKER: pb.SUBJECT_WORKER, Subject.AGENT: pb.SUBJECT_AGENT}
_SUBJECTS_BACK = {number: subject for subject, number in _SUBJECTS.items()}
_PHASES = {Phase.JOINED: pb.PHASE_JOINED, Phase.FAILED: pb.PHASE_FAILED, Phase.SUCCEEDED: pb.PHASE_SUCCEEDED}
_PHASES_BACK = {number: phase for phase, number in _PHASES.items()}


# --- failures -------------------------------------------------------------------------------------------------------


def encode(error: WorkerError) -> bytes:
    """Return the bytes of a document about `error`.

    They parse as ``flyteidl.core.ErrorDocument`` too. Texts are cut and redacted here, for all writers.
    """
    failure = pb.WorkerFailure(
        schema_version=SCHEMA_VERSION,
        writer=_WRITERS.get(error.writer, pb.WRITER_UNSPECIFIED),
        subject=_SUBJECTS[error.subject],
        place=_place_to_pb(error.place),
        wall_time_ns=error.timestamp_ns or 0,
        monotonic_ns=error.monotonic_ns or 0,
        boot_id=clean(error.boot_id, MAX_LINE),
        upload_delay_ns=error.upload_delay_ns or 0,
        exit_code=error.exit_code,
        signal=clean(error.signal, MAX_LINE),
        sent_signals=[
            pb.SentSignal(signal=clean(sent.signal, MAX_LINE), reason=clean(sent.reason, MAX_LINE))
            for sent in error.sent_signals[:MAX_NAMES]
        ],
        in_flight=error.in_flight,
        category=clean(error.category, MAX_LINE),
        fingerprint=clean(error.fingerprint, MAX_LINE),
        log_tail=clean(error.log_tail, _MAX_LOG_TAIL),
        stack_dumps=_dumps_to_pb(error.stack_dumps[:_MAX_DUMPS]),
        versions={clean(name, MAX_LINE): clean(text, MAX_LINE) for name, text in error.versions[:MAX_NAMES]},
        thread_failures=[thread_to_pb(thread) for thread in error.thread_failures[:_MAX_THREADS]],
        collectives=[_collective_to_pb(progress) for progress in error.collectives[:MAX_NAMES]],
    )
    if error.exception is not None:
        failure.exception.CopyFrom(exception_to_pb(error.exception))
    if error.resources != Resources():
        failure.resources.CopyFrom(_resources_to_pb(error.resources))
    if error.caused_by is not None:
        failure.caused_by.CopyFrom(_caused_by_to_pb(error.caused_by))
    if error.system != SystemState():
        failure.system.CopyFrom(_system_to_pb(error.system))
    if error.expired is not None:
        failure.expired.CopyFrom(_expired_to_pb(error.expired))
    container_error = _container_error(
        error.code, error.message, error.kind, error.origin, error.timestamp_ns, error.worker
    )
    return _within_limit(pb.WorkerErrorDocument(error=container_error, failure=failure))


def decode(data: bytes, ref: DocumentRef) -> WorkerError | Seal:
    """Return the failure in a document of ours or of Flyte's own, or a sealed verdict.

    Raises:
        BadDocumentError: the document is empty, not protobuf, or has no error.
    """
    if not data:
        raise BadDocumentError(f"{ref.name} is empty (0 bytes); its upload was interrupted")
    _check_size(data, ref.name)
    document = pb.WorkerErrorDocument()
    try:
        document.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadDocumentError(f"{ref.name} is not an error document: {error}") from error
    if not document.HasField("error"):
        raise BadDocumentError(f"{ref.name} has no error; it is truncated or has another format")
    if document.HasField("verdict"):
        return _seal_from_pb(document, ref)
    return _error_from_pb(document, ref)


def _check_size(data: bytes, name: str) -> None:
    # a listing gave the size, but an object may have been overwritten since
    if len(data) > MAX_DOCUMENT_BYTES:
        raise BadDocumentError(f"{name} has {len(data)} bytes, more than the limit of {MAX_DOCUMENT_BYTES}")


def _within_limit(document: pb.WorkerErrorDocument) -> bytes:
    """Return the document's bytes, without some parts if it is larger than a reader accepts."""
    data = _bytes(document)
    for part in _EXPENDABLE:
        if len(data) <= MAX_DOCUMENT_BYTES:
            break
        _leave_out(document.failure, part)
        data = _bytes(document)
    return data


def _leave_out(failure: pb.WorkerFailure, part: str) -> None:
    owner, _, name = part.rpartition(".")
    # ClearField on a missing exception would create one
    if not owner or failure.HasField("exception"):
        (failure.exception if owner else failure).ClearField(name)


def _error_from_pb(document: pb.WorkerErrorDocument, ref: DocumentRef) -> WorkerError:
    error, failure = document.error, document.failure
    ours = document.HasField("failure")
    budget = Budget()
    timestamp_ns = failure.wall_time_ns or _timestamp_from_pb(error)
    return WorkerError(
        code=line_from_pb(error.code),
        message=error.message,
        kind=_kind_from_pb(error.kind),
        origin=_origin_from_pb(error.origin),
        timestamp_ns=timestamp_ns,
        worker=line_from_pb(error.worker),
        place=_place_from_pb(failure.place) if ours else Place(node=line_from_pb(error.worker)),
        # a writer that a later version added has the least authority of ours
        writer=_WRITERS_BACK.get(failure.writer, Writer.RECORDER) if ours else Writer.STOCK,
        subject=_SUBJECTS_BACK.get(failure.subject, Subject.WORKER),
        exception=exception_from_pb(failure.exception, budget) if failure.HasField("exception") else None,
        exit_code=failure.exit_code if failure.HasField("exit_code") else None,
        signal=line_from_pb(failure.signal),
        sent_signals=interned(
            tuple(
                SentSignal(line_from_pb(sent.signal), line_from_pb(sent.reason))
                for sent in failure.sent_signals[:MAX_NAMES]
            )
        ),
        category=line_from_pb(failure.category),
        fingerprint=line_from_pb(failure.fingerprint),
        log_tail=failure.log_tail[-_MAX_LOG_TAIL:],
        resources=interned(_resources_from_pb(failure.resources)),
        monotonic_ns=failure.monotonic_ns or None,
        boot_id=line_from_pb(failure.boot_id),
        upload_delay_ns=failure.upload_delay_ns or None,
        versions=interned(_versions_from_pb(failure)),
        documents=(ref,),
        in_flight=failure.in_flight,
        stack_dumps=tuple(_dump_from_pb(dump) for dump in failure.stack_dumps[:_MAX_DUMPS]),
        thread_failures=threads_from_pb(failure.thread_failures, budget),
        collectives=interned(tuple(map(_collective_from_pb, failure.collectives[:MAX_NAMES]))),
        caused_by=_caused_by_from_pb(failure.caused_by) if failure.HasField("caused_by") else None,
        expired=_expired_from_pb(failure.expired) if failure.HasField("expired") else None,
        system=interned(_system_from_pb(failure.system)),
        newer=failure.schema_version > SCHEMA_VERSION,
    )


def _versions_from_pb(failure: pb.WorkerFailure) -> tuple[tuple[str, str], ...]:
    known = sorted(failure.versions.items())[:MAX_NAMES]
    return tuple((line_from_pb(name), line_from_pb(text)) for name, text in known)


# --- sealed verdicts ------------------------------------------------------------------------------------------------


def encode_seal(seal: Seal) -> bytes:
    """Return the bytes of the ``error.pb`` that gives a pod's verdict to Flyte."""
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
        newer=verdict.schema_version > SCHEMA_VERSION,
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
                error=clean(receipt.error, MAX_LINE),
                global_rank=receipt.rank,
                withdrawn=receipt.withdrawn,
            )
            for receipt in presence.receipts
        ],
        first_failure_reason=clean(presence.first_failure_reason, MAX_LINE),
        log_tails=[
            pb.LogTail(global_rank=_count_to_pb(tail.rank), text=clean_end(tail.text, _MAX_ENTRYS_LOG))
            for tail in presence.log_tails[:_MAX_LOGS]
        ],
        setup=_setup_to_pb(presence.setup) if presence.setup != NodeSetup() else None,
    )
    if presence.first_failure is not None:
        entry.first_failure.CopyFrom(_caused_by_to_pb(presence.first_failure))
    return _bytes(entry)


def decode_presence(data: bytes, name: str) -> NodePresence:
    """Return a roster entry.

    Raises:
        BadDocumentError: `data` is not a roster entry, has an unknown phase, or lists more workers than a node has.
    """
    _check_size(data, name)
    entry = pb.RosterEntry()
    try:
        entry.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BadDocumentError(f"{name} is not a roster entry: {error}") from error
    if entry.phase not in _PHASES_BACK:
        raise BadDocumentError(f"{name} is not a roster entry: its phase is unknown to this version")
    workers = max(len(entry.workers), len(entry.receipts))
    if workers > _MAX_WORKERS:
        raise BadDocumentError(f"{name} is not a roster entry: it lists {workers:,} workers of one node")
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
                withdrawn=receipt.withdrawn,
            )
            for receipt in entry.receipts
        ),
        timestamp_ns=entry.wall_time_ns or None,
        first_failure=_caused_by_from_pb(entry.first_failure) if entry.HasField("first_failure") else None,
        first_failure_reason=entry.first_failure_reason,
        log_tails=tuple(LogTail(tail.global_rank, tail.text) for tail in entry.log_tails[:_MAX_LOGS]),
        setup=_setup_from_pb(entry.setup),
        newer=entry.schema_version > SCHEMA_VERSION,
    )


def _setup_to_pb(setup: NodeSetup) -> pb.NodeSetup:
    return pb.NodeSetup(
        task=clean(setup.task, MAX_LINE),
        image=clean(setup.image, MAX_LINE),
        gpu_model=clean(setup.gpu_model, MAX_LINE),
        gpus=_count_to_pb(setup.gpus),
        source_url=clean(setup.source_url, MAX_LINE),
        source_root=clean(setup.source_root, MAX_LINE),
    )


def _setup_from_pb(setup: pb.NodeSetup) -> NodeSetup:
    texts = (setup.task, setup.image, setup.gpu_model, setup.source_url, setup.source_root)
    if any(len(text) > MAX_LINE for text in texts):
        return NodeSetup()  # no version of ours wrote it
    return interned(
        NodeSetup(setup.task, setup.image, setup.gpu_model, setup.gpus, setup.source_url, setup.source_root)
    )


# --- parts ----------------------------------------------------------------------------------------------------------


def _bytes(message: pb.WorkerErrorDocument | pb.RosterEntry) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _container_error(  # noqa: PLR0913, PLR0917 - the message has six fields
    code: str, message: str, kind: Kind, origin: Origin, timestamp_ns: int | None, worker: str
) -> errors_pb2.ContainerError:
    error = errors_pb2.ContainerError(
        code=clean(code, MAX_LINE),
        message=clean(message, _MAX_MESSAGE),
        kind=errors_pb2.ContainerError.Kind.Value(kind.value),
        origin=execution_pb2.ExecutionError.ErrorKind.Value(origin.value),
        worker=clean(worker, MAX_LINE),
    )
    if timestamp_ns is not None:
        error.timestamp.seconds, error.timestamp.nanos = divmod(timestamp_ns, _NANO)
    return error


def _timestamp_from_pb(error: errors_pb2.ContainerError) -> int | None:
    """Return nanoseconds since the Unix epoch; None if unset, zero or out of a Timestamp's range."""
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
        role=clean(place.role, MAX_LINE),
        node=clean(place.node, MAX_LINE),
        host=clean(place.host, MAX_LINE),
        ip=clean(place.ip, MAX_LINE),
        namespace=clean(place.namespace, MAX_LINE),
        engine=clean(place.engine, MAX_LINE),
        machine=clean(place.machine, MAX_LINE),
        gpu=clean(place.gpu, MAX_LINE),
        pid=_count_to_pb(place.pid),
    )


def _count_to_pb(number: int) -> int:
    return min(max(number, 0), _MAX_COUNT)


def _rank_to_pb(rank: int | None) -> int | None:
    """Return None for an invalid rank, such as torch's -1 before the rendezvous."""
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
        role=line_from_pb(place.role),
        node=line_from_pb(place.node),
        host=line_from_pb(place.host),
        ip=line_from_pb(place.ip),
        namespace=line_from_pb(place.namespace),
        engine=line_from_pb(place.engine),
        machine=line_from_pb(place.machine),
        gpu=line_from_pb(place.gpu),
        pid=place.pid,
    )


_RESOURCES = {
    "oom_kill": "oom_kill",
    "memory_peak_bytes": "memory_peak_bytes",
    "memory_limit_bytes": "memory_limit_bytes",
    "memory_used_bytes": "memory_used_bytes",
    "watermark_ns": "watermark_wall_ns",
}
"""The field of the model, and its name on the wire."""


def _resources_to_pb(resources: Resources) -> pb.ResourceEvidence:
    return pb.ResourceEvidence(**{wire: long_to_pb(getattr(resources, ours)) for ours, wire in _RESOURCES.items()})


def _resources_from_pb(resources: pb.ResourceEvidence) -> Resources:
    known = {ours: getattr(resources, wire) for ours, wire in _RESOURCES.items() if resources.HasField(wire)}
    return Resources(**known)


def _system_to_pb(system: SystemState) -> pb.SystemState:
    return pb.SystemState(
        file_systems=[
            pb.FileSystem(
                path=clean(found.path, MAX_LINE),
                free_bytes=long_to_pb(found.free_bytes),
                total_bytes=long_to_pb(found.total_bytes),
                free_inodes=long_to_pb(found.free_inodes),
                total_inodes=long_to_pb(found.total_inodes),
            )
            for found in system.file_systems[:_MAX_FILE_SYSTEMS]
        ],
        limits=[
            pb.ResourceLimit(name=clean(name, MAX_LINE), value=long_to_pb(limit))
            for name, limit in system.limits[:MAX_NAMES]
        ],
        open_files=None if system.open_files is None else min(max(system.open_files, 0), _MAX_COUNT),
    )


def _system_from_pb(system: pb.SystemState) -> SystemState:
    return SystemState(
        tuple(
            FileSystem(
                line_from_pb(found.path), found.free_bytes, found.total_bytes, found.free_inodes, found.total_inodes
            )
            for found in system.file_systems[:_MAX_FILE_SYSTEMS]
        ),
        tuple((line_from_pb(limit.name), limit.value) for limit in system.limits[:MAX_NAMES]),
        system.open_files if system.HasField("open_files") else None,
    )


def _dumps_to_pb(dumps: Sequence[StackDump]) -> list[pb.StackDump]:
    share = min(_MAX_DUMP, _MAX_ALL_DUMPS // max(len(dumps), 1))
    return [
        pb.StackDump(pid=_count_to_pb(dump.pid), global_rank=_rank_to_pb(dump.rank), text=clean(dump.text, share))
        for dump in dumps
    ]


def _dump_from_pb(dump: pb.StackDump) -> StackDump:
    return StackDump(dump.pid, dump.global_rank if dump.HasField("global_rank") else None, dump.text)


def _collective_to_pb(progress: CollectiveProgress) -> pb.CollectiveProgress:
    return pb.CollectiveProgress(
        group=clean(progress.group, MAX_LINE),
        last_operation=clean(progress.last_operation, MAX_LINE),
        enqueued=long_to_pb(progress.enqueued),
        completed=long_to_pb(progress.completed),
        last=[_entry_to_pb(entry) for entry in progress.last[-_MAX_ENTRIES:]],
        members=[_count_to_pb(rank) for rank in progress.members[:_MAX_MEMBERS]],
    )


def _entry_to_pb(entry: Collective) -> pb.Collective:
    return pb.Collective(
        sequence=long_to_pb(entry.sequence),
        operation=clean(entry.operation, MAX_LINE),
        sizes=clean(entry.sizes, MAX_LINE),
        dtypes=clean(entry.dtypes, MAX_LINE),
        state=clean(entry.state, MAX_LINE),
        is_p2p=entry.is_p2p,
    )


def _collective_from_pb(progress: pb.CollectiveProgress) -> CollectiveProgress:
    return CollectiveProgress(
        group=progress.group,
        last_operation=progress.last_operation,
        enqueued=progress.enqueued,
        completed=progress.completed if progress.HasField("completed") else None,
        last=tuple(
            Collective(entry.sequence, entry.operation, entry.sizes, entry.dtypes, entry.state, entry.is_p2p)
            for entry in progress.last[-_MAX_ENTRIES:]
        ),
        members=tuple(progress.members[:_MAX_MEMBERS]),
    )


def _caused_by_to_pb(cause: CausedBy) -> pb.CausedBy:
    return pb.CausedBy(
        global_rank=_rank_to_pb(cause.rank),
        node=clean(cause.node, MAX_LINE),
        document=clean(cause.document, MAX_LINE),
    )


def _caused_by_from_pb(cause: pb.CausedBy) -> CausedBy:
    return CausedBy(cause.global_rank if cause.HasField("global_rank") else None, cause.node, cause.document)


def _expired_to_pb(expired: ExpiredDeadline) -> pb.ExpiredDeadline:
    return pb.ExpiredDeadline(
        scope=clean(expired.scope, MAX_LINE),
        seconds=expired.seconds,
        heartbeat=expired.heartbeat,
        since=clean(expired.since, MAX_LINE),
    )


def _expired_from_pb(expired: pb.ExpiredDeadline) -> ExpiredDeadline | None:
    if not 0 <= expired.seconds <= _MAX_SECONDS:
        return None  # no version of ours wrote it; JSON has no NaN
    return interned(ExpiredDeadline(expired.scope, expired.seconds, expired.heartbeat, expired.since))
