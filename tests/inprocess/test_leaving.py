"""A rank that leaves, and a monitor process whose store fails: what the others learn of it."""

import dataclasses
import datetime as dt
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import firstfault_inprocess as inprocess
from firstfault_inprocess import wrap as call_module
from firstfault_inprocess.call.rank_iteration import RankIteration
from firstfault_inprocess.detached import DetachedProcess
from firstfault_inprocess.exception import RankLost
from firstfault_inprocess.job import find_root_fault
from firstfault_inprocess.monitor.process import MonitorProcess
from firstfault_inprocess.progress import RankPhase, SharedProgress, find_position
from firstfault_inprocess.store import Fault, FaultKind, Iteration, IterationEnd
from firstfault_inprocess.wrap import CallWrapper

OPTIONS = inprocess.InProcessRestart(last_call_wait=0.01)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[CallWrapper]:
    """Return a call of rank 0 of one, which takes part in no iteration yet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    with call_module.CallWrapper(OPTIONS) as began:
        yield began


@pytest.mark.parametrize("phase", [RankPhase.ENDING, RankPhase.ARRIVED])
def test_a_rank_considered_lost_interrupts_no_later_iteration(
    phase: RankPhase, call: CallWrapper
) -> None:
    """The others have continued without it: it interrupts none of their iterations,
    and is not counted again.
    """
    session = call._session
    state = dataclasses.replace(call.state, world_size=4)
    taking_part = RankIteration(session, state, None)
    taking_part.call(lambda: None)
    iteration = session.open_iteration(0, 4)
    iteration.leave(0)
    iteration.arrive()
    session.progress.phase = phase
    taking_part.leave(RankLost("taken for lost"))
    assert [session.open_iteration(number, 4).outcome() for number in (0, 1)] == [None, None]
    assert iteration._store.add("arrived", 0) == 1
    session.open_iteration(0, 1).complete()  # ends the monitor thread
    taking_part.close()


def test_a_rank_declared_gone_does_not_arrive(call: CallWrapper) -> None:
    """Before it arrives: another one has arrived for it, and would be counted twice."""
    iteration = Iteration(call._session.store.clone(), call._session.prefix, 0, 1)

    def train() -> None:
        iteration.leave(0)
        raise ValueError("the fault")

    with pytest.raises(RankLost, match="rank 0 was considered lost"):
        call(train, (), {})
    assert iteration._store.add("arrived", 0) == 0


def test_a_rank_that_leaves_is_one_fault(call: CallWrapper) -> None:
    """It is told once, so that it does not push others out of the list."""
    iteration = Iteration(call._session.store.clone(), call._session.prefix, 0, 1)
    with pytest.raises(SystemExit):
        call(sys.exit, (3,), {})
    assert [str(fault) for fault in iteration.faults()] == ["rank 0: left, SystemExit: 3"]


class _Failing:
    """A store whose first calls fail."""

    def __init__(self, store: dist.Store, failures: int) -> None:
        self._store = store
        self._failures = failures

    def __call__(self) -> dist.Store:
        self._failures -= 1
        if self._failures >= 0:
            raise dist.DistNetworkError("the store is busy")
        return self._store


def _watcher(connect: _Failing, soft: float, hard: float) -> MonitorProcess:
    progress = SharedProgress()
    progress.begin(0, 0, 2)
    progress.automatic -= 10.0
    options = inprocess.InProcessRestart(
        soft_timeout=soft,
        hard_timeout=hard,
        monitor_process_interval=0.1,
        progress_watchdog_interval=0.1,
    )
    watcher = MonitorProcess(progress, 0, "p/0", connect, options)
    watcher.begin()
    return watcher


def test_a_monitor_wakes_the_peers_of_the_last_rank_that_died() -> None:
    """Its monitor process wakes them: they have all completed, and would wait without end."""
    store = dist.HashStore()
    watcher = _watcher(_Failing(store, 0), soft=50.0, hard=100.0)
    iteration = Iteration(store, "p/0", 0, 2)
    store.set("p/0/0/outcome", IterationEnd.COMPLETED.value)  # as if it died between the two keys
    watcher._report_death()
    assert iteration.await_outcome(dt.timedelta(seconds=1)) is IterationEnd.COMPLETED


def test_a_report_that_failed_is_sent_again() -> None:
    """One error of the store does not leave the other ranks without the news of a hang."""
    store = dist.HashStore()
    watcher = _watcher(_Failing(store, 1), soft=1.0, hard=100.0)
    iteration = Iteration(store, "p/0", 0, 2)
    watcher._check_worker(math.inf)
    assert iteration.outcome() is None
    watcher._check_worker(math.inf)
    assert iteration.outcome() is IterationEnd.INTERRUPTED
    watcher._check_worker(math.inf)
    assert len(iteration.faults()) == 1


def test_a_death_is_reported_if_the_kill_could_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The death that follows is told instead."""
    store = dist.HashStore()
    watcher = _watcher(_Failing(store, 2), soft=1.0, hard=2.0)
    monkeypatch.setattr(watcher, "_kill", lambda: None)
    watcher._check_worker(math.inf)
    iteration = Iteration(store, "p/0", 0, 2)
    assert iteration.outcome() is None
    watcher._store_calls.make(watcher._report_death, patient=True)
    assert iteration.outcome() is IterationEnd.INTERRUPTED
    assert [str(fault) for fault in iteration.faults()] == ["rank 0: terminated, its process ended"]


_STALL = FaultKind.SOFT_TIMEOUT


def _fault(rank: int, kind: FaultKind, **fields: Any) -> Fault:
    return Fault(rank, kind, "", 0, rank, **fields)


@pytest.mark.parametrize(
    ("faults", "root"),
    [
        ([], None),
        ([_fault(2, FaultKind.EXCEPTION), _fault(1, FaultKind.EXCEPTION)], 2),
        ([_fault(2, FaultKind.EXCEPTION), _fault(1, FaultKind.PROCESS_EXITED)], 1),
        ([_fault(2, FaultKind.SOFT_TIMEOUT, waits=True), _fault(1, FaultKind.SOFT_TIMEOUT)], 1),
        ([_fault(2, FaultKind.SOFT_TIMEOUT, waits=True), _fault(1, FaultKind.HARD_TIMEOUT)], 1),
        (
            [
                _fault(2, FaultKind.SOFT_TIMEOUT, begun=7),
                _fault(1, FaultKind.SOFT_TIMEOUT, begun=6),
            ],
            1,
        ),
        ([_fault(2, FaultKind.SOFT_TIMEOUT), _fault(1, FaultKind.SOFT_TIMEOUT)], 2),
        ([_fault(2, FaultKind.SOFT_TIMEOUT, waits=True), _fault(1, FaultKind.EXCEPTION)], 1),
        ([_fault(2, _STALL, waits=True), _fault(3, FaultKind.EXCEPTION), _fault(1, _STALL)], 1),
        ([_fault(3, FaultKind.EXCEPTION), _fault(2, _STALL, waits=True), _fault(1, _STALL)], 3),
    ],
    ids=[
        "none",
        "first",
        "ended",
        "waits",
        "blocked",
        "fewest",
        "alike",
        "raised",
        "torn out",
        "raised before",
    ],
)
def test_a_rank_that_ended_is_the_root_before_one_that_raised(
    faults: list[Fault], root: int | None
) -> None:
    """A rank that ended comes before one that raised,
    and a rank that waits for others comes last.
    """
    found = find_root_fault(faults)
    assert (found.initial_rank if found is not None else None) == root


def test_a_position_is_the_innermost_line_of_the_users_code() -> None:
    """It is the innermost line of the user's code, with what that calls;
    a thread that has ended stands nowhere.
    """
    gate = threading.Event()

    def waiting() -> None:
        gate.wait()

    thread = threading.Thread(target=waiting)
    thread.start()
    try:
        position = find_position(thread.ident or 0, begun=3)
        while position is None or "threading" not in position.text:
            position = find_position(thread.ident or 0, begun=3)
    finally:
        gate.set()
        thread.join()
    line = waiting.__code__.co_firstlineno + 1
    assert position.text == f"test_leaving.py:{line} in waiting, which calls threading.wait"
    assert (position.waits, position.begun) == (False, 3)
    assert find_position(2**40) is None


def test_a_process_that_ended_before_its_lookup_is_dead() -> None:
    """It counts as dead at once: a monitor process that starts after its worker's death ends,
    too.
    """
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert DetachedProcess(ended.pid).await_death(0.01)
