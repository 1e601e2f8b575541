"""The first cause of an exception that others were raised from."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from firstfault.exceptions.exceptions_in_text import (
    POOL_TRACEBACK_SUFFIX,
    REMOTE,
    get_short_name,
    unwrap_remote_exception,
)
from firstfault.exceptions.source_files import find_library, is_library_file
from firstfault.model import ExceptionInfo, FrameInfo

_FRAMEWORKS = {"Python", "torch", "flytekit", "firstfault", "numpy"}
_HIDES_ITS_CAUSE = re.compile(
    r"failed to run (?:stage backward|(?:full )?backward|forward|stage)|^Error (?:locating target|in call to target)"
    r"|^An error occurred while generating the dataset|^RetryError\b|when making fake tensor call",
    re.IGNORECASE | re.MULTILINE,
)
"""Found in texts of wrappers that libraries raise for an error of any kind."""
_INTERRUPTIONS = {"CancelledError", "GeneratorExit", "StopIteration", "StopAsyncIteration", "SystemExit"}
"""Exceptions that tell how a task or an iterator ended, not why."""
_WORDLESS = {"Empty", "Full", "IndexError", "KeyError", "LookupError"}
"""Lookups whose texts tell little: what a program raises in their place tells more."""
_OTHER_WAYS = {"ImportError", "ModuleNotFoundError", "NotImplementedError"}
"""Exceptions that ask for another way, whatever else the handler does."""
_LOOKUPS = {"AttributeError", "FileExistsError", "FileNotFoundError"} | _WORDLESS | _OTHER_WAYS
"""Exceptions that programs expect: they try one way, and take another one in the handler."""
_CLEAN_UPS = {"__exit__", "__aexit__", "__del__", "close", "aclose", "shutdown"}
_TIDIES = re.compile(
    r"(?:\b|_)(?:abort|alert|cancel|cle?a|clos|destroy|dump|error|exception|exit|fail|finali|finish|flush|handle|kill|log|notif"
    r"|print|record|releas|report|rollback|save|send|shut_?down|stop|tear|terminat|unlock)",
    re.IGNORECASE,
)
"""Begins a word in the names of what programs do after a failure, and not in its stead."""
_OF_PEERS = re.compile(r"(?i)\b(?:peers?|gloo|nccl|process group|monitored|timed out waiting|wait timeout|store)\b")
"""Found in the texts of errors between ranks, which a handler meets that all ranks take part in."""
_BLOCK = re.compile(r"\s*(?:(?P<handler>except|finally)|(?:async\s+)?def|class)\b")
_CLAUSE = re.compile(r"^\s*except\*?\s+\(?(?P<types>[\w., ]+?)\)?\s*(?:as\s+(?P<name>\w+)\s*)?:")
_LONGEST_HANDLER = 12
"""Lines of a handler that are looked at."""
_ANY = {"", "BaseException", "Exception"}
_GIVES = re.compile(r"(?:return|yield|import|from)\b|[\w.\[\], '\"]+(?::[^=]+)?=(?!=)")
"""Begins a line that gives something in place of what failed."""
_LEAVES = re.compile(r"\s*(?:raise\b|(?:sys\.|os\.)?_?exit\()")


@dataclass(frozen=True, slots=True)
class CauseChain:
    """An exception's first cause, and what was raised because of it."""

    wrappers: tuple[ExceptionInfo, ...]
    """What was raised because of it, outermost first; empty if the exception has no cause."""
    first: ExceptionInfo
    """The first cause. Its own `causes` are what libraries raised and replaced before it reached the program."""

    @property
    def told(self) -> tuple[ExceptionInfo, ...]:
        """The first cause, and what libraries raised before it: all that tells what failed."""
        return (self.first, *(link for link in self.first.causes if not _tells_nothing(link)))


def find_causes(exception: ExceptionInfo) -> CauseChain:
    """Return the first cause of an exception, and its wrappers.

    That is the innermost exception of the chain that came out of the program's code: a library may have caught and
    replaced others, whose texts tell less. A group counts as its first member. A lookup that failed as the program
    expects it to, in a clause for that, isn't the cause of what failed in the handler.
    """
    links = [exception]
    for link in exception.causes:
        outer = next((outer for outer in reversed(links) if not _tells_nothing(outer)), exception)
        links += [] if _was_handled(outer, link) else [link]
    last_first = range(len(links) - 1, -1, -1)
    counting = (at for belongs in (_is_own, _is_of_a_package) for at in last_first if _counts(links[at], belongs))
    at = _behind(links, next(counting, 0))
    wrappers, first = tuple(links[:at]), links[at]
    members = [member for member in first.members if get_short_name(member) not in _INTERRUPTIONS] or first.members
    if members:
        inner = find_causes(members[0])
        return CauseChain((*wrappers, first, *inner.wrappers), inner.first)
    return CauseChain(wrappers, replace(first, causes=tuple(links[at + 1 :])))


def find_first_cause(exception: ExceptionInfo) -> ExceptionInfo:
    """Return the first cause; if its text has the traceback of another process, the exception of that process."""
    return unwrap_remote_exception(find_causes(exception).first)


def is_wrapper(outer: ExceptionInfo, inner: ExceptionInfo) -> bool:
    """Whether `outer` was raised to report `inner`; else it failed by itself while `inner` was being handled."""
    if inner.relation not in {"context", "suppressed"} or not outer.frames or not inner.frames:
        return True
    innermost = outer.frames[-1]
    return innermost.code.startswith("raise") and _place(innermost) == _place(inner.frames[0])


def iter_exceptions(exception: ExceptionInfo) -> Iterator[ExceptionInfo]:
    """Yield an exception, its causes, and all members with theirs."""
    for link in (exception, *exception.causes):
        yield link
        for member in link.members:
            yield from iter_exceptions(member)


def list_library_calls(exception: ExceptionInfo) -> list[str]:
    """Return the files and functions of libraries, innermost first, from the program's last line to the first cause."""
    causes = find_causes(exception)
    frames = join_frames([*causes.wrappers, causes.first])[::-1]
    inner = itertools.takewhile(lambda frame: is_library_file(frame.file), frames)
    return [f"{frame.file} {frame.function}" for frame in inner]


def find_own_frames(exception: ExceptionInfo) -> tuple[FrameInfo, ...]:
    """Return the frames of the user's code on the way to the first cause, outermost first.

    If it has none, those of the nearest wrapper that has any. The user's code may be an installed package: if no other
    frame is found, frames of packages count, except those of Python, torch, flytekit, firstfault and numpy.
    """
    causes, first = find_causes(exception), find_first_cause(exception)
    path = [*causes.wrappers, *([] if first is causes.first else [causes.first]), first]
    for belongs in (_is_own, _is_of_a_package):
        for end in range(len(path), 0, -1):
            if any(map(belongs, path[end - 1].frames)):
                return tuple(filter(belongs, join_frames(path[:end])))
        for link in first.causes:
            if found := tuple(filter(belongs, link.frames)):
                return found
    return ()


def join_frames(path: Sequence[ExceptionInfo]) -> tuple[FrameInfo, ...]:
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
    """Whether `context` was dealt with, and `outer` is the failure of what was done in its stead."""
    places = [_place(frame) for frame in outer.frames]
    # a program that exits takes no other way
    if get_short_name(outer) == "SystemExit" or not context.frames or _place(context.frames[0]) not in places:
        return False
    below = outer.frames[len(places) - places[::-1].index(_place(context.frames[0])) :]
    at = outer.frames[-len(below) - 1]
    here = at.line - at.context_line
    above = find_enclosing_handler(at.context, here)
    clause = _CLAUSE.match(at.code if above is None else at.context[above])
    expected = {name.strip().rsplit(".", 1)[-1] for name in clause["types"].split(",")} if clause else {""}
    code = _CLAUSE.sub("", at.code).strip()
    name, own = get_short_name(context), [frame for frame in context.frames if _is_own(frame)]
    # a lookup that failed in the program's own line, in a clause for lookups alone, or in a library's
    is_lookup = name in _LOOKUPS and (expected <= _LOOKUPS if _is_own(context.frames[0]) else len(context.frames) == 1)
    is_lookup = is_lookup and len(own) <= 1 and not any(frame.code.startswith("raise") for frame in own)
    if is_lookup or context.relation != "context" or is_wrapper(outer, context):
        is_told = context.relation == "suppressed" or not is_wrapper(outer, context)
        return is_lookup and (is_told or name in _WORDLESS)
    if any(_TIDIES.search(text) for text in (code.partition("(")[0], *(frame.function for frame in below))):
        return False
    if name not in _OTHER_WAYS and any(_OF_PEERS.search(link.message) for link in (outer, context)):
        return False
    is_own = bool(below) and _is_own(below[0])
    is_again = is_own and _place(below[0]) in map(_place, context.frames[1:2])
    if not own or (is_again and not expected <= _LOOKUPS):
        return not own  # else a library's handler
    # a clause for any exception, or none that is known
    if expected & _ANY and name not in _OTHER_WAYS and not (is_own and _GIVES.match(code)):
        return False
    after = (
        n
        for n in range(here + 1, len(at.context))
        if above is not None and find_enclosing_handler(at.context, n) == above
    )
    if (above is not None and "finally" in at.context[above]) or any(_LEAVES.match(at.context[n]) for n in after):
        return False
    return not (clause and clause["name"] and re.search(rf"\b{clause['name']}\b", code))


def find_enclosing_handler(lines: Sequence[str], at: int) -> int | None:
    """Return where the clause, `except` or `finally`, stands in whose block a line is; None: none."""
    near = lines[max(at - _LONGEST_HANDLER, 0) : at + 1]
    margins = [len(line) - len(line.lstrip()) if line.strip() else 1000 for line in near]
    for number in range(at - 1, at - len(margins), -1):
        margin = margins[number - at - 1]
        if margin < min(margins[number - at :]) and (block := _BLOCK.match(lines[number])):
            return number if block["handler"] else None
    return None


def _behind(links: Sequence[ExceptionInfo], at: int) -> int:
    """Return the link during which a library's clean-up failed, or that a library wrapped: what they hide is why."""
    while at + 1 < len(links) and not _tells_nothing(links[at + 1]):
        is_wrapped = is_wrapper(links[at], links[at + 1])
        is_tidied = not is_wrapped and any(frame.function in _CLEAN_UPS for frame in links[at].frames)
        if not is_tidied and not (is_wrapped and _HIDES_ITS_CAUSE.search(links[at].message)):
            break
        at += 1
    return at


def _counts(link: ExceptionInfo, belongs: Callable[[FrameInfo], bool]) -> bool:
    if _tells_nothing(link):
        return False
    return not link.frames or any(map(belongs, link.frames)) or any(_counts(member, belongs) for member in link.members)


def _tells_nothing(link: ExceptionInfo) -> bool:
    name = get_short_name(link)
    if name == "SystemExit" and link.relation == "context" and link.frames:
        return not _is_own(link.frames[-1])  # the program wanted to end, and then its clean-up failed
    return name in _INTERRUPTIONS or name.endswith(POOL_TRACEBACK_SUFFIX)


def _place(frame: FrameInfo) -> tuple[str, str]:
    return frame.file, frame.function


def _is_own(frame: FrameInfo) -> bool:
    return not is_library_file(frame.file)


def _is_of_a_package(frame: FrameInfo) -> bool:
    return find_library(frame) not in _FRAMEWORKS
