"""An agent's own workers: real processes that die, are stopped with real signals,
and are reported.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing import LogsDest

from firstfault.layout import error_key_for
from firstfault.model import CollectiveProgress, Place, Writer
from firstfault.recorder.client import RecorderClient
from firstfault.recorder.folder import NodeFolder
from firstfault.testing import make_error
from firstfault.wire.documents import encode
from firstfault_torch.agent import stop_processes
from firstfault_torch.agent.deaths import WorkerExit, WorkerSnapshot, WorkerStop, signal_name
from firstfault_torch.agent.exit_watch import ExitWatch
from firstfault_torch.agent.local_workers import LocalWorkers
from firstfault_torch.agent.reporter import Reporter
from firstfault_torch.agent.timers import TimerServer
from firstfault_torch.compat.torch_agent import find_ranks_without_result
from firstfault_torch.node.channel import WorkerChannel, to_message
from firstfault_torch.protocol.stopping import (
    SIBLING_FAILED,
    AskPeers,
    PeersAsked,
    StopInstruction,
    StopWorkers,
    TorchFoundFailure,
)
from firstfault_torch.rounds.roster_poller import RosterPoller
from firstfault_torch.watchdog.timers import Timer
from tests.prefix import Prefix
from tests.waiting import wait_until

_ONLY_ITS_MAIN_THREAD_EXITS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
_fork = multiprocessing.get_context("fork")
LONG_S = 60.0
pytestmark = [pytest.mark.slow, pytest.mark.forks]


def _ignores_sigterm(ready: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    threading.Event().wait()


def _plain(ready: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready.set()
    threading.Event().wait()


def _leaving(ready: Any) -> None:
    """Take a moment for the exit; a SIGTERM meanwhile would be seen in the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ready.set()
    time.sleep(0.5)
    raise SystemExit(7)


def _exit_codes(processes: list[Any]) -> list[int | None]:
    """Return how processes ended; the kernel may take long to end one that was
    killed on a busy machine.
    """
    for process in processes:
        process.join(LONG_S)
    return [process.exitcode for process in processes]


@pytest.fixture
def start() -> Iterator[Callable[..., list[Any]]]:
    """Start a process for each function, and wait until they run."""
    started = []

    def begin(*functions: Callable[[Any], None]) -> list[Any]:
        for function in functions:
            ready = _fork.Event()
            process = _fork.Process(target=function, args=(ready,))
            process.start()
            started.append(process)
            assert ready.wait(LONG_S)
        return list(started)

    yield begin
    for process in started:
        process.kill()
        process.join()


def _stop(
    local: LocalWorkers,
    reason: str = SIBLING_FAILED,
    failed: frozenset[int] = frozenset(),
    seconds: float = LONG_S,
) -> None:
    """Stop workers as a node without peers does."""
    instructions = deque[StopInstruction]([StopWorkers(reason, seconds, failed)])
    while instructions:
        instruction = instructions.popleft()
        if isinstance(instruction, AskPeers):
            instructions += local.stopper.handle(PeersAsked(has_signal=False))
        else:
            instructions += local.stopper.carry_out(instruction)


def _watch(prefix: Prefix, processes: list[Any]) -> LocalWorkers:
    """Return the workers of a node, which are these processes."""
    context = prefix.node_context()
    reporter = Reporter(context, lambda rank: Place(node="worker-0", local_rank=rank))
    local = LocalWorkers(context, reporter, LONG_S, lambda: None)
    local.stopper.watch(processes)
    return local


def test_one_that_ignores_the_signal_is_killed(
    start: Callable[..., list[Any]], prefix: Prefix
) -> None:
    """One that has failed isn't signalled, and has longer to end by itself."""
    processes = start(_leaving, _plain, _ignores_sigterm)
    began = time.monotonic()
    _stop(_watch(prefix, processes), failed=frozenset({0}), seconds=0.3)
    assert _exit_codes(processes) == [7, -signal.SIGTERM, -signal.SIGKILL]
    assert 0.3 <= time.monotonic() - began < LONG_S / 2


def test_one_that_is_exiting() -> None:
    """The kernel marks a process from the moment its exit begins;
    such a process is not stopped any more.
    """
    with subprocess.Popen([sys.executable, "-c", _ONLY_ITS_MAIN_THREAD_EXITS]) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        deadline = time.monotonic() + LONG_S
        while (fields := stat.read_text().rpartition(")")[2].split())[
            0
        ] != "Z" and time.monotonic() < deadline:
            time.sleep(0.01)

        assert int(fields[1 + stop_processes.STAT_FLAGS_INDEX]) & stop_processes.PROCESS_EXITING
        assert not stop_processes.is_running(process.pid)
        assert stop_processes.is_running(os.getpid())
        process.kill()


def test_a_signal_from_elsewhere(start: Callable[..., list[Any]], prefix: Prefix) -> None:
    """A worker that SIGTERM ended before its agent sent one was not stopped,
    even if its death is noticed later.
    """
    processes = start(_plain, _plain)
    processes[0].terminate()
    _exit_codes(processes[:1])
    local = _watch(prefix, processes)
    _stop(local)

    assert _exit_codes(processes) == [-signal.SIGTERM, -signal.SIGTERM]
    now = time.monotonic_ns()
    assert local.stopper.stopped is not None
    assert [
        local.stopper.stopped.ended(WorkerExit(rank, 1, -15, time.time_ns(), now))
        for rank in (0, 1)
    ] == [False, True]


def test_workers_whose_deadlines_expire_together(
    start: Callable[..., list[Any]], prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are killed before anything is logged:
    the first death makes torch send SIGTERM to the next worker.
    """
    processes = start(_plain, _plain)
    local = _watch(prefix, processes)

    def log(*_: object) -> None:
        for process in processes:
            process.terminate()
        _exit_codes(processes)

    monkeypatch.setattr(stop_processes.logger, "warning", log)
    local.stopper.expire(
        {process.pid: Timer(process.pid, "step", "", 0.0, 1.0) for process in processes}
    )
    assert _exit_codes(processes) == [-signal.SIGKILL, -signal.SIGKILL]


def test_a_deadline_of_a_worker_that_is_gone(prefix: Prefix) -> None:
    """A process that has the number of a worker after it gets no signal."""
    # the shell ends, so its child isn't this process's
    shell = subprocess.run(
        ["sh", "-c", "sleep 60 >&- 2>&- & echo $!"], check=True, capture_output=True
    )
    pid = int(shell.stdout)
    local = _watch(prefix, [])
    local.stopper._processes = [SimpleNamespace(pid=pid, exitcode=None)]
    local.stopper.expire({pid: Timer(pid, "step", "", 0.0, 1.0)})
    os.kill(pid, 0)
    assert stop_processes.is_running(pid)
    assert not local.stopper.expired
    os.kill(pid, signal.SIGKILL)


def test_a_deadline_of_a_worker_that_is_no_child(prefix: Prefix) -> None:
    """A worker that another process has forked, as torch's "forkserver" does,
    is ended at its deadline.
    """
    local = LocalWorkers(
        prefix.node_context(),
        Reporter(prefix.node_context(), Place),
        LONG_S,
        lambda: None,
    )
    shell = subprocess.run(
        ["sh", "-c", "sleep 60 >&- 2>&- & echo $!"], check=True, capture_output=True
    )
    pid = int(shell.stdout)
    processes = [SimpleNamespace(pid=pid, exitcode=None, sentinel=-1)]
    local.started(SimpleNamespace(_pc=SimpleNamespace(processes=processes), error_files={}), (0,))
    local.stopper.expire({pid: Timer(pid, "step", "", 0.0, 1.0)})
    assert local.stopper.expired.keys() == {0}
    wait_until(lambda: not stop_processes.is_running(pid))
    local.stop_watching()


def test_a_deadline_after_the_program_closed_every_descriptor(
    start: Callable[..., list[Any]], prefix: Prefix, tmp_path: Path
) -> None:
    """The worker is ended, and a file that has got the number of its descriptor
    stays open after the round.
    """
    local = LocalWorkers(
        prefix.node_context(),
        Reporter(prefix.node_context(), Place),
        LONG_S,
        lambda: None,
    )
    processes = start(_plain)
    local.started(SimpleNamespace(_pc=SimpleNamespace(processes=processes), error_files={}), (0,))
    number = local.stopper._pidfds[0].number
    with (tmp_path / "data").open("w") as data:
        os.dup2(data.fileno(), number)
    local.stopper.expire({processes[0].pid: Timer(processes[0].pid, "step", "", 0.0, 1.0)})
    assert _exit_codes(processes) == [-signal.SIGKILL]
    local.stop_watching()
    os.write(number, b"still open")
    os.close(number)


def test_a_program_that_exits_while_a_peer_fails(
    start: Callable[..., list[Any]], prefix: Prefix
) -> None:
    """It ends by itself, and counts as failed when it began to exit."""
    with tempfile.TemporaryDirectory(
        prefix="ff-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        context = replace(prefix.node_context(), node_folder=folder)
        assert context.files is not None
        files = context.files
        local = LocalWorkers(context, Reporter(context, Place), LONG_S, lambda: None)
        local.begin_round()

        def exits(ready: Any) -> None:
            channel = WorkerChannel(files, context.round, 0, lambda _: {})
            channel.report_exit()
            _leaving(ready)

        began = time.monotonic_ns()
        # the second one is waited for, because it failed, and ends by itself
        processes = start(exits, _leaving)
        pcontext = SimpleNamespace(_pc=SimpleNamespace(processes=processes), error_files={})
        local.started(pcontext, (0, 1))
        local.find_finished()  # all that was sent before has been read
        _stop(local, failed=frozenset({1}))
        assert _exit_codes(processes)[0] == 7
        (exiting_ns,) = local.find_failure_times().values()
        assert began < exiting_ns < local.stopper.stopped.began_ns
        assert 0 in local.stopper.stopped.failed_first
        local.stop_watching()
        local.close()


@pytest.mark.parametrize("function", ["__del__", "__next__"])
def test_a_worker_in_a_finaliser(function: str) -> None:
    """The agent waits for the report of a worker that drops a loader,
    perhaps for an exception that it has raised.
    """
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/x/site-packages/torch/loader.py", line 3'
        f" in {function}\n"
    )
    seen = WorkerSnapshot(f'{stack}  File "/app/train.py", line 9 in main\n')
    assert stop_processes.find_raising({0: seen}) == ({0} if function == "__del__" else set())


def test_unfinished() -> None:
    """A worker that handed over its result, read or not, is finished."""

    class Context:
        _return_values = {0: "taken"}  # noqa: RUF012 - torch's, of an instance
        _ret_vals = {rank: _fork.SimpleQueue() for rank in range(3)}  # noqa: RUF012 - as above

    Context._ret_vals[1].put("waiting")
    assert find_ranks_without_result(Context()) == {2}
    assert find_ranks_without_result(object()) == frozenset()


# --- their deaths ---------------------------------------------------------------------------------


def _act(orders: Connection, answers: Connection) -> None:
    """Do what the parent orders, after sending the (wall, monotonic) nanoseconds of that moment."""
    action = orders.recv()
    if action == "with a child of its own":
        # it inherits every descriptor of this process, as a data loader's workers do
        child = os.fork()
        if child == 0:
            time.sleep(LONG_S)
            os._exit(0)
        answers.send(child)
    answers.send((time.time_ns(), time.monotonic_ns()))
    if action == "exit 3":
        os._exit(3)
    elif action == "raise":
        raise SystemExit(4)
    elif action != "end":
        os.kill(os.getpid(), signal.SIGKILL)


class _Worker:
    """A child process that ends on order, in the way of the order."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        # two pipes rather than a socket, which may be reset when its other end is killed
        orders, self.orders = context.Pipe(duplex=False)
        self.answers, answers = context.Pipe(duplex=False)
        self.process = context.Process(target=_act, args=(orders, answers))
        self.process.start()
        orders.close()
        answers.close()

    def end(self, action: str) -> Any:
        """Order it to end; return its last answer."""
        self.orders.send(action)
        said = self.answers.recv()
        if action == "with a child of its own":
            self.answers.recv()
        return said


def _deaths(watch: ExitWatch) -> list[WorkerExit]:
    return [worker_exit for worker_exit in watch.ended() if worker_exit.exit_code != 0]


@pytest.fixture
def doomed() -> Iterator[Callable[..., _Worker]]:
    """Start worker processes; none survives the test."""
    workers: list[_Worker] = []

    def begin() -> _Worker:
        workers.append(_Worker())
        return workers[-1]

    yield begin
    for worker in workers:
        worker.process.kill()
        worker.process.join()


def _noted(watch: ExitWatch, index: int = 0) -> int:
    """Wait until a death is noted, and return its moment;
    reading the watch later does not change it.
    """
    wait_until(partial(watch._ended.__contains__, index))
    return time.monotonic_ns()


def test_deaths(doomed: Callable[..., _Worker]) -> None:
    """Deaths are noted in their order, with local rank, pid, exit code,
    signal and the moment by both clocks.
    """
    workers = [doomed() for _ in range(4)]
    watch = ExitWatch([worker.process for worker in workers])
    assert _deaths(watch) == []
    moments = []
    for index, action in ((2, "kill"), (0, "exit 3"), (1, "raise"), (3, "end")):
        began = workers[index].end(action)
        workers[index].process.join()  # torch may have waited for it first
        moments.append((began, _noted(watch, index)))
    exits = _deaths(watch)
    found = [
        (worker_exit.local_rank, worker_exit.pid, worker_exit.exit_code, worker_exit.signal)
        for worker_exit in exits
    ]
    pids = [worker.process.pid for worker in workers]
    assert found == [(2, pids[2], -9, "SIGKILL"), (0, pids[0], 3, ""), (1, pids[1], 4, "")]
    for worker_exit, ((wall_ns, monotonic_ns), noted_ns) in zip(exits, moments[:3], strict=True):
        assert monotonic_ns <= worker_exit.monotonic_ns <= noted_ns
        assert wall_ns <= worker_exit.wall_ns
    wait_until(lambda: not watch._thread.is_alive())


def test_a_signal_without_a_name() -> None:
    """It is told by its number."""
    assert [signal_name(number) for number in (9, 99)] == ["SIGKILL", "SIG99"]


def test_deaths_before_the_watch(doomed: Callable[..., _Worker]) -> None:
    """Processes that ended and were reaped before the watch began are recorded,
    one that SIGTERM ended last.
    """
    workers = [doomed(), doomed()]
    for worker, number in zip(workers, (signal.SIGTERM, signal.SIGKILL), strict=True):
        os.kill(worker.process.pid or 0, number)
        worker.process.join()
    began_ns = time.monotonic_ns()
    watch = ExitWatch([worker.process for worker in workers])
    exits = _deaths(watch)
    watch.stop()
    assert [(worker_exit.local_rank, worker_exit.signal) for worker_exit in exits] == [
        (1, "SIGKILL"),
        (0, "SIGTERM"),
    ]
    assert all(worker_exit.monotonic_ns >= began_ns for worker_exit in exits)


def test_a_death_with_a_child_alive(doomed: Callable[..., _Worker]) -> None:
    """The children of a worker, such as a data loader's, do not hide its death."""
    worker = doomed()
    watch = ExitWatch([worker.process])
    child = worker.end("with a child of its own")
    try:
        worker.process.join()
        noted_ns = _noted(watch)
        (worker_exit,) = _deaths(watch)
        assert worker_exit.monotonic_ns <= noted_ns
    finally:
        os.kill(child, signal.SIGKILL)
        watch.stop()


@pytest.mark.parametrize("name", ["firstfault-deaths", "firstfault-timers", "firstfault-roster"])
def test_a_moment_without_free_threads(
    name: str,
    prefix: Prefix,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watches of a round start although the system allows no thread at first."""
    start, failures = threading.Thread.start, [1, 2]

    def fail_at_first(thread: threading.Thread) -> None:
        if failures and thread.name == name:
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_at_first)
    if name == "firstfault-deaths":
        end = ExitWatch([SimpleNamespace(pid=os.getpid())]).stop
    elif name == "firstfault-timers":
        timers = TimerServer(tmp_path / "timers")
        timers.start([], lambda _: None)
        end = timers.stop
    else:
        end = RosterPoller(
            RecorderClient(NodeFolder(tmp_path)),
            prefix.node_context(),
            0,
            LONG_S,
            lambda _: None,
        ).end
    assert not failures
    assert name in {thread.name for thread in threading.enumerate()}
    end()


@pytest.mark.parametrize("lacks", ["kernel", "Python"])
def test_without_pidfds(
    lacks: str, doomed: Callable[..., _Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a kernel, or with a Python, without pidfds the watch uses multiprocessing's sentinels."""
    if lacks == "kernel":
        monkeypatch.setattr(
            os, "pidfd_open", Mock(side_effect=OSError(38, "Function not implemented"))
        )
    else:
        monkeypatch.delattr(os, "pidfd_open")
    worker = doomed()
    watch = ExitWatch([worker.process])
    _, monotonic_ns = worker.end("kill")
    wait_until(lambda: _deaths(watch))
    noted_ns = _noted(watch)
    (worker_exit,) = _deaths(watch)
    watch.stop()
    assert monotonic_ns <= worker_exit.monotonic_ns <= noted_ns


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_stop_leaves_nothing(doomed: Callable[..., _Worker]) -> None:
    """A stopped watch has no thread and no descriptor, so that the agent may fork again."""
    worker = doomed()
    before = _descriptors()
    watch = ExitWatch([worker.process])
    assert _descriptors() > before
    watch.stop()
    assert _descriptors() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "firstfault-deaths"]
    assert worker.process.is_alive(), "it only watches"


# --- what the agent reports -----------------------------------------------------------------------


def _garbage(spool: Path) -> None:
    (spool / "garbage.pb").write_bytes(b"garbage")


def _truncated(spool: Path) -> None:
    (spool / "garbage.pb").write_bytes(encode(make_error(1))[:-3])


def _folder(spool: Path) -> None:
    (spool / "garbage.pb").mkdir()


def _strange_receipt(spool: Path) -> None:
    _garbage(spool)
    (spool / "garbage.pb.receipt.json").write_text('{"durable": true}')


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """Return the spool of local rank 1."""
    folder = tmp_path / "node" / "spool" / "0-1"
    folder.mkdir(parents=True)
    return folder


def _report(
    prefix: Prefix, spool: Path, worker_exit: WorkerExit, stop: WorkerStop | None = None
) -> None:
    node_context = replace(prefix.node_context(), node_folder=str(spool.parents[1]))
    reporter = Reporter(
        node_context, lambda rank: Place(node="worker-0", rank=rank, local_rank=rank)
    )
    reporter.document(worker_exit, stop)
    reporter.finish((0, 1), None)
    reporter.drain()


def test_a_worker_that_torch_is_about_to_abort(prefix: Prefix, spool: Path) -> None:
    """When torch prints that it waits before an abort, the worker is asked once;
    the document has its collectives.
    """
    node_context = replace(prefix.node_context(), node_folder=str(spool.parents[1]))
    reporter = Reporter(
        node_context, lambda rank: Place(node="worker-0", rank=rank, local_rank=rank)
    )
    local = LocalWorkers(node_context, reporter, LONG_S, lambda: None)
    questions: list[int] = []
    outstanding = CollectiveProgress("default_pg", "nccl2:all_reduce", 9, 8)

    def answer(_question: str) -> dict[str, Any]:
        questions.append(1)
        return to_message([outstanding], ())

    channel = WorkerChannel(node_context.files, 0, 1, answer)
    files = node_context.files.worker(0, 1)
    local.prepare({1: {}}, LogsDest(stderrs={1: ""}))
    with Path(files.stderr).open("wb", buffering=0) as stderr:
        for part in (
            b"[TC][rank=1] Waiting 15000 ms for health check and flight ",
            b"recorder dump before aborting\n",
        ) * 2:
            stderr.write(part)
            local._stderr.tail(1)
        wait_until(lambda: local._channel is not None and 1 in local._channel.get_states())
    local.document(WorkerExit(1, 123, -6, time.time_ns(), time.monotonic_ns()))
    reporter.finish((1,), None)
    reporter.drain()
    (failure,) = prefix.failures()
    assert (failure.signal, failure.collectives, questions) == ("SIGABRT", (outstanding,), [1])
    local.close_stderr()
    local.close()
    channel._listener.close()


@pytest.mark.parametrize("spoil", [_garbage, _truncated, _folder, _strange_receipt])
@pytest.mark.parametrize("wrote", [True, False])
def test_a_document_in_the_spool_that_cannot_be_read(
    spoil: Callable[[Path], None],
    wrote: bool,
    prefix: Prefix,
    spool: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unreadable file in a worker's spool hides neither the worker's other
    documents nor its death.
    """
    spoil(spool)
    own = make_error(1, node="worker-0", local_rank=1)
    if wrote:
        (spool / error_key_for(own)).write_bytes(encode(own))
    _report(prefix, spool, WorkerExit(1, 123, -9, time.time_ns(), time.monotonic_ns()))
    (failure,) = prefix.failures()
    assert (failure.rank, failure.writer) == (1, Writer.WORKER if wrote else Writer.AGENT)
    (entry,) = prefix.roster()
    assert {
        receipt.name: (receipt.durable, receipt.error, receipt.rank) for receipt in entry.receipts
    } == {
        "garbage.pb": (False, "it cannot be read", 1),
        failure.documents[0].name: (True, "", 1),
    }
    assert "garbage.pb" in caplog.text


@pytest.mark.parametrize("later", [True, False])
def test_an_exit_after_the_agents_signal(later: bool, prefix: Prefix, spool: Path) -> None:
    """A worker whose handler exited with 0 was stopped, even if it was not asked before;
    one that exited before not.
    """
    now = time.monotonic_ns()
    exited = make_error(
        1,
        node="worker-0",
        local_rank=1,
        exception="SystemExit",
        message="0",
        monotonic_ns=now,
    )
    (spool / error_key_for(exited)).write_bytes(encode(exited))
    stop = WorkerStop(
        "another worker of this node had failed",
        now - 1 if later else now + 1,
        failed_first=frozenset({0}),
    )
    _report(prefix, spool, WorkerExit(1, 123, 0, time.time_ns(), now + 2), stop)
    sent = [bool(failure.sent_signals) for failure in prefix.failures()]
    assert sorted(sent) == ([False, True] if later else [False])


def _finishes(folder: Path, local_rank: int, ready: Any, *, by_child: bool = False) -> None:
    """Report the end of a program to the agent; with `by_child`,
    from a program that this process has started.
    """
    pid = os.fork() if by_child else 0
    if pid == 0:
        WorkerChannel(NodeFolder(folder), 0, local_rank, lambda _: {}).report_finished()
    if by_child and pid == 0:
        os._exit(0)
    if by_child:
        os.waitpid(pid, 0)
    _plain(ready)


def _fails_with_success(folder: Path, local_rank: int, ready: Any) -> None:
    """Report a failure, then exit with 0, as the entrypoint of Flyte 2 does."""
    if local_rank == 1:
        WorkerChannel(NodeFolder(folder), 0, local_rank, lambda _: {}).report_failure({})
    ready.set()
    os._exit(0)


def test_a_failure_of_a_program_that_exits_with_0(
    start: Callable[..., list[Any]], prefix: Prefix, spool: Path
) -> None:
    """A program that has reported a failure has failed, whatever its exit code,
    also if the report wasn't read before the exit.
    """
    folder = spool.parents[1]
    node_context = replace(prefix.node_context(), node_folder=str(folder))
    reporter = Reporter(
        node_context, lambda rank: Place(node="worker-0", rank=rank, local_rank=rank)
    )
    local = LocalWorkers(node_context, reporter, LONG_S, lambda: None)
    local.are_programs = True
    processes = start(
        partial(_fails_with_success, folder, 0), partial(_fails_with_success, folder, 1)
    )
    local._context = SimpleNamespace(subprocess_handlers={}, _pc=SimpleNamespace())
    local._watch = ExitWatch(processes)
    assert _exit_codes(processes) == [0, 0]
    wait_until(lambda: len(local._watch.ended()) == len(processes) if local._watch else False)
    assert local.has_failure_after_clean_exit()
    assert [death.local_rank for death in local.get_exits()] == [1]
    local._watch.stop()
    local.close()


def test_workers_that_have_come_to_their_end(
    start: Callable[..., list[Any]], prefix: Prefix, spool: Path
) -> None:
    """A worker counts if its own process reported it, before any stop;
    a function also needs its result.
    """
    folder = spool.parents[1]
    node_context = replace(prefix.node_context(), node_folder=str(folder))
    reporter = Reporter(
        node_context, lambda rank: Place(node="worker-0", rank=rank, local_rank=rank)
    )
    local = LocalWorkers(node_context, reporter, LONG_S, lambda: None)
    processes = start(
        partial(_finishes, folder, 0),
        partial(_finishes, folder, 1),
        partial(_finishes, folder, 2, by_child=True),
    )
    queues = {rank: _fork.SimpleQueue() for rank in range(3)}
    queues[1].put("loss")
    context = SimpleNamespace(
        _pc=SimpleNamespace(processes=processes), _return_values={}, _ret_vals=queues
    )
    local._context = context
    local._watch = ExitWatch(processes)
    assert local.find_finished() == {1}
    assert local.take_results(local.finished) == {1: "loss"}
    local.are_programs = True
    assert local.find_finished() == {0, 1}
    local.stopper.handle(TorchFoundFailure(frozenset(), (), 0))
    assert local.find_finished() == frozenset()
    local._watch.stop()
    local.close()
