"""The first cause of an exception: the one in its chain that explains the failure.

A program often raises a wrapper, `TrainingError("training failed")`, from the error that explains
it. Or its clean-up fails while the first exception is being handled. Or it looks something up,
catches the `KeyError`, and fails in the handler for another reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from firstfault.exceptions.exceptions_in_text import (
    POOL_TRACEBACK_SUFFIX,
    REMOTE_RELATION,
    get_short_name,
    unwrap_remote,
)
from firstfault.exceptions.source_files import find_library, is_library_file
from firstfault.model import ExceptionInfo, FrameInfo
from firstfault.utils.lazy_pattern import LazyPattern

_FRAMEWORK_PACKAGES = {"Python", "torch", "flytekit", "firstfault", "numpy"}
_CONTROL_FLOW_TYPES = {
    "CancelledError",
    "GeneratorExit",
    "StopIteration",
    "StopAsyncIteration",
    "SystemExit",
}
"""Exceptions that report how a task or an iterator ended, not why."""
_FAILED_LOOKUP_TYPES = {"Empty", "Full", "IndexError", "KeyError", "LookupError"}
"""Lookups with uninformative messages: the exception that a program raises in the
handler explains more.
"""
_MISSING_FEATURE_TYPES = {"ImportError", "ModuleNotFoundError", "NotImplementedError"}
"""Exceptions that make a program take another way, whatever else its handler does."""
_EXPECTED_EXCEPTION_TYPES = (
    {"AttributeError", "FileExistsError", "FileNotFoundError"}
    | _FAILED_LOOKUP_TYPES
    | _MISSING_FEATURE_TYPES
)
"""Exceptions that programs expect: they try one way, and take another way in the handler."""
_CLEAN_UP_FUNCTIONS = {"__exit__", "__aexit__", "__del__", "close", "aclose", "shutdown"}
_HANDLER_LINES_READ = 12
_CATCH_ALL_TYPES = {"", "BaseException", "Exception"}


@dataclass(frozen=True, slots=True)
class CauseChain:
    """An exception's first cause, and the exceptions that were raised because of it."""

    wrappers: tuple[ExceptionInfo, ...]
    """The exceptions raised because of it, outermost first; empty if the exception has no cause."""
    first: ExceptionInfo
    """The first cause. Its own `causes` were raised and replaced by libraries before
    it reached the program.
    """

    @property
    def informative_causes(self) -> tuple[ExceptionInfo, ...]:
        """The exceptions that explain the failure: the first cause,
        and what libraries raised before it.
        """
        return (self.first, *(link for link in self.first.causes if not _is_uninformative(link)))


def find_causes(exception: ExceptionInfo) -> CauseChain:
    """Return the first cause of an exception, and its wrappers.

    The first cause is the innermost exception of the chain that passed through the program's code.
    A library may have caught and replaced others before, with messages that explain less. An
    exception group counts as its first member. A lookup that failed as its handler expects isn't
    the cause of what failed in the handler.
    """
    links = [exception]
    for link in exception.causes:
        outer = next(
            (outer for outer in reversed(links) if not _is_uninformative(outer)), exception
        )
        links += [] if _was_handled(outer, link) else [link]
    innermost_first = range(len(links) - 1, -1, -1)
    candidates = (
        index
        for belongs in (_is_own_frame, _is_outside_frameworks)
        for index in innermost_first
        if _is_candidate(links[index], belongs)
    )
    index = _skip_generic_wrappers(links, next(candidates, 0))
    wrappers = tuple(links[:index])
    first = links[index]
    # a task group cancels its other tasks when one fails: their CancelledErrors explain nothing
    members = [
        member for member in first.members if get_short_name(member) not in _CONTROL_FLOW_TYPES
    ] or first.members
    if members:
        inner = find_causes(members[0])
        return CauseChain((*wrappers, first, *inner.wrappers), inner.first)
    return CauseChain(wrappers, replace(first, causes=tuple(links[index + 1 :])))


def find_first_cause(exception: ExceptionInfo) -> ExceptionInfo:
    """Return the first cause. If its message is a traceback of another process,
    return that process's exception.
    """
    return unwrap_remote(find_causes(exception).first)


def is_wrapper(outer: ExceptionInfo, inner: ExceptionInfo) -> bool:
    """Whether `outer` was raised to report `inner`. Otherwise it is another failure,
    during the handling of `inner`.
    """
    if inner.relation not in {"context", "suppressed"} or not outer.frames or not inner.frames:
        return True
    innermost = outer.frames[-1]
    return innermost.code.startswith("raise") and _get_function(innermost) == _get_function(
        inner.frames[0]
    )


def iter_exceptions(exception: ExceptionInfo) -> Iterator[ExceptionInfo]:
    """Yield an exception, its causes, and all members of exception groups with their causes."""
    for link in (exception, *exception.causes):
        yield link
        for member in link.members:
            yield from iter_exceptions(member)


def find_own_frames(exception: ExceptionInfo) -> tuple[FrameInfo, ...]:
    """Return the frames of the user's code on the way to the first cause, outermost first.

    If there are none, return those of the nearest wrapper that has any. The user's code may be an
    installed package: if no other frame is found, frames of packages count, except for Python,
    torch, flytekit, firstfault and numpy.
    """
    causes = find_causes(exception)
    first = find_first_cause(exception)
    path = [*causes.wrappers, *([] if first is causes.first else [causes.first]), first]
    for belongs in (_is_own_frame, _is_outside_frameworks):
        for end in range(len(path), 0, -1):
            if any(map(belongs, path[end - 1].frames)):
                return tuple(filter(belongs, join_frames(path[:end])))
        for link in first.causes:
            if frames := tuple(filter(belongs, link.frames)):
                return frames
    return ()


def join_frames(path: Sequence[ExceptionInfo]) -> tuple[FrameInfo, ...]:
    """Return all frames on the way to the last exception of a path of wrappers, outermost first."""
    frames: tuple[FrameInfo, ...] = ()
    is_member = False
    for link in path:
        if link.frames:
            # The traceback of a cause begins in the function that caught it. The frames outside of
            # that function are only in the wrapper's traceback.
            catching = _get_function(link.frames[0])
            caught = [
                number for number, frame in enumerate(frames) if _get_function(frame) == catching
            ]
            if caught and link.relation != REMOTE_RELATION:
                frames = frames[: caught[-1]]
            elif not is_member:
                frames = ()
            frames += link.frames
        is_member = bool(link.members)
    return frames


# In the messages of errors between ranks, which a handler raises if all ranks take part in it
_PEER_ERROR = LazyPattern(
    r"(?i)\b(?:peers?|gloo|nccl|process[ ]group|monitored|timed[ ]out[ ]waiting|wait[ ]timeout|store)\b"
)

# Begins a word in the names of functions that a program calls after a failure, not instead of what
# failed
_ERROR_HANDLING_VERB = LazyPattern(r"""(?i)
  (?:\b|_)
  (?:abort|alert|cancel|cle?a|clos|destroy|dump|error|exception|exit|fail|finali|finish|flush|handle|kill|log|notif|print
    |record|releas|report|rollback|save|send|shut_?down|stop|tear|terminat|unlock)
""")
_EXCEPT_CLAUSE = LazyPattern(
    r"^\s*except\*?\s+\(?(?P<types>[\w., ]+?)\)?\s*(?:as\s+(?P<name>\w+)\s*)?:"
)

# Begins a line that returns or assigns a substitute for what failed
_SUBSTITUTE_STATEMENT = LazyPattern(
    r"""(?:return|yield|import|from)\b|[\w.\[\], '\"]+(?::[^=]+)?=(?!=)"""
)
_RAISE_OR_EXIT_STATEMENT = LazyPattern(r"\s*(?:raise\b|(?:sys\.|os\.)?_?exit\()")


def _was_handled(outer: ExceptionInfo, context: ExceptionInfo) -> bool:
    """Whether the program handled `context`, and `outer` is the failure of what it did instead.

    `try: return cache[key]` / `except KeyError: return download(key)`: the failed download isn't a
    consequence of the lookup. But in `except Exception: save_checkpoint(); raise` a failed save
    hides why the training failed. The frames decide, and the source lines around the handler.
    """
    functions = [_get_function(frame) for frame in outer.frames]
    handling = _get_function(context.frames[0]) if context.frames else None
    # a program that exits takes no other way
    if get_short_name(outer) == "SystemExit" or handling not in functions:
        return False
    # the frame that handled `context`, the frames that the handler called, and the source around
    # the handler's call
    below = outer.frames[len(functions) - functions[::-1].index(handling) :]
    handling_frame = outer.frames[-len(below) - 1]
    line_index = handling_frame.line - handling_frame.context_line
    above = find_enclosing_handler(handling_frame.context, line_index)
    clause = _EXCEPT_CLAUSE.match(
        handling_frame.code if above is None else handling_frame.context[above]
    )
    expected = (
        {name.strip().rsplit(".", 1)[-1] for name in clause["types"].split(",")} if clause else {""}
    )
    code = _EXCEPT_CLAUSE.sub("", handling_frame.code).strip()
    name = get_short_name(context)
    own_frames = [frame for frame in context.frames if _is_own_frame(frame)]
    # a lookup failed in a line of the program, in a clause for lookups alone, or directly in a
    # library
    is_handled_as_expected = (
        expected <= _EXPECTED_EXCEPTION_TYPES
        if _is_own_frame(context.frames[0])
        else len(context.frames) == 1
    )
    is_raised = any(frame.code.startswith("raise") for frame in own_frames)
    is_expected_failure = (
        name in _EXPECTED_EXCEPTION_TYPES
        and is_handled_as_expected
        and len(own_frames) <= 1
        and not is_raised
    )
    if is_expected_failure or context.relation != "context" or is_wrapper(outer, context):
        is_separate = context.relation == "suppressed" or not is_wrapper(outer, context)
        return is_expected_failure and (is_separate or name in _FAILED_LOOKUP_TYPES)
    names = (code.partition("(")[0], *(frame.function for frame in below))
    if any(map(_ERROR_HANDLING_VERB.search, names)):
        return False
    if name not in _MISSING_FEATURE_TYPES and any(
        _PEER_ERROR.search(link.message) for link in (outer, context)
    ):
        return False
    is_own = bool(below) and _is_own_frame(below[0])
    is_again = is_own and _get_function(below[0]) in map(_get_function, context.frames[1:2])
    if not own_frames:
        return True  # raised and caught within a library
    if is_again and not expected <= _EXPECTED_EXCEPTION_TYPES:
        # the same function was called again: a second try, which fails because of the first
        return False
    # a clause for any exception, or an unknown clause: only a substitute shows that the program
    # took another way
    has_substitute = is_own and _SUBSTITUTE_STATEMENT.match(code)
    if expected & _CATCH_ALL_TYPES and name not in _MISSING_FEATURE_TYPES and not has_substitute:
        return False
    if above is not None:
        next_lines = (
            n
            for n in range(line_index + 1, len(handling_frame.context))
            if find_enclosing_handler(handling_frame.context, n) == above
        )
        if "finally" in handling_frame.context[above] or any(
            _RAISE_OR_EXIT_STATEMENT.match(handling_frame.context[n]) for n in next_lines
        ):
            return False
    return not (clause and clause["name"] and re.search(rf"\b{clause['name']}\b", code))


_HANDLER_OR_DEFINITION_START = LazyPattern(
    r"\s*(?:(?P<handler>except|finally)|(?:async\s+)?def|class)\b"
)


def find_enclosing_handler(lines: Sequence[str], at: int) -> int | None:
    """Return the index of the `except` or `finally` around a line, or None if the line isn't in
    such a block.
    """
    lines_above = lines[max(at - _HANDLER_LINES_READ, 0) : at + 1]
    margins = [len(line) - len(line.lstrip()) if line.strip() else 1000 for line in lines_above]
    for index in range(at - 1, at - len(margins), -1):
        margin = margins[index - at - 1]
        if margin < min(margins[index - at :]) and (
            block := _HANDLER_OR_DEFINITION_START.match(lines[index])
        ):
            return index if block["handler"] else None
    return None


# In the messages of wrappers that libraries raise around any error
_GENERIC_WRAPPER = LazyPattern(r"""(?im)
  failed[ ]to[ ]run[ ](?:stage[ ]backward|(?:full[ ])?backward|forward|stage)
  |^Error[ ](?:locating[ ]target|in[ ]call[ ]to[ ]target)
  |^An[ ]error[ ]occurred[ ]while[ ]generating[ ]the[ ]dataset
  |^RetryError\b
  |when[ ]making[ ]fake[ ]tensor[ ]call
""")


def _skip_generic_wrappers(links: Sequence[ExceptionInfo], index: int) -> int:
    """Return the index of the exception behind a library's failed clean-up or generic wrapper,
    which only hide it.
    """
    while index + 1 < len(links) and not _is_uninformative(links[index + 1]):
        outer, inner = links[index], links[index + 1]
        has_wrapped = is_wrapper(outer, inner)
        is_clean_up = not has_wrapped and any(
            frame.function in _CLEAN_UP_FUNCTIONS for frame in outer.frames
        )
        if not is_clean_up and not (has_wrapped and _GENERIC_WRAPPER.search(outer.message)):
            break
        index += 1
    return index


def _is_candidate(link: ExceptionInfo, belongs: Callable[[FrameInfo], bool]) -> bool:
    if _is_uninformative(link):
        return False
    has_frame = not link.frames or any(map(belongs, link.frames))
    return has_frame or any(_is_candidate(member, belongs) for member in link.members)


def _is_uninformative(link: ExceptionInfo) -> bool:
    name = get_short_name(link)
    if name == "SystemExit" and link.relation == "context" and link.frames:
        # `sys.exit` in the program's own line, and then its clean-up failed: the exit was intended
        return not _is_own_frame(link.frames[-1])
    return name in _CONTROL_FLOW_TYPES or name.endswith(POOL_TRACEBACK_SUFFIX)


def _get_function(frame: FrameInfo) -> tuple[str, str]:
    return frame.file, frame.function


def _is_own_frame(frame: FrameInfo) -> bool:
    return not is_library_file(frame.file)


def _is_outside_frameworks(frame: FrameInfo) -> bool:
    return find_library(frame) not in _FRAMEWORK_PACKAGES
