"""Isolates firstfault's own code: its errors and its waits must not hide or delay the user's error."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from firstfault.utils.loggers import get_logger
from firstfault_torch.time_limits import (
    BACKGROUND_RESULT_TIMEOUT_SECONDS,
    SHORT_POLL_SECONDS,
    SHUTDOWN_CALL_TIMEOUT_SECONDS,
    SHUTDOWN_POLL_SECONDS,
    THREAD_START_TIMEOUT_SECONDS,
)

logger = get_logger("firstfault_torch")

T = TypeVar("T")
WORKER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
"""Signals with handlers that may raise in a worker.

An agent stops a worker with SIGTERM, the kernel with SIGINT after the agent's death, and torch's data loader raises on
SIGCHLD when one of its processes has died.
"""
_NO_THREAD = "can't start new thread"
_AT_THE_END = "at interpreter shutdown"
MAX_CONSECUTIVE_ERRORS = 3
"""Internal errors in a row after which a loop ends."""
_LONGEST_CHAIN = 50
_refused_threads = threading.Event()
"""Set after the first warning that the system allows no more threads: one warning is enough."""


@contextlib.contextmanager
def suppress_internal_errors(activity: str, *, through: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn an exception of firstfault's own code into one warning; torch elastic continues as without firstfault.

    The warning names the `activity`, and has the traceback if ``FIRSTFAULT_DEBUG`` is set. Exceptions of type `through`
    pass: they belong to others, such as torch's SignalException.
    """
    try:
        yield
    except through:
        raise
    except BaseException as error:
        text, hidden = try_call(lambda error=error: str(error))  # type: ignore[misc]
        text = "<no text>" if hidden is not None else text
        if isinstance(error, RuntimeError) and _AT_THE_END in str(text):
            return  # since Python 3.12 no thread can be started while the interpreter exits
        if isinstance(error, RuntimeError) and text == _NO_THREAD:
            if not _refused_threads.is_set():
                _refused_threads.set()
                logger.warning("can't start more threads: %s (first while %s)", text, activity)
            return
        logger.warning(
            "failed while %s (%s: %s); the job continues without it",
            activity,
            type(error).__name__,
            text,
            exc_info=bool(os.environ.get("FIRSTFAULT_DEBUG")),
        )


def call_with_timeout(  # noqa: PLR0913 - keywords
    call: Callable[[], T],
    seconds: float,
    activity: str,
    shutdown_requested: threading.Event | None = None,
    *,
    shutdown_seconds: float = SHUTDOWN_CALL_TIMEOUT_SECONDS,
    local: bool = False,
) -> T | None:
    """Return the result of `call`; None if it raises or takes longer than `seconds`.

    It runs in a daemon thread, which stays behind if `call` blocks, as a ``__str__`` or a storage may. Once
    `shutdown_requested` is set, the wait ends within `shutdown_seconds`. A `local` call needs only this process and its
    disk: if the system allows no more threads, it runs in the current one.
    """
    results: list[T] = []
    # An event instead of join(): if a signal handler raises inside join(), Python marks the running thread as ended,
    # and a second join() returns at once.
    done = threading.Event()
    with suppress_internal_errors(activity):
        deadline = time.monotonic() + max(seconds, 0)
        try:
            _start(lambda: results.append(call()), done, activity, local=local)
            while shutdown_requested is not None and not shutdown_requested.is_set() and time.monotonic() < deadline:
                if done.wait(SHUTDOWN_POLL_SECONDS):
                    break
            hurried = shutdown_requested is not None and shutdown_requested.is_set()
            left = max(deadline - time.monotonic(), 0)
            done.wait(min(left, shutdown_seconds) if hurried else left)
        except BaseException:
            # A signal handler raised in this wait. The call may be the upload of the only document about the failure,
            # milliseconds before its end: give it a moment before the exception unwinds and the process exits.
            done.wait(max(min(deadline - time.monotonic(), SHUTDOWN_CALL_TIMEOUT_SECONDS), 0))
            raise
    return results[0] if results else None


def run_loop(step: Callable[[], bool], activity: str) -> None:
    """Call `step` until it returns False.

    A training may run for months, so one internal error must not end the loop: it is logged, and `step` is called
    again. `MAX_CONSECUTIVE_ERRORS` in a row end the loop with a warning. A step has to wait before it can fail: after
    an error it is called again at once.
    """
    errors = 0
    while errors < MAX_CONSECUTIVE_ERRORS:
        errors += 1
        with suppress_internal_errors(activity):
            if not step():
                return
            errors = 0
    logger.warning("stopped %s after %d errors in a row", activity, errors)


def start_thread(call: Callable[[], object], name: str) -> threading.Thread:
    """Start and return a daemon thread; wait a moment if the system allows no further one, because it may soon.

    Raises:
        RuntimeError: it doesn't allow one within `THREAD_START_TIMEOUT_SECONDS`.
    """
    deadline = time.monotonic() + THREAD_START_TIMEOUT_SECONDS
    while True:
        thread = threading.Thread(target=call, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(SHORT_POLL_SECONDS)
        else:
            return thread


def start_in_thread(call: Callable[[], object], activity: str) -> threading.Event:
    """Start a call in a daemon thread; return an event that is set when it has ended or couldn't start."""
    ended = threading.Event()
    with suppress_internal_errors(activity):
        _start(call, ended, activity)
        return ended
    ended.set()
    return ended


def _start(call: Callable[[], object], ended: threading.Event, activity: str, *, local: bool = False) -> None:
    """Start a daemon thread that sets `ended` after the call; make a `local` call here if no thread can start."""

    def run() -> None:
        with suppress_internal_errors(activity):
            call()
        ended.set()

    try:
        threading.Thread(target=run, name="firstfault-call", daemon=True).start()
    except RuntimeError as refused:
        if not local:
            raise
        logger.info("%s while %s; continuing without a timeout", refused, activity)
        run()


class BackgroundCall(Generic[T]):
    """A function that a loop calls repeatedly, and that must not block the loop: its peer may be frozen.

    Each call runs in a daemon thread, at most one at a time:

        called     -> a thread starts, and the loop waits up to `seconds`
        in time    -> the loop gets the result
        late       -> the loop gets the default, at once on further calls
        finished   -> the next call returns that late result, or raises its exception
    """

    def __init__(self, call: Callable[[], T], default: T, seconds: float = BACKGROUND_RESULT_TIMEOUT_SECONDS) -> None:
        self._call = call
        self._default = default
        self._seconds = seconds
        self._answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._is_asked = False

    def __call__(self) -> T:
        """Return the answer, or the default.

        Raises:
            Exception: whatever `call` raised.
        """
        seconds = 0.0
        if not self._is_asked:
            try:
                threading.Thread(target=self._ask, name="firstfault-question", daemon=True).start()
            except RuntimeError:
                self._ask()  # no thread available: block the loop instead of failing
            self._is_asked = True
            seconds = self._seconds
        try:
            answer, error = self._answers.get(timeout=seconds)
        except queue.Empty:
            return self._default
        self._is_asked = False
        if error is not None:
            raise error
        return cast("T", answer)

    def _ask(self) -> None:
        self._answers.put(try_call(self._call, Exception))


@contextlib.contextmanager
def ignore_worker_signals(*, handled_only: bool = False) -> Iterator[None]:
    """Ignore `WORKER_SIGNALS` in the block; a no-op outside the main thread, because only it can set handlers.

    With `handled_only`, a signal without a handler still ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in WORKER_SIGNALS}
    # None: a handler installed in C, which Python can't restore
    ignored = {
        number: handler
        for number, handler in handlers.items()
        if callable(handler) or (handler is not None and not handled_only and number != signal.SIGCHLD)
    }
    for number in ignored:
        # SIGCHLD keeps a handler: if it were ignored, the kernel would reap children that other code waits for
        signal.signal(number, (lambda *_: None) if number == signal.SIGCHLD else signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)


def try_call(call: Callable[[], T], kind: type[BaseException] = BaseException) -> tuple[T | None, BaseException | None]:
    """Call third-party code; return (result, None), or (None, exception) for an exception of this kind."""
    try:
        return call(), None
    except kind as error:
        return None, error


def iter_chain(error: BaseException | None) -> list[BaseException]:
    """Return `error` and its chain of causes and contexts, nearest first."""
    chain: list[BaseException] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(chain) < _LONGEST_CHAIN:
        seen.add(id(error))
        chain.append(error)
        error = error.__context__ if error.__cause__ is None else error.__cause__  # a user's class may have no truth
    return chain
