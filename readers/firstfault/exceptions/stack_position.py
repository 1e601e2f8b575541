"""The stack position of a stopped worker: in a collective, in another wait inside torch, or elsewhere."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from firstfault.exceptions.source_files import is_library_file
from firstfault.exceptions.stack_dumps import THREAD_HEADER, find_crash_frames, get_stack_dumps, parse_frames
from firstfault.exceptions.traceback_format import format_place
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


class PositionKind(enum.Enum):
    """Where the main thread of a process was."""

    COLLECTIVE = "in a collective"
    TORCH = "inside of torch"
    ELSEWHERE = "somewhere else"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StackPosition:
    """The stack position of a process."""

    kind: PositionKind
    frame: str = ""
    """The innermost frame of the user's code: "train.py:12 in step"."""
    raised_at: FrameInfo | None = None
    """Where an exception was raised that was on its way out; None: there was none, or it is not known."""
    waits_for_loader: bool = False
    """Whether it waited for a process of its data loader."""
    is_finalizing: bool = False
    """Whether that frame of the user's code was dropping an object that has a finaliser."""
    exit_stage: str = ""
    """What had ended, the process still being there: the task function, while torch's process waits until its agent has
    read the result, the program, while Python ends, or its part in the process group. Empty: none of them."""

    @property
    def description(self) -> str:
        """A sentence: "it was at train.py:12 in step"."""
        waits = "waited for a process of its data loader" if self.waits_for_loader else "was"
        return self.exit_stage or f"it {waits} at {self.frame}"


def locate_main_thread(failure: WorkerError) -> StackPosition:
    """Return the position of a worker's main thread, from the stack dump that its agent took before it stopped it."""
    has_outstanding = any(item.is_outstanding for item in failure.collectives)
    return parse_position(next(iter(get_stack_dumps(failure)), ""), has_outstanding=has_outstanding)


def parse_position(text: str, *, has_outstanding: bool = False) -> StackPosition:
    """Return the position that a stack dump tells, of a worker with or without an outstanding collective."""
    found = _RAISED_AT.match(text)
    # faulthandler prints the main thread last, innermost frame first
    *others, main = THREAD_HEADER.split(text)
    frames = parse_frames(main)
    within = itertools.takewhile(lambda frame: is_library_file(frame.file), frames)
    inner = [f"{frame.file} {frame.function}" for frame in within]
    return replace(
        _where(frames, others, has_left=_NO_FRAME in main, has_outstanding=has_outstanding),
        raised_at=FrameInfo(found["file"], int(found["line"]), found["function"]) if found else None,
        waits_for_loader=any(map(_WAITS_FOR_LOADER.search, inner)),
        is_finalizing=any(name.endswith(" __del__") for name in inner),
    )


def is_process_group_code(text: str) -> bool:
    """Whether a text, such as a file's name, names code of torch's process groups and their store."""
    return _COLLECTIVE.search(text) is not None


def has_ended(failure: WorkerError) -> bool:
    """Whether a worker that its agent stopped had already left the task function, or its program, by itself."""
    frames = [frame for text in get_stack_dumps(failure) for frame in parse_frames(THREAD_HEADER.split(text)[-1])]
    return any(frame.function in {"record_end", "exits"} and _RECORDS_THE_END.search(frame.file) for frame in frames)


def find_crash_position(failure: WorkerError) -> str:
    """Return where Python met the fatal signal: "train.py:12 in step"; empty: not known, or it was in a collective."""
    frames = find_crash_frames(failure)
    in_collective = any(_COLLECTIVE.search(frame.file) for frame in frames if not _OURS.search(frame.file))
    return _name(frames) if frames and not in_collective else ""


def _where(frames: list[FrameInfo], others: Sequence[str], *, has_left: bool, has_outstanding: bool) -> StackPosition:
    """Return the position of a main thread with these frames, beside the other threads' stacks."""
    if has_left or (frames and _ENDS_PYTHON.search(frames[-1].function)):
        return StackPosition(PositionKind.ELSEWHERE, exit_stage=PROGRAM_ENDED)
    if any(_LEAVES_GROUP.search(f"{frame.file} {frame.function}") for frame in frames):
        return StackPosition(PositionKind.ELSEWHERE, _name(frames), exit_stage="it was leaving the process group")
    if not frames:
        return StackPosition(PositionKind.UNKNOWN)
    around = next((frame for frame in frames if not _PYTHONS_EVENT.search(frame.file)), None)
    if around not in {None, frames[0]} and _RUNS_THE_FUNCTION.search(around.file) and around.function == "_wrap":
        return StackPosition(PositionKind.ELSEWHERE, exit_stage="its function had returned")
    if _WAITS_FOR_THREAD.search(frames[0].file):
        working = [found for found in map(parse_frames, others) if _works(found)]
        own = [found for found in working if any(not is_library_file(frame.file) for frame in found)]
        if not own and any(_COLLECTIVE.search(frame.file) for found in working for frame in found):
            # a library's thread, such as that of a checkpoint
            return StackPosition(PositionKind.COLLECTIVE, _name(frames))
        frames = own[0] if len(own) == 1 else frames
    name = _name(frames)
    inner = [frame.file for frame in frames[:_DEPTH] if not _OURS.search(frame.file)]
    if any(_COLLECTIVE.search(file) for file in inner):
        return StackPosition(PositionKind.COLLECTIVE, name)
    # a hook of the program in a backward pass may hang, or wait for a collective that has been called
    if not is_library_file(frames[0].file):
        waits = has_outstanding and any(map(_BACKWARD.search, inner))
    else:
        waits = any(map(_WAITING.search, inner[:2]))
    if waits:
        return StackPosition(PositionKind.TORCH, name)
    return StackPosition(PositionKind.ELSEWHERE, name)


def _name(frames: Sequence[FrameInfo]) -> str:
    return format_place(next((frame for frame in frames if not is_library_file(frame.file)), frames[0]))


def _works(frames: Sequence[FrameInfo]) -> bool:
    """Whether a thread of Python's runs something, and does not wait for other work."""
    is_thread = bool(frames) and _STARTS.search(frames[-1].file) is not None
    return is_thread and _WAITS_FOR_THREAD.search(frames[0].file) is None
