"""The one table of fields: the content of firstfault's files, the limits of each field,
and its names elsewhere.

To add a field, add one row here and one line to the ``.proto`` file. The encoder and the decoder
run these tables, which don't import protobuf: rows name its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from firstfault import model
from firstfault.model import (
    ExceptionInfo,
    Kind,
    NodeSetup,
    Origin,
    Phase,
    Resources,
    Subject,
    SystemState,
    Writer,
)
from firstfault.utils.stored_text import clean
from firstfault.wire import codecs
from firstfault.wire.codecs import (
    COUNT,
    FLAG,
    LINE,
    LONG,
    MAX_NAMES,
    NAME,
    RANK,
    TIME,
    Field,
    FieldTable,
    ValueCodec,
)

T = TypeVar("T")

MAX_SECONDS = 253_402_300_799
"""The last second of the year 9999, google.protobuf.Timestamp's maximum."""
MAX_WORKERS = 16_384
"""Workers, and receipts, of one node; no agent writes an entry with more."""
MAX_MESSAGE_CHARACTERS = 64 * 1024
"""For ContainerError.message; flyteadmin keeps 100 KB."""
MAX_LOG_TAIL_CHARACTERS = 32 * 1024
MAX_ROSTER_LOG_CHARACTERS = 2 * 1024
"""For one worker's log in a roster entry."""
MAX_ROSTER_LOGS = 8
"""Logs of workers in one roster entry."""
MAX_DUMP_CHARACTERS = 64 * 1024
MAX_DUMPS = 64
MAX_ALL_DUMPS_CHARACTERS = 1024 * 1024
"""For all stack dumps together, in equal shares: a hang's document must include every process."""
MAX_FILE_SYSTEMS = 8
MAX_COLLECTIVES = 10
"""Per process group."""
MAX_GROUP_MEMBERS = 16_384
MAX_TEXT_CHARACTERS = 16 * 1024
MAX_CAUSES = 10
MAX_FRAMES = 100
MAX_CONTEXT_LINES = 20
"""A frame's line and the lines around it."""
MAX_EXCEPTION_DEPTH = 6
"""Nesting of exceptions. Protobuf rejects more than 100 nested messages,
and each level can double a report's time.
"""
MAX_THREADS = 10
MAX_HANDLED = 8
MAX_EXCEPTIONS_READ = 2000
"""Exceptions, with causes and members, of the document's own exception, and of all its threads."""
MAX_FRAMES_READ = 1000
"""Frames of one exception."""
MAX_ALL_FRAMES_READ = 20_000
"""Frames of all exceptions; the exceptions beyond keep their first and last frame."""
MAX_THREADS_READ = 100
"""Failed threads of one document."""


def _plain_fields(names: str, form: ValueCodec) -> tuple[Field, ...]:
    """Return fields that have one codec, the same name everywhere,
    and no key in a report's JSON.
    """
    return tuple(Field(name, form) for name in names.split())


# --- who and where --------------------------------------------------------------------------------

PLACE = FieldTable(
    model.Place,
    (
        Field("attempt", COUNT),
        Field("round", COUNT, json="round"),
        Field("incarnation", LONG),
        Field("restart_count", COUNT, json="restarts"),
        Field("rank", RANK, "global_rank", json="rank"),
        Field("local_rank", RANK, json="local_rank"),
        Field("group_rank", RANK),
        *_plain_fields("world_size group_world_size", COUNT),
        Field("role", LINE),
        Field("node", LINE, json="pod"),
        Field("host", LINE, json="host"),
        Field("ip", LINE),
        *_plain_fields("namespace engine", LINE),
        Field("machine", LINE, json="machine"),
        Field("gpu", LINE, json="gpu"),
        Field("pid", COUNT, json="pid"),
    ),
)

CAUSED_BY = FieldTable(
    model.CausedBy, (Field("rank", RANK, "global_rank"), *_plain_fields("node document", LINE))
)

SENT_SIGNAL = FieldTable(model.SentSignal, _plain_fields("signal reason", LINE))


# --- evidence -------------------------------------------------------------------------------------

RESOURCES = FieldTable(
    Resources,
    (
        Field("oom_kill", codecs.OPTIONAL_LONG, json="oom_kills"),
        Field("memory_peak_bytes", codecs.OPTIONAL_LONG, json="peak_bytes"),
        Field("memory_limit_bytes", codecs.OPTIONAL_LONG, json="limit_bytes"),
        Field("memory_used_bytes", codecs.OPTIONAL_LONG, json="used_bytes"),
        Field("watermark_ns", codecs.OPTIONAL_LONG, "watermark_wall_ns"),
    ),
)

FILE_SYSTEM = FieldTable(
    model.FileSystem,
    (Field("path", LINE), *_plain_fields("free_bytes total_bytes free_inodes total_inodes", LONG)),
)


LIMITS = ValueCodec(
    lambda limits: [
        {"name": LINE.write(name), "value": LONG.write(value)} for name, value in limits[:MAX_NAMES]
    ],
    lambda limits: tuple((LINE.read(limit.name), limit.value) for limit in limits[:MAX_NAMES]),
    is_redacted=True,
    max_size=MAX_NAMES,
)
SYSTEM = FieldTable(
    SystemState,
    (
        Field(
            "file_systems", codecs.list_codec(codecs.required_part(FILE_SYSTEM), MAX_FILE_SYSTEMS)
        ),
        Field("limits", LIMITS),
        Field("open_files", codecs.OPTIONAL_COUNT),
    ),
)

COLLECTIVE = FieldTable(
    model.Collective,
    (
        Field("sequence", LONG),
        *_plain_fields("operation sizes dtypes state", LINE),
        Field("is_p2p", FLAG),
    ),
)

PROGRESS = FieldTable(
    model.CollectiveProgress,
    (
        Field("group", LINE, json="group"),
        Field("last_operation", LINE, json="operation"),
        Field("enqueued", LONG, json="enqueued"),
        Field("completed", codecs.OPTIONAL_LONG, json="completed"),
        Field(
            "last",
            codecs.list_codec(codecs.required_part(COLLECTIVE), MAX_COLLECTIVES, keeps_last=True),
        ),
        Field("members", codecs.list_codec(COUNT, MAX_GROUP_MEMBERS)),
    ),
)

EXPIRED = FieldTable(
    model.ExpiredDeadline,
    (
        Field("scope", LINE, json="scope"),
        Field("seconds", codecs.NUMBER, json="seconds"),
        Field("heartbeat", FLAG, json="heartbeat"),
        Field("since", LINE, json="since"),
    ),
)


def _expired_from_pb(expired: Any) -> model.ExpiredDeadline | None:
    # no writer of firstfault's writes other numbers, and JSON has no NaN
    return EXPIRED.read(expired) if 0 <= expired.seconds <= MAX_SECONDS else None


STACK_DUMP = FieldTable(
    model.StackDump, (Field("pid", COUNT), Field("rank", RANK, "global_rank"), Field("text", NAME))
)
"""The text's limit depends on the number of dumps: see `_dumps_to_pb`."""


def _dumps_to_pb(dumps: Sequence[model.StackDump]) -> list[dict[str, Any]]:
    some = dumps[:MAX_DUMPS]
    share = min(MAX_DUMP_CHARACTERS, MAX_ALL_DUMPS_CHARACTERS // max(len(some), 1))
    return [STACK_DUMP.write(dump, text=clean(dump.text, share)) for dump in some]


DUMPS = ValueCodec(
    _dumps_to_pb,
    codecs.list_codec(codecs.required_part(STACK_DUMP), MAX_DUMPS).read,
    is_redacted=True,
    max_size=MAX_DUMPS,
)


def _versions_from_pb(versions: Any) -> Any:
    some = sorted(versions.items())[:MAX_NAMES]
    return codecs.intern_value(
        tuple((LINE.read(name), LINE.read(version)) for name, version in some)
    )


VERSIONS = ValueCodec(
    lambda versions: {
        LINE.write(name): LINE.write(version) for name, version in versions[:MAX_NAMES]
    },
    _versions_from_pb,
    is_redacted=True,
    max_size=MAX_NAMES,
)


# --- exceptions and failed threads ----------------------------------------------------------------

FRAME = FieldTable(
    model.FrameInfo,
    (
        Field("file", LINE, json="file"),
        Field("line", COUNT, json="line"),
        Field("function", LINE, json="function"),
        Field("code", LINE, json="source"),
        Field("context", codecs.list_codec(LINE, MAX_CONTEXT_LINES), json="context"),
        Field("context_line", COUNT, json="context_line"),
    ),
)
"""Except the marked characters, which are two numbers on the wire."""


def _frame_to_pb(frame: model.FrameInfo) -> dict[str, Any]:
    message = FRAME.write(frame)
    # redaction moves characters, so the marks no longer fit
    first, last = frame.marked if message["code"] == frame.code else (0, 0)
    return {**message, "marked_from": max(first, 0), "marked_to": max(last, 0)}


FRAME_WITH_MARKS = ValueCodec(
    _frame_to_pb,
    lambda message: FRAME.read(message, marked=(message.marked_from, message.marked_to)),
    is_redacted=True,
)
FRAMES = codecs.list_codec(FRAME_WITH_MARKS, is_interned=True)
EXCEPTION_FIELDS = FieldTable(
    ExceptionInfo,
    (
        Field("type", LINE),
        Field("message", codecs.text(MAX_TEXT_CHARACTERS)),
        Field("bases", codecs.list_codec(LINE, MAX_NAMES, is_interned=True)),
        Field("notes", codecs.list_codec(codecs.text(MAX_TEXT_CHARACTERS), MAX_NAMES)),
        Field("relation", LINE),
        Field("text_frames", codecs.list_codec(FRAME_WITH_MARKS, MAX_FRAMES, is_interned=True)),
    ),
)
"""Except frames, causes and members, which have different limits for readers and writers."""


def _keep_both_ends(frames: Sequence[T], limit: int) -> tuple[Sequence[T], int]:
    """Return the outermost and innermost frames of a deep stack,
    and the number of dropped frames.
    """
    if len(frames) <= limit:
        return frames, 0
    return [*frames[: limit // 2], *frames[-limit // 2 :]], len(frames) - limit


def _exception_to_pb(exception: ExceptionInfo, depth: int = 1) -> dict[str, Any]:
    """Return an exception's protobuf fields; `depth` counts the surrounding exceptions."""
    nested_limit = MAX_CAUSES if depth < MAX_EXCEPTION_DEPTH else 0
    frames, omitted = _keep_both_ends(exception.frames, MAX_FRAMES)
    return EXCEPTION_FIELDS.write(
        exception,
        frames=FRAMES.write(frames),
        frames_omitted=exception.frames_omitted + omitted,
        causes=[_exception_to_pb(cause, depth + 1) for cause in exception.causes[:nested_limit]],
        members=[
            _exception_to_pb(member, depth + 1) for member in exception.members[:nested_limit]
        ],
    )


class _ExceptionReader:
    """Reads a document's exceptions within the reader's limits, which all of them share."""

    def __init__(self) -> None:
        self.exceptions_left = MAX_EXCEPTIONS_READ
        self.frames_left = MAX_ALL_FRAMES_READ

    def read(self, record: Any, depth: int = 1) -> ExceptionInfo:
        """Return an exception; its last notes count the dropped parts."""
        self.exceptions_left -= 1
        frames, omitted = _keep_both_ends(
            record.frames, min(MAX_FRAMES_READ, max(self.frames_left, 2))
        )
        self.frames_left -= len(frames)
        attributes: dict[str, Any] = {
            "frames": FRAMES.read(frames),
            "frames_omitted": record.frames_omitted + omitted,
        }
        notes = []
        for name in ("causes", "members"):
            records = getattr(record, name)
            read_items: list[ExceptionInfo] = []
            while (
                depth < MAX_EXCEPTION_DEPTH
                and self.exceptions_left > 0
                and len(read_items) < len(records)
            ):
                read_items.append(self.read(records[len(read_items)], depth + 1))
            if len(read_items) < len(records):
                notes.append(_describe_omission(len(records) - len(read_items), name))
            attributes[name] = tuple(read_items)
        exception: ExceptionInfo = EXCEPTION_FIELDS.read(record, **attributes)
        return replace(exception, notes=(*exception.notes, *notes)) if notes else exception


def _describe_omission(count: int, what: str) -> str:
    return f"... {count} more {what} left out: the document holds more than firstfault reads ..."


THREAD_FAILURE = FieldTable(
    model.ThreadFailure, (Field("thread", LINE), Field("timestamp_ns", TIME, "wall_time_ns"))
)
"""Without the exception."""


def _thread_failures_to_pb(threads: Sequence[model.ThreadFailure]) -> list[dict[str, Any]]:
    some = threads[:MAX_THREADS]
    return [
        THREAD_FAILURE.write(thread, exception=_exception_to_pb(thread.exception))
        for thread in some
    ]


def _thread_failures_from_pb(threads: Sequence[Any]) -> tuple[model.ThreadFailure, ...]:
    read_items: list[model.ThreadFailure] = []
    reader = _ExceptionReader()
    for thread in threads:
        if len(read_items) == MAX_THREADS_READ or (read_items and reader.exceptions_left <= 0):
            last = read_items[-1]
            notes = (
                *last.exception.notes,
                _describe_omission(len(threads) - len(read_items), "failed threads"),
            )
            read_items[-1] = replace(last, exception=replace(last.exception, notes=notes))
            break
        read_items.append(THREAD_FAILURE.read(thread, exception=reader.read(thread.exception)))
    return tuple(read_items)


HANDLED_EXCEPTION = FieldTable(
    model.HandledException,
    (
        Field("timestamp_ns", TIME, "wall_time_ns"),
        Field("times", LONG),
        Field("calls_since", codecs.OPTIONAL_LONG),
    ),
)
"""Without the exception."""


def _handled_to_pb(handled: Sequence[model.HandledException]) -> list[dict[str, Any]]:
    some = handled[-MAX_HANDLED:]
    return [
        HANDLED_EXCEPTION.write(item, exception=_exception_to_pb(item.exception)) for item in some
    ]


def _handled_from_pb(handled: Sequence[Any]) -> tuple[model.HandledException, ...]:
    reader = _ExceptionReader()
    last = handled[-MAX_HANDLED:]
    return tuple(
        HANDLED_EXCEPTION.read(item, exception=reader.read(item.exception)) for item in last
    )


EXCEPTION = ValueCodec(
    lambda value: value and _exception_to_pb(value),
    lambda record: _ExceptionReader().read(record),
    is_optional=True,
    is_redacted=True,
)
HANDLED_EXCEPTIONS = ValueCodec(
    _handled_to_pb,
    _handled_from_pb,
    is_redacted=True,
    max_size=MAX_HANDLED,
)
THREAD_FAILURES = ValueCodec(
    _thread_failures_to_pb,
    _thread_failures_from_pb,
    is_redacted=True,
    max_size=MAX_THREADS,
)


# --- documents ------------------------------------------------------------------------------------

CONTAINER_ERROR = FieldTable(
    dict,
    (
        Field("code", LINE),
        Field("message", codecs.text(MAX_MESSAGE_CHARACTERS)),
        Field(
            "kind",
            codecs.enum_codec({Kind.NON_RECOVERABLE: 0, Kind.RECOVERABLE: 1}, Kind.NON_RECOVERABLE),
        ),
        Field(
            "origin",
            codecs.enum_codec(
                {Origin.UNKNOWN: 0, Origin.USER: 1, Origin.SYSTEM: 2}, Origin.UNKNOWN
            ),
        ),
        Field("worker", LINE),
    ),
)
"""Flyte's part of a document except the time, which `WorkerError` and `Seal` name differently."""

# a later version's writer is trusted the least: like the recorder, which saw a failure only from
# outside
WRITER = codecs.enum_codec(
    {Writer.STOCK: 0, Writer.WORKER: 1, Writer.AGENT: 2, Writer.RECORDER: 3}, Writer.RECORDER
)
SUBJECT = codecs.enum_codec({Subject.WORKER: 1, Subject.AGENT: 2}, Subject.WORKER)

FAILURE = FieldTable(
    model.WorkerError,
    (
        Field("writer", WRITER),
        Field("subject", SUBJECT),
        Field("place", codecs.required_part(PLACE)),
        Field("timestamp_ns", TIME, "wall_time_ns"),
        Field("monotonic_ns", TIME),
        Field("boot_id", LINE),
        Field("upload_delay_ns", TIME),
        Field("exception", EXCEPTION),
        Field("exit_code", codecs.OPTIONAL_NUMBER),
        Field("signal", LINE),
        Field(
            "sent_signals",
            codecs.list_codec(codecs.required_part(SENT_SIGNAL), MAX_NAMES, is_interned=True),
        ),
        Field("in_flight", FLAG),
        Field("expired", codecs.optional_part(EXPIRED, _expired_from_pb)),
        Field("caused_by", codecs.optional_part(CAUSED_BY)),
        Field("category", LINE),
        Field("fingerprint", LINE),
        Field("stack_dumps", DUMPS),
        Field("log_tail", codecs.text_tail(MAX_LOG_TAIL_CHARACTERS)),
        Field("thread_failures", THREAD_FAILURES),
        Field("handled_exceptions", HANDLED_EXCEPTIONS),
        Field(
            "collectives",
            codecs.list_codec(codecs.required_part(PROGRESS), MAX_NAMES, is_interned=True),
        ),
        Field("resources", codecs.optional_part(RESOURCES, empty=Resources())),
        Field("system", codecs.optional_part(SYSTEM, empty=SystemState())),
        Field("versions", VERSIONS),
    ),
)
"""firstfault's part of an error document."""

SEAL = FieldTable(
    model.Seal,
    (
        Field("timestamp_ns", LONG, "wall_time_ns"),
        Field("digest", NAME),
        Field("count", COUNT, "document_count"),
        *_plain_fields("strategy json node", NAME),
    ),
)
"""firstfault's part of a sealed verdict; the texts in its JSON are already redacted."""


# --- the roster -----------------------------------------------------------------------------------

RECEIPT = FieldTable(
    model.Receipt,
    (
        Field("name", NAME, "key"),
        Field("durable", FLAG),
        Field("fault_to_durable_ns", TIME),
        Field("error", LINE),
        Field("rank", RANK, "global_rank"),
        Field("withdrawn", FLAG),
    ),
)

LOG_TAIL = FieldTable(
    model.LogTail,
    (
        Field("rank", COUNT, "global_rank"),
        Field("text", codecs.text_tail(MAX_ROSTER_LOG_CHARACTERS)),
    ),
)

SETUP = FieldTable(
    NodeSetup,
    (
        *_plain_fields("task image gpu_model", LINE),
        Field("gpus", COUNT),
        *_plain_fields("source_url source_root", LINE),
    ),
)


def _setup_from_pb(setup: Any) -> Any:
    texts = (setup.task, setup.image, setup.gpu_model, setup.source_url, setup.source_root)
    # a page repeats these texts; no writer of firstfault's writes longer ones
    return (
        SETUP.read(setup)
        if all(len(text) <= codecs.MAX_LINE_CHARACTERS for text in texts)
        else NodeSetup()
    )


TRAINING_PROGRESS = FieldTable(
    model.Progress,
    (
        Field("collectives", LONG),
        Field("seconds", codecs.NUMBER),
        Field("idle_seconds", codecs.NUMBER),
    ),
)


def _progress_from_pb(progress: Any) -> Any:
    is_valid = 0 <= progress.seconds <= MAX_SECONDS and 0 <= progress.idle_seconds <= MAX_SECONDS
    return TRAINING_PROGRESS.read(progress) if is_valid else model.Progress()


PRESENCE = FieldTable(
    model.NodePresence,
    (
        Field(
            "phase", codecs.enum_codec({Phase.JOINED: 1, Phase.FAILED: 2, Phase.SUCCEEDED: 3}, None)
        ),
        Field("place", codecs.required_part(PLACE)),
        Field("receipts", codecs.list_codec(codecs.required_part(RECEIPT))),
        Field("timestamp_ns", TIME, "wall_time_ns"),
        Field("first_failure", codecs.optional_part(CAUSED_BY)),
        Field("first_failure_reason", LINE),
        Field("log_tails", codecs.list_codec(codecs.required_part(LOG_TAIL), MAX_ROSTER_LOGS)),
        Field("setup", codecs.optional_part(SETUP, _setup_from_pb, empty=NodeSetup())),
        Field(
            "progress",
            codecs.optional_part(TRAINING_PROGRESS, _progress_from_pb, empty=model.Progress()),
        ),
        Field("finished_ranks", codecs.list_codec(COUNT, MAX_WORKERS)),
    ),
)
"""A roster entry except its workers, who have two ranks each on the wire."""
