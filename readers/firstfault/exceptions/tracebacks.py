"""An exception as Python prints it, and its frames told apart: the program's own, and its libraries'."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from firstfault.model import ExceptionInfo, FrameInfo

__all__ = [
    "FrameRun",
    "Link",
    "chain",
    "first_member",
    "format_exception",
    "is_library",
    "own_frames",
    "place_of",
    "runs",
]

_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|lib/python\d[\d.]*|flytekitplugins/firstfault|firstfault_torch)/|^<"
)
_OURS = re.compile(r"(?:flytekitplugins/firstfault|firstfault_torch)/")
_PACKAGE = re.compile(r"(?:site-packages|dist-packages)/(?P<name>[^/]+)")
_FRAMEWORKS = {"Python", "torch", "flytekit", "firstfault", "numpy"}
_BETWEEN = {
    "cause": "The above exception was the direct cause of the following exception:",
    "context": "During handling of the above exception, another exception occurred:",
}


@dataclass(frozen=True, slots=True)
class FrameRun:
    """Frames that follow each other and are all the program's own, or all of one library."""

    library: str
    """Its package, "torch"; empty for frames of the program's own."""
    frames: tuple[FrameInfo, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """One exception of a chain."""

    exception: ExceptionInfo
    follows: str
    """How it hangs on the one before it, as Python says it; empty for the first."""


def is_library(file: str) -> bool:
    """Whether a file is none of the program's own: of an installed package, of Python, or of firstfault."""
    return _LIBRARY.search(file) is not None


def own_frames(exception: ExceptionInfo) -> tuple[FrameInfo, ...]:
    """Return the program's own frames, outermost first; of its nearest cause that has any, if it has none itself.

    Those of a group go on in its first member.

    A program may be installed as a package: where nothing else is its own, frames of packages count that are none of
    the frameworks'.
    """
    for belongs in (_is_own, lambda frame: _library_of(frame) not in _FRAMEWORKS):
        for link in (exception, *exception.causes):
            found = tuple(frame for frame in link.frames if belongs(frame))
            found += own_frames(link.members[0]) if link.members else ()
            if found:
                return found
    return ()


def first_member(exception: ExceptionInfo) -> ExceptionInfo | None:
    """Return the first exception in a group that is none itself; None if it is no group."""
    found = None
    while exception.members:
        found = exception = exception.members[0]
    return found


def place_of(frame: FrameInfo) -> str:
    """Return "train.py:41 in step": the file without its folders."""
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} in {frame.function}"


def runs(frames: Sequence[FrameInfo]) -> list[FrameRun]:
    """Return frames in their order, those of one library that follow each other together."""
    return [FrameRun(library, tuple(group)) for library, group in itertools.groupby(frames, _library_of)]


def chain(exception: ExceptionInfo) -> list[Link]:
    """Return an exception with its causes as Python prints them: the deepest first, itself last."""
    # `causes` is nearest first; each says how it hangs on the one before it
    links = [*reversed(exception.causes), exception]
    relations = ["", *(cause.relation for cause in reversed(exception.causes))]
    return [Link(link, _BETWEEN.get(relation, "")) for link, relation in zip(links, relations, strict=True)]


def format_exception(exception: ExceptionInfo) -> str:
    """Return an exception as Python prints it: causes first, then its own traceback, message and notes."""
    parts: list[str] = []
    for link in chain(exception):
        parts += ["", link.follows, ""] if link.follows else []
        parts += _traceback(link.exception)
    return "\n".join(parts).rstrip("\n")


def _is_own(frame: FrameInfo) -> bool:
    return not is_library(frame.file)


def _library_of(frame: FrameInfo) -> str:
    if _is_own(frame):
        return ""
    package = _PACKAGE.search(frame.file)
    if package:
        return package["name"].removesuffix(".py")
    return "firstfault" if _OURS.search(frame.file) else "Python"


def _traceback(exception: ExceptionInfo) -> Iterator[str]:
    if exception.frames:
        yield "Traceback (most recent call last):"
    half = len(exception.frames) // 2
    for index, frame in enumerate(exception.frames):
        if exception.frames_omitted and index == half:
            yield f"  ... {exception.frames_omitted} frames left out ..."
        yield f'  File "{frame.file}", line {frame.line}, in {frame.function}'
        if frame.code:
            yield f"    {frame.code}"
    yield f"{exception.type}: {exception.message}" if exception.message else exception.type
    yield from exception.notes
    for index, member in enumerate(exception.members, 1):
        yield f"  ---- member {index} ----"
        yield from _indented(format_exception(member).splitlines())


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)
