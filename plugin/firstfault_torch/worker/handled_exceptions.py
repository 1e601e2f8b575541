"""Exceptions that the program handled: why a rank may be out of step with its peers.

``for attempt in range(3): try: step() ... except Exception: ...``: rank 2 handles its own exception
and calls the step again, its peers are one collective ahead, and all of them time out. The
exception is gone by then.

Python 3.12 and later have an event for each handled exception (`sys.monitoring`). What is needed to
describe it is copied at once: a reference would keep its frames alive, and with them a batch that
the program wants to free before it tries again. A program that handles many exceptions pays for
`_BUDGET` units a minute, some milliseconds; then the events are turned off until the channel's
thread turns them on again. A rank without an agent has no such thread: there they stay off once the
program has handled too many within a minute.

Earlier versions have none. There an exception is known if the program formats its traceback, as
``logging.exception`` and ``traceback.print_exc`` do, or if it still refers to it
(``errors.append(error)``) from a frame that tries again when the worker fails or is about to be
stopped. One that was dropped without a traceback isn't.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from firstfault.exceptions import source_files
from firstfault.model import HandledException
from firstfault.utils.frames import get_current_frames
from firstfault_torch import time_limits
from firstfault_torch.failures.capture import capture
from firstfault_torch.failures.copied_exception import (
    CopiedException,
    build_exception,
    copy_exception,
    get_traceback,
)
from firstfault_torch.guard import call_with_timeout, iter_chain
from firstfault_torch.worker.in_flight import handled_exception, may_fail

_TOOL = "firstfault"
_TOOL_IDS = (4, 3)
"""Debuggers, coverage and profilers have their own ids, 0 to 2; 5 is for optimizers."""
_MAX_PLACES = 8
"""Exceptions are grouped by where they were raised; the last of each group is kept."""
_MAX_LISTED = 4
_BUDGET = 10_000
"""Units a minute, of about 0.3 us: one for an event of a library, `_OWN_COST` more for one of the
program, and `_COPY_COST` for one that is copied.
"""
_OWN_COST, _COPY_COST = 5, 20
_STARTUP_BUDGET = 100_000
"""Before the first minute is over: the imports of torch and its
DistributedDataParallel handle 40,000.
"""
_MIN_COPIES, _MIN_COPY_NS = 8, 100_000_000
"""After this many exceptions at one place, one per interval is copied, the rest counted."""
_REFILL_NS = 60_000_000_000
MAX_REPEATED_HANDLINGS = 50
"""An exception that was handled so often before the last collectives is part of
the program's business.
"""
_OWN_FOLDERS = tuple(
    f"{Path(file).parents[1]}{os.sep}" for file in (__file__, source_files.__file__)
)
"""Also of an installation in which they aren't among the packages."""
_MAX_FILES = 4096
_EXC_VALUE_ARGUMENT = 2
"""Position of the exception among the arguments of ``TracebackException.__init__``."""
_SUPPRESSED_ERRORS = (
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
_MAX_OBJECTS = 20_000
_MAX_MEMBERS = 50
_MAX_DEPTH = 5
_DEAD_ENDS = (
    ModuleType,
    type,
    FunctionType,
    BuiltinFunctionType,
    CodeType,
    FrameType,
    str,
    bytes,
    int,
    float,
)
"""Objects from which everything in the process can be reached, or nothing."""


@dataclass(slots=True)
class _Handled:
    """The last exception that was raised at one place and handled."""

    identity: int
    """The `id` of the last one."""
    handler_position: tuple[int, int]
    """Entries of the last one's traceback, and the instruction of its handler. The same `id`
    further out is the same object; before that it is another one in the same memory.
    """
    copies: tuple[CopiedException, ...]
    first_ns: int
    last_ns: int
    times: int


class HandledExceptions:
    """Remembers the exceptions that the main thread of this process handled.

    watch        -> sys.monitoring calls `_on_handled` with each handled exception; before Python
                 3.12, `traceback` does with each one that it formats
    _on_handled  -> copied, in the main thread, within the budget; else turned off
    refill       on again, once a minute at most: in the channel's thread, or when the budget is
                 used up
    list         what to put in a document or an answer; in any thread
    close        off until the process ends
    """

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._owner = os.getpid()
        self._tool_id: int | None = None
        self._left = _STARTUP_BUDGET
        self._refilled_ns = time.monotonic_ns()
        # Changed by the main thread only; `list` copies it in one call, which the interpreter's
        # lock makes atomic.
        self._by_place: dict[tuple[int, int, int], _Handled] = {}
        self._is_own_file: dict[str, bool] = {}
        self._undo: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Subscribe to handled exceptions, or where Python has no such event, to formatted ones."""
        if not self._watch_all():
            self._watch_formatted()

    def _watch_all(self) -> bool:
        """Return False if this version of Python has no such event, or all tool ids are taken."""
        monitoring: Any = getattr(sys, "monitoring", None)  # Python 3.12
        for tool in _TOOL_IDS if monitoring is not None else ():
            if monitoring.get_tool(tool) is not None:
                continue
            try:
                monitoring.use_tool_id(tool, _TOOL)
            except ValueError:
                continue  # taken by another thread in this moment
            self._tool_id = tool
            monitoring.register_callback(
                tool, monitoring.events.EXCEPTION_HANDLED, self._on_handled
            )
            self._set_events(is_on=True)
            # a process of a data loader would pay for events that nobody asks for
            os.register_at_fork(after_in_child=functools.partial(_close, weakref.ref(self)))
            return True
        return False

    def _watch_formatted(self) -> None:
        """Note each exception when its traceback is formatted, which takes far longer than the
        note.
        """
        original = traceback.TracebackException.__init__

        @functools.wraps(original)
        def note_and_format(*args: Any, **kwargs: Any) -> None:
            # At the limit of recursion this fails only where `original` would: both need one more
            # frame.
            with contextlib.suppress(*_SUPPRESSED_ERRORS):
                self._note_formatted(
                    kwargs["exc_value"] if "exc_value" in kwargs else args[_EXC_VALUE_ARGUMENT]
                )
            return original(*args, **kwargs)  # as it is: another library's may return something

        def undo() -> None:
            # another library may have replaced it since, and may call this one
            if traceback.TracebackException.__init__ is note_and_format:
                traceback.TracebackException.__init__ = original  # type: ignore[method-assign]

        traceback.TracebackException.__init__ = note_and_format  # type: ignore[method-assign]
        self._undo = undo

    def _note_formatted(self, error: object) -> None:
        if issubclass(type(error), BaseException) and os.getpid() == self._owner:
            self._on_handled(None, 0, error)  # type: ignore[arg-type]  # its `__class__` may be anything

    def refill(self) -> None:
        """Turn the events on again if they were turned off, once a minute."""
        now = time.monotonic_ns()
        if now - self._refilled_ns >= _REFILL_NS:
            self._refilled_ns = now
            self._left = max(self._left, _BUDGET)
            if self._tool_id is not None:
                self._set_events(is_on=True)

    def close(self) -> None:
        """Stop watching."""
        self._undo()
        if self._tool_id is None:
            return
        monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # Python 3.12
        self._set_events(is_on=False)
        monitoring.register_callback(self._tool_id, monitoring.events.EXCEPTION_HANDLED, None)
        monitoring.free_tool_id(self._tool_id)
        self._tool_id = None

    def list(
        self,
        current: BaseException | None = None,
        count_since: Callable[[int], int | None] = lambda _: None,
        *,
        may_read_frames: bool = True,
    ) -> tuple[HandledException, ...]:
        """Return the last handled exceptions, the last one last,
        without `current` and those in its chain.

        Args:
            current: the exception that is being recorded or handled. An exception that was kept,
                and raised again later, isn't handled.
            count_since: returns how many collectives the process has called since a time.
            may_read_frames: whether the program is about to end. Reading the variables of its
                frames keeps them alive before Python 3.13.
        """
        chain = {id(link): type(link) for link in iter_chain(current)}
        known = sorted(dict(self._by_place).values(), key=lambda item: item.last_ns)
        # raised again as the cause of another one
        chain |= {cause.identity: cause.kind for item in known for cause in item.copies[1:]}
        handled = []
        for item in known:
            if chain.get(item.identity) is item.copies[0].kind:
                continue
            if item.times > MAX_REPEATED_HANDLINGS and count_since(item.first_ns) != count_since(
                item.last_ns
            ):
                continue
            since = count_since(item.last_ns)
            handled.append(
                HandledException(item.last_ns, build_exception(item.copies), item.times, since)
            )
        if self._tool_id is None and may_read_frames:
            handled += self._list_referenced(
                current, {item.identity: item.copies[0].kind for item in known}
            )
        return tuple(handled[-_MAX_LISTED:])

    # --- Python 3.12 and later --------------------------------------------------------------------

    def _set_events(self, *, is_on: bool) -> None:
        # Also if they are on or off: another thread may be about to turn them, and Python compares.
        monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]  # as above
        monitoring.set_events(self._tool_id, monitoring.events.EXCEPTION_HANDLED if is_on else 0)

    def _on_handled(self, _code: CodeType | None, offset: int, error: BaseException) -> None:
        # Called for each handler and each clean-up that an exception enters, also if it leaves it
        # again: `list` sorts those out. What is raised here would be raised in the program. A
        # signal's handler of the program may run here, too, and what it raises has to pass: not all
        # exceptions. No block of `contextlib`: it takes longer, and needs one more frame, which
        # there may not be at the limit of recursion.
        try:
            self._left -= 1
            if self._left < 0:
                self.refill()
                if self._left < 0:
                    if self._tool_id is not None:
                        self._set_events(is_on=False)
                    return
            if threading.get_ident() == self._main:
                self._record_if_own(offset, error)
        except _SUPPRESSED_ERRORS:
            return

    def _record_if_own(self, offset: int, error: BaseException) -> None:
        entry = get_traceback(error)
        is_own = False
        raised = None
        entries = 0
        while entry is not None:
            file = entry.tb_frame.f_code.co_filename
            known = self._is_own_file.get(file)
            if known is None:
                known = self._is_own(file)
            is_own = is_own or known
            raised = entry
            entry = entry.tb_next
            entries = entries + 1
        self._left -= entries // 8  # a deep recursion takes longer
        if not is_own or raised is None or not may_fail(error):
            return
        self._left -= _OWN_COST
        # what is kept refers to class and code, so their ids aren't reused
        place = (id(type(error)), id(raised.tb_frame.f_code), raised.tb_lasti)
        now = time.time_ns()
        before = self._by_place.get(place)
        if (
            before is not None
            and before.times >= _MIN_COPIES
            and now - before.last_ns < _MIN_COPY_NS
        ):
            before.times += not (
                before.identity == id(error) and before.handler_position < (entries, offset)
            )
            before.identity = id(error)
            before.handler_position = (entries, offset)
            before.last_ns = now
            return
        self._left -= _COPY_COST
        self._copy(place, error, (entries, offset), now)

    def _is_own(self, file: str) -> bool:
        """Whether a file is the program's own."""
        # a program that generates code has ever more of them
        if len(self._is_own_file) >= _MAX_FILES:
            self._is_own_file.clear()
        is_own = not (source_files.is_library_file(file) or file.startswith(_OWN_FOLDERS))
        self._is_own_file[file] = is_own
        return is_own

    def _copy(
        self,
        place: tuple[int, int, int],
        error: BaseException,
        handler_position: tuple[int, int],
        now: int,
    ) -> None:
        copies = copy_exception(error)
        before = self._by_place.pop(place, None)
        first_ns, times = now, 1
        if before is not None:
            is_again = before.identity == id(error) and before.handler_position < handler_position
            first_ns, times = before.first_ns, before.times + (not is_again)
        self._by_place[place] = _Handled(id(error), handler_position, copies, first_ns, now, times)
        if len(self._by_place) > _MAX_PLACES:
            del self._by_place[next(iter(self._by_place))]

    # --- all versions -----------------------------------------------------------------------------

    def _list_referenced(
        self, current: BaseException | None, known: dict[int, type]
    ) -> Iterator[HandledException]:
        """Yield exceptions to which the program still refers,
        and that a frame handled which runs on.
        """
        frames = list(_list_frames(current, self._main))
        active = set(map(id, frames))
        chain = {id(link) for link in iter_chain(current)}
        chain |= {id(link) for link in iter_chain(handled_exception(self._main))}
        count = 0
        for error in _search_exceptions(frames):
            entry = get_traceback(error)
            # the traceback begins in the frame that handled it
            if (
                entry is None
                or id(entry.tb_frame) not in active
                or id(error) in chain
                or not may_fail(error)
            ):
                continue
            if known.get(id(error)) is type(error):
                continue
            if (
                source_files.is_library_file(entry.tb_frame.f_code.co_filename)
                and entry.tb_next is None
            ):
                continue
            yield HandledException(None, capture(error))
            count += 1
            if count == _MAX_LISTED:
                return


def list_within(
    seconds: float,
    handled: HandledExceptions,
    current: BaseException | None,
    calls: Sequence[int],
    *,
    may_read_frames: bool = True,
) -> tuple[HandledException, ...]:
    """Return what `HandledExceptions.list` returns. `calls`: times of recorded collectives.

    It takes at most `seconds`, and no longer than `HANDLED_EXCEPTIONS_TIMEOUT_SECONDS`.
    """
    limit = min(seconds, time_limits.HANDLED_EXCEPTIONS_TIMEOUT_SECONDS)
    if limit <= 0:
        return ()

    def count_since(when_ns: int) -> int | None:
        return sum(called > when_ns for called in calls) if calls else None

    # reads source files, on a file system that may not answer
    read = partial(handled.list, current, count_since, may_read_frames=may_read_frames)
    return call_with_timeout(read, limit, "listing handled exceptions", local=True) or ()


def _close(reference: weakref.ref[HandledExceptions]) -> None:
    handled = reference()
    if handled is not None:
        handled.close()


def _list_frames(current: BaseException | None, thread: int) -> Iterator[FrameType]:
    """Yield the frames through which `current` has passed, and those in which a thread is,
    the innermost ones first.
    """
    entry = None if current is None else get_traceback(current)
    passed = []
    while entry is not None:
        passed.append(entry.tb_frame)
        entry = entry.tb_next
    yield from reversed(passed)
    # documented, for debuggers and the like
    frame = get_current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _search_exceptions(frames: Iterable[FrameType]) -> Iterator[BaseException]:
    """Yield exceptions that can be reached from the local variables of the program's frames,
    the nearest ones first.
    """
    own = [frame for frame in frames if not source_files.is_library_file(frame.f_code.co_filename)]
    level: list[Any] = [value for frame in own for value in list(frame.f_locals.values())]
    seen: set[int] = set()
    for _ in range(_MAX_DEPTH):
        following: list[Any] = []
        for item in level:
            kind = type(item)
            if id(item) in seen or issubclass(kind, _DEAD_ENDS):
                continue
            seen.add(id(item))
            if issubclass(kind, BaseException):
                yield item
            elif len(seen) < _MAX_OBJECTS:
                # no code of the program runs for this question
                members = gc.get_referents(item)
                following += (
                    members
                    if len(members) <= 2 * _MAX_MEMBERS
                    else members[:_MAX_MEMBERS] + members[-_MAX_MEMBERS:]
                )
        level = following
