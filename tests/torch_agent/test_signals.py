"""Signals to an agent, whatever its main thread is doing: real signals to real processes."""

import contextlib
import datetime as dt
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import pytest
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException

from firstfault_torch.agent.signals import HANDLED, SignalReceived, SignalWatch
from tests.waiting import run_in_thread

pytestmark = [pytest.mark.slow, pytest.mark.forks]

LONG_S = 60.0
SOON_S = 30.0
"""Milliseconds are usual; the machine may be busy."""
LAST_RESORT_S = 1.0
"""Time for the main thread to handle a signal."""


class Agent:
    """A process that receives signals and reports them with the time."""

    def __init__(self, work: Callable[[SignalWatch, Callable[..., None]], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._said, said = context.Pipe(duplex=False)
        self.process = context.Process(target=_be_agent, args=(work, said))
        self.process.start()
        said.close()

    def send(self, number: signal.Signals = signal.SIGTERM) -> None:
        os.kill(self.process.pid or 0, number)

    def next(self) -> tuple[Any, ...]:
        """Return its next report, without the time."""
        return self.timed()[1:]

    def timed(self) -> tuple[Any, ...]:
        """Return its next report, after the time by the monotonic clock."""
        assert self._said.poll(SOON_S), "it says nothing"
        said: tuple[Any, ...] = self._said.recv()
        return said

    def end(self) -> list[tuple[Any, ...]]:
        """Return all its reports until it ends, without the times."""
        left = []
        with contextlib.suppress(EOFError):
            while True:
                left.append(self.next())
        self.process.join(LONG_S)
        return left


def _be_agent(work: Callable[[SignalWatch, Callable[..., None]], None], said: Connection) -> None:
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)

    def say(*what: Any) -> None:
        said.send((time.monotonic(), *what))

    def last_resort(number: signal.Signals) -> None:
        say("last resort", number.name)
        os._exit(7)

    heard = threading.Event()

    def tell(told: SignalReceived) -> None:
        say("told", told.number.name)
        heard.set()

    watch = SignalWatch()
    watch.on_received = tell
    watch.replace_last_resort(last_resort)
    with watch:
        try:
            work(watch, say)
        except SignalException as error:
            watch.acknowledge()
            say("raised", error.sigval.name, watch.shutdown_requested.is_set())
            heard.wait(LONG_S)
    say("left", signal.getsignal(signal.SIGTERM))


@pytest.fixture
def start() -> Iterator[Callable[..., Agent]]:
    """Start agents; none survives the test."""
    started: list[Agent] = []

    def begin(work: Callable[[SignalWatch, Callable[..., None]], None]) -> Agent:
        started.append(Agent(work))
        return started[-1]

    yield begin
    for agent in started:
        agent.process.kill()
        agent.process.join()


def _in_python(watch: SignalWatch, say: Callable[..., None]) -> None:
    say("ready")
    time.sleep(LONG_S)


def _swallowing(watch: SignalWatch, say: Callable[..., None]) -> None:
    """Continue after the first exception, whatever it is."""
    say("ready")
    with contextlib.suppress(Exception):
        time.sleep(LONG_S)
    time.sleep(LONG_S)


def _with_torchs_handlers(watch: SignalWatch, say: Callable[..., None]) -> None:
    """Restore ours after torch has set its own, as it does when it starts workers."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    watch.install()
    _in_python(watch, say)


def _in_c(watch: SignalWatch, say: Callable[..., None]) -> None:
    """Wait in a store, in C++ without the interpreter's lock, as in a rendezvous."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = dt.timedelta(seconds=LONG_S)
    threading.Thread(
        target=_say_when_inside, args=(threading.get_ident(), say), daemon=True
    ).start()
    with contextlib.suppress(DistStoreError):
        _wait(store, limit)


def _wait(store: TCPStore, limit: dt.timedelta) -> None:
    store.wait(["never"], limit)


def _say_when_inside(thread: int, say: Callable[..., None]) -> None:
    """Say "ready" when the thread is in the store's own code: twice at the same place,
    with time for many others.
    """
    places = [("", -1), ("", -2)]
    while places[-1] != places[-2] or places[-1][0] != "_wait":
        time.sleep(0.02)
        frame = sys._current_frames()[thread]
        places.append((frame.f_code.co_name, frame.f_lasti))
    say("ready")


# --- while the agent works ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "number"),
    [
        *((_in_python, number) for number in HANDLED),
        (_swallowing, signal.SIGTERM),
        (_with_torchs_handlers, signal.SIGTERM),
    ],
    ids=[*(number.name for number in HANDLED), "swallowed", "torch's handlers"],
)
def test_in_python(work: Any, number: signal.Signals, start: Callable[..., Agent]) -> None:
    """A main thread in Python gets torch's exception; the signal is reported,
    and the pod is not ended.
    """
    agent = start(work)
    assert agent.next() == ("ready",)
    agent.send(number)
    said = [agent.next(), agent.next()]
    assert sorted(said) == [("raised", number.name, True), ("told", number.name)]
    assert agent.end() == [("left", signal.SIG_DFL)]
    assert agent.process.exitcode == 0


@pytest.mark.parametrize("breaks", [False, True])
def test_inside_of_c(breaks: bool, start: Callable[..., Agent]) -> None:
    """While the main thread is blocked in C++, the signal is reported at once,
    and a second later the pod ends.

    Python alone would run the handler after the wait, half a minute later. The pod also ends if our
    own code raises.
    """

    def work(watch: SignalWatch, say: Callable[..., None]) -> None:
        if breaks:
            watch.on_received = lambda _: 1 / 0  # type: ignore[arg-type, return-value]
        _in_c(watch, say)

    agent = start(work)
    assert agent.next() == ("ready",)
    sent = time.monotonic()
    agent.send()
    if not breaks:
        told = agent.timed()
        assert told[1:] == ("told", "SIGTERM")
        assert told[0] - sent < SOON_S
    last = agent.timed()
    assert last[1:] == ("last resort", "SIGTERM")
    assert LAST_RESORT_S <= last[0] - sent < LAST_RESORT_S + SOON_S
    assert agent.end() == []
    assert agent.process.exitcode == 7


def test_the_first_signal_counts(start: Callable[..., Agent]) -> None:
    """A second signal, while the agent stops its workers,
    interrupts nothing and is not reported.
    """

    def work(watch: SignalWatch, say: Callable[..., None]) -> None:
        try:
            _in_python(watch, say)
        except SignalException:
            watch.acknowledge()
            say("stopping")
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
            time.sleep(LAST_RESORT_S / 2)
            say("stopped", watch.received and watch.received.number.name)

    agent = start(work)
    assert agent.next() == ("ready",)
    agent.send()
    left = agent.end()
    assert left.count(("told", "SIGTERM")) == 1
    assert [one for one in left if one[0] != "told"] == [
        ("stopping",),
        ("stopped", "SIGTERM"),
        ("left", signal.SIG_DFL),
    ]


# --- later ----------------------------------------------------------------------------------------


def test_at_the_beginning_of_a_wait(start: Callable[..., Agent]) -> None:
    """A signal ends the wait that it interrupts,
    also while the main thread holds the lock of the event.
    """

    def work(watch: SignalWatch, say: Callable[..., None]) -> None:
        watch.begin_shutdown()
        lines = []

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code is threading.Event.wait.__code__ and event == "line":
                lines.append(frame.f_lineno)
                if len(lines) == 2:  # the first one takes the lock
                    signal.raise_signal(signal.SIGTERM)
            return trace

        sys.settrace(trace)
        shutdown_requested = watch.shutdown_requested.wait(LONG_S)
        sys.settrace(None)
        say("gave up", shutdown_requested)

    agent = start(work)
    assert agent.next() == ("gave up", True)
    assert agent.end() == [("left", signal.SIG_DFL)]


def test_while_leaving(start: Callable[..., Agent]) -> None:
    """A signal to a pod that leaves with its result does nothing, to the end of the process."""

    def work(watch: SignalWatch, say: Callable[..., None]) -> None:
        watch.ignore_signals_until_exit()
        say("ready")
        for number in HANDLED:
            signal.raise_signal(number)
        time.sleep(0.1)
        say("done", watch.received)

    agent = start(work)
    assert agent.end() == [("ready",), ("done", None), ("left", signal.SIG_IGN)]
    assert agent.process.exitcode == 0


# --- other processes and threads ------------------------------------------------------------------


def test_a_forked_worker(start: Callable[..., Agent]) -> None:
    """A forked worker that receives a signal gets torch's exception,
    and its agent receives nothing; so vice versa.
    """

    def work(watch: SignalWatch, say: Callable[..., None]) -> None:
        worker = os.fork()
        if worker == 0:
            try:
                say("worker", os.getpid())
                time.sleep(LONG_S)
            except SignalException as error:
                say("the worker's", error.sigval.name)
                os._exit(5)
        _, status = os.waitpid(worker, 0)
        say("ended", os.waitstatus_to_exitcode(status))
        time.sleep(0.1)
        say("heard", watch.received, watch.shutdown_requested.is_set())
        worker = os.fork()
        if worker == 0:
            time.sleep(LONG_S)
            os._exit(0)
        with contextlib.suppress(SignalException):
            _in_python(watch, say)
        watch.acknowledge()
        time.sleep(0.1)
        say("worker", os.waitpid(worker, os.WNOHANG))
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)

    agent = start(work)
    _, pid = agent.next()
    os.kill(pid, signal.SIGTERM)
    assert agent.next() == ("the worker's", "SIGTERM")
    assert [agent.next() for _ in range(3)] == [("ended", 5), ("heard", None, False), ("ready",)]
    agent.send()
    assert sorted(agent.end()) == [
        ("left", signal.SIG_DFL),
        ("told", "SIGTERM"),
        ("worker", (0, 0)),
    ]


def _hearing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "firstfault-signals"]


@pytest.mark.parametrize("error", [None, KeyError("the user's")], ids=["result", "error"])
def test_it_leaves_nothing_behind(error: Exception | None) -> None:
    """After a local call, whatever its end, handlers and wakeup descriptor are the caller's,
    and no thread is left.
    """

    def own(*_: object) -> None:
        """Be a caller's handler."""

    signal.signal(signal.SIGTERM, own)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in HANDLED]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    watch = SignalWatch()
    try:
        with pytest.raises(type(error)) if error is not None else contextlib.nullcontext(), watch:
            assert watch.is_listening
            assert signal.getsignal(signal.SIGTERM) not in before
            (thread,) = _hearing()
            lives_on = multiprocessing.get_context("fork").Process(
                target=time.sleep, args=(LONG_S,)
            )
            lives_on.start()
            if error is not None:
                raise error
        assert [signal.getsignal(number) for number in HANDLED] == before
        thread.join(SOON_S)
        assert not thread.is_alive()
    finally:
        lives_on.kill()
        lives_on.join()
        left = signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)
    assert left == writer


def test_in_another_thread() -> None:
    """A task that is called from a thread receives no signals and changes no handlers."""
    before = [signal.getsignal(number) for number in HANDLED]
    seen = []

    def call() -> None:
        with SignalWatch() as watch:
            watch.install()
            watch.ignore_signals_until_exit()
            seen.append(
                (watch.is_listening, _hearing(), [signal.getsignal(number) for number in HANDLED])
            )

    run_in_thread(call)
    assert seen == [(False, [], before)]
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_the_signals_that_are_handled() -> None:
    """The agent handles the signals that the user names, and leaves the others as they are."""
    before = signal.getsignal(signal.SIGTERM)
    with SignalWatch((signal.SIGUSR1,)) as watch:
        assert signal.getsignal(signal.SIGTERM) is before
        with pytest.raises(SignalException):
            signal.raise_signal(signal.SIGUSR1)
        assert watch.shutdown_requested.is_set()
        watch.acknowledge()
