"""Stalls that last or come again and again: real workers,
and agents that compare over a real store.
"""

import ctypes
import datetime as dt
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from firstfault.model import Place
from firstfault.recorder.folder import NodeFolder
from firstfault_torch import Hang, time_limits
from firstfault_torch.agent.local_workers import LocalWorkers
from firstfault_torch.agent.reporter import Reporter
from firstfault_torch.hang import StallWatch, observe
from firstfault_torch.hang.compare import parse_report
from firstfault_torch.hang.stall_report import WorkerObservation
from firstfault_torch.node.channel import WorkerChannel
from firstfault_torch.node.stacks import register_stacks
from firstfault_torch.protocol.stall_limits import build_stall_limits
from firstfault_torch.protocol.stall_messages import NumberRead, StallReport
from tests.plugin.running import short_folder
from tests.prefix import Prefix
from tests.torch_agent.stores import hosted
from tests.torch_agent.test_hangs import READS, worker

pytestmark = [pytest.mark.slow, pytest.mark.forks]

LONG_S = 60.0
WARN_S, END_S = 60.0, 300.0
ALIVE = {0: os.getpid()}


# --- no signal to a worker that goes on -----------------------------------------------------------


def _poll_with_the_lock(folder: Path, seconds: int, ends: Any) -> None:
    """Be a worker that waits in one native call, which holds Python's lock;
    send what the call returned.
    """
    register_stacks(NodeFolder(folder).worker(0, 0))
    WorkerChannel(NodeFolder(folder), 0, 0, lambda _: {"begun": 1, "ended": 1, "at": 1})
    poll = ctypes.PyDLL(None).poll
    ends.send("ready")
    ends.send(poll(None, 0, seconds * 1000))
    ends.recv()


@pytest.mark.parametrize("ends_attempt", [False, True])
def test_a_stalled_worker_gets_no_signal(
    ends_attempt: bool, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A native call isn't interrupted by a look at a stall,
    also if the attempt may be ended but this worker isn't.
    """
    monkeypatch.setattr(observe, "SNAPSHOT_TIMEOUT_SECONDS", 0.1)  # it can't answer
    folder = short_folder()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_poll_with_the_lock, args=(folder, 1, theirs))
    process.start()
    try:
        assert ours.recv() == "ready"
        node_context = replace(prefix.node_context(), node_folder=str(folder))
        reporter = Reporter(
            node_context, lambda rank: Place(node="worker-0", rank=rank, local_rank=rank)
        )
        local = LocalWorkers(node_context, reporter, LONG_S, lambda: None)
        places = SimpleNamespace(
            nodes=1, of=lambda *_: Place(group_rank=0, rank=0, local_rank=0, world_size=1)
        )
        one = StallWatch(Hang(None, None), local, reporter, places, None)  # type: ignore[arg-type]
        now = time.monotonic()
        one._tracker.since = one._tracker.moved[0] = one._tracker._answered[0] = now - WARN_S
        one._tracker._counts[0] = 1, 0
        one._observer.observe({0: process.pid or 0}, now, ends_attempt=ends_attempt)
        assert ours.recv() == 0, "the call of poll was interrupted"
        ours.send("end")
        local.close()
    finally:
        process.kill()
        process.join()


# --- nodes that compare over a real store ----------------------------------------------------


class Node:
    """The watch of one node of a job of two, whose worker makes no progress."""

    def __init__(
        self,
        group_rank: int,
        connect: Callable[[], Any],
        hang: Hang,
        wait_seconds: float,
    ) -> None:
        self.answers: dict[int, Any] = {}
        workers: Any = SimpleNamespace(alive=ALIVE, ask=lambda *_: self.answers)
        reporter: Any = SimpleNamespace(
            node_context=SimpleNamespace(round=0, output_prefix="/jobs/7", files=None),
            put=lambda *_: None,
        )
        places: Any = SimpleNamespace(
            nodes=2,
            of=lambda *_: Place(group_rank=group_rank, world_size=4),
            rank_of=lambda local: 2 * group_rank + local,
        )
        liveness = SimpleNamespace(states={}, request_states=lambda: None)
        peers: Any = SimpleNamespace(connect=connect, liveness=liveness, roster=None)
        self.watch = StallWatch(Hang(None, None), workers, reporter, places, peers)
        limits = build_stall_limits(hang.warn_seconds, hang.end_seconds)
        self.watch._limits = replace(limits, reports=wait_seconds)
        self.watch._protocol.times.limits = limits
        self.watch._protocol.times.reset()
        self.watch._tracker.looks = 3
        seen = [
            (
                worker(rank, of=4, **({"begun": 40, "stack": READS} if rank == 2 else {})),
                WorkerObservation(group_rank, rank % 2, 58.0),
            )
            for rank in (2 * group_rank, 2 * group_rank + 1)
        ]
        self.watch._observer._observe_workers = lambda *_, **__: seen  # type: ignore[method-assign]

    def stall(self) -> None:
        """Poll the workers when the first warning is due."""
        self.watch._tracker.since = time.monotonic() - WARN_S
        self.watch._poll()

    def resume(self) -> None:
        """Poll the workers when they make progress again."""
        begun = self.watch._tracker.enqueued.get(0, 0) + 1
        self.answers[0] = {"begun": begun, "ended": begun, "at": begun}
        self.watch._poll()

    @property
    def lines(self) -> tuple[str, ...]:
        """What it printed about the stall."""
        stall = self.watch._protocol.reports.stall
        return stall.report.lines if stall is not None else ()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _connected(store: TCPStore) -> Callable[[], Any]:
    limit = dt.timedelta(seconds=LONG_S)
    return lambda: TCPStore(
        "127.0.0.1",
        store.port,
        is_master=False,
        wait_for_workers=False,
        timeout=limit,
    )


@contextmanager
def _in_thread(call: Callable[..., None], *args: Any) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=call, args=args)
    thread.start()
    yield thread
    thread.join(LONG_S)
    assert not thread.is_alive()


# --- what stays -----------------------------------------------------------------------------------


def test_many_stalls_leave_nothing_in_the_store(store: TCPStore) -> None:
    """The store holds the keys of the last one only."""
    nodes = [Node(rank, _connected(store), Hang(WARN_S), LONG_S) for rank in (0, 1)]
    keys = []
    for number in range(5):
        with _in_thread(nodes[1].stall):
            nodes[0].stall()
        assert "rank 2 " in nodes[0].lines[0], nodes[0].lines
        assert nodes[0].lines == nodes[1].lines
        assert nodes[0].watch._protocol.reports.stall.number == number  # type: ignore[union-attr]
        for node in nodes:
            node.resume()
        keys.append(store.num_keys())
    assert keys[1:] == keys[1:2] * 4, keys
    for node in nodes:
        node.watch.end()


def test_a_broken_connection_is_replaced() -> None:
    """After its store's connection broke, the watch compares the next stall over another one."""
    with hosted() as (host, lost), hosted() as (_, store):
        stores = [lost, lost, store, store]
        node = Node(0, lambda: stores.pop(0).clone(), Hang(WARN_S), 0.2)
        assert node.watch._comparison.read_number() == NumberRead(0)
        host.kill()
        host.join()
        assert node.watch._comparison.read_number() == NumberRead(None)
        assert node.watch._comparison.read_number() == NumberRead(0)
        node.watch.end()


def test_a_leader_of_an_earlier_version_does_not_decide() -> None:
    """Its leader doesn't decide for all nodes whether they print."""
    fields = asdict(StallReport(("no progress",), workers_to_kill=((0, 1),)))
    assert parse_report(json.dumps(fields).encode()) == StallReport(**fields)
    del fields["is_shown"]
    assert parse_report(json.dumps(fields).encode()).is_shown is None


def test_a_watch_survives_failed_polls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Polls that fail end neither the watch nor are they all logged:
    a lack of descriptors may last for hours.
    """
    failures = [1] * 10
    polled = threading.Event()

    def ask(*_: Any) -> dict[int, Any]:
        if failures:
            failures.pop()
            raise OSError("too many open files")
        polled.set()
        return {}

    monkeypatch.setattr(time_limits, "PROGRESS_POLL_SECONDS", 0.01)
    workers: Any = SimpleNamespace(alive=ALIVE, ask=ask)
    reporter: Any = SimpleNamespace(
        node_context=SimpleNamespace(round=0, output_prefix="", files=None)
    )
    places: Any = SimpleNamespace(nodes=1, of=lambda *_: Place(group_rank=1), rank_of=lambda _: 0)
    one = StallWatch(Hang(WARN_S), workers, reporter, places, None)
    assert polled.wait(LONG_S)
    one.end()
    assert caplog.text.count("too many open files") == 1
