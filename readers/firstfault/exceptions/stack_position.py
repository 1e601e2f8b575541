"""The stack position of a stopped worker: in a collective, in another wait inside torch, or elsewhere."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.exceptions.tracebacks import is_library, place_of
from firstfault.model import FrameInfo

if TYPE_CHECKING:
    from firstfault.model import WorkerError

__all__ = ["Stood", "Where", "where_it_stood"]

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(r'^[ \t]*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_COLLECTIVE = re.compile(r"torch/distributed/(?!elastic/|launcher/|run\.py)")
_WAITING = re.compile(r"torch/(?:autograd/|cuda/|nn/parallel/|_tensor\.py|_ops\.py)")
_OURS = re.compile(
    r"(?:flytekitplugins/firstfault|firstfault|firstfault_torch)/|/flytekit/|torch/(?:distributed/elastic|multiprocessing)/"
)
_DEPTH = 12


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


def where_it_stood(failure: WorkerError) -> Where:
    """Return the position of a worker's main thread, from the stack dump that its agent took before it stopped it."""
    for dump in failure.stack_dumps:
        if dump.rank == failure.rank:
            return _where(dump.text)
    return Where(Stood.UNKNOWN)


def _where(text: str) -> Where:
    # faulthandler prints the main thread last, innermost frame first
    parts = _THREAD.split(text)
    frames = [FrameInfo(match["file"], int(match["line"]), match["function"]) for match in _FRAME.finditer(parts[-1])]
    if not frames:
        return Where(Stood.UNKNOWN)
    name = place_of(next((frame for frame in frames if not is_library(frame.file)), frames[0]))
    inner = [frame.file for frame in frames[:_DEPTH] if not _OURS.search(frame.file)]
    if any(_COLLECTIVE.search(file) for file in inner):
        return Where(Stood.COLLECTIVE, name)
    if any(_WAITING.search(file) for file in inner[:2]):
        return Where(Stood.TORCH, name)
    return Where(Stood.ELSEWHERE, name)
