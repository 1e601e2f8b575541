"""Exceptions in flight: raised, and not yet out of the task function.

``finally: destroy_process_group()`` closes the sockets while the exception is still inside, so the
peers fail before it leaves. It is recorded at that call, before the sockets close, or when the
agent is about to stop the worker. If the user's code then handles the exception, the document is
withdrawn.

An exception may also be on its way out of a frame in which Python handles none. When it leaves
``for batch in DataLoader(...)``, the frame first drops the iterator, and its ``__del__`` joins its
processes. During that ``sys.exc_info()`` has no exception: only the frame's place, and the
traceback that refers to it, show that one was raised. Looking costs a healthy training nothing: the
agent asks before it stops the worker.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from firstfault.model import FrameInfo
from firstfault.utils.frames import get_current_exceptions, get_current_frames
from firstfault_torch.compat.torch_worker import group_teardown
from firstfault_torch.guard import ignore_worker_signals, iter_chain, suppress_internal_errors
from firstfault_torch.node_context import Moment
from firstfault_torch.worker.last_call import is_last_call

_ATTRIBUTE = "__firstfault_moment__"
_HOOK = "__firstfault_destroy__"
_RAISES = {dis.opmap[name] for name in ("RAISE_VARARGS", "RERAISE") if name in dis.opmap}
_MAX_TRACEBACK_SEARCHES = 2
"""For a frame's traceback: each looks at all objects of the process,
and the agent waits a fraction of a second.
"""


def get_moment(error: BaseException) -> Moment:
    """Return when `error` or a cause was first seen in flight, at a process group's end, or now.

    The time of its cause counts, because a handler may have cleaned up before it raised `error`
    from that. A context doesn't count: it may have been handled long ago.
    """
    noted = None
    seen: set[int] = set()
    current: BaseException | None = error
    with suppress_internal_errors("looking up when an exception was first seen"):
        while current is not None and id(current) not in seen:
            seen.add(id(current))
            noted = vars(current).get(_ATTRIBUTE, noted)
            current = current.__cause__
    return noted if isinstance(noted, Moment) else Moment.now()


class InFlight:
    """The exceptions of this process's main thread that were recorded before they
    left the task function.

    `record` makes a document durable and returns its name, with which `withdraw` takes it back if
    the exception was handled after all. An exception's document goes through these states:

        raised -> `record_seen` or `ask` -> recorded        durable, while the exception is inside
                                                            the task function
        recorded -> `keep_handled` -> kept                  handled for now; it counts if the job
                                                            fails later
        kept -> `withdraw_kept` -> withdrawn                handled
        recorded -> `withdraw_handled_except` -> withdrawn  neither in flight any more, nor kept
        recorded -> the task function ends                  stays; `WorkerMonitor.fails` adds the
                                                            final document

    `ask` runs in the channel's thread while the main thread raises and handles exceptions.
    """

    def __init__(
        self, record: Callable[[BaseException], str], withdraw: Callable[[str], None]
    ) -> None:
        self._record = record
        self._withdraw = withdraw
        self._main = threading.get_ident()
        self._owner = os.getpid()
        self._recorded: list[tuple[BaseException, str]] = []
        self._kept_errors: list[BaseException] = []
        # a signal handler of the program may end a process group while the main thread records
        self._lock = threading.RLock()
        self._was_asked = False
        self.without_async_exceptions: Callable[[], AbstractContextManager[object]] = (
            contextlib.nullcontext
        )
        """A block in which another thread raises nothing in this one:
        a name that were lost could not be withdrawn.
        """
        self.unwinding: Unwinding | None = None
        """The exception that was leaving a frame of the main thread, or had left it,
        when the agent asked.
        """
        self.escaped_error: BaseException | None = None
        """The exception that has left the task function, and is being recorded."""

    @property
    def is_main_thread(self) -> bool:
        """Whether this is the worker's main thread, and not one of a process that it has forked."""
        return threading.get_ident() == self._main and os.getpid() == self._owner

    def record_seen(self, error: BaseException) -> None:
        """Record an exception before its clean-up closes the sockets; once,
        and only in the main thread.

        One that began after the agent asked is what the training makes of the agent's signal, and
        isn't recorded.
        """
        # A forked child has a copy of this object, and the same thread id: its exceptions aren't
        # this worker's.
        if not self.is_main_thread or not may_fail(error):
            return
        if self._was_asked and not self.began_before_asked(error):
            return
        # The first time counts: the same exception may pass several clean-ups, and its peers failed
        # after the first.
        vars(error).setdefault(_ATTRIBUTE, Moment.now())
        self._note(error)

    def ask(self) -> None:
        """Record the main thread's exception in flight, and withdraw those that were handled;
        runs in any thread.
        """
        # Read once: the main thread may set it at any moment. Once it is set, the main thread
        # records that exception itself, so this thread must not record another document about it.
        escaped_error = self.escaped_error
        with self._lock:
            earlier = frozenset(name for _, name in self._recorded)
        error = handled_exception(self._main) if escaped_error is None else escaped_error
        # Only documents from before that look: the main thread may have recorded a newer exception
        # in the meantime, which is in flight although `error` isn't it.
        self.withdraw_handled_except(error, earlier)
        # The agent may ask more than once: before torch's abort, at a deadline, before a stop.
        # Later questions only withdraw.
        if self._was_asked:
            return
        try:
            if (
                escaped_error is not None
                and (entry := BaseException.__getattribute__(escaped_error, "__traceback__"))
                is not None
            ):
                self.unwinding = Unwinding(
                    entry.tb_frame, entry.tb_lasti, _raised_at(entry.tb_frame, entry)
                )
            elif error is not None and may_fail(error):
                self._note(error)
            else:
                self.unwinding = find_unwinding(self._main)
        finally:
            # Last, even after an error: until here an exception of the main thread counts as its
            # own. The agent sends the signal only after the answer, or when it waits no longer.
            self._was_asked = True

    def began_before_asked(self, error: BaseException) -> bool:
        """Whether `error`, or an exception of its chain, was in flight when the agent asked."""
        unwinding = self.unwinding
        return self.has_recorded(error) or (
            unwinding is not None and any(map(unwinding.matches, iter_chain(error)))
        )

    def keep_handled(self, error: BaseException) -> None:
        """Keep the document about `error`, which is handled for now, until `withdraw_kept`."""
        with self._lock:
            self._kept_errors.append(error)

    def withdraw_kept(self) -> None:
        """Withdraw the documents that were kept: the exceptions were handled."""
        with self._lock:
            self._kept_errors.clear()
        self.withdraw_handled_except(None)

    def has_recorded(self, error: BaseException) -> bool:
        """Whether `error`, or an exception of its chain, was recorded while it was in flight."""
        chain = {id(item) for item in iter_chain(error)}
        with self._lock:
            return any(id(item) in chain for item, _ in self._recorded)

    def withdraw_handled_except(
        self, error: BaseException | None, names: frozenset[str] | None = None
    ) -> None:
        """Withdraw documents of exceptions that are neither kept nor `error` or in its chain.

        If `names` is given, only these documents are considered.
        """
        # Identities suffice: the lists keep every recorded and kept exception alive, so no id is
        # reused.
        alive = {id(item) for item in iter_chain(error)}
        with self._lock:
            # Taken out of the list under the lock, withdrawn after it: of two threads that withdraw
            # at the same time only one withdraws a document, and neither waits for the disk access
            # of its rival.
            alive |= {id(item) for kept in self._kept_errors for item in iter_chain(kept)}
            stays = [
                id(item) in alive or (names is not None and name not in names)
                for item, name in self._recorded
            ]
            withdrawn = [
                item for item, is_kept in zip(self._recorded, stays, strict=True) if not is_kept
            ]
            self._recorded = list(itertools.compress(self._recorded, stays))
        for _, name in withdrawn:
            with suppress_internal_errors("withdrawing an exception that was handled"):
                self._withdraw(name)

    def _note(self, error: BaseException) -> None:
        # Held during the upload: the channel's thread may see the same exception while the main
        # thread records it, and waits here instead of recording it again.
        with self._lock:
            if any(error is item for item, _ in self._recorded):
                return
            name = self._record(error)
            if name:
                self._recorded.append((error, name))


def watch_process_groups(
    in_flight: InFlight, on_last_call: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Let ``torch.distributed.destroy_process_group`` first record the exception in flight;
    return the undo function.

    Without one, `on_last_call` is called if the program does nothing more than to end its default
    group.

    It replaces the function's code, so that it also works for names that were imported from torch
    before.
    """
    function = group_teardown()
    if function is None or _HOOK in function.__globals__:
        return lambda: None
    original, names = function.__code__, function.__globals__
    destroy = types.FunctionType(
        original,
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )

    @functools.wraps(destroy)
    def noting(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None:
            with (
                suppress_internal_errors("noting an exception in flight"),
                in_flight.without_async_exceptions(),
                ignore_worker_signals(handled_only=True),
            ):
                in_flight.record_seen(error)
        elif not args and not kwargs and in_flight.is_main_thread:
            with suppress_internal_errors("looking for the end of the program"):
                # Below this frame is that of `_call_hook`, and then the caller's.
                if is_last_call(sys._getframe(2)):  # noqa: SLF001 - documented
                    on_last_call()
        return destroy(*args, **kwargs)

    # The name first: another thread may call the function as soon as its code is replaced. `undo`
    # has the reverse order.
    names[_HOOK] = noting
    function.__code__ = _call_hook.__code__

    def undo() -> None:
        function.__code__ = original
        names.pop(_HOOK, None)

    return undo


def _call_hook(*args: Any, **kwargs: Any) -> Any:
    """Call the hook; runs with torch's module as its globals."""
    # see watch_process_groups
    return __firstfault_destroy__(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def may_fail(error: BaseException) -> bool:
    """Whether an exception is a failure if it leaves the task function;
    an iterator's end or a clean exit is none.
    """
    if isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit):
        return False
    if type(error).__name__ == "RankShouldRestart":
        return False  # an in-process restart interrupts the function
    return not is_clean_exit(error)


def is_clean_exit(error: BaseException) -> bool:
    """Whether `error` is a ``sys.exit()`` with success."""
    # the code may be any object: don't hash or compare it
    return isinstance(error, SystemExit) and (
        error.code is None or (isinstance(error.code, int) and error.code == 0)
    )


# --- on its way out of a frame --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unwinding:
    """An exception that is leaving a frame."""

    frame: FrameType
    """The frame that it is leaving."""
    instruction: int
    """The frame's instruction that raised, or called what raised."""
    raised_at: FrameInfo

    def matches(self, error: BaseException) -> bool:
        """Whether `error` is this exception."""
        # a user's class may override how attributes are read
        entry: TracebackType | None = BaseException.__getattribute__(error, "__traceback__")
        while entry is not None:
            if entry.tb_frame is self.frame:
                return bool(entry.tb_lasti == self.instruction)
            entry = entry.tb_next
        return False


def handled_exception(thread: int) -> BaseException | None:
    """Return the exception that a thread is handling: in a clean-up, too."""
    # documented, for debuggers and the like
    item: Any = get_current_exceptions().get(thread)
    if isinstance(item, tuple):
        item = item[1]  # (type, value, traceback): Python 3.10 and 3.11
    return item if isinstance(item, BaseException) else None


def find_unwinding(thread: int) -> Unwinding | None:
    """Return the innermost exception that is leaving a frame of a thread, or None."""
    closes_generator = isinstance(handled_exception(thread), GeneratorExit)
    searches = 0
    above = get_current_frames().get(thread)
    while above is not None and above.f_back is not None:
        frame = above.f_back
        raises = frame.f_code.co_code[frame.f_lasti] in _RAISES
        if (
            raises or _may_run_finalizer(above, closes_generator=closes_generator)
        ) and searches < _MAX_TRACEBACK_SEARCHES:
            searches += 1
            entry = _find_exception_entry(frame)
            if entry is not None or raises:
                # without an entry the exception is being made: its class is Python code
                return Unwinding(frame, frame.f_lasti, _raised_at(frame, entry))
        above = frame
    return None


def _may_run_finalizer(frame: FrameType, *, closes_generator: bool) -> bool:
    """Whether a frame may run because the one below drops an object: a finaliser,
    or a generator that is closed.
    """
    return frame.f_code.co_name == "__del__" or (
        closes_generator and bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    )


def _find_exception_entry(frame: FrameType) -> TracebackType | None:
    """Return the traceback entry of `frame`'s current instruction: that instruction raised,
    and nothing ran since.
    """
    for entry in gc.get_referrers(frame):
        if (
            type(entry) is TracebackType
            and entry.tb_frame is frame
            and entry.tb_lasti == frame.f_lasti
        ):
            return entry
    return None


def _raised_at(frame: FrameType, entry: TracebackType | None) -> FrameInfo:
    line = frame.f_lineno
    while entry is not None:
        frame, line = entry.tb_frame, entry.tb_lineno
        entry = entry.tb_next
    return FrameInfo(frame.f_code.co_filename, line or 0, frame.f_code.co_name)
