"""Isolates firstfault's own code: its errors and its waits must not hide or
delay the user's error.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from firstfault.errors import FirstFaultError
from firstfault.utils.loggers import get_logger
from firstfault_torch.time_limits import (
    BACKGROUND_RESULT_TIMEOUT_SECONDS,
    LOOP_SHORTAGE_PAUSE_SECONDS,
    SHORTAGE_RETRY_SECONDS,
    SHUTDOWN_CALL_TIMEOUT_SECONDS,
    SHUTDOWN_POLL_SECONDS,
)

logger = get_logger("firstfault_torch")

T = TypeVar("T")
WORKER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
"""Signals with handlers that may raise in a worker.

An agent stops a worker with SIGTERM, the kernel with SIGINT after the agent's death, and torch's
data loader raises on SIGCHLD when one of its processes has died.
"""
_NO_THREAD_TEXT = "can't start new thread"
_SHUTDOWN_TEXT = "at interpreter shutdown"
MAX_CONSECUTIVE_ERRORS = 3
"""Internal errors in a row after which a loop ends."""
_SHORTAGE_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOBUFS,
        errno.ENOSPC,
        errno.EDQUOT,
    }
)
"""The machine, the user's limits or the control group had no process, memory,
descriptor or disk left.
"""
_MAX_CHAIN_LENGTH = 50
_refused_threads = threading.Event()
"""Set after the first warning that the system allows no more threads: one warning is enough."""


_failed_places: set[str] = set()
"""Output prefixes with an upload that has failed: one warning is enough."""
_MAX_REASON_CHARACTERS = 160


def log_failed_upload(prefix: str, reason: str) -> None:
    """Log that a document couldn't be uploaded. A storage that fails once often fails for each
    document of a job, so a process warns once for an output prefix.
    """
    level = logging.DEBUG if prefix in _failed_places else logging.WARNING
    _failed_places.add(prefix)
    short = " ".join(reason.replace(prefix, "it").split())
    if len(short) > _MAX_REASON_CHARACTERS:
        short = f"{short[:_MAX_REASON_CHARACTERS]}..."
    logger.log(
        level,
        "a document in %s was not uploaded: %s (further ones aren't logged; see `firstfault doctor`)",
        prefix,
        short,
    )


@contextlib.contextmanager
def suppress_internal_errors(
    activity: str, *, through: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Turn an exception of firstfault's own code into one warning;
    torch elastic continues as without firstfault.

    The warning names the `activity`, and has the traceback if ``FIRSTFAULT_DEBUG`` is set.
    Exceptions of type `through` pass: they belong to others, such as torch's SignalException.
    """
    try:
        yield
    except through:
        raise
    except BaseException as error:
        text, hidden = try_call(lambda error=error: str(error))  # type: ignore[misc]
        text = "<no text>" if hidden is not None else text
        if isinstance(error, RuntimeError) and _SHUTDOWN_TEXT in str(text):
            return  # since Python 3.12 no thread can be started while the interpreter exits
        if isinstance(error, RuntimeError) and text == _NO_THREAD_TEXT:
            if not _refused_threads.is_set():
                _refused_threads.set()
                logger.warning("can't start more threads: %s (first while %s)", text, activity)
            return
        is_known = isinstance(error, FirstFaultError) and any(
            prefix in str(text) for prefix in _failed_places
        )
        logger.log(
            logging.DEBUG if is_known else logging.WARNING,
            "failed while %s (%s: %s); the job itself isn't affected",
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
    """Return the result of `call`, or None if it raises or takes longer than `seconds`.

    It runs in a daemon thread, which stays behind if `call` blocks, as a ``__str__`` or a storage
    may. Once `shutdown_requested` is set, the wait ends within `shutdown_seconds`. A `local` call
    needs only this process and its disk: if the system allows no more threads, it runs in the
    current one.
    """
    results: list[T] = []
    # An event instead of join(): if a signal handler raises inside join(), Python marks the running
    # thread as ended, and a second join() returns at once.
    done = threading.Event()
    with suppress_internal_errors(activity):
        deadline = time.monotonic() + max(seconds, 0)
        try:
            _start(lambda: results.append(call()), done, activity, local=local)
            while (
                shutdown_requested is not None
                and not shutdown_requested.is_set()
                and time.monotonic() < deadline
            ):
                if done.wait(SHUTDOWN_POLL_SECONDS):
                    break
            hurried = shutdown_requested is not None and shutdown_requested.is_set()
            left = max(deadline - time.monotonic(), 0)
            done.wait(min(left, shutdown_seconds) if hurried else left)
        except BaseException:
            # A signal handler raised in this wait. The call may be the upload of the only document
            # about the failure, milliseconds before its end: give it a moment before the exception
            # unwinds and the process exits.
            done.wait(max(min(deadline - time.monotonic(), SHUTDOWN_CALL_TIMEOUT_SECONDS), 0))
            raise
    return results[0] if results else None


def run_loop(step: Callable[[], bool], activity: str) -> None:
    """Call `step` until it returns False.

    A training may run for months, so one internal error must not end the loop: it is logged, and
    `step` is called again. `MAX_CONSECUTIVE_ERRORS` in a row end the loop with a warning. A step
    has to wait before it can fail: after an error it is called again at once.

    A shortage isn't an error of the loop: a machine may be out of threads or disk for hours, and
    recover. It is logged when it begins, and the loop pauses after each.
    """
    errors, was_short = 0, False
    while errors < MAX_CONSECUTIVE_ERRORS:
        is_wanted, error = try_call(step)
        if error is None:
            if not is_wanted:
                return
            errors, was_short = 0, False
            continue
        is_short = is_shortage(error)
        if not (is_short and was_short):
            with suppress_internal_errors(activity):
                raise error
        was_short = is_short
        if is_short:
            time.sleep(LOOP_SHORTAGE_PAUSE_SECONDS)
        else:
            errors += 1
    logger.warning("stopped %s after %d errors in a row", activity, errors)


def is_shortage(error: BaseException) -> bool:
    """Whether something failed because the system has no thread, process, memory,
    descriptor or disk left right now.
    """
    if isinstance(error, OSError):
        return error.errno in _SHORTAGE_ERRNOS
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and str(error) == _NO_THREAD_TEXT
    )


def retry_shortage(call: Callable[[], T], seconds: float) -> T:
    """Return the result of `call`; call it again for at most `seconds` if the system
    is short of something.

    Raises:
        Exception: what `call` raised otherwise, or last.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except (OSError, MemoryError, RuntimeError) as error:
            if not is_shortage(error) or time.monotonic() >= deadline:
                raise
        time.sleep(SHORTAGE_RETRY_SECONDS)


def start_daemon(target: Callable[[], object], name: str, seconds: float) -> threading.Thread:
    """Start a daemon thread; try again for at most `seconds` while the system
    allows no further one.

    Raises:
        RuntimeError, MemoryError: it still doesn't.
    """

    def start() -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    return retry_shortage(start, seconds)


def start_in_thread(
    call: Callable[[], object], activity: str, *, local: bool = False
) -> threading.Event:
    """Start a call in a daemon thread; return an event that is set when it has
    ended or couldn't start.

    If the system allows no more threads, a `local` call runs in the current one.
    """
    ended = threading.Event()
    with suppress_internal_errors(activity):
        _start(call, ended, activity, local=local)
        return ended
    ended.set()
    return ended


def _start(
    call: Callable[[], object],
    ended: threading.Event,
    activity: str,
    *,
    local: bool = False,
) -> None:
    """Start a daemon thread that sets `ended` after the call;
    make a `local` call here if no thread can start.
    """

    def run() -> None:
        with suppress_internal_errors(activity):
            call()
        ended.set()

    try:
        start_late(threading.Thread(target=run, name="firstfault-call", daemon=True))
    except RuntimeError as refused:
        if not local:
            raise
        logger.info("%s while %s; continuing without a timeout", refused, activity)
        run()


_late_threads: set[threading.Thread] = set()
"""Daemon threads that may be inside C++, and stay there."""


def start_late(thread: threading.Thread) -> None:
    """Start a daemon thread that may be inside C++ for long, for `await_late_calls`."""
    for other in list(_late_threads):  # a copy: another thread may add one
        if not other.is_alive():
            _late_threads.discard(other)
    thread.start()
    _late_threads.add(thread)


def await_late_calls(seconds: float) -> bool:
    """Wait for the threads that `start_late` has started; return whether all have ended.

    When the interpreter ends, it ends a thread that returns from C++ by unwinding its stack.
    torch's C++ doesn't allow that, and aborts the process.
    """
    deadline = time.monotonic() + seconds
    for thread in list(_late_threads):
        thread.join(max(deadline - time.monotonic(), 0))
    return not any(thread.is_alive() for thread in list(_late_threads))


def _forget_calls() -> None:
    _late_threads.clear()


os.register_at_fork(after_in_child=_forget_calls)


class BackgroundCall(Generic[T]):
    """A function that a loop calls repeatedly, and that must not block the loop:
    its peer may be frozen.

    Each call runs in a daemon thread, at most one at a time:

        called     -> a thread starts, and the loop waits up to `seconds`
        in time    -> the loop gets the result
        late       -> the loop gets the default, at once on further calls
        finished   -> the next call returns that late result, or raises its exception
    """

    def __init__(
        self,
        call: Callable[[], T],
        default: T,
        seconds: float = BACKGROUND_RESULT_TIMEOUT_SECONDS,
    ) -> None:
        self._call = call
        self._default = default
        self._seconds = seconds
        self._answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = (
            queue.SimpleQueue()
        )
        self._is_asked = False

    def __call__(self) -> T:
        """Return the answer, or the default.

        Raises:
            Exception: whatever `call` raised.
        """
        seconds = 0.0
        if not self._is_asked:
            try:
                start_late(
                    threading.Thread(target=self._ask, name="firstfault-question", daemon=True)
                )
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
    """Ignore `WORKER_SIGNALS` in the block; a no-op outside the main thread,
    because only it can set handlers.

    With `handled_only`, a signal without a handler still ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in WORKER_SIGNALS}
    # None means a handler installed in C, which Python can't restore
    ignored = {
        number: handler
        for number, handler in handlers.items()
        if callable(handler)
        or (handler is not None and not handled_only and number != signal.SIGCHLD)
    }
    for number in ignored:
        # SIGCHLD keeps a handler: if it were ignored, the kernel would reap children that other
        # code waits for
        signal.signal(number, (lambda *_: None) if number == signal.SIGCHLD else signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)


def try_call(
    call: Callable[[], T], kind: type[BaseException] = BaseException
) -> tuple[T | None, BaseException | None]:
    """Call third-party code; return (result, None), or (None,
    exception) for an exception of this kind.
    """
    try:
        return call(), None
    except kind as error:
        return None, error


def iter_chain(error: BaseException | None) -> list[BaseException]:
    """Return `error` and its chain of causes and contexts, nearest first."""
    chain: list[BaseException] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(chain) < _MAX_CHAIN_LENGTH:
        seen.add(id(error))
        chain.append(error)
        # a user's class may have no truth
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return chain
