"""Signals to the agent, noticed also while its main thread waits inside C++.

Python runs a signal's handler in the main thread, between two of its own instructions: an agent that waits in a store
would notice SIGTERM after minutes. The interpreter's C handler writes a byte into the wakeup descriptor at once; a
thread reads it, reports the signal and, if the main thread does not notice it, ends the process.
"""

from __future__ import annotations

import enum
import math
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import SignalException

from firstfault_torch.context import Moment
from firstfault_torch.guard import guarded, logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

    from typing_extensions import Self

__all__ = ["HANDLED", "SignalPhase", "SignalReceived", "SignalWatch"]

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that terminate a pod; the same as torch elastic's."""
_MAIN_THREAD_S = 1.0
"""How long the main thread has to notice a signal before the watching thread ends the pod in its stead."""
_AGAIN_S = 0.25
"""How often the main thread is told again: code that goes on after any exception may have swallowed the first one."""


class SignalPhase(enum.Enum):
    """What a signal means, depending on how far this pod is."""

    WORKING = "working"
    """The main thread is interrupted by torch's SignalException."""
    SETTLING = "settling"
    """The wait for other nodes ends; what is known by then is sealed."""
    LEAVING = "leaving"
    """Nothing: the result is on its way out, and this pod ends by itself."""


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """The first signal that terminates this agent."""

    number: signal.Signals
    moment: Moment


class SignalWatch:
    """Hears the signals to this process for as long as it is entered; only the main thread can enter it usefully.

    Elsewhere (a task called from a thread) it changes nothing and hears nothing.
    """

    def __init__(self) -> None:
        self.received: SignalReceived | None = None
        self.gave_up = threading.Event()
        """Set by a signal: no wait should go on."""
        self._phase = SignalPhase.WORKING
        self._noticed = threading.Event()
        self._raised_at = -math.inf
        """By the monotonic clock: a second signal right behind the first is no new one."""
        self._on_received: Callable[[SignalReceived], None] | None = None
        self._last_resort: Callable[[signal.Signals], None] | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._ear: socket.socket | None = None
        self._mouth: socket.socket | None = None
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            with guarded("listening to signals"):
                self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phase = SignalPhase.LEAVING
        if self._mouth is None or self._ear is None:
            return
        with guarded("ceasing to listen to signals"):
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._mouth.close()
            self._mouth = None

    @property
    def is_listening(self) -> bool:
        """Whether signals are heard: not if it was entered outside of the main thread."""
        return self._mouth is not None

    def leave(self) -> None:
        """Let signals do nothing from here to the end of the process: the pod is ending, with its result."""
        self._phase = SignalPhase.LEAVING
        if self._mouth is not None:
            self._before = dict.fromkeys(self._before, signal.SIG_IGN)

    def notice(self) -> None:
        """The main thread has heard of the signal, and ends what it was doing: it is not interrupted again."""
        self._noticed.set()

    def begin_shutdown(self) -> None:
        """A signal from here on ends waits and interrupts nothing."""
        self._phase = SignalPhase.SETTLING
        self._noticed.set()

    def install(self) -> None:
        """Put the handlers (back) in place; torch sets its own whenever it starts workers."""
        if self._mouth is not None:
            for number in HANDLED:
                signal.signal(number, self._handle)

    def when_received(self, on_received: Callable[[SignalReceived], None] | None) -> None:
        """Call `on_received` in the watching thread as soon as a signal comes, whatever the main thread is doing."""
        self._on_received = on_received

    def as_last_resort(self, call: Callable[[signal.Signals], None]) -> None:
        """Call `call` in the watching thread if the main thread has not noticed a signal in time; it ends the pod."""
        self._last_resort = call

    def _listen(self) -> None:
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._before = {number: signal.getsignal(number) for number in HANDLED}
        self.install()
        self._wakeup_before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        # a forked worker has this process's descriptors and handlers: its signals are not ours
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._hear, name="firstfault-signals", daemon=True).start()

    def _forget(self) -> None:
        if self._phase is not SignalPhase.LEAVING and self._mouth is not None:
            signal.set_wakeup_fd(-1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._owner:
            raise SignalException(f"Process {os.getpid()} got signal: {number}", signal.Signals(number))
        self.gave_up.set()
        now = time.monotonic()
        if self._phase is SignalPhase.WORKING and not self._noticed.is_set() and now - self._raised_at >= _AGAIN_S:
            self._raised_at = now
            sent = signal.Signals(number)
            raise SignalException(f"Process {os.getpid()} got signal: {sent.name}", sigval=sent)

    def _hear(self) -> None:
        ear = self._ear
        if ear is None:
            return
        with ear:
            while data := ear.recv(64):
                number = next((signal.Signals(byte) for byte in data if byte in set(HANDLED)), None)
                if number is not None and self.received is None and self._phase is not SignalPhase.LEAVING:
                    self.received = SignalReceived(number, Moment.now())
                    self.gave_up.set()
                    with guarded("answering a signal"):
                        self._answer(self.received)

    def _answer(self, received: SignalReceived) -> None:
        if self._phase is not SignalPhase.WORKING:
            return
        with guarded("reporting that this pod is terminated"):
            if self._on_received is not None:
                self._on_received(received)
        if not self._is_noticed(received.number) and self._last_resort is not None:
            logger.warning("the main thread does not notice %s; this pod ends without it", received.number.name)
            self._last_resort(received.number)

    def _is_noticed(self, number: signal.Signals) -> bool:
        main = threading.main_thread().ident
        for _ in range(round(_MAIN_THREAD_S / _AGAIN_S)):
            if self._noticed.wait(1.1 * _AGAIN_S):
                return True
            if main is not None:
                signal.pthread_kill(main, number)
        return self._noticed.is_set()
