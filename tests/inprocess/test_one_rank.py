"""A job of one rank, in this process: what a restart leaves behind, and what ends it."""

import getpass
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import firstfault_inprocess as inprocess
from firstfault_inprocess.monitor.heartbeats import HeartbeatRing
from firstfault_inprocess.progress import SharedProgress
from firstfault_inprocess.store import Fault, FaultKind
from firstfault_inprocess.store_host import list_open_sockets
from firstfault_inprocess.wrap import CallWrapper, current_call
from firstfault_torch import PlainEngine, Watchdog, guard, watchdog
from firstfault_torch.agent.timers import TimerServer
from firstfault_torch.worker.in_flight import InFlight, watch_process_groups
from firstfault_torch.worker.worker_monitor import WorkerMonitor
from tests.inprocess.training import run
from tests.ports import get_free_port
from tests.processes import read_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.jobs

FEW = inprocess.initialize.RetryController(max_iterations=3)
FAST = {"last_call_wait": 0.01, "monitor_process_interval": 0.05, "initialize": FEW}


class Keeping:
    """An observer that holds the exceptions until the ranks continue."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def raised(self, error: BaseException) -> None:
        self.errors.append(error)

    def recovered(self, interruption: object) -> None:
        del interruption
        self.errors.clear()

    def collectives_begun(self) -> None:
        """Nothing is known."""


class Model:
    """Stands for what takes memory."""


@pytest.fixture(autouse=True)
def _world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": get_free_port()}
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, **address}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("observer", [None, Keeping()], ids=["none", "a monitor"])
def test_memory_is_freed_before_the_function_is_called_again(
    observer: Keeping | None,
) -> None:
    """Also what only the traceback of its exception holds: on a GPU there is no memory for both.

    A worker's monitor keeps the exception on record until the ranks continue.
    """
    held: list[weakref.ref[Model]] = []
    alive = []

    def train() -> None:
        alive.append([model() is not None for model in held])
        model = Model()
        held.append(weakref.ref(model))
        if len(held) < FEW.max_iterations:
            raise ValueError("the fault")

    with CallWrapper(inprocess.InProcessRestart(**FAST), observer) as call:
        call(train, (), {})
    assert alive == [[], [False], [False, False]]


@pytest.mark.parametrize("faults", [0, 1])
def test_tracing_still_works_after_a_call(faults: int) -> None:
    """A debugger, a profiler or coverage still works, also after an interruption."""

    @inprocess.Wrapper(**FAST)
    def train(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        if call.iteration < faults:
            raise ValueError("the fault")

    train()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # Python would wait for ever
        sys.settrace(lambda *_: None)
        getpass.getuser()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_program_may_ignore_the_end_of_children() -> None:
    """The kernel removes the process that starts the monitor process:
    nothing is left to wait for.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert inprocess.Wrapper(**FAST)(lambda: 5)() == 5
    finally:
        signal.signal(signal.SIGCHLD, before)


class Releasing(logging.Handler):
    """Releases a lock when a rank says that it is still in the function."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__()
        self.held = lock

    def emit(self, record: logging.LogRecord) -> None:
        if "still at" in record.getMessage():
            self.held.release()


def test_a_rank_that_cannot_be_interrupted_says_where_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says where it stands, and after which fault,
    before its monitor process ends it from outside.
    """
    lock = threading.Lock()
    lock.acquire()
    peer = Fault(1, FaultKind.EXCEPTION, "ValueError: no labels", 0, 1)

    @inprocess.Wrapper(**FAST, soft_timeout=100, hard_timeout=102)
    def train(call: inprocess.CallWrapper | None = None) -> None:
        assert call is not None
        if call.iteration == 0:
            call._session.iteration.interrupt(peer)
            lock.acquire()  # one call of C

    handler = Releasing(lock)
    guard.logger.addHandler(handler)
    try:
        train()
    finally:
        guard.logger.removeHandler(handler)
    said = next(message for message in caplog.messages if "still at" in message)
    assert f"{Path(__file__).name}:" in said
    assert "in train, after rank 1: exception, ValueError: no labels;" in said
    assert "within 102 s (hard_timeout)" in said


@dataclass(frozen=True)
class _FrozenJob:
    """A job of one rank whose processes are stopped."""

    process: ForkProcess
    connection: Connection
    rank: int
    """A process id."""
    monitor: int


def _frozen_before(call: Callable[..., Any], freezes: Event, rank: int) -> Callable[..., Any]:
    """Return a function that stops the rank and its own process once, before its call."""

    def run(*args: Any) -> Any:
        if freezes.is_set():
            freezes.clear()
            for pid in (rank, os.getpid()):
                os.kill(pid, signal.SIGSTOP)
        return call(*args)

    return run


def _train_and_freeze(freezes_in: str, freezes: Event, its: Connection, port: int) -> None:
    """Train in a process of its own, in which the monitor process may freeze both."""
    os.environ["MASTER_PORT"] = str(port)
    if freezes_in == "heartbeat":
        HeartbeatRing.beat = _frozen_before(HeartbeatRing.beat, freezes, os.getpid())
    elif freezes_in == "check":
        measure = _frozen_before(SharedProgress.stalled_seconds.fget, freezes, os.getpid())
        SharedProgress.stalled_seconds = property(measure)

    @inprocess.Wrapper(
        **{**FAST, "soft_timeout": 5.0, "hard_timeout": 7.0},
        progress_watchdog_interval=0.1,
        heartbeat_interval=1.0 if freezes_in == "heartbeat" else 29.0,
    )
    def train(call: inprocess.CallWrapper | None = None) -> int:
        assert call is not None
        time.sleep(1.0)  # until the monitor process has sent its heartbeat
        its.send((os.getpid(), call._session.monitor.pid))
        wait_until(its.poll, seconds=250.0)
        for _ in range(30):
            time.sleep(0.01)
        return call.iteration

    its.send(train())


@pytest.fixture
def frozen_jobs() -> Iterator[list[_FrozenJob]]:
    """Start one job for each place in which the monitor process may be when the machine freezes,
    and freeze it there.
    """
    context = multiprocessing.get_context("fork")
    jobs: list[_FrozenJob] = []
    try:
        for freezes_in in ("sleep", "heartbeat", "check"):
            ours, its = context.Pipe()
            freezes = context.Event()
            # Here, not in the child: this process keeps the port's lock until the end.
            port = get_free_port()
            process = context.Process(
                target=_train_and_freeze,
                args=(freezes_in, freezes, its, port),
            )
            process.start()
            its.close()  # so that the end of the rank ends the waits
            job = _FrozenJob(process, ours, *ours.recv())
            jobs.append(job)
            if freezes_in == "sleep":
                os.kill(job.rank, signal.SIGSTOP)
                os.kill(job.monitor, signal.SIGSTOP)
            else:
                freezes.set()
        yield jobs
    finally:
        processes = read_processes()
        for job in jobs:
            job.process.kill()
            job.process.join()
            # one that runs ends by itself, and its number may be another process's by now
            if job.monitor in processes and processes[job.monitor].state == "T":
                os.kill(job.monitor, signal.SIGKILL)


def test_a_machine_that_was_frozen_loses_no_rank(frozen_jobs: list[_FrozenJob]) -> None:
    """A rank that was frozen together with its monitor process, longer than it may make no
    progress, continues; also if the monitor process wasn't asleep at that moment.
    """
    for job in frozen_jobs:
        for pid in (job.rank, job.monitor):
            wait_until(lambda pid=pid: read_processes()[pid].state == "T")
    time.sleep(9.0)
    for job in frozen_jobs:
        # the monitor process checks before the rank makes progress
        for pid in (job.monitor, job.rank):
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.5)
        job.connection.send("continue")
        job.process.join()
        assert job.process.exitcode == 0
        assert job.connection.recv() == 0


def test_no_timeout_ends_a_rank_without_hang_protection() -> None:
    """In a block without hang protection, also after one within it, no timeout ends a rank;
    then all begin anew.
    """

    @inprocess.Wrapper(**FAST)
    def train(call: CallWrapper) -> int:
        progress = call._session.progress
        call.ping()
        with call.disable_hang_protection():
            progress.manual = progress.interrupted = 1e-9  # when the machine was started
            with call.disable_hang_protection():
                pass
            assert (progress.stalled_seconds, progress.ending_seconds) == (0, 0)
        assert max(progress.stalled_seconds, progress.ending_seconds) < 60
        progress.interrupted = 0.0
        return call.iteration

    assert train() == 0


def test_a_call_within_a_call_is_refused() -> None:
    """It is refused at once: after a fault the ranks would be in different calls."""
    inner = inprocess.Wrapper(**FAST)(lambda: None)
    with pytest.raises(inprocess.exception.RestartAbort) as caught:
        inprocess.Wrapper(**FAST)(inner)()
    assert "inside another one" in str(caught.value.__cause__)
    inner()


@pytest.mark.parametrize("how", ["raise", "exit", "return"])
def test_a_forked_child_ends_as_without_a_wrapper(how: str) -> None:
    """It ends as it would without a wrapper, and the parent's call continues undisturbed."""
    codes = []

    @inprocess.Wrapper(**FAST)
    def train(call: inprocess.CallWrapper | None = None) -> int:
        assert call is not None
        child = os.fork()
        if child == 0:
            if how == "raise":
                raise ValueError("of the child")
            if how == "exit":
                sys.exit(3)
            return -1
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert Path(f"/proc/{call._session.monitor.pid}").exists()
        return call.iteration

    parent = os.getpid()
    try:
        answer = train()
    except BaseException as error:
        if os.getpid() != parent:
            os._exit({"ValueError": 4, "SystemExit": 3}.get(type(error).__name__, 9))
        raise
    if os.getpid() != parent:
        os._exit(5 if answer == -1 else 9)
    assert codes == [{"raise": 4, "exit": 3, "return": 5}[how]]
    assert answer == 0


def test_an_interruption_waits_for_an_exceptions_record() -> None:
    """It waits for that: a document of which no name is known could not be withdrawn
    when the ranks continue.
    """
    monitor = WorkerMonitor(PlainEngine(""))
    recorded = list[str]()
    withdrawn = list[str]()

    def record(error: BaseException) -> str:
        recorded.append(str(error))
        for _ in range(100):
            time.sleep(0.01)
        return str(error)

    def train() -> int:
        call = current_call()
        assert call._session.iteration is not None
        if call.iteration:
            return call.iteration
        try:
            call._session.iteration.interrupt(Fault(0, FaultKind.EXCEPTION, "another rank's", 0))
            raise ConnectionError("the peer is gone")
        finally:
            dist.destroy_process_group(dist.GroupMember.NON_GROUP_MEMBER)

    monitor.in_flight = InFlight(record, withdrawn.append)
    undo = watch_process_groups(monitor.in_flight)
    try:
        assert inprocess.InProcessRestart(**FAST).call(train, monitor).value == 1
    finally:
        undo()
    assert recorded == withdrawn == ["the peer is gone"]


def test_a_call_that_has_failed_keeps_no_connection_open() -> None:
    """Not even while its exception, whose frames hold the call, is in use."""
    before = list_open_sockets()

    @inprocess.Wrapper(**FAST)
    def train() -> None:
        raise ValueError("the fault")

    with pytest.raises(inprocess.exception.RestartAbort) as caught:
        train()
    assert isinstance(caught.value.__cause__, ValueError)
    assert not list_open_sockets() - before


def test_the_function_may_ask_for_a_restart() -> None:
    """A RankShouldRestart that no other rank caused is a fault of this rank:
    all restart at once.
    """
    iterations = []

    @inprocess.Wrapper(**FAST, hard_timeout=100.0)
    def train(call: inprocess.CallWrapper | None = None) -> str:
        iterations.append(call.iteration)
        if call.iteration == 0:
            raise inprocess.exception.RankShouldRestart
        return os.environ["RANK"]

    assert train() == "0"
    assert iterations == [0, 1]


class Unchanged(inprocess.rank_assignment.RankAssignment):
    """Says for no rank whether it is active."""

    def __call__(self, ctx: Any) -> Any:
        """Return what was given; the store is torch's, and new in each iteration."""
        assert ctx.store.add("calls", 1) == 1
        return ctx


def test_a_rank_assignment_that_activates_no_rank_ends_the_call() -> None:
    """The function must not be skipped as if all ranks had completed it."""

    @inprocess.Wrapper(**FAST, rank_assignment=Unchanged())
    def train() -> None:
        pytest.fail("the rank is not active")

    with pytest.raises(inprocess.exception.RestartAbort, match="neither active nor a reserve"):
        train()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TimerServer]:
    """Keep the deadlines of this process."""
    server = TimerServer(tmp_path / "timers.fifo")
    for name, value in server.environment(Watchdog(heartbeat_timeout=1000.0)).items():
        monkeypatch.setenv(name, value)
    server.start([os.getpid()], lambda _: None)
    yield server
    watchdog.release_all()
    server.stop()


def test_a_heartbeat_ends_with_its_iteration(server: TimerServer) -> None:
    """It has ended: a rank is not killed because it made no ping while it restarted. The
    next ping begins another.
    """

    @inprocess.Wrapper(**FAST)
    def train(call: inprocess.CallWrapper | None = None) -> int:
        assert call is not None
        if call.iteration:
            wait_until(lambda: not server._timers)
        watchdog.ping()
        wait_until(lambda: server._timers)
        if not call.iteration:
            raise ValueError("the fault")
        return call.iteration

    assert train() == 1


def test_a_deadline_ends_with_its_iteration(server: TimerServer) -> None:
    """It has ended, also if an interruption came before its block began;
    one around the call continues.
    """

    @inprocess.Wrapper(**FAST)
    def train(call: inprocess.CallWrapper | None = None) -> int:
        assert call is not None
        if not call.iteration:
            watchdog.expires(1000.0, "of a step").__enter__()
            wait_until(lambda: len(server._timers) == 2)
            raise ValueError("the fault")
        wait_until(lambda: [timer.scope for timer in server._timers.values()] == ["of the call"])
        return call.iteration

    with watchdog.expires(1000.0, "of the call"):
        assert train() == 1
    wait_until(lambda: not server._timers)


def test_an_interrupted_rank_keeps_no_deadline(server: TimerServer) -> None:
    """None is left, although the rank may be interrupted while a block begins or ends:
    it would be killed later.
    """

    @inprocess.Wrapper(
        **{**FAST, "initialize": inprocess.initialize.RetryController(max_iterations=9)}
    )
    def train(call: inprocess.CallWrapper | None = None) -> None:
        iteration = call._session.iteration
        assert iteration is not None
        if call.iteration < 8:
            iteration.interrupt(Fault(0, FaultKind.SOFT_TIMEOUT, "", 0))
            while True:
                with watchdog.expires(1000.0):
                    pass

    train()
    wait_until(lambda: not server._timers)


def test_a_job_does_not_find_the_faults_of_the_job_before() -> None:
    """The second does not find the faults of the first, whose store stays a moment longer."""
    first = run("raise", 2, initialize=FEW)
    assert set(first.of("enter", 1)) == {0, 1}
    second = run("", 2, port=first.port, initialize=FEW)
    assert not second.of("enter", 1)
    assert second.values("done") == {0: (0, 2), 1: (1, 2)}
