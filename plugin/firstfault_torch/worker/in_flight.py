"""Exceptions that are on their way out of the task function and have not left it yet.

``finally: destroy_process_group()`` closes the sockets while the exception is still inside, so the peers fail before it
has left. It is recorded at that call, before the sockets close, and once more, if need be, when the agent is about to
stop the worker. Should the user's code go on to handle it, what was recorded is withdrawn.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

from firstfault_torch.compat.torch_worker import group_teardown
from firstfault_torch.context import Moment
from firstfault_torch.guard import WORKER_SIGNALS, guarded, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["InFlight", "chain_of", "is_clean_exit", "moment_of", "watch_process_groups"]

_ATTRIBUTE = "__firstfault_moment__"
_HOOK = "__firstfault_destroy__"
_LONGEST_CHAIN = 50


def chain_of(error: BaseException | None) -> list[BaseException]:
    """Return `error` and what it was raised from or in the context of, nearest first."""
    chain: list[BaseException] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(chain) < _LONGEST_CHAIN:
        seen.add(id(error))
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def moment_of(error: BaseException) -> Moment:
    """Return when `error` was first seen on its way out: at a process group's end, else now.

    An exception that was raised from another one, after a clean-up in its handler, failed when that one did. What it
    was merely raised in the context of may have been handled long ago.
    """
    noted = None
    seen: set[int] = set()
    current: BaseException | None = error
    with guarded("asking when an exception was first seen"):
        while current is not None and id(current) not in seen:
            seen.add(id(current))
            noted = vars(current).get(_ATTRIBUTE, noted)
            current = current.__cause__
    return noted if isinstance(noted, Moment) else Moment.now()


class InFlight:
    """The exceptions of this process's main thread that were recorded before they had left the task function.

    Args:
        record: makes a document about one durable and returns its name.
        withdraw: takes back a document that an exception has left which was handled after all.
    """

    def __init__(self, record: Callable[[BaseException], str], withdraw: Callable[[str], None]) -> None:
        self._record = record
        self._withdraw = withdraw
        self._main = threading.get_ident()
        self._owner = os.getpid()
        self._recorded: list[tuple[BaseException, str]] = []
        self._lock = threading.Lock()

    def seen(self, error: BaseException) -> None:
        """Record an exception that is about to close the sockets; once, and only in the main thread of its process."""
        if threading.get_ident() != self._main or os.getpid() != self._owner or not _may_fail(error):
            return
        vars(error).setdefault(_ATTRIBUTE, Moment.now())
        self._note(error)

    def ask(self) -> None:
        """Record what the main thread is unwinding or handling now, and withdraw what it no longer is; any thread."""
        current = sys._current_exceptions().get(self._main)  # noqa: SLF001 - documented, for debuggers and the like
        error = current if isinstance(current, BaseException) else _value_of(current)
        self.reconcile(error)
        if error is not None and _may_fail(error):
            self._note(error)

    def reconcile(self, error: BaseException | None) -> None:
        """Withdraw what has not become `error`, or its cause or context; None: all of it."""
        alive = {id(item) for item in chain_of(error)}
        with self._lock:
            gone = [item for item in self._recorded if id(item[0]) not in alive]
            self._recorded = [item for item in self._recorded if id(item[0]) in alive]
        for _, name in gone:
            with guarded("withdrawing an exception that was handled"):
                self._withdraw(name)

    def _note(self, error: BaseException) -> None:
        with self._lock:
            if any(error is item for item, _ in self._recorded):
                return
            name = self._record(error)
            if name:
                self._recorded.append((error, name))


def watch_process_groups(in_flight: InFlight) -> Callable[[], None]:
    """Let ``torch.distributed.destroy_process_group`` first record the exception in flight; returns the undoing.

    The function's own code is exchanged, so that a name that was imported from torch earlier calls it too.
    """
    function = group_teardown()
    if function is None or _HOOK in function.__globals__:
        return lambda: None
    original, names = function.__code__, function.__globals__
    destroy = types.FunctionType(original, names, function.__name__, function.__defaults__, function.__closure__)

    @functools.wraps(destroy)
    def noting(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None:
            with guarded("noting an exception in flight"), undisturbed(WORKER_SIGNALS, handled_only=True):
                in_flight.seen(error)
        return destroy(*args, **kwargs)

    names[_HOOK] = noting
    function.__code__ = _through_hook.__code__

    def undo() -> None:
        function.__code__ = original
        names.pop(_HOOK, None)

    return undo


def _through_hook(*args: Any, **kwargs: Any) -> Any:
    """Runs with torch's module as its globals."""
    return __firstfault_destroy__(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821 - see watch_process_groups


def _may_fail(error: BaseException) -> bool:
    """Whether an exception is a failure if it leaves: not the ends of iterators, nor a clean exit."""
    if isinstance(error, StopIteration | StopAsyncIteration | GeneratorExit):
        return False
    return not is_clean_exit(error)


def is_clean_exit(error: BaseException) -> bool:
    """Whether `error` is a ``sys.exit()`` that says success."""
    # the code may be any object, of which neither hash nor comparison may be asked
    return isinstance(error, SystemExit) and (error.code is None or (isinstance(error.code, int) and error.code == 0))


def _value_of(item: Any) -> BaseException | None:
    """Python 3.10 and 3.11 have (type, value, traceback) here."""
    return item[1] if isinstance(item, tuple) and len(item) > 1 and isinstance(item[1], BaseException) else None
