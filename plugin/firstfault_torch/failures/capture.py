"""Turns a live exception into data, also with a hostile ``__str__``, broken notes,
cycles of causes or odd classes.
"""

from __future__ import annotations

import itertools
import linecache
import os
import textwrap
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from firstfault import credentials, exceptions
from firstfault.exceptions.exceptions_in_text import unwrap_remote
from firstfault.exceptions.first_cause import find_enclosing_handler
from firstfault.exceptions.source_files import is_library_file
from firstfault.model import ExceptionInfo, FrameInfo
from firstfault.utils.lazy_pattern import compile_patterns
from firstfault.utils.text import counted
from firstfault_torch.guard import try_call

_MAX_FRAMES = 200
_MAX_FRAMES_WITH_CONTEXT = 8
"""Frames of the program's own that are kept with the lines around theirs,
the innermost of an exception.
"""
_CONTEXT_LINES = 2
"""Lines before and after."""
_MAX_CAUSES = 10
_MAX_CHAIN_LENGTH = 10_000
"""Of a chain, to find its innermost exception."""
_MAX_MEMBERS = 10
_MAX_DEPTH = 6
"""Exceptions within exceptions: a group's members, and their causes."""
_MAX_EXCEPTIONS = 60
"""In all causes and groups together."""
_MAX_NOTES = 20
_MAX_NOTE_CHARACTERS = 4096
_OWN_FOLDERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{os.sep}flytekitplugins{os.sep}firstfault{os.sep}",
)
"""The folders of this package and of the task plugin that calls it."""

_MAX_TEXT_CHARACTERS = 64 * 1024
"""Characters of a message that are kept in memory."""
CAPTURED_ATTRIBUTE = "__firstfault_noted__"
"""The attribute of an exception that was captured before."""

# Each process that records failures imports this module before it can fail. Then it may lack the
# memory or the stack to compile a pattern.
credentials.compile_patterns()
compile_patterns(exceptions)


def capture(error: BaseException, *, in_flight: bool = False) -> ExceptionInfo:
    """Return `error` as data. `in_flight` means that it is still inside the task function."""
    if isinstance(noted := _get_attribute(error, CAPTURED_ATTRIBUTE), ExceptionInfo):
        return noted
    found = _capture(error, [])
    return (try_call(lambda: _with_outer_frames(found, error))[0] or found) if in_flight else found


def find_exception_behind_exit(error: BaseException) -> BaseException:
    """Return the exception that became ``sys.exit(code)``, by default `error` itself.

    Scripts and frameworks (Hydra, click, a plain main) catch an exception, print it and exit: the
    exception is the reason, not the exit. So it is with the end of in-process restarts.
    """
    for _ in range(_MAX_CAUSES):
        is_exit = isinstance(error, SystemExit)
        if not is_exit and type(error).__name__ != "RestartAbort":
            break
        following = _get_attribute(error, "__cause__")
        if following is None and is_exit:
            following = _get_attribute(error, "__context__")
        if not _is_exception(following):
            break
        error = following
    return error


def describe_type(error: BaseException) -> ExceptionInfo:
    """Return the type of `error` and its bases, without running the user's code."""
    kind = type(error)
    return ExceptionInfo(type=qualified_name(kind), message="", bases=list_bases(kind))


def safe_text(value: Any) -> str:
    """Return ``str(value)``, or why it can't be converted."""
    # a subclass of str may override anything
    text, error = try_call(lambda: str.__str__(str(value))[:_MAX_TEXT_CHARACTERS])
    return text if text is not None else f"<no text: str() raised {type(error).__name__}>"


def qualified_name(kind: type) -> str:
    """Return the module and qualified name of a class; builtins without their module."""

    def read() -> str:
        module = type.__getattribute__(kind, "__module__")
        name = type.__getattribute__(kind, "__qualname__")
        return str(name) if module in {"builtins", None} else f"{module}.{name}"

    return try_call(read)[0] or "unknown"


def _with_outer_frames(found: ExceptionInfo, error: BaseException) -> ExceptionInfo:
    """Return an exception that hasn't left the task function with the frames that
    it has still to leave.

    They are in its traceback when it has left, and two ranks' same fault is to have the same
    frames.
    """
    trace = _get_attribute(error, "__traceback__")
    frame = trace.tb_frame.f_back if isinstance(trace, TracebackType) else None
    outer: list[FrameInfo] = []
    while frame is not None and len(outer) < _MAX_FRAMES:
        code = frame.f_code
        line = frame.f_lineno or 0
        if any(folder in code.co_filename for folder in _OWN_FOLDERS):
            break
        outer.append(
            FrameInfo(
                code.co_filename,
                line,
                code.co_name,
                linecache.getline(code.co_filename, line).strip(),
            )
        )
        frame = frame.f_back
    return (
        replace(found, frames=(*reversed(outer), *found.frames))
        if not found.frames_omitted
        else found
    )


def _get_attribute(error: BaseException, name: str, default: Any = None) -> Any:
    """Return an attribute of an exception, `default` if its ``__getattr__`` raises."""
    found, raised = try_call(lambda: getattr(error, name, default))
    return default if raised is not None else found


def _is_exception(value: Any) -> bool:
    """Whether `value` is an exception by its type;
    isinstance() would also read its ``__class__``.
    """
    return issubclass(type(value), BaseException)


def _capture(
    error: BaseException,
    done: list[BaseException],
    depth: int = 1,
    *,
    is_link: bool = False,
) -> ExceptionInfo:
    """Return an exception as data and add it to `done`; with `is_link`, without its causes."""
    done.append(error)
    kind = type(error)
    frames, omitted = _list_frames(_get_attribute(error, "__traceback__"))
    found = ExceptionInfo(
        type=qualified_name(kind),
        message=safe_text(error),
        bases=list_bases(kind),
        frames=frames,
        frames_omitted=omitted,
        notes=_list_notes(error),
        causes=() if is_link else _capture_causes(error, done, depth),
        members=_capture_members(error, done, depth),
    )
    return try_call(lambda: _with_text_frames(found))[0] or found


def list_bases(kind: type) -> tuple[str, ...]:
    """Return the qualified names of a class's bases, nearest first, without object."""
    return tuple(qualified_name(base) for base in type.__getattribute__(kind, "__mro__")[1:-1])


def _list_frames(trace: Any) -> tuple[tuple[FrameInfo, ...], int]:
    """Return the frames, outermost first, without our own at the top,
    and how many in the middle were left out.
    """
    entries: list[TracebackType] = []
    while isinstance(trace, TracebackType):
        if entries or not any(
            folder in trace.tb_frame.f_code.co_filename for folder in _OWN_FOLDERS
        ):
            entries.append(trace)
        trace = trace.tb_next
    omitted = max(len(entries) - _MAX_FRAMES, 0)
    if omitted:
        entries = entries[: _MAX_FRAMES // 2] + entries[-_MAX_FRAMES // 2 :]
    own = [entry for entry in entries if not is_library_file(entry.tb_frame.f_code.co_filename)]
    with_context = set(map(id, own[-_MAX_FRAMES_WITH_CONTEXT:]))
    return (
        tuple(_build_frame(entry, with_context=id(entry) in with_context) for entry in entries),
        omitted,
    )


def _build_frame(entry: TracebackType, *, with_context: bool) -> FrameInfo:
    code = entry.tb_frame.f_code
    line = entry.tb_lineno or 0
    lines = read_lines(code.co_filename)
    source = lines[line - 1].rstrip() if 0 < line <= len(lines) else ""
    bare = FrameInfo(code.co_filename, line, code.co_name, source.strip())
    if not source or not with_context:
        return bare
    full = try_call(
        lambda: replace(add_context(bare, lines), marked=_find_marked_columns(entry, source))
    )[0]
    return full or bare


def read_lines(file: str) -> list[str]:
    """Return a file's lines; loaders are third-party code, and may give something else."""
    lines = try_call(lambda: linecache.getlines(file))[0] or []
    return lines if all(isinstance(line, str) for line in lines) else []


def add_context(frame: FrameInfo, lines: list[str]) -> FrameInfo:
    """Return a frame with the lines around its own."""
    first = max(frame.line - 1 - _CONTEXT_LINES, 0)
    last = frame.line + _CONTEXT_LINES
    if (clause := find_enclosing_handler(lines, frame.line - 1)) is not None:
        # these lines show what the handler does
        first = min(first, clause)
        last = frame.line + 3 * _CONTEXT_LINES
    around = textwrap.dedent("\n".join(text.rstrip() for text in lines[first:last])).split("\n")
    return replace(frame, context=tuple(around), context_line=first + 1)


def _with_text_frames(exception: ExceptionInfo) -> ExceptionInfo:
    """Return an exception with the lines around the frames that its text names,
    if another process raised it.
    """
    original = unwrap_remote(exception)
    if original is exception:
        return exception
    own = [frame for frame in original.frames if not is_library_file(frame.file)][
        -_MAX_FRAMES_WITH_CONTEXT:
    ]
    known = [(frame, read_lines(frame.file)) for frame in own]
    frames = tuple(
        add_context(frame, lines) for frame, lines in known if 0 < frame.line <= len(lines)
    )
    return replace(exception, text_frames=frames)


def _find_marked_columns(entry: TracebackType, source: str) -> tuple[int, int]:
    """Return the characters of the stripped line that Python (3.11 or later) marks; (0,
    0) if it is the whole line.
    """
    positions = getattr(entry.tb_frame.f_code, "co_positions", None)
    if positions is None or entry.tb_lasti < 0:
        return (0, 0)
    first, last, start, end = next(
        itertools.islice(positions(), entry.tb_lasti // 2, None), (None,) * 4
    )
    if first != entry.tb_lineno or start is None or end is None:
        return (0, 0)
    data = source.encode()
    # of an expression on several lines the first one is marked to its end
    till = len(source) if last != first else len(data[:end].decode(errors="replace"))
    indent = len(source) - len(source.lstrip())
    since = len(data[:start].decode(errors="replace")) - indent
    till -= indent
    whole = since <= 0 and till >= len(source) - indent
    return (0, 0) if whole or not 0 <= since < till else (since, till)


def _list_notes(error: BaseException) -> tuple[str, ...]:
    notes = _get_attribute(error, "__notes__", ())
    if not isinstance(notes, list | tuple):
        return (safe_text(notes),)
    return tuple(safe_text(note)[:_MAX_NOTE_CHARACTERS] for note in notes[:_MAX_NOTES])


def _capture_causes(
    error: BaseException, done: list[BaseException], depth: int
) -> tuple[ExceptionInfo, ...]:
    """Return the nearest exceptions of the chain and the innermost ones,
    which show what failed first.
    """
    links = _list_chain(error) if depth < _MAX_DEPTH else []
    omitted, half = len(links) - _MAX_CAUSES, _MAX_CAUSES // 2
    causes: list[ExceptionInfo] = []
    for number, (link, relation) in enumerate(
        links[:half] + links[-half:] if omitted > 0 else links
    ):
        if len(done) >= _MAX_EXCEPTIONS:
            break
        found = replace(_capture(link, done, depth + 1, is_link=True), relation=relation)
        if omitted > 0 and number == half:
            found = replace(
                found,
                notes=(*found.notes, f"{counted(omitted, 'exception')} left out after this one"),
            )
        causes.append(found)
    return tuple(causes)


def _list_chain(error: BaseException) -> list[tuple[BaseException, str]]:
    """Return the causes: an explicit cause, else the context. After ``raise ... from
    None`` that isn't printed.
    """
    seen = {id(error)}
    links: list[tuple[BaseException, str]] = []
    while len(links) < _MAX_CHAIN_LENGTH:
        following = _get_attribute(error, "__cause__")
        relation = "cause"
        if following is None:
            following = _get_attribute(error, "__context__")
            relation = "suppressed" if _get_attribute(error, "__suppress_context__") else "context"
        if not _is_exception(following) or id(following) in seen:
            break
        seen.add(id(following))
        links.append((following, relation))
        error = following
    return links


def _capture_members(
    error: BaseException, done: list[BaseException], depth: int
) -> tuple[ExceptionInfo, ...]:
    """Return the members of an exception group (Python 3.11, or the backport)."""
    members = _get_attribute(error, "exceptions")
    if depth >= _MAX_DEPTH or not isinstance(members, list | tuple):
        return ()
    known = [member for member in members[:_MAX_MEMBERS] if _is_exception(member)]
    return tuple(
        _capture(member, done, depth + 1) for member in known if len(done) < _MAX_EXCEPTIONS
    )
