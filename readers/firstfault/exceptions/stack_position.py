"""The stack position of a stopped worker, from the stack dumps of faulthandler: in a collective, in
torch elsewhere, or outside torch.

Of 64 ranks that were stopped after a timeout, 63 are in one all-reduce. The rank that is elsewhere
is the straggler.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from firstfault.exceptions.exceptions_in_text import format_place
from firstfault.exceptions.source_files import is_library_file
from firstfault.model import FrameInfo, WorkerError
from firstfault.utils.lazy_pattern import LazyPattern

THREAD_HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_MAX_SOURCE_LINES = 64
_MAX_SOURCE_LINE_CHARS = 200
_FATAL_ERROR_TITLE = "Fatal Python error"

# A frame as faulthandler prints it, with the source line that `add_source_lines` added
_DUMP_FRAME = LazyPattern(r"""(?m)
  ^[ \t]*File[ ]"(?P<file>[^"]*)",[ ]line[ ](?P<line>\d{1,9})[ ]in[ ](?P<function>.+)$(?:\n[ ]{4}(?P<code>\S.*)$)?
""")


def get_stack_dumps(failure: WorkerError) -> list[str]:
    """Return a worker's stack dumps. Without one, return the dump that it printed before it exited,
    as by a timer.
    """
    own = [dump.text for dump in failure.stack_dumps if dump.rank == failure.rank]
    has_printed = (
        bool(failure.exit_code)
        and failure.exception is None
        and THREAD_HEADER.search(failure.printed)
    )
    return own or ([failure.printed] if has_printed else [])


def parse_frames(thread: str) -> list[FrameInfo]:
    """Return the frames of one thread in a stack dump, innermost first."""
    return [
        FrameInfo(match["file"], int(match["line"]), match["function"], match["code"] or "")
        for match in _DUMP_FRAME.finditer(thread)
    ]


def find_crash_frames(failure: WorkerError) -> list[FrameInfo]:
    """Return the frames of the thread that got the fatal signal, innermost first, or an empty list
    if they are unknown.
    """
    for text in get_stack_dumps(failure):
        if text.startswith(_FATAL_ERROR_TITLE):
            threads = zip(THREAD_HEADER.findall(text), THREAD_HEADER.split(text)[1:], strict=True)
            # faulthandler marks the thread that got the signal as "Current"
            crashed = (
                parse_frames(thread) for header, thread in threads if header.startswith("Current")
            )
            if frames := next(filter(None, crashed), []):
                return frames
    return []


def add_source_lines(dump: str, read_line: Callable[[str, int], str]) -> str:
    """Return a stack dump with the source lines of the program's own frames.

    faulthandler prints no source lines, because it allocates no memory.

    Args:
        dump: the stack dump.
        read_line: returns a line of a file, given its name and number; empty if it can't be read.
    """
    lines_left = _MAX_SOURCE_LINES

    def add(match: re.Match[str]) -> str:
        nonlocal lines_left
        if match["code"] or is_library_file(match["file"]) or not lines_left:
            return match[0]
        lines_left -= 1
        code = read_line(match["file"], int(match["line"])).strip()[:_MAX_SOURCE_LINE_CHARS]
        return f"{match[0]}\n    {code}" if code else match[0]

    return _DUMP_FRAME.sub(add, dump)


def add_raise_point(dump: str, raised_at: FrameInfo) -> str:
    """Return a stack dump with a first line about the exception in flight: where it was raised."""
    place = f'"{raised_at.file}", line {raised_at.line} in {raised_at.function}'
    return f"An exception raised at {place} was on its way out.\n{dump}"


def format_stack_dump(dump: str) -> str:
    """Return a stack dump for a report: the thread that matters first,
    without the frames that started it.

    The thread that matters is the one that crashed, else the main thread. Further threads are shown
    if they run the program's own code. Frames outside of that code are left out: those of torch
    elastic, flytekit and firstfault. A text that isn't a stack dump is returned unchanged.
    """
    headers = THREAD_HEADER.findall(dump)
    threads = THREAD_HEADER.split(dump)[1:]
    if not headers:
        return dump
    is_fatal = _FATAL_ERROR_TITLE in dump
    crashed = [
        index for index, header in enumerate(headers) if is_fatal and header.startswith("Current")
    ]
    # faulthandler prints the main thread last
    shown_first = crashed[0] if crashed else len(headers) - 1
    others = [index for index in range(len(headers)) if index != shown_first]
    own = [
        index
        for index in others
        if any(not is_library_file(frame.file) for frame in parse_frames(threads[index]))
    ]
    blocks = [
        _format_thread("thread that crashed" if crashed else "main thread", threads[shown_first])
    ]
    blocks += [_format_thread("another thread", threads[index]) for index in own]
    hidden = len(others) - len(own)
    if hidden:
        blocks.append(
            f"{hidden} more {'thread runs' if hidden == 1 else 'threads run'} only code of"
            " libraries"
        )
    title = dump[: dump.index(headers[0])].strip()
    return "\n\n".join([*([title] if title else []), *blocks])


def _format_thread(name: str, thread: str) -> str:
    frames = parse_frames(thread)
    own = [index for index, frame in enumerate(frames) if not is_library_file(frame.file)]
    lines = []
    for frame in frames[: max(own, default=len(frames)) + 1]:
        lines.append(f'  File "{frame.file}", line {frame.line} in {frame.function}')
        lines += [f"    {frame.code}"] if frame.code else []
    return "\n".join([f"{name} (innermost first):", *(lines or ["  no Python frame"])])


PROGRAM_ENDED = "its program had ended"
"""`StackPosition.exit_stage` of a process in which Python runs exit handlers or finalizers."""
_MAX_FRAMES_SEARCHED = 12
_END_RECORDER_FILE = re.compile(
    r"firstfault_torch/(?:worker/(?:recording|worker_monitor)|torchrun/script)\.py$"
)
_NO_PYTHON_FRAME = "<no Python frame>"
"""faulthandler's text for a main thread that has left the program."""
_PROCESS_GROUP_FILE = LazyPattern(r"torch/distributed/(?!elastic/|launcher/|run\.py)")

# Not any folder with this name: a clone named firstfault is in the path of everything installed
# below it
_LAUNCHER_FILE = LazyPattern(r"""
  (?:flyte(?:kit)?plugins/firstfault|firstfault(?:_torch|_inprocess)?)/(?!.*(?:site|dist)-packages/)
  |/flytekit/
  |torch/(?:distributed/elastic|multiprocessing)/
""")

# The innermost file of a thread that waits for another thread: a join, a queue, a future, or
# asyncio's loop
_THREAD_WAIT_FILE = LazyPattern(
    r"/(?:threading|queue|selectors|concurrent/futures/(?:_base|thread))\.py$"
)


class PositionKind(enum.Enum):
    """Where the main thread of a process was."""

    COLLECTIVE = "in a collective"
    TORCH = "inside of torch"
    ELSEWHERE = "somewhere else"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StackPosition:
    """The stack position of a process's main thread."""

    kind: PositionKind
    frame: str = ""
    """The innermost frame of the user's code: "train.py:12 in step"."""
    raised_at: FrameInfo | None = None
    """Where the exception in flight was raised; None if unknown or if there was no exception."""
    waits_for_loader: bool = False
    """Whether it waited for a process of its data loader."""
    is_finalizing: bool = False
    """Whether the frame was dropping an object with a finalizer."""
    exit_stage: str = ""
    """What had ended in a process that still exists, or empty if nothing had. It is a sentence
    about one of three: the task function (torch's process waits until its agent has read the
    result), the program (Python ends), or the process group.
    """

    @property
    def description(self) -> str:
        """A sentence: "it was at train.py:12 in step"."""
        waits = "waited for a process of its data loader" if self.waits_for_loader else "was"
        return self.exit_stage or f"it {waits} at {self.frame}"


def locate_main_thread(failure: WorkerError) -> StackPosition:
    """Return the position of a worker's main thread in the stack dump that its agent
    took before stopping it.
    """
    has_outstanding = any(item.is_outstanding for item in failure.collectives)
    return parse_position(next(iter(get_stack_dumps(failure)), ""), has_outstanding=has_outstanding)


# The line of `add_raise_point`
_RAISE_POINT_LINE = LazyPattern(r"""(?m)
  ^An[ ]exception[ ]raised[ ]at[ ]"(?P<file>[^"]*)",[ ]line[ ](?P<line>\d{1,9})[ ]in[ ](?P<function>.+)[ ]
  was[ ]on[ ]its[ ]way[ ]out\.$
""")

# The file and function of a frame
_LOADER_WAIT_FRAME = LazyPattern(r"/torch/utils/data/dataloader\.py[ ](?:_try_get_data|_get_data)$")


def parse_position(dump: str, *, has_outstanding: bool = False) -> StackPosition:
    """Return the position of the main thread in a stack dump.

    Args:
        dump: a stack dump of faulthandler.
        has_outstanding: whether the worker had called a collective that hadn't completed.
    """
    raise_point = _RAISE_POINT_LINE.match(dump)
    # faulthandler prints the main thread last, innermost frame first
    *other_threads, main_thread = THREAD_HEADER.split(dump)
    frames = parse_frames(main_thread)
    library_frames = itertools.takewhile(lambda frame: is_library_file(frame.file), frames)
    library_calls = [f"{frame.file} {frame.function}" for frame in library_frames]
    position = _find_exit_stage(frames, has_left=_NO_PYTHON_FRAME in main_thread)
    raised_at = raise_point and FrameInfo(
        raise_point["file"], int(raise_point["line"]), raise_point["function"]
    )
    return replace(
        position or _classify(frames, other_threads, has_outstanding=has_outstanding),
        raised_at=raised_at,
        waits_for_loader=any(map(_LOADER_WAIT_FRAME.search, library_calls)),
        is_finalizing=any(call.endswith(" __del__") for call in library_calls),
    )


def is_process_group_code(text: str) -> bool:
    """Whether a text, such as a file name, names code of torch's process groups or their store."""
    return _PROCESS_GROUP_FILE.search(text) is not None


def has_left_program(failure: WorkerError) -> bool:
    """Whether a worker had left the task function, or its program, before its agent stopped it."""
    frames = [
        frame
        for dump in get_stack_dumps(failure)
        for frame in parse_frames(THREAD_HEADER.split(dump)[-1])
    ]
    return any(
        frame.function in {"record_end", "record_exit", "exits"}
        and _END_RECORDER_FILE.search(frame.file)
        for frame in frames
    )


def find_crash_position(failure: WorkerError) -> str:
    """Return where a process crashed, "train.py:12 in step", or an empty string if this is unknown
    or in a collective.
    """
    frames = find_crash_frames(failure)
    files = (frame.file for frame in frames if not _LAUNCHER_FILE.search(frame.file))
    in_collective = any(map(_PROCESS_GROUP_FILE.search, files))
    return _format_own_frame(frames) if frames and not in_collective else ""


_MULTIPROCESSING_WAIT_FILE = LazyPattern(r"/multiprocessing/(?:synchronize|queues|connection)\.py$")
_WORKER_ENTRY_FILE = LazyPattern(r"torch/distributed/elastic/multiprocessing/api\.py$")
_DESTROY_GROUP_FRAME = LazyPattern(
    r"torch/distributed/distributed_c10d\.py[ ]destroy_process_group$"
)

# The outermost function of a main thread while Python ends: an exit handler, a finalizer, or
# Python's own
_EXIT_FUNCTION = LazyPattern(
    r"^(?:__del__|_?\w*(?:at_?exit|_exit|exit_?func|shutdown|clean_?up|tear_?down)\w*)$"
)


def _find_exit_stage(frames: list[FrameInfo], *, has_left: bool) -> StackPosition | None:
    """Return the position of a main thread that has left the training, fully or in part, or None if
    it hasn't left.
    """
    if has_left or (frames and _EXIT_FUNCTION.search(frames[-1].function)):
        return StackPosition(PositionKind.ELSEWHERE, exit_stage=PROGRAM_ENDED)
    if any(_DESTROY_GROUP_FRAME.search(f"{frame.file} {frame.function}") for frame in frames):
        stage = "it was leaving the process group"
        return StackPosition(PositionKind.ELSEWHERE, _format_own_frame(frames), exit_stage=stage)
    # the task function has returned, and torch's `_wrap` waits in a multiprocessing event until its
    # agent has read the result
    caller = next(
        (frame for frame in frames if not _MULTIPROCESSING_WAIT_FILE.search(frame.file)),
        None,
    )
    is_wrap = (
        caller is not None and caller.function == "_wrap" and _WORKER_ENTRY_FILE.search(caller.file)
    )
    if is_wrap and caller != frames[0]:
        return StackPosition(PositionKind.ELSEWHERE, exit_stage="its function had returned")
    return None


_TORCH_WAIT_FILE = LazyPattern(r"torch/(?:autograd/|cuda/|nn/parallel/|_tensor\.py|_ops\.py)")
_AUTOGRAD_FILE = LazyPattern(r"torch/autograd/")


def _classify(
    frames: list[FrameInfo], other_threads: Sequence[str], *, has_outstanding: bool
) -> StackPosition:
    if not frames:
        return StackPosition(PositionKind.UNKNOWN)
    if _THREAD_WAIT_FILE.search(frames[0].file):
        # The main thread waits for a thread, so the thread's position counts: an asynchronous
        # checkpoint runs its collectives in a thread of a library, and a program may train in a
        # separate thread.
        busy_threads = [thread for thread in map(parse_frames, other_threads) if _is_busy(thread)]
        own_threads = [
            thread
            for thread in busy_threads
            if any(not is_library_file(frame.file) for frame in thread)
        ]
        files = (frame.file for thread in busy_threads for frame in thread)
        if not own_threads and any(map(_PROCESS_GROUP_FILE.search, files)):
            return StackPosition(PositionKind.COLLECTIVE, _format_own_frame(frames))
        frames = own_threads[0] if len(own_threads) == 1 else frames
    own_frame = _format_own_frame(frames)
    inner_files = [
        frame.file
        for frame in frames[:_MAX_FRAMES_SEARCHED]
        if not _LAUNCHER_FILE.search(frame.file)
    ]
    if any(map(_PROCESS_GROUP_FILE.search, inner_files)):
        return StackPosition(PositionKind.COLLECTIVE, own_frame)
    if is_library_file(frames[0].file):
        is_waiting = any(map(_TORCH_WAIT_FILE.search, inner_files[:2]))
    else:
        # a hook of the program within a backward pass: it may hang itself, or wait for a collective
        # that was called
        is_waiting = has_outstanding and any(map(_AUTOGRAD_FILE.search, inner_files))
    return StackPosition(PositionKind.TORCH if is_waiting else PositionKind.ELSEWHERE, own_frame)


def _format_own_frame(frames: Sequence[FrameInfo]) -> str:
    """Return the innermost frame of the user's code; without one, the innermost frame."""
    return format_place(
        next((frame for frame in frames if not is_library_file(frame.file)), frames[0])
    )


_THREAD_START_FILE = LazyPattern(r"/(?:threading|concurrent/futures/thread)\.py$")


def _is_busy(thread: Sequence[FrameInfo]) -> bool:
    """Whether a thread that Python started runs something, instead of waiting for work."""
    is_started = bool(thread) and _THREAD_START_FILE.search(thread[-1].file) is not None
    return is_started and _THREAD_WAIT_FILE.search(thread[0].file) is None
