"""The stack position of a stopped worker: in a collective, in another wait inside torch, or elsewhere."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from firstfault.exceptions.source_files import is_library
from firstfault.exceptions.stack_dumps import THREAD_HEADER, frames_of_crash, parse_frames, stacks_of
from firstfault.exceptions.traceback_format import place_of
from firstfault.model import FrameInfo, WorkerError

_COLLECTIVE = re.compile(r"torch/distributed/(?!elastic/|launcher/|run\.py)")
_WAITING = re.compile(r"torch/(?:autograd/|cuda/|nn/parallel/|_tensor\.py|_ops\.py)")
_BACKWARD = re.compile(r"torch/autograd/")
_OURS = re.compile(
    # not any folder of this name: a clone's is in the path of all that is installed below it
    r"(?:flytekitplugins/firstfault|firstfault|firstfault_torch)/(?!.*(?:site|dist)-packages/)"
    r"|/flytekit/|torch/(?:distributed/elastic|multiprocessing)/"
)
_RAISED_AT = re.compile(
    r'^An exception raised at "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<function>.+) was on its way out\.$',
    re.MULTILINE,
)
_WAITS_FOR_THREAD = re.compile(r"/(?:threading|queue|selectors|concurrent/futures/(?:_base|thread))\.py$")
"""Where a main thread stands that waits for a thread: in a join, a queue, a future, or asyncio's loop."""
_STARTS = re.compile(r"/(?:threading|concurrent/futures/thread)\.py$")
_DEPTH = 12
_RUNS_THE_FUNCTION = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py$")
_RECORDS_THE_END = re.compile(r"firstfault_torch/(?:worker/(?:recording|worker_monitor)|torchrun/script)\.py$")
PROGRAM_ENDED = "its program had ended"
"""What had ended, of a process in which Python runs exit handlers or finalisers."""
_WAITS_FOR_LOADER = re.compile(r"/torch/utils/data/dataloader\.py (?:_try_get_data|_get_data)$")
_NO_FRAME = "<no Python frame>"
"""faulthandler's text for a main thread that has left the program."""
_ENDS_PYTHON = re.compile(r"^(?:__del__|_?\w*(?:at_?exit|_exit|exit_?func|shutdown|clean_?up|tear_?down)\w*)$")
"""The outermost function of a main thread that Python calls while it ends: an exit handler, a finaliser, or its own."""
_LEAVES_GROUP = re.compile(r"torch/distributed/distributed_c10d\.py destroy_process_group$")
_PYTHONS_EVENT = re.compile(r"/multiprocessing/(?:synchronize|queues|connection)\.py$")


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
    in_loader: bool = False
    """Whether it waited for a process of its data loader."""
    finalises: bool = False
    """Whether that frame of the user's code was dropping an object that has a finaliser."""
    returned: str = ""
    """What had ended, the process still being there: the task function, while torch's process waits until its agent has
    read the result, the program, while Python ends, or its part in the process group. Empty: none of them."""

    @property
    def doing(self) -> str:
        """A sentence: "it was at train.py:12 in step"."""
        waits = "waited for a process of its data loader" if self.in_loader else "was"
        return self.returned or f"it {waits} at {self.frame}"


def where_it_stood(failure: WorkerError) -> Where:
    """Return the position of a worker's main thread, from the stack dump that its agent took before it stopped it."""
    has_outstanding = any(item.is_outstanding for item in failure.collectives)
    return stood_at(next(iter(stacks_of(failure)), ""), has_outstanding=has_outstanding)


def stood_at(text: str, *, has_outstanding: bool = False) -> Where:
    """Return the position that a stack dump tells, of a worker with or without an outstanding collective."""
    found = _RAISED_AT.match(text)
    # faulthandler prints the main thread last, innermost frame first
    *others, main = THREAD_HEADER.split(text)
    frames = parse_frames(main)
    within = itertools.takewhile(lambda frame: is_library(frame.file), frames)
    inner = [f"{frame.file} {frame.function}" for frame in within]
    return replace(
        _where(frames, others, has_left=_NO_FRAME in main, has_outstanding=has_outstanding),
        raised_at=FrameInfo(found["file"], int(found["line"]), found["function"]) if found else None,
        in_loader=any(map(_WAITS_FOR_LOADER.search, inner)),
        finalises=any(name.endswith(" __del__") for name in inner),
    )


def is_of_a_group(text: str) -> bool:
    """Whether a text, such as a file's name, names code of torch's process groups and their store."""
    return _COLLECTIVE.search(text) is not None


def has_ended(failure: WorkerError) -> bool:
    """Whether a worker that its agent stopped had already left the task function, or its program, by itself."""
    frames = [frame for text in stacks_of(failure) for frame in parse_frames(THREAD_HEADER.split(text)[-1])]
    return any(frame.function in {"record_end", "exits"} and _RECORDS_THE_END.search(frame.file) for frame in frames)


def place_of_crash(failure: WorkerError) -> str:
    """Return where Python met the fatal signal: "train.py:12 in step"; empty: not known, or it was in a collective."""
    frames = frames_of_crash(failure)
    in_collective = any(_COLLECTIVE.search(frame.file) for frame in frames if not _OURS.search(frame.file))
    return _name(frames) if frames and not in_collective else ""


def _where(frames: list[FrameInfo], others: Sequence[str], *, has_left: bool, has_outstanding: bool) -> Where:
    """Return the position of a main thread with these frames, beside the other threads' stacks."""
    if has_left or (frames and _ENDS_PYTHON.search(frames[-1].function)):
        return Where(Stood.ELSEWHERE, returned=PROGRAM_ENDED)
    if any(_LEAVES_GROUP.search(f"{frame.file} {frame.function}") for frame in frames):
        return Where(Stood.ELSEWHERE, _name(frames), returned="it was leaving the process group")
    if not frames:
        return Where(Stood.UNKNOWN)
    around = next((frame for frame in frames if not _PYTHONS_EVENT.search(frame.file)), None)
    if around not in {None, frames[0]} and _RUNS_THE_FUNCTION.search(around.file) and around.function == "_wrap":
        return Where(Stood.ELSEWHERE, returned="its function had returned")
    if _WAITS_FOR_THREAD.search(frames[0].file):
        working = [found for found in map(parse_frames, others) if _works(found)]
        own = [found for found in working if any(not is_library(frame.file) for frame in found)]
        if not own and any(_COLLECTIVE.search(frame.file) for found in working for frame in found):
            # a library's thread, such as that of a checkpoint
            return Where(Stood.COLLECTIVE, _name(frames))
        frames = own[0] if len(own) == 1 else frames
    name = _name(frames)
    inner = [frame.file for frame in frames[:_DEPTH] if not _OURS.search(frame.file)]
    if any(_COLLECTIVE.search(file) for file in inner):
        return Where(Stood.COLLECTIVE, name)
    # a hook of the program in a backward pass may hang, or wait for a collective that has been called
    if not is_library(frames[0].file):
        waits = has_outstanding and any(map(_BACKWARD.search, inner))
    else:
        waits = any(map(_WAITING.search, inner[:2]))
    if waits:
        return Where(Stood.TORCH, name)
    return Where(Stood.ELSEWHERE, name)


def _name(frames: Sequence[FrameInfo]) -> str:
    return place_of(next((frame for frame in frames if not is_library(frame.file)), frames[0]))


def _works(frames: Sequence[FrameInfo]) -> bool:
    """Whether a thread of Python's runs something, and does not wait for other work."""
    is_thread = bool(frames) and _STARTS.search(frames[-1].file) is not None
    return is_thread and _WAITS_FOR_THREAD.search(frames[0].file) is None
