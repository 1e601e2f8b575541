"""The stack position of a stopped worker: in a collective, in another wait inside torch, or elsewhere."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.exceptions.tracebacks import is_library, place_of
from firstfault.model import FrameInfo

if TYPE_CHECKING:
    from firstfault.model import WorkerError

__all__ = ["Stood", "Where", "readable_stack", "where_it_stood", "with_raise_point"]

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(r'^[ \t]*File "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<function>.+)$', re.MULTILINE)
_COLLECTIVE = re.compile(r"torch/distributed/(?!elastic/|launcher/|run\.py)")
_WAITING = re.compile(r"torch/(?:autograd/|cuda/|nn/parallel/|_tensor\.py|_ops\.py)")
_OURS = re.compile(
    r"(?:flytekitplugins/firstfault|firstfault|firstfault_torch)/|/flytekit/|torch/(?:distributed/elastic|multiprocessing)/"
)
_RAISED_AT = re.compile(
    r'^An exception raised at "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<function>.+) was on its way out\.$',
    re.MULTILINE,
)
_DEPTH = 12
_FATAL = "Fatal Python error"


class Stood(enum.Enum):
    """Where the main thread of a process was."""

    COLLECTIVE = "in a collective"
    TORCH = "inside of torch"
    ELSEWHERE = "somewhere else"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Where:
    """The stack position of a process."""

    stood: Stood
    frame: str = ""
    """The innermost frame of the user's code: "train.py:12 in step"."""
    raised_at: FrameInfo | None = None
    """Where an exception was raised that was on its way out; None: there was none, or it is not known."""


def where_it_stood(failure: WorkerError) -> Where:
    """Return the position of a worker's main thread, from the stack dump that its agent took before it stopped it."""
    for dump in failure.stack_dumps:
        if dump.rank == failure.rank:
            return replace(_where(dump.text), raised_at=_raised_at(dump.text))
    return Where(Stood.UNKNOWN)


def with_raise_point(dump: str, raised_at: FrameInfo) -> str:
    """Return a stack dump that tells where an exception was raised that was on its way out."""
    place = f'"{raised_at.file}", line {raised_at.line} in {raised_at.function}'
    return f"An exception raised at {place} was on its way out.\n{dump}"


def readable_stack(dump: str) -> str:
    """Return a dump of faulthandler as a person reads it: the thread that matters first, and no frames that started it.

    That is the main thread, or the one that crashed. Of the others those are shown that run the program's own code.
    Frames outside of the outermost one of that code are left out: torch elastic's, flytekit's, our own. A text that is
    no such dump is returned as it is.
    """
    heads, parts = _THREAD.findall(dump), _THREAD.split(dump)[1:]
    if not heads:
        return dump
    crashed = [index for index, head in enumerate(heads) if head.startswith("Current")] if _FATAL in dump else []
    first = crashed[0] if crashed else len(heads) - 1
    others = [index for index in range(len(heads)) if index != first]
    own = [index for index in others if any(not is_library(frame.file) for frame in _frames(parts[index]))]
    blocks = [_thread("thread that crashed" if crashed else "main thread", parts[first])]
    blocks += [_thread("another thread", parts[index]) for index in own]
    hidden = len(others) - len(own)
    if hidden:
        blocks.append(f"{hidden} more {'thread runs' if hidden == 1 else 'threads run'} only code of libraries")
    said = dump[: dump.index(heads[0])].strip()
    return "\n\n".join([*([said] if said else []), *blocks])


def _thread(name: str, part: str) -> str:
    frames = _frames(part)
    outermost = max((index for index, frame in enumerate(frames) if not is_library(frame.file)), default=len(frames))
    lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames[: outermost + 1]]
    return "\n".join([f"{name} (innermost first):", *(lines or ["  no Python frame"])])


def _raised_at(text: str) -> FrameInfo | None:
    found = _RAISED_AT.match(text)
    return FrameInfo(found["file"], int(found["line"]), found["function"]) if found is not None else None


def _frames(part: str) -> list[FrameInfo]:
    return [FrameInfo(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(part)]


def _where(text: str) -> Where:
    # faulthandler prints the main thread last, innermost frame first
    frames = _frames(_THREAD.split(text)[-1])
    if not frames:
        return Where(Stood.UNKNOWN)
    name = place_of(next((frame for frame in frames if not is_library(frame.file)), frames[0]))
    inner = [frame.file for frame in frames[:_DEPTH] if not _OURS.search(frame.file)]
    if any(_COLLECTIVE.search(file) for file in inner):
        return Where(Stood.COLLECTIVE, name)
    if any(_WAITING.search(file) for file in inner[:2]):
        return Where(Stood.TORCH, name)
    return Where(Stood.ELSEWHERE, name)
