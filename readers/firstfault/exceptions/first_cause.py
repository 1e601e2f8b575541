"""Finds the first cause of an exception: through causes, contexts and groups, as deep as they were recorded.

What a program raises is often a wrapper: `TrainingError("training failed")` from the error that tells why. Or it is the
failure of a clean-up, which ran while the first exception was being handled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.exceptions.tracebacks import (
    FRAMEWORKS,
    OF_POOLS,
    REMOTE,
    is_library,
    library_of,
    original_of,
    short_name,
)

if TYPE_CHECKING:
    from firstfault.model import ExceptionInfo, FrameInfo

_INTERRUPTIONS = {"CancelledError", "GeneratorExit", "StopIteration", "StopAsyncIteration", "SystemExit"}
"""Exceptions that tell how a task or an iterator ended, not why."""
_LOOKUPS = {
    "AttributeError",
    "Empty",
    "FileExistsError",
    "FileNotFoundError",
    "Full",
    "ImportError",
    "IndexError",
    "KeyError",
    "LookupError",
    "ModuleNotFoundError",
    "NotImplementedError",
}
"""Exceptions that programs expect: they try one way, and take another one in the handler."""
_WORDLESS = {"Empty", "Full", "IndexError", "KeyError", "LookupError"}
"""Those whose texts tell little: what a program raises in their place tells more."""
_CLEAN_UPS = {"__exit__", "__aexit__", "__del__", "close", "aclose", "shutdown"}
_CLAUSE = re.compile(r"^\s*except\*?\s+\(?(?P<types>[\w., ]+?)\)?\s*(?:as\s+\w+\s*)?:")


@dataclass(frozen=True, slots=True)
class Causes:
    """An exception's first cause, and what was raised because of it."""

    wrappers: tuple[ExceptionInfo, ...]
    """What was raised because of it, outermost first; empty if the exception has no cause."""
    first: ExceptionInfo
    """The first cause. Its own `causes` are what libraries raised and replaced before it reached the program."""

    @property
    def told(self) -> tuple[ExceptionInfo, ...]:
        """The first cause, and what libraries raised before it: all that tells what failed."""
        return (self.first, *(link for link in self.first.causes if not _tells_nothing(link)))


def causes_of(exception: ExceptionInfo) -> Causes:
    """Return the first cause of an exception, and its wrappers.

    That is the innermost exception of the chain that came out of the program's code: a library may have caught and
    replaced others, whose texts tell less. A group counts as its first member. A lookup that failed as the program
    expects it to, in a clause for that, is not the cause of what failed in the handler.
    """
    links = (exception, *exception.causes)
    handled = (number for number in range(1, len(links)) if _was_handled(links[number - 1], links[number]))
    links = links[: next(handled, len(links))]
    last_first = range(len(links) - 1, -1, -1)
    counting = (at for belongs in (_is_own, _is_of_a_package) for at in last_first if _counts(links[at], belongs))
    at = _before_clean_ups(links, next(counting, 0))
    wrappers, first = links[:at], links[at]
    members = [member for member in first.members if short_name(member) not in _INTERRUPTIONS] or first.members
    if members:
        inner = causes_of(members[0])
        return Causes((*wrappers, first, *inner.wrappers), inner.first)
    return Causes(wrappers, replace(first, causes=tuple(links[at + 1 :])))


def first_cause(exception: ExceptionInfo) -> ExceptionInfo:
    """Return the first cause; if its text has the traceback of another process, the exception of that process."""
    return original_of(causes_of(exception).first)


def is_wrapper(outer: ExceptionInfo, inner: ExceptionInfo) -> bool:
    """Whether `outer` was raised to report `inner`; else it failed by itself while `inner` was being handled."""
    if inner.relation not in {"context", "suppressed"} or not outer.frames or not inner.frames:
        return True
    innermost = outer.frames[-1]
    return innermost.code.startswith("raise") and _place(innermost) == _place(inner.frames[0])


def all_links(exception: ExceptionInfo) -> Iterator[ExceptionInfo]:
    """Yield an exception, its causes, and all members with theirs."""
    for link in (exception, *exception.causes):
        yield link
        for member in link.members:
            yield from all_links(member)


def own_frames(exception: ExceptionInfo) -> tuple[FrameInfo, ...]:
    """Return the frames of the user's code on the way to the first cause, outermost first.

    If it has none, those of the nearest wrapper that has any. The user's code may be an installed package: if no other
    frame is found, frames of packages count, except those of Python, torch, flytekit, firstfault and numpy.
    """
    causes, first = causes_of(exception), first_cause(exception)
    path = [*causes.wrappers, *([] if first is causes.first else [causes.first]), first]
    for belongs in (_is_own, _is_of_a_package):
        for end in range(len(path), 0, -1):
            if any(map(belongs, path[end - 1].frames)):
                return tuple(filter(belongs, frames_to(path[:end])))
        for link in first.causes:
            if found := tuple(filter(belongs, link.frames)):
                return found
    return ()


def frames_to(path: Sequence[ExceptionInfo]) -> tuple[FrameInfo, ...]:
    """Return all frames on the way to the last exception of a path of wrappers.

    The traceback of a cause begins where it was caught; the frames around that are in the wrapper's.
    """
    frames: tuple[FrameInfo, ...] = ()
    is_member = False
    for link in path:
        if link.frames:
            caught = [number for number, frame in enumerate(frames) if _place(frame) == _place(link.frames[0])]
            if caught and link.relation != REMOTE:
                frames = frames[: caught[-1]]
            elif not is_member:
                frames = ()
            frames += link.frames
        is_member = bool(link.members)
    return frames


def _was_handled(outer: ExceptionInfo, context: ExceptionInfo) -> bool:
    """Whether `context` is a lookup that failed as expected, in whose handler `outer` was raised."""
    is_reported = context.relation != "suppressed" and is_wrapper(outer, context)
    if short_name(context) not in (_WORDLESS if is_reported else _LOOKUPS) or not context.frames:
        return False
    own = [frame for frame in context.frames if _is_own(frame)]
    if len(own) > 1 or any(frame.code.startswith("raise") for frame in own):
        return False
    if is_library(context.frames[0].file):
        return len(context.frames) == 1  # no lines are recorded around it
    caught_at = [frame for frame in outer.frames if _place(frame) == _place(context.frames[0])]
    if not caught_at:
        return False
    # whether the clause that caught it is for expected exceptions alone
    frame = caught_at[-1]
    above = frame.context[: max(frame.line - frame.context_line, 0)]
    clause = next((match for line in reversed(above) if (match := _CLAUSE.match(line))), None)
    return clause is not None and {name.strip().rsplit(".", 1)[-1] for name in clause["types"].split(",")} <= _LOOKUPS


def _before_clean_ups(links: Sequence[ExceptionInfo], at: int) -> int:
    """Return the link during which a library's clean-up failed: what it hides is why."""
    while at + 1 < len(links) and not is_wrapper(links[at], links[at + 1]) and not _tells_nothing(links[at + 1]):
        if not any(frame.function in _CLEAN_UPS for frame in links[at].frames):
            break
        at += 1
    return at


def _counts(link: ExceptionInfo, belongs: Callable[[FrameInfo], bool]) -> bool:
    if _tells_nothing(link):
        return False
    return not link.frames or any(map(belongs, link.frames)) or any(_counts(member, belongs) for member in link.members)


def _tells_nothing(link: ExceptionInfo) -> bool:
    name = short_name(link)
    if name == "SystemExit" and link.relation == "context" and link.frames:
        return not _is_own(link.frames[-1])  # the program wanted to end, and then its clean-up failed
    return name in _INTERRUPTIONS or name.endswith(OF_POOLS)


def _place(frame: FrameInfo) -> tuple[str, str]:
    return frame.file, frame.function


def _is_own(frame: FrameInfo) -> bool:
    return not is_library(frame.file)


def _is_of_a_package(frame: FrameInfo) -> bool:
    return library_of(frame) not in FRAMEWORKS
