"""Turns a live exception into data, also with a hostile ``__str__``, broken notes, cycles of causes or odd classes.

And a failure into the record of a document, and into torch's ``error.json``.

`firstfault.report` decides how it is shown.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import json
import linecache
import os
import pickle
import re
import tempfile
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.exceptions.tracebacks import handler_above, is_library, original_of
from firstfault.model import ExceptionInfo, FrameInfo, Kind, Origin, Place, Subject, WorkerError, Writer
from firstfault.utils.text import counted, parse_json
from firstfault_torch.context import boot_id, versions
from firstfault_torch.guard import caught

_MAX_TEXT = 64 * 1024
"""Characters of a message that are kept in memory."""
_MAX_FRAMES = 200
_WITH_CONTEXT = 8
"""Frames of the program's own that are kept with the lines around theirs, the innermost of an exception."""
_AROUND = 2
"""Lines before and after."""
_MAX_CAUSES = 10
_MAX_LINKS = 10_000
"""Of a chain, to find its innermost exception."""
_MAX_MEMBERS = 10
_MAX_DEPTH = 6
"""Exceptions within exceptions: a group's members, and their causes."""
_MAX_EXCEPTIONS = 60
"""In all causes and groups together."""
_MAX_NOTES = 20
_MAX_NOTE = 4096
_OWN_FOLDERS = (f"{Path(__file__).parent}{os.sep}", f"{os.sep}flytekitplugins{os.sep}firstfault{os.sep}")
"""The folders of this package and of the task plugin that calls it."""


NOTED = "__firstfault_noted__"
"""The attribute of an exception that was captured before."""


def capture(error: BaseException, *, in_flight: bool = False) -> ExceptionInfo:
    """Return `error` as data; `in_flight`: it is still inside the task function."""
    if isinstance(noted := _attribute(error, NOTED), ExceptionInfo):
        return noted
    found = _capture(error, [])
    return (caught(lambda: _with_outer_frames(found, error))[0] or found) if in_flight else found


def before_exit(error: BaseException) -> BaseException:
    """Return the exception that the program turned into ``sys.exit(code)``; `error` itself if there is none.

    Scripts and frameworks (Hydra, click, a plain main) catch an exception, print it and exit: the exception is
    the reason, not the exit. So it is with the end of in-process restarts.
    """
    for _ in range(_MAX_CAUSES):
        if isinstance(error, SystemExit):
            following = _attribute(error, "__cause__")
            if following is None:
                following = _attribute(error, "__context__")
        elif type(error).__name__ == "RestartAbort":
            following = _attribute(error, "__cause__")
        else:
            break
        if not _is_exception(following):
            break
        error = following
    return error


def bare(error: BaseException) -> ExceptionInfo:
    """Return the type of `error` and its bases, without running the user's code."""
    kind = type(error)
    return ExceptionInfo(type=qualified_name(kind), message="", bases=_bases(kind))


def safe_text(value: Any) -> str:
    """Return ``str(value)``, or why there is no text."""
    # a subclass of str may override anything
    text, error = caught(lambda: str.__str__(str(value))[:_MAX_TEXT])
    return text if text is not None else f"<no text: str() raised {type(error).__name__}>"


def qualified_name(kind: type) -> str:
    """Return the module and qualified name of a class; builtins without their module."""

    def read() -> str:
        module, name = type.__getattribute__(kind, "__module__"), type.__getattribute__(kind, "__qualname__")
        return str(name) if module in {"builtins", None} else f"{module}.{name}"

    return caught(read)[0] or "unknown"


def _attribute(error: BaseException, name: str, default: Any = None) -> Any:
    """Return an attribute of an exception, `default` if its ``__getattr__`` raises."""
    found, raised = caught(lambda: getattr(error, name, default))
    return default if raised is not None else found


def _is_exception(value: Any) -> bool:
    """Whether `value` is an exception by its type; isinstance() would also read its ``__class__``."""
    return issubclass(type(value), BaseException)


def _capture(
    error: BaseException, done: list[BaseException], depth: int = 1, *, is_link: bool = False
) -> ExceptionInfo:
    """Return an exception, and add it to those that are done; `is_link`: its owner has the other links of its chain."""
    done.append(error)
    kind = type(error)
    frames, omitted = _frames(_attribute(error, "__traceback__"))
    found = ExceptionInfo(
        type=qualified_name(kind),
        message=safe_text(error),
        bases=_bases(kind),
        frames=frames,
        frames_omitted=omitted,
        notes=_notes(error),
        causes=() if is_link else _causes(error, done, depth),
        members=_members(error, done, depth),
    )
    return caught(lambda: _with_text_frames(found))[0] or found


def _bases(kind: type) -> tuple[str, ...]:
    return tuple(qualified_name(base) for base in type.__getattribute__(kind, "__mro__")[1:-1])


def _frames(trace: Any) -> tuple[tuple[FrameInfo, ...], int]:
    """Return the frames, outermost first, without our own at the top, and how many in the middle were left out."""
    entries: list[TracebackType] = []
    while isinstance(trace, TracebackType):
        if entries or not any(folder in trace.tb_frame.f_code.co_filename for folder in _OWN_FOLDERS):
            entries.append(trace)
        trace = trace.tb_next
    omitted = max(len(entries) - _MAX_FRAMES, 0)
    if omitted:
        entries = entries[: _MAX_FRAMES // 2] + entries[-_MAX_FRAMES // 2 :]
    own = [entry for entry in entries if not is_library(entry.tb_frame.f_code.co_filename)]
    with_context = set(map(id, own[-_WITH_CONTEXT:]))
    return tuple(_frame(entry, with_context=id(entry) in with_context) for entry in entries), omitted


def _with_outer_frames(found: ExceptionInfo, error: BaseException) -> ExceptionInfo:
    """Return an exception that has not left the task function with the frames that it has still to leave.

    They are in its traceback when it has left, and two ranks' same fault is to have the same frames.
    """
    trace = _attribute(error, "__traceback__")
    frame = trace.tb_frame.f_back if isinstance(trace, TracebackType) else None
    outer: list[FrameInfo] = []
    while frame is not None and len(outer) < _MAX_FRAMES:
        code, line = frame.f_code, frame.f_lineno or 0
        if any(folder in code.co_filename for folder in _OWN_FOLDERS):
            break
        outer.append(FrameInfo(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip()))
        frame = frame.f_back
    return replace(found, frames=(*reversed(outer), *found.frames)) if not found.frames_omitted else found


def _frame(entry: TracebackType, *, with_context: bool) -> FrameInfo:
    code, line = entry.tb_frame.f_code, entry.tb_lineno or 0
    lines = _lines(code.co_filename)
    source = lines[line - 1].rstrip() if 0 < line <= len(lines) else ""
    bare = FrameInfo(code.co_filename, line, code.co_name, source.strip())
    if not source or not with_context:
        return bare
    full = caught(lambda: replace(_with_context(bare, lines), marked=_marked(entry, source)))[0]
    return full or bare


def _lines(file: str) -> list[str]:
    """Return a file's lines; loaders are third-party code, and may give something else."""
    lines = caught(lambda: linecache.getlines(file))[0] or []
    return lines if all(isinstance(line, str) for line in lines) else []


def _with_context(frame: FrameInfo, lines: list[str]) -> FrameInfo:
    first, last = max(frame.line - 1 - _AROUND, 0), frame.line + _AROUND
    if (clause := handler_above(lines, frame.line - 1)) is not None:
        first, last = min(first, clause), frame.line + 3 * _AROUND  # they tell what the handler does
    around = textwrap.dedent("\n".join(text.rstrip() for text in lines[first:last])).split("\n")
    return replace(frame, context=tuple(around), context_line=first + 1)


def _with_text_frames(exception: ExceptionInfo) -> ExceptionInfo:
    """Return an exception with the lines around the frames that its text names, if another process raised it."""
    original = original_of(exception)
    if original is exception:
        return exception
    own = [frame for frame in original.frames if not is_library(frame.file)][-_WITH_CONTEXT:]
    known = [(frame, _lines(frame.file)) for frame in own]
    return replace(
        exception,
        text_frames=tuple(_with_context(frame, lines) for frame, lines in known if 0 < frame.line <= len(lines)),
    )


def _marked(entry: TracebackType, source: str) -> tuple[int, int]:
    """Return the characters of the stripped line that Python (3.11 or later) marks; (0, 0) if it is the whole line."""
    positions = getattr(entry.tb_frame.f_code, "co_positions", None)
    if positions is None or entry.tb_lasti < 0:
        return (0, 0)
    first, last, start, end = next(itertools.islice(positions(), entry.tb_lasti // 2, None), (None,) * 4)
    if first != entry.tb_lineno or start is None or end is None:
        return (0, 0)
    data = source.encode()
    # of an expression on several lines the first one is marked to its end
    till = len(source) if last != first else len(data[:end].decode(errors="replace"))
    indent = len(source) - len(source.lstrip())
    since, till = len(data[:start].decode(errors="replace")) - indent, till - indent
    whole = since <= 0 and till >= len(source) - indent
    return (0, 0) if whole or not 0 <= since < till else (since, till)


def _notes(error: BaseException) -> tuple[str, ...]:
    notes = _attribute(error, "__notes__", ())
    if not isinstance(notes, list | tuple):
        return (safe_text(notes),)
    return tuple(safe_text(note)[:_MAX_NOTE] for note in notes[:_MAX_NOTES])


def _causes(error: BaseException, done: list[BaseException], depth: int) -> tuple[ExceptionInfo, ...]:
    """Return the nearest exceptions of the chain and the innermost ones, which tell what failed first."""
    links = _chain(error) if depth < _MAX_DEPTH else []
    omitted, half = len(links) - _MAX_CAUSES, _MAX_CAUSES // 2
    causes: list[ExceptionInfo] = []
    for number, (link, relation) in enumerate(links[:half] + links[-half:] if omitted > 0 else links):
        if len(done) >= _MAX_EXCEPTIONS:
            break
        found = replace(_capture(link, done, depth + 1, is_link=True), relation=relation)
        if omitted > 0 and number == half:
            found = replace(found, notes=(*found.notes, f"{counted(omitted, 'exception')} left out after this one"))
        causes.append(found)
    return tuple(causes)


def _chain(error: BaseException) -> list[tuple[BaseException, str]]:
    """Return the causes: an explicit cause, else the context. After ``raise ... from None`` that is not printed."""
    seen = {id(error)}
    links: list[tuple[BaseException, str]] = []
    while len(links) < _MAX_LINKS:
        following, relation = _attribute(error, "__cause__"), "cause"
        if following is None:
            following = _attribute(error, "__context__")
            relation = "suppressed" if _attribute(error, "__suppress_context__") else "context"
        if not _is_exception(following) or id(following) in seen:
            break
        seen.add(id(following))
        links.append((following, relation))
        error = following
    return links


def _members(error: BaseException, done: list[BaseException], depth: int) -> tuple[ExceptionInfo, ...]:
    """Return the members of an exception group (Python 3.11, or the backport)."""
    members = _attribute(error, "exceptions")
    if depth >= _MAX_DEPTH or not isinstance(members, list | tuple):
        return ()
    known = [member for member in members[:_MAX_MEMBERS] if _is_exception(member)]
    return tuple(_capture(member, done, depth + 1) for member in known if len(done) < _MAX_EXCEPTIONS)


# --- torch's classes of errors, and the record of a failure -----------------------------------------------------------

# torch distinguishes input errors, worker failures, platform errors and infra errors
# (``torch.distributed.elastic.multiprocessing.errors``). Category, kind, origin and code follow from the class; only an
# exception that its author declared recoverable does not fit one of torch's classes.


_WRONG_PATHS = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOEXEC, errno.E2BIG, errno.ELOOP),
    errno.ENAMETOOLONG,
}
"""Errors of open(2) and execve(2) that the same arguments meet again."""


@dataclass(frozen=True, slots=True)
class FlyteClass:
    """The fields of a document about such an error, in the terms of flyteidl's ContainerError."""

    category: str
    """Empty: the reader derives it from exit code and signal."""
    kind: Kind
    origin: Origin
    code: str
    """The default; an exception may have its own code."""


class ErrorClass(enum.Enum):
    """torch's taxonomy, and what it lacks: recoverable exceptions, preemption, lost agents."""

    INPUT_ERROR = FlyteClass("input", Kind.NON_RECOVERABLE, Origin.USER, "USER:InputError")
    WORKER_FAILURE = FlyteClass("", Kind.NON_RECOVERABLE, Origin.USER, "USER:RuntimeError")
    RECOVERABLE_EXCEPTION = FlyteClass("recoverable", Kind.RECOVERABLE, Origin.USER, "USER:Recoverable")
    PLATFORM_ERROR = FlyteClass("platform", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:AgentError")
    INFRA_ERROR = FlyteClass("infrastructure", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:InfrastructureError")
    RENDEZVOUS_ERROR = FlyteClass("rendezvous", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:RendezvousError")
    PREEMPTION = FlyteClass("preemption", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:Preemption")
    INTERRUPTION = FlyteClass("interrupted", Kind.NON_RECOVERABLE, Origin.USER, "USER:Interrupted")
    LOST_AGENT = FlyteClass("node_lost", Kind.RECOVERABLE, Origin.SYSTEM, "SYSTEM:AgentLost")


def failure_record(error_class: ErrorClass, place: Place, **fields: Any) -> WorkerError:
    """Return the record of a failure with its fingerprint; `fields` of `WorkerError` go before those of the class."""
    flyte = error_class.value
    defaults = {"code": flyte.code, "kind": flyte.kind, "origin": flyte.origin, "category": flyte.category}
    failure = WorkerError(worker=place.node, place=place, boot_id=boot_id(), versions=versions(), **(defaults | fields))
    return replace(failure, fingerprint=fingerprint_of(failure))


def lost_agent(place: Place) -> WorkerError:
    """Return the record of the death of the agent at `place`, without its time; a worker or the recorder writes it."""
    return failure_record(
        ErrorClass.LOST_AGENT,
        place,
        message="the agent died and left no report; its workers were terminated",
        writer=Writer.WORKER,
        subject=Subject.AGENT,
    )


def error_class_of(error: BaseException) -> ErrorClass:
    """Return the class of an error that the agent itself raised.

    A lost store and missing nodes are rendezvous errors; a wrong argument is an input error, and so is a path to a
    program or folder that is missing, or may not be used.
    """
    names = {qualified_name(kind) for kind in type(error).__mro__}
    if any(name.startswith("torch.distributed.elastic.rendezvous.") for name in names):
        return ErrorClass.RENDEZVOUS_ERROR
    if names & {"torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"}:
        return ErrorClass.RENDEZVOUS_ERROR
    if isinstance(error, ValueError | TypeError | AttributeError | ImportError | pickle.PicklingError):
        return ErrorClass.INPUT_ERROR  # a setting, or a function or argument that cannot be pickled
    if isinstance(error, OSError) and error.errno in _WRONG_PATHS:
        return ErrorClass.INPUT_ERROR
    if isinstance(error, OSError | MemoryError):
        return ErrorClass.INFRA_ERROR
    return ErrorClass.PLATFORM_ERROR


# --- error.json, written so that torchrun and its tools show the same error -------------------------------------------

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_RECOVERABLE = "recoverable_error"
"""The file name that kfpytorch uses for the same mark."""
_MADE_BY_TORCH = re.compile(r"torchelastic_[a-z0-9_]{8}")
"""The name of the folder that torch makes for a run whose user named none."""


def error_file_data(type_name: str, message: str, traceback: str, timestamp_ns: int) -> dict[str, Any]:
    """Return the content in torch's format, with the time in whole seconds."""
    short = type_name.rsplit(".", 1)[-1]
    return {
        "message": {
            "message": f"{short}: {message}",
            "extraInfo": {"py_callstack": traceback, "timestamp": str(timestamp_ns // 1_000_000_000)},
        }
    }


def write_error_file(path: str | Path, data: dict[str, Any]) -> None:
    """Write `data` atomically."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.write_text(json.dumps(data), encoding="utf-8", errors="backslashreplace")
    part.replace(target)


class _TextUnpickler(pickle.Unpickler):
    """Loads a pickled text and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse every class."""
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a text")


def read_traceback(path: str | Path) -> str:
    """Return the traceback that torch.multiprocessing keeps of an exception outside of torch elastic's wrapper.

    It keeps one if a result cannot be pickled or arguments cannot be unpickled. Empty if there is none.
    """
    try:
        with Path(path).open("rb") as stream:
            text = _TextUnpickler(stream).load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError):
        return ""
    return text if isinstance(text, str) else ""


def mark_recoverable(error_file: str) -> None:
    """Create a file beside a worker's error.json that marks its exception as recoverable."""
    (Path(error_file).parent / _RECOVERABLE).touch()


def was_recoverable(error_file: str) -> bool:
    """Whether the worker that this error.json belongs to marked its exception as recoverable."""
    return (Path(error_file).parent / _RECOVERABLE).exists()


def remove_error_files(log_folder: str) -> None:
    """Remove a run's error files, and their folders if those are empty then, from a folder that torch made itself.

    torch leaves one folder for each run in that for temporary files. A folder that the user named stays as it is, and
    so does every log file.
    """
    root = Path(log_folder)
    if root.parent != Path(tempfile.gettempdir()) or not _MADE_BY_TORCH.fullmatch(root.name):
        return
    for file in [*root.glob("*/attempt_*/*/error.json"), *root.glob(f"*/attempt_*/*/{_RECOVERABLE}")]:
        file.unlink(missing_ok=True)
    for folder, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def read_error_file(path: str | Path) -> dict[str, Any] | None:
    """Return the message part of an ``error.json``; None if the file is missing or unreadable."""
    try:
        message = parse_json(Path(path).read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, dict) else {"message": str(message), "extraInfo": {}}


def is_readable(error_file: str) -> bool:
    """Whether torch can read an error.json, and make a ChildFailedError of it."""
    try:
        content = json.loads(Path(error_file).read_text(encoding="utf-8"))
        message = content["message"]
        if isinstance(message, str):
            int(content.get("timestamp", 0))
            return True
        extra = message["extraInfo"]
        int(extra["timestamp"])
        return isinstance(extra.get("py_callstack", message.get("message", "")), str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
