"""Signals to the agent, received also while its main thread waits inside C++.

Python runs a signal's handler in the main thread, so an agent that waits in a store would handle
SIGTERM after minutes. The interpreter's C handler writes a byte into the wakeup descriptor at once;
a thread reads it, reports the signal, and ends the process if the main thread doesn't handle the
signal.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from typing_extensions import Self

from firstfault_torch.guard import logger, suppress_internal_errors
from firstfault_torch.node_context import Moment
from firstfault_torch.protocol.shutdown import SignalPhase
from firstfault_torch.time_limits import (
    MAIN_THREAD_TIMEOUT_SECONDS,
    POSTPONED_SIGNAL_TIMEOUT_SECONDS,
    SIGNAL_RAISE_INTERVAL_SECONDS,
)

suppress_internal_errors_in_main = partial(suppress_internal_errors, through=(SignalException,))
"""`suppress_internal_errors` in the main thread, through which the exception of a signal passes."""
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that terminate a pod; the same as torch elastic's."""


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The first signal that terminates this agent."""

    number: signal.Signals
    moment: Moment


class ShutdownEvent(threading.Event):
    """An event that a signal handler may set while it interrupts a wait for it:
    `Event`'s own lock would block it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


class SignalWatch:
    """Receives the signals that terminate this process while it is entered.

        WORKING    a signal raises SignalException in the main thread, and `on_received` reports it
                   in another thread; `acknowledge`: the main thread handles it
        SETTLING   after `begin_shutdown`: a signal only ends waits, if the main thread runs Python
        LEAVING    after `ignore_signals_until_exit` or the block: a signal does nothing

    If the main thread doesn't do its part within a second, `last_resort` ends the pod.

    Only the main thread can install handlers: entered in another thread, it changes and receives
    nothing.
    """

    def __init__(self, handled: tuple[signal.Signals, ...] = HANDLED) -> None:
        self._handled = handled
        self.received: SignalReceived | None = None
        self.shutdown_requested: threading.Event = ShutdownEvent()
        """Set by a signal; ends every wait."""
        self._phase = SignalPhase.WORKING
        self._noticed = threading.Event()
        self._is_interruptible = threading.Event()
        """Cleared while the main thread runs code that no signal's exception may interrupt."""
        self._is_interruptible.set()
        self._has_run_handler = ShutdownEvent()
        """Set in the main thread by a signal that interrupts nothing."""
        self._postponed: signal.Signals | None = None
        """A signal that arrived during the block."""
        self._raised_at = -math.inf
        """By the monotonic clock; a second signal right after the first raises no second exception.
        """
        self.on_received: Callable[[SignalReceived], None] | None = None
        """Called in the watching thread at the first signal, whatever the main thread is doing."""
        self._last_resort: Callable[[signal.Signals], None] | None = None
        """Ends the pod: called in the watching thread if the main thread ignores
        a signal for too long.
        """
        self._ends_pod = threading.Lock()
        """Held during `_last_resort`."""
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._wakeup_writer: socket.socket | None = None
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            with suppress_internal_errors("listening to signals"):
                reader, self._wakeup_writer = socket.socketpair()
                # The interpreter's C handler writes to it, in the middle of anything, so it must
                # never block.
                self._wakeup_writer.setblocking(False)  # noqa: FBT003 - the socket's own signature
                self._before = {number: signal.getsignal(number) for number in self._handled}
                self.install()
                self._wakeup_before = signal.set_wakeup_fd(
                    self._wakeup_writer.fileno(), warn_on_full_buffer=False
                )
                # a forked worker inherits descriptor and handlers, but its signals aren't the
                # agent's
                os.register_at_fork(after_in_child=self._forget_in_child)
                # A signal may arrive before the thread runs: the socket keeps its byte.
                read = partial(self._read_signals, reader)
                threading.Thread(target=read, name="firstfault-signals", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The phase first: a signal that arrives while the handlers are put back does nothing.
        self._phase = SignalPhase.LEAVING
        # They hold the agent, and `_forget_in_child` holds this object.
        self.on_received = None
        self.replace_last_resort(None)
        if self._wakeup_writer is None:
            return
        with suppress_internal_errors("ceasing to listen to signals"):
            # Before the socket is closed: the C handler would write to a number that another file
            # may have by then.
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            # Ends the thread. A close wouldn't, as long as a forked process lives that has a copy
            # of the writer.
            self._wakeup_writer.shutdown(socket.SHUT_RDWR)
            self._wakeup_writer.close()
            self._wakeup_writer = None

    @property
    def is_listening(self) -> bool:
        """Whether signals are received; not if it was entered outside of the main thread."""
        return self._wakeup_writer is not None

    def ignore_signals_until_exit(self) -> None:
        """Ignore signals until the process ends: it has its result and is exiting."""
        self._phase = SignalPhase.LEAVING
        if self._wakeup_writer is not None:
            # `__exit__` installs these. The handlers from before may be the default action, with
            # which a second SIGTERM ends the process before it has written its result.
            self._before = dict.fromkeys(self._before, signal.SIG_IGN)

    def replace_last_resort(self, last_resort: Callable[[signal.Signals], None] | None) -> None:
        """Set what ends the pod from now on if the main thread ignores a signal for too long.

        If the pod is being ended, this waits for its end: a main thread that comes out of C++ then
        must not report the same failure a second time.
        """
        with self._ends_pod:
            self._last_resort = last_resort

    def acknowledge(self) -> None:
        """Confirm that the main thread handles the signal, so that it isn't interrupted again."""
        self._noticed.set()

    def begin_shutdown(self) -> None:
        """Let further signals end waits and interrupt nothing."""
        # The one of the phase before would report a signal as this node's failure.
        self.replace_last_resort(None)
        self._phase = SignalPhase.SETTLING
        self._noticed.set()

    def install(self) -> None:
        """Install the handlers, again after each start of workers: torch then installs its own."""
        if self._wakeup_writer is not None:
            for number in self._handled:
                signal.signal(number, self._handle)

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """Install the handlers, and let the exception of a signal wait for the end of the block.

        For code that connects to other nodes: interrupted halfway, it would leave threads, and the
        peers would get no notice.
        """
        if self._wakeup_writer is None:
            yield
            return
        # Cleared first: between the two lines the old handlers act.
        self._is_interruptible.clear()
        try:
            self.install()
            yield
        finally:
            self._is_interruptible.set()
            number, self._postponed = self._postponed, None
            if number is not None:
                self._handle(number, None)

    def _forget_in_child(self) -> None:
        # Without this a signal to a worker would write into the agent's socket, and the agent would
        # report that it was terminated itself. After the block the wakeup descriptor is the earlier
        # one again.
        if self._phase is not SignalPhase.LEAVING and self._wakeup_writer is not None:
            signal.set_wakeup_fd(-1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        # Python runs this in the main thread, between two bytecodes of anything, also of a wait for
        # `shutdown_requested`. `_read_signals` sees the same signal in its thread; either may be
        # first.
        if os.getpid() != self._owner:
            # a forked worker inherits the handler; there it does what torch's own would do
            raise SignalException(
                f"Process {os.getpid()} got signal: {number}", signal.Signals(number)
            )
        # Before the exception: code that swallows it still finds the event set, and its waits end.
        self.shutdown_requested.set()
        if not self._is_interruptible.is_set():
            self._postponed = signal.Signals(number)
            return
        if not self._phase.interrupts_main:
            self._has_run_handler.set()
            return
        now = time.monotonic()
        has_just_raised = now - self._raised_at < SIGNAL_RAISE_INTERVAL_SECONDS
        if not self._noticed.is_set() and not has_just_raised:
            self._raised_at = now
            sent = signal.Signals(number)
            raise SignalException(f"Process {os.getpid()} got signal: {sent.name}", sigval=sent)

    def _read_signals(self, reader: socket.socket) -> None:
        with reader:
            # A read may return the bytes of several signals, also of those that other code handles,
            # and of `_is_handled`'s own. Only the first terminating signal counts.
            while data := reader.recv(64):
                number = next(
                    (signal.Signals(byte) for byte in data if byte in set(self._handled)), None
                )
                if number is not None and self.received is None and self._phase.needs_main:
                    self.received = SignalReceived(number, Moment.now())
                    self.shutdown_requested.set()
                    with suppress_internal_errors("answering a signal"):
                        self._answer(self.received)

    def _answer(self, received: SignalReceived) -> None:
        """Report the signal, and end the pod if the main thread doesn't handle it."""
        # The report comes first: it is bounded, and by then the main thread has had time to handle
        # the signal.
        if self._phase.reports_signal:
            with suppress_internal_errors("reporting that this pod is terminated"):
                if self.on_received is not None:
                    self.on_received(received)
        # A main thread that needs no exception isn't disturbed in vain, such as after success.
        is_needed = self._phase.interrupts_main or self._last_resort is not None
        if not is_needed or self._is_handled(received.number):
            return
        with self._ends_pod:
            if self._last_resort is not None:
                logger.warning(
                    "the main thread didn't handle %s; exiting from another thread",
                    received.number.name,
                )
                self._last_resort(received.number)

    def _is_handled(self, number: signal.Signals) -> bool:
        main = threading.main_thread().ident
        handled = self._noticed if self._phase.interrupts_main else self._has_run_handler
        self._is_interruptible.wait(POSTPONED_SIGNAL_TIMEOUT_SECONDS)
        for _ in range(round(MAIN_THREAD_TIMEOUT_SECONDS / SIGNAL_RAISE_INTERVAL_SECONDS)):
            # Longer than the interval: `_handle` ignores a signal that comes within one interval
            # after it has raised.
            if handled.wait(1.1 * SIGNAL_RAISE_INTERVAL_SECONDS):
                return True
            if main is not None:
                # To that thread: a system call there is interrupted, so the Python handler runs.
                # Code may also have swallowed the first exception; then this raises another.
                signal.pthread_kill(main, number)
        return handled.is_set()
