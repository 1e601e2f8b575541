"""A traceback with the frames of libraries folded: for the page with the lines around each frame, and as lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from firstfault.exceptions.first_cause import own_frames
from firstfault.exceptions.tracebacks import chain, format_exception, place_of, runs
from firstfault.text import elide

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from firstfault.exceptions.tracebacks import FrameRun
    from firstfault.model import ExceptionInfo, FrameInfo
    from firstfault.report.facts import JobIdentity

_TEXT = 16_000
_WEB = re.compile(r"https?://[\w.-]+(?::\d+)?(?:/[\w.~@+-]+)+")
_PATH = re.compile(r"[^\x00-\x1f]+")


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of source code."""

    number: int
    before: str
    marked: str
    """The part that Python marks with carets."""
    after: str
    is_current: bool


@dataclass(frozen=True, slots=True)
class _Frame:
    """One frame of the program's own code, with the lines around."""

    folder: str
    name: str
    """The file without its folders."""
    line: int
    function: str
    code: str
    lines: tuple[_Line, ...]
    link: str
    """Where the line can be read in its repository; empty: not known."""
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive frames: of a library, folded, or of the program."""

    library: str
    frames: tuple[_Frame, ...]
    gap: str = ""
    """A sentence about frames that were left out, instead of frames."""


@dataclass(frozen=True, slots=True)
class FoldedException:
    """One exception of a chain, with its frames grouped by library."""

    follows: str
    exception: ExceptionInfo
    runs: tuple[_Run, ...]
    members: tuple[str, ...]
    message: str


def folded_traceback(exception: ExceptionInfo, identity: JobIdentity) -> list[FoldedException]:
    """Return an exception with its causes, the deepest first; frames link to the source code of `identity`."""
    innermost = next(reversed(own_frames(exception)), None)
    links = chain(exception)
    # in a recursion many frames are equal: the last one is the innermost
    opened = max((number for number, link in enumerate(links) if innermost in link.exception.frames), default=-1)
    found = []
    for number, link in enumerate(links):
        raised = link.exception
        own = innermost if number == opened else None
        half = len(raised.frames) // 2 if raised.frames_omitted else 0
        shown = [_run(run, identity) for run in runs(raised.frames[:half])]
        if raised.frames_omitted:
            shown.append(_Run("", (), f"{raised.frames_omitted} frames left out"))
        shown += [_run(run, identity) for run in runs(raised.frames[half:])]
        members = tuple(elide(format_exception(member), _TEXT) for member in raised.members)
        message = elide(raised.message, _TEXT)
        found.append(FoldedException(link.follows, raised, tuple(_with_open(shown, own)), members, message))
    return found


def _with_open(shown: list[_Run], innermost: FrameInfo | None) -> list[_Run]:
    """Return the runs with the last frame at the innermost own place open."""
    for index, run in reversed(list(enumerate(shown))):
        for place, frame in reversed(list(enumerate(run.frames))):
            if innermost is not None and (frame.folder + frame.name, frame.line) == (innermost.file, innermost.line):
                frames = (*run.frames[:place], replace(frame, is_open=True), *run.frames[place + 1 :])
                return [*shown[:index], replace(run, frames=frames), *shown[index + 1 :]]
    return shown


def _run(run: FrameRun, identity: JobIdentity) -> _Run:
    return _Run(run.library, tuple(_frame(frame, identity) for frame in run.frames))


def _frame(frame: FrameInfo, identity: JobIdentity) -> _Frame:
    folder, slash, name = frame.file.rpartition("/")
    lines = tuple(_line(frame, number, text) for number, text in enumerate(frame.context, frame.context_line))
    link = _link(frame, identity)
    return _Frame(folder + slash, name, frame.line, frame.function, frame.code, lines, link)


def _line(frame: FrameInfo, number: int, text: str) -> _Line:
    if number != frame.line:
        return _Line(number, text, "", "", is_current=False)
    indent = len(text) - len(text.lstrip())
    is_marked = 0 <= frame.marked[0] < frame.marked[1] <= len(text) - indent
    since, until = (indent + column for column in frame.marked) if is_marked else (len(text), len(text))
    return _Line(number, text[:since], text[since:until], text[until:], is_current=True)


def _link(frame: FrameInfo, identity: JobIdentity) -> str:
    """Return the address of a frame's line; only an ordinary web address is ever one."""
    root = identity.source_root.rstrip("/") + "/"
    if not frame.file.startswith(root) or not _WEB.fullmatch(identity.source_url) or not _PATH.fullmatch(frame.file):
        return ""
    anchor = f"#lines-{frame.line}" if "bitbucket" in identity.source_url else f"#L{frame.line}"
    return f"{identity.source_url}/{quote(frame.file.removeprefix(root))}{anchor}"


# --- as lines -------------------------------------------------------------------------------------------------------


def folded_lines(exception: ExceptionInfo) -> Iterator[str]:
    """Yield a traceback with consecutive frames of a library in one line; unfolded if no frame is the program's own."""
    fold = bool(own_frames(exception))
    for link in chain(exception):
        if link.follows:
            yield from ("", link.follows, "")
        yield from _folded_link(link.exception, fold=fold)


def _folded_link(exception: ExceptionInfo, *, fold: bool) -> Iterator[str]:
    frames = exception.frames
    if frames:
        yield "Traceback (most recent call last):"
    half = len(frames) // 2 if exception.frames_omitted else 0
    yield from _folded_frames(frames[:half], fold=fold, innermost=False)
    if exception.frames_omitted:
        yield f"  ... {exception.frames_omitted} frames left out"
    yield from _folded_frames(frames[half:], fold=fold, innermost=True)
    yield f"{exception.type}: {exception.message}" if exception.message else exception.type
    yield from exception.notes
    for number, member in enumerate(exception.members, 1):
        yield f"  ---- member {number} ----"
        yield from (f"  {line}" for line in folded_lines(member))


def _folded_frames(frames: Sequence[FrameInfo], *, fold: bool, innermost: bool) -> Iterator[str]:
    found = runs(frames)
    for run in found:
        if run.library and fold:
            count = f"{len(run.frames)} frame{'s' if len(run.frames) > 1 else ''}"
            where = f", the last is {place_of(run.frames[-1])}" if innermost and run is found[-1] else ""
            yield f"  ... {count} of {run.library}{where}"
            continue
        for frame in run.frames:
            yield f'  File "{frame.file}", line {frame.line}, in {frame.function}'
            if frame.code:
                yield f"    {frame.code}"
