"""Formats an exception as Python prints it, and separates frames of the user's code from those of libraries."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.exceptions.remote_traceback import REMOTE, with_remote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from firstfault.model import ExceptionInfo, FrameInfo

_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|lib/python\d[\d.]*|flytekitplugins/firstfault|firstfault_torch)/|^<"
)
_OURS = re.compile(r"(?:flytekitplugins/firstfault|firstfault_torch)/")
_PACKAGE = re.compile(r"(?:site-packages|dist-packages)/(?P<name>[^/]+)")
FRAMEWORKS = {"Python", "torch", "flytekit", "firstfault", "numpy"}
_BETWEEN = {
    REMOTE: "The traceback above is in the text of the following exception:",
    "cause": "The above exception was the direct cause of the following exception:",
    "context": "During handling of the above exception, another exception occurred:",
}


@dataclass(frozen=True, slots=True)
class FrameRun:
    """Consecutive frames of the user's code, or of one library."""

    library: str
    """The package, "torch"; empty for the user's code."""
    frames: tuple[FrameInfo, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """One exception of a chain."""

    exception: ExceptionInfo
    follows: str
    """Python's sentence between the previous exception and this one; empty for the first."""


def is_library(file: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to firstfault."""
    return _LIBRARY.search(file) is not None


def library_of(frame: FrameInfo) -> str:
    """Return the package of a frame, "torch"; empty for the user's code."""
    if not is_library(frame.file):
        return ""
    package = _PACKAGE.search(frame.file)
    if package:
        return package["name"].removesuffix(".py")
    return "firstfault" if _OURS.search(frame.file) else "Python"


def place_of(frame: FrameInfo) -> str:
    """Return "train.py:41 in step": the file without its folders."""
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} in {frame.function}"


def runs(frames: Sequence[FrameInfo]) -> list[FrameRun]:
    """Return the frames in their order, consecutive frames of one library together."""
    return [FrameRun(library, tuple(group)) for library, group in itertools.groupby(frames, library_of)]


def chain(exception: ExceptionInfo) -> list[Link]:
    """Return an exception's causes and the exception, in Python's order: the deepest cause first.

    An exception of another process is a cause of the one that has its traceback in its text.
    """
    exception = with_remote(exception)
    # `causes` is nearest first; the relation of each is to the exception before it
    shown = tuple(itertools.takewhile(lambda cause: cause.relation != "suppressed", exception.causes))
    links = [*reversed(shown), exception]
    relations = ["", *(cause.relation for cause in reversed(shown))]
    return [Link(link, _BETWEEN.get(relation, "")) for link, relation in zip(links, relations, strict=True)]


def format_exception(exception: ExceptionInfo) -> str:
    """Return an exception as Python prints it: causes first, then its own traceback, message and notes."""
    parts: list[str] = []
    for link in chain(exception):
        parts += ["", link.follows, ""] if link.follows else []
        parts += _traceback(link.exception)
    return "\n".join(parts).rstrip("\n")


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
