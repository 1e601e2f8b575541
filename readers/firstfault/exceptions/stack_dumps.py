"""Stack dumps of faulthandler: parsed, annotated with source lines, and formatted for a report."""

from __future__ import annotations

import re
from collections.abc import Callable

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
