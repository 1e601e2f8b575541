"""A copy of an exception that refers to none of its objects,
made while the program runs and described later.

A reference to an exception keeps the frames of its traceback alive, and their local variables: a
batch on the GPU that the program wants to free before it tries again. The copy is made in the
middle of the program: it runs no code of the program, reads no file, and takes some microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, TracebackType, WrapperDescriptorType
from typing import Any

from firstfault.exceptions.source_files import is_library_file
from firstfault.model import ExceptionInfo, FrameInfo
from firstfault_torch.failures.capture import add_context, list_bases, qualified_name, read_lines

_MAX_FRAMES = 40
_MAX_CAUSES = 3
_MAX_TEXT = 2000
_PLAIN_TYPES = {str, int, float, bool, bytes, type(None)}


def _reader(name: str) -> Callable[[BaseException], Any]:
    """Return a function that reads an exception's attribute,
    whatever its class does with attributes.
    """
    get: Callable[[BaseException], Any] = vars(BaseException)[name].__get__
    return get


get_traceback: Callable[[BaseException], TracebackType | None] = _reader("__traceback__")
_get_args, _get_cause, _get_context = map(_reader, ("args", "__cause__", "__context__"))
_is_context_suppressed = _reader("__suppress_context__")


@dataclass(slots=True)  # a frozen one takes longer to make
class CopiedException:
    """What describes an exception, or one of its causes."""

    identity: int
    """The exception's `id`; another object may have it later."""
    kind: type[BaseException]
    text: str
    frames: list[tuple[CodeType, int]]
    """Code and line, outermost first."""
    omitted: int
    """Frames in the middle that were left out."""
    relation: str = ""
    """To the one before it: "cause", "context" or "suppressed"."""


def copy_exception(error: BaseException) -> tuple[CopiedException, ...]:
    """Return a copy of an exception, and of the nearest exceptions of its chain."""
    return (_copy(error, ""), *(_copy(link, relation) for link, relation in _iter_causes(error)))


def build_exception(copies: Sequence[CopiedException]) -> ExceptionInfo:
    """Return a copied exception as data; reads the source files."""
    first, *causes = map(_build, copies)
    return replace(first, causes=tuple(causes))


def _iter_causes(error: BaseException) -> Iterator[tuple[BaseException, str]]:
    seen = {id(error)}
    for _ in range(_MAX_CAUSES):
        cause = _get_cause(error)
        relation = "cause"
        if cause is None:
            cause = _get_context(error)
            relation = "suppressed" if _is_context_suppressed(error) else "context"
        if cause is None or id(cause) in seen:
            return
        seen.add(id(cause))
        yield cause, relation
        error = cause


def _copy(error: BaseException, relation: str) -> CopiedException:
    frames: list[tuple[CodeType, int]] = []
    entry = get_traceback(error)
    while entry is not None:
        frames.append((entry.tb_frame.f_code, entry.tb_lineno or 0))
        entry = entry.tb_next
    omitted = max(len(frames) - _MAX_FRAMES, 0)
    if omitted:
        frames = frames[: _MAX_FRAMES // 4] + frames[_MAX_FRAMES // 4 + omitted :]
    return CopiedException(id(error), type(error), _copy_text(error), frames, omitted, relation)


def _copy_text(error: BaseException) -> str:
    """Return the text without the program's ``__str__``, which may be slow or wait for a GPU:
    then the plain args.
    """
    args = _get_args(error)
    plain = [arg for arg in args if type(arg) in _PLAIN_TYPES]
    is_built_in = type(type.__getattribute__(type(error), "__str__")) is WrapperDescriptorType
    if is_built_in and len(plain) == len(args):
        return str(error)[:_MAX_TEXT]
    return ", ".join(str(arg) for arg in plain)[:_MAX_TEXT]


def _build(copy: CopiedException) -> ExceptionInfo:
    frames = tuple(_build_frame(code, line) for code, line in copy.frames)
    return ExceptionInfo(
        type=qualified_name(copy.kind),
        message=copy.text,
        bases=list_bases(copy.kind),
        frames=frames,
        frames_omitted=copy.omitted,
        relation=copy.relation,
    )


def _build_frame(code: CodeType, line: int) -> FrameInfo:
    lines = read_lines(code.co_filename)
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    frame = FrameInfo(code.co_filename, line, code.co_name, source)
    return add_context(frame, lines) if source and not is_library_file(code.co_filename) else frame
