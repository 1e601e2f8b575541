"""The one table of fields: what firstfault's files hold, how each field is bounded, and what it is called elsewhere.

A new field is one row here and one line in the ``.proto`` file. The encoder and the decoder run these tables.
They know no protobuf: rows name its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from firstfault import model
from firstfault.model import ExceptionInfo, Kind, NodeSetup, Origin, Phase, Resources, Subject, SystemState, Writer
from firstfault.text import clean
from firstfault.wire import forms
from firstfault.wire.forms import COUNT, FLAG, LINE, LONG, MAX_LINE, MAX_NAMES, NAME, RANK, TIME, Field, Form, Table

T = TypeVar("T")

MAX_SECONDS = 253_402_300_799
"""The last second of the year 9999, the end of google.protobuf.Timestamp."""
MAX_WORKERS = 16_384
"""Workers of one node, and receipts: an entry with more was not written by an agent."""
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
_MAX_ENTRIES = 10
"""Collectives of one process group."""
_MAX_MEMBERS = 16_384
"""Ranks of one process group."""
_MAX_TEXT = 16 * 1024
_MAX_CAUSES = 10
_MAX_FRAMES = 100
_MAX_CONTEXT = 20
"""Lines around a frame's line, with it."""
_MAX_DEPTH = 6
"""Exceptions within exceptions. Protobuf's parsers refuse more than 100 nested messages, and the time for a report can
double with each level."""
_MAX_THREADS = 10
_MAX_READ_EXCEPTIONS = 2000
"""Exceptions that a reader takes of a document's own exception, and of all its threads: with causes and members."""
_MAX_READ_FRAMES = 1000
"""Frames of one exception that a reader takes."""
_MAX_READ_ALL_FRAMES = 20_000
"""Frames of all of them; each that is left keeps its first and its last one."""
_MAX_READ_THREADS = 100
"""Failed threads that a reader takes from one document."""


def _fields(names: str, form: Form) -> tuple[Field, ...]:
    """Return fields of one form that are called the same everywhere and have no line of their own in a report."""
    return tuple(Field(name, form) for name in names.split())


# --- who and where --------------------------------------------------------------------------------------------------

PLACE = Table(
    model.Place,
    (
        Field("attempt", COUNT),
        Field("round", COUNT, json="round"),
        Field("incarnation", LONG),
        Field("restart_count", COUNT, json="restarts"),
        Field("rank", RANK, "global_rank", json="rank"),
        Field("local_rank", RANK, json="local_rank"),
        Field("group_rank", RANK),
        *_fields("world_size group_world_size", COUNT),
        Field("role", LINE),
        Field("node", LINE, json="pod"),
        Field("host", LINE, json="host"),
        Field("ip", LINE),
        *_fields("namespace engine", LINE),
        Field("machine", LINE, json="machine"),
        Field("gpu", LINE, json="gpu"),
        Field("pid", COUNT, json="pid"),
    ),
)

CAUSED_BY = Table(model.CausedBy, (Field("rank", RANK, "global_rank"), *_fields("node document", LINE)))

SENT_SIGNAL = Table(model.SentSignal, _fields("signal reason", LINE))


# --- evidence -------------------------------------------------------------------------------------------------------

RESOURCES = Table(
    Resources,
    (
        Field("oom_kill", forms.OPTIONAL_LONG, json="oom_kills"),
        Field("memory_peak_bytes", forms.OPTIONAL_LONG, json="peak_bytes"),
        Field("memory_limit_bytes", forms.OPTIONAL_LONG, json="limit_bytes"),
        Field("memory_used_bytes", forms.OPTIONAL_LONG, json="used_bytes"),
        Field("watermark_ns", forms.OPTIONAL_LONG, "watermark_wall_ns"),
    ),
)

FILE_SYSTEM = Table(
    model.FileSystem, (Field("path", LINE), *_fields("free_bytes total_bytes free_inodes total_inodes", LONG))
)


_LIMITS = Form(
    lambda limits: [{"name": LINE.write(name), "value": LONG.write(value)} for name, value in limits[:MAX_NAMES]],
    lambda limits: tuple((LINE.read(limit.name), limit.value) for limit in limits[:MAX_NAMES]),
    is_redacted=True,
    cap=MAX_NAMES,
)
SYSTEM = Table(
    SystemState,
    (
        Field("file_systems", forms.many(forms.whole(FILE_SYSTEM), _MAX_FILE_SYSTEMS)),
        Field("limits", _LIMITS),
        Field("open_files", forms.OPTIONAL_COUNT),
    ),
)

COLLECTIVE = Table(
    model.Collective,
    (Field("sequence", LONG), *_fields("operation sizes dtypes state", LINE), Field("is_p2p", FLAG)),
)

PROGRESS = Table(
    model.CollectiveProgress,
    (
        Field("group", LINE, json="group"),
        Field("last_operation", LINE, json="operation"),
        Field("enqueued", LONG, json="enqueued"),
        Field("completed", forms.OPTIONAL_LONG, json="completed"),
        Field("last", forms.many(forms.whole(COLLECTIVE), _MAX_ENTRIES, last=True)),
        Field("members", forms.many(COUNT, _MAX_MEMBERS)),
    ),
)

EXPIRED = Table(
    model.ExpiredDeadline,
    (
        Field("scope", LINE, json="scope"),
        Field("seconds", forms.NUMBER, json="seconds"),
        Field("heartbeat", FLAG, json="heartbeat"),
        Field("since", LINE, json="since"),
    ),
)


def _expired_from_pb(expired: Any) -> model.ExpiredDeadline | None:
    # a writer of ours writes no other number, and JSON has no NaN
    return EXPIRED.read(expired) if 0 <= expired.seconds <= MAX_SECONDS else None


STACK_DUMP = Table(model.StackDump, (Field("pid", COUNT), Field("rank", RANK, "global_rank"), Field("text", NAME)))
"""The text's limit depends on the number of dumps."""


def _dumps_to_pb(dumps: Sequence[model.StackDump]) -> list[dict[str, Any]]:
    kept = dumps[:_MAX_DUMPS]
    share = min(_MAX_DUMP, _MAX_ALL_DUMPS // max(len(kept), 1))
    return [STACK_DUMP.write(dump, text=clean(dump.text, share)) for dump in kept]


_DUMPS = Form(_dumps_to_pb, forms.many(forms.whole(STACK_DUMP), _MAX_DUMPS).read, is_redacted=True, cap=_MAX_DUMPS)


def _versions_from_pb(versions: Any) -> Any:
    some = sorted(versions.items())[:MAX_NAMES]
    return forms.interned(tuple((LINE.read(name), LINE.read(version)) for name, version in some))


_VERSIONS = Form(
    lambda versions: {LINE.write(name): LINE.write(version) for name, version in versions[:MAX_NAMES]},
    _versions_from_pb,
    is_redacted=True,
    cap=MAX_NAMES,
)


# --- exceptions and failed threads ----------------------------------------------------------------------------------

FRAME = Table(
    model.FrameInfo,
    (
        Field("file", LINE, json="file"),
        Field("line", COUNT, json="line"),
        Field("function", LINE, json="function"),
        Field("code", LINE, json="source"),
        Field("context", forms.many(LINE, _MAX_CONTEXT), json="context"),
        Field("context_line", COUNT, json="context_line"),
    ),
)
"""Without the marked characters, which are two numbers on the wire."""


def _frame_to_pb(frame: model.FrameInfo) -> dict[str, Any]:
    message = FRAME.write(frame)
    # what is redacted moves what is marked
    first, last = frame.marked if message["code"] == frame.code else (0, 0)
    return {**message, "marked_from": max(first, 0), "marked_to": max(last, 0)}


_ONE_FRAME = Form(
    _frame_to_pb,
    lambda message: FRAME.read(message, marked=(message.marked_from, message.marked_to)),
    is_redacted=True,
)
_FRAMES = forms.many(_ONE_FRAME, keep=True)
_PARTS = Table(
    ExceptionInfo,
    (
        Field("type", LINE),
        Field("message", forms.text(_MAX_TEXT)),
        Field("bases", forms.many(LINE, MAX_NAMES, keep=True)),
        Field("notes", forms.many(forms.text(_MAX_TEXT), MAX_NAMES)),
        Field("relation", LINE),
        Field("text_frames", forms.many(_ONE_FRAME, _MAX_FRAMES, keep=True)),
    ),
)
"""Without the frames, causes and members, of which readers and writers take different numbers."""


def _both_ends(frames: Sequence[T], most: int) -> tuple[Sequence[T], int]:
    """Return the outermost and the innermost frames of a deep stack, and how many lie between them."""
    if len(frames) <= most:
        return frames, 0
    return [*frames[: most // 2], *frames[-most // 2 :]], len(frames) - most


def _exception_to_pb(exception: ExceptionInfo, depth: int = 1) -> dict[str, Any]:
    """Return an exception's message, with texts cut and redacted; `depth` counts the exceptions around it."""
    deeper = _MAX_CAUSES if depth < _MAX_DEPTH else 0
    frames, omitted = _both_ends(exception.frames, _MAX_FRAMES)
    return _PARTS.write(
        exception,
        frames=_FRAMES.write(frames),
        frames_omitted=exception.frames_omitted + omitted,
        causes=[_exception_to_pb(cause, depth + 1) for cause in exception.causes[:deeper]],
        members=[_exception_to_pb(member, depth + 1) for member in exception.members[:deeper]],
    )


class _ExceptionReader:
    """Reads a document's exceptions with what the reader's limits admit."""

    def __init__(self) -> None:
        self.left = _MAX_READ_EXCEPTIONS
        self.frames_left = _MAX_READ_ALL_FRAMES

    def read(self, record: Any, depth: int = 1) -> ExceptionInfo:
        """Return an exception; its last notes count what is left out."""
        self.left -= 1
        frames, omitted = _both_ends(record.frames, min(_MAX_READ_FRAMES, max(self.frames_left, 2)))
        self.frames_left -= len(frames)
        given: dict[str, Any] = {"frames": _FRAMES.read(frames), "frames_omitted": record.frames_omitted + omitted}
        notes = []
        for name in ("causes", "members"):
            records = getattr(record, name)
            taken: list[ExceptionInfo] = []
            while depth < _MAX_DEPTH and self.left > 0 and len(taken) < len(records):
                taken.append(self.read(records[len(taken)], depth + 1))
            if len(taken) < len(records):
                notes.append(_left_out(len(records) - len(taken), name))
            given[name] = tuple(taken)
        exception: ExceptionInfo = _PARTS.read(record, **given)
        return replace(exception, notes=(*exception.notes, *notes)) if notes else exception


def _left_out(count: int, what: str) -> str:
    return f"... {count} more {what} left out: the document holds more than firstfault reads ..."


_THREAD = Table(model.ThreadFailure, (Field("thread", LINE), Field("timestamp_ns", TIME, "wall_time_ns")))
"""Without the exception."""


def _threads_to_pb(threads: Sequence[model.ThreadFailure]) -> list[dict[str, Any]]:
    return [_THREAD.write(thread, exception=_exception_to_pb(thread.exception)) for thread in threads[:_MAX_THREADS]]


def _threads_from_pb(threads: Sequence[Any]) -> tuple[model.ThreadFailure, ...]:
    taken: list[model.ThreadFailure] = []
    reader = _ExceptionReader()
    for thread in threads:
        if len(taken) == _MAX_READ_THREADS or (taken and reader.left <= 0):
            last = taken[-1]
            notes = (*last.exception.notes, _left_out(len(threads) - len(taken), "failed threads"))
            taken[-1] = replace(last, exception=replace(last.exception, notes=notes))
            break
        taken.append(_THREAD.read(thread, exception=reader.read(thread.exception)))
    return tuple(taken)


_EXCEPTION = Form(
    lambda value: value and _exception_to_pb(value),
    lambda record: _ExceptionReader().read(record),
    is_optional=True,
    is_redacted=True,
)
_THREAD_FAILURES = Form(_threads_to_pb, _threads_from_pb, is_redacted=True, cap=_MAX_THREADS)


# --- documents ------------------------------------------------------------------------------------------------------

CONTAINER_ERROR = Table(
    dict,
    (
        Field("code", LINE),
        Field("message", forms.text(_MAX_MESSAGE)),
        Field("kind", forms.one_of({Kind.NON_RECOVERABLE: 0, Kind.RECOVERABLE: 1}, Kind.NON_RECOVERABLE)),
        Field("origin", forms.one_of({Origin.UNKNOWN: 0, Origin.USER: 1, Origin.SYSTEM: 2}, Origin.UNKNOWN)),
        Field("worker", LINE),
    ),
)
"""Flyte's own part of a document, without the time: `WorkerError` and `Seal` have it under different names."""

# a writer that a later version added has the least authority of ours
_WRITER = forms.one_of({Writer.STOCK: 0, Writer.WORKER: 1, Writer.AGENT: 2, Writer.RECORDER: 3}, Writer.RECORDER)
_SUBJECT = forms.one_of({Subject.WORKER: 1, Subject.AGENT: 2}, Subject.WORKER)

FAILURE = Table(
    model.WorkerError,
    (
        Field("writer", _WRITER),
        Field("subject", _SUBJECT),
        Field("place", forms.whole(PLACE)),
        Field("timestamp_ns", TIME, "wall_time_ns"),
        Field("monotonic_ns", TIME),
        Field("boot_id", LINE),
        Field("upload_delay_ns", TIME),
        Field("exception", _EXCEPTION),
        Field("exit_code", forms.OPTIONAL_NUMBER),
        Field("signal", LINE),
        Field("sent_signals", forms.many(forms.whole(SENT_SIGNAL), MAX_NAMES, keep=True)),
        Field("in_flight", FLAG),
        Field("expired", forms.part(EXPIRED, _expired_from_pb)),
        Field("caused_by", forms.part(CAUSED_BY)),
        Field("category", LINE),
        Field("fingerprint", LINE),
        Field("stack_dumps", _DUMPS),
        Field("log_tail", forms.end_of_text(_MAX_LOG_TAIL)),
        Field("thread_failures", _THREAD_FAILURES),
        Field("collectives", forms.many(forms.whole(PROGRESS), MAX_NAMES, keep=True)),
        Field("resources", forms.part(RESOURCES, empty=Resources())),
        Field("system", forms.part(SYSTEM, empty=SystemState())),
        Field("versions", _VERSIONS),
    ),
)
"""firstfault's part of an error document."""

SEAL = Table(
    model.Seal,
    (
        Field("timestamp_ns", LONG, "wall_time_ns"),
        Field("digest", NAME),
        Field("count", COUNT, "document_count"),
        *_fields("strategy json node", NAME),
    ),
)
"""firstfault's part of a sealed verdict; the texts of its JSON were redacted when they were read or written."""


# --- the roster -----------------------------------------------------------------------------------------------------

RECEIPT = Table(
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

LOG_TAIL = Table(
    model.LogTail, (Field("rank", COUNT, "global_rank"), Field("text", forms.end_of_text(_MAX_ENTRYS_LOG)))
)

SETUP = Table(
    NodeSetup, (*_fields("task image gpu_model", LINE), Field("gpus", COUNT), *_fields("source_url source_root", LINE))
)


def _setup_from_pb(setup: Any) -> Any:
    texts = (setup.task, setup.image, setup.gpu_model, setup.source_url, setup.source_root)
    # a page repeats such texts; a writer of ours writes none that is longer
    return SETUP.read(setup) if all(len(text) <= MAX_LINE for text in texts) else NodeSetup()


TRAINED = Table(model.Progress, (Field("collectives", LONG), Field("seconds", forms.NUMBER)))


def _trained_from_pb(progress: Any) -> Any:
    return TRAINED.read(progress) if 0 <= progress.seconds <= MAX_SECONDS else model.Progress()


PRESENCE = Table(
    model.NodePresence,
    (
        Field("phase", forms.one_of({Phase.JOINED: 1, Phase.FAILED: 2, Phase.SUCCEEDED: 3}, None)),
        Field("place", forms.whole(PLACE)),
        Field("receipts", forms.many(forms.whole(RECEIPT))),
        Field("timestamp_ns", TIME, "wall_time_ns"),
        Field("first_failure", forms.part(CAUSED_BY)),
        Field("first_failure_reason", LINE),
        Field("log_tails", forms.many(forms.whole(LOG_TAIL), _MAX_LOGS)),
        Field("setup", forms.part(SETUP, _setup_from_pb, empty=NodeSetup())),
        Field("progress", forms.part(TRAINED, _trained_from_pb, empty=model.Progress())),
    ),
)
"""A roster entry, without its workers: on the wire each has two ranks."""
