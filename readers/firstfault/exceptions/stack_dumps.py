"""Stack dumps of faulthandler: parsed, annotated with source lines, and formatted."""

from __future__ import annotations

import re
from collections.abc import Callable

from firstfault.exceptions.source_files import is_library_file
from firstfault.model import FrameInfo, WorkerError

THREAD_HEADER = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*$", re.MULTILINE)
_FRAME = re.compile(
    r'^[ \t]*File "(?P<file>[^"]*)", line (?P<line>\d{1,9}) in (?P<function>.+)$(?:\n {4}(?P<code>\S.*)$)?',
    re.MULTILINE,
)
"""A line of faulthandler, and the source line that `add_source_lines` added."""
_MAX_SOURCES = 64
"""Frames of one dump that get their source line."""
_MAX_LINE = 200
_FATAL = "Fatal Python error"


def get_stack_dumps(failure: WorkerError) -> list[str]:
    """Return a worker's own stack dumps; without one those that it printed before it exited, as by a timer."""
    own = [dump.text for dump in failure.stack_dumps if dump.rank == failure.rank]
    has_printed = bool(failure.exit_code) and failure.exception is None and THREAD_HEADER.search(failure.printed)
    return own or ([failure.printed] if has_printed else [])


def find_crash_frames(failure: WorkerError) -> list[FrameInfo]:
    """Return where Python met the fatal signal, innermost frame first; empty: not known."""
    fatal = (text for text in get_stack_dumps(failure) if text.startswith(_FATAL))
    threads = (
        thread
        for text in fatal
        for thread in zip(THREAD_HEADER.findall(text), THREAD_HEADER.split(text)[1:], strict=True)
    )
    found = (parse_frames(part) for head, part in threads if head.startswith("Current"))
    return next(filter(None, found), [])


def add_source_lines(dump: str, line_of: Callable[[str, int], str]) -> str:
    """Return a stack dump with the source lines of the program's own frames; an empty one could not be read."""
    left = _MAX_SOURCES

    def add(found: re.Match[str]) -> str:
        nonlocal left
        if found["code"] or is_library_file(found["file"]) or not left:
            return found[0]
        left -= 1
        code = line_of(found["file"], int(found["line"])).strip()[:_MAX_LINE]
        return f"{found[0]}\n    {code}" if code else found[0]

    return _FRAME.sub(add, dump)


def add_raise_point(dump: str, raised_at: FrameInfo) -> str:
    """Return a stack dump that tells where an exception was raised that was on its way out."""
    place = f'"{raised_at.file}", line {raised_at.line} in {raised_at.function}'
    return f"An exception raised at {place} was on its way out.\n{dump}"


def format_stack_dump(dump: str) -> str:
    """Return a dump of faulthandler as a person reads it: the thread that matters first, and no frames that started it.

    That is the main thread, or the one that crashed. Of the others those are shown that run the program's own code.
    Frames outside of the outermost one of that code are left out: torch elastic's, flytekit's, our own. A text that is
    no such dump is returned as it is.
    """
    heads, parts = THREAD_HEADER.findall(dump), THREAD_HEADER.split(dump)[1:]
    if not heads:
        return dump
    crashed = [index for index, head in enumerate(heads) if head.startswith("Current")] if _FATAL in dump else []
    first = crashed[0] if crashed else len(heads) - 1
    others = [index for index in range(len(heads)) if index != first]
    own = [index for index in others if any(not is_library_file(frame.file) for frame in parse_frames(parts[index]))]
    blocks = [_thread("thread that crashed" if crashed else "main thread", parts[first])]
    blocks += [_thread("another thread", parts[index]) for index in own]
    hidden = len(others) - len(own)
    if hidden:
        blocks.append(f"{hidden} more {'thread runs' if hidden == 1 else 'threads run'} only code of libraries")
    said = dump[: dump.index(heads[0])].strip()
    return "\n\n".join([*([said] if said else []), *blocks])


def _thread(name: str, part: str) -> str:
    frames = parse_frames(part)
    outermost = max(
        (index for index, frame in enumerate(frames) if not is_library_file(frame.file)), default=len(frames)
    )
    lines = []
    for frame in frames[: outermost + 1]:
        lines.append(f'  File "{frame.file}", line {frame.line} in {frame.function}')
        lines += [f"    {frame.code}"] if frame.code else []
    return "\n".join([f"{name} (innermost first):", *(lines or ["  no Python frame"])])


def parse_frames(part: str) -> list[FrameInfo]:
    """Return the frames of one thread in a stack dump, innermost first."""
    return [
        FrameInfo(match["file"], int(match["line"]), match["function"], match["code"] or "")
        for match in _FRAME.finditer(part)
    ]
