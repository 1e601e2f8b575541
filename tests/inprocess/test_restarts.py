"""Real ranks restart in their processes after a fault on one of them."""

import datetime as dt
import re
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import firstfault_inprocess as inprocess
from firstfault.model import RestartKind
from firstfault_inprocess import InProcessRestart, initialize
from firstfault_inprocess.store import TCPStore
from firstfault_torch import Options
from tests.inprocess.training import BLOCKED, FAST, FAULTY, Run, on_nodes, run
from tests.nodes import Ended, Job
from tests.waiting import run_in_background, wait_until

pytestmark = pytest.mark.jobs

ALL = {0, 1, 2, 3}
FEW = inprocess.initialize.RetryController(max_iterations=4)
SLOW_S = 60.0
"""A restart takes a second; what must hold on any machine. `make bench-restart` measures."""


@pytest.fixture(scope="module", autouse=True)
def waits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """Begin the runs that mostly wait."""
    calls: dict[str, Callable[[], Any]] = {
        "test_a_stuck_rank_is_interrupted_or_ended": partial(
            run, "stuck", initialize=FEW, **BLOCKED
        ),
        "test_a_job_succeeds_after_an_exception_an_exit_and_a_hang": partial(
            _end, tmp_path_factory.mktemp("hang"), ["3 raise", "0 exit", "2 hang"]
        ),
    }
    with run_in_background(request, calls) as begun:
        yield begun


def test_all_ranks_call_the_function_again_after_exceptions() -> None:
    """All four ranks call the function again, with the same ranks,
    after two exceptions in one iteration.
    """
    ended = run("again and again", initialize=FEW, **FAST)
    # the third one may interrupt ranks that are only about to enter
    assert set(ended.of("enter", 1)) <= set(ended.of("enter", 2)) == ALL
    assert ended.values("done") == {rank: (rank, 4) for rank in ALL}
    assert ended.codes == [0] * 4
    assert ended.seconds() < SLOW_S


def test_peers_continue_without_a_rank_that_exits() -> None:
    """A rank that leaves ends alone; the others get new ranks and continue."""
    ended = run("exit", initialize=FEW, **FAST)
    assert set(ended.of("enter", 1)) == ALL - {FAULTY}
    assert ended.values("done") == {0: (0, 3), 2: (1, 3), 3: (2, 3)}
    assert ended.codes == [0, 3, 0, 0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no exception groups")
def test_a_rank_continues_if_code_replaces_its_interruption() -> None:
    """A healthy rank continues if the interruption leaves its function as another exception.

    Torch's older store, without libuv, wakes waiting ranks, too. The options are as a program for
    NVRx may give them.
    """
    options = {
        "store_factory": TCPStore,
        "store_kwargs": {"use_libuv": False, "wait_for_workers": True},
    }
    ended = run("otherwise", initialize=FEW, last_call_wait=dt.timedelta(0), **options, **FAST)
    # not all: the second iteration was once seen interrupted before the last rank had entered it
    assert ended.of("enter", 1)
    assert ended.values("done") == {rank: (rank, 4) for rank in ALL}, ended.events


def test_every_rank_ends_at_the_limit_with_its_cause() -> None:
    """At the limit every rank ends; the cause is its own exception, with its traceback,
    or what the others told.
    """
    limit = inprocess.initialize.RetryController(max_iterations=1)
    ended = run("raise", world=2, initialize=limit, **FAST)
    told = ended.values("raised")
    assert {name for name, *_ in told.values()} == {"RestartAbort"}
    assert told[1][2] == "ValueError"
    assert told[0][2] in {
        "RestartError",
        "RuntimeError",
    }, "it was interrupted, or its collective had failed before"
    assert told[1][3], "the live exception with its traceback"
    assert all("1" in text for _, text, _, _ in told.values())
    assert ended.codes == [1, 1]


def test_no_fault_leaves_nothing_behind(tmp_path: Path) -> None:
    """Without a fault every rank calls the function once, and the monitor processes are gone."""
    log = tmp_path / "monitor-{rank}.log"
    ended = run("", monitor_process_logfile=str(log), **FAST)
    assert set(ended.of("done")) == ALL
    assert not ended.of("enter", 1)
    said = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert len(list(tmp_path.iterdir())) == 4
    # torch's, without a name service
    assert not [line for line in said if "hostname of the client" not in line]
    wait_until(lambda: not _listens(ended.port), "the store's host lives on", SLOW_S)
    opened = [
        Path(f"/proc/{pid}/fd/1")
        for pid in map(attrgetter("name"), Path("/proc").iterdir())
        if pid.isdigit()
    ]
    assert not [file for file in opened if _target(file).startswith(str(tmp_path))]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _target(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:
        return ""


def test_a_stuck_rank_is_interrupted_or_ended(waits: dict[str, Future[Any]]) -> None:
    """A rank that hangs in Python is interrupted and continues;
    one in a C call or an atomic section is ended.
    """
    ended: Run = waits["test_a_stuck_rank_is_interrupted_or_ended"].result()
    assert set(ended.of("enter", 1)) == {0, 2}
    assert ended.values("done") == {0: (0, 2), 2: (1, 2)}
    assert ended.codes == [0, -15, 0, -15]


def _end(folder: Path, faults: list[str]) -> Ended:
    restart = InProcessRestart(
        initialize=initialize.RetryController(max_iterations=4, min_world_size=3),
        soft_timeout=10.0,
        hard_timeout=20.0,
        monitor_process_interval=0.2,
    )
    options = Options(in_process_restart=restart)
    with Job(folder, on_nodes, (faults,), options=options, config={"nproc_per_node": 2}).start(
        2
    ) as job:
        return job.end()


def test_the_last_fault_is_the_root_cause(tmp_path: Path) -> None:
    """When the ranks give up, the fault from which they did not recover is the root cause;
    the others are history.
    """
    ended = _end(tmp_path, ["3 kill", "1 raise", "1 raise", "1 raise"])
    assert ended.verdict.ranks == (1,), ended.verdict
    assert "the fault of iteration 3" in ended.verdict.headline
    assert [(record.number, record.rank) for record in ended.job.restarts] == [
        (0, 3),
        (1, 1),
        (2, 1),
    ]


def test_the_last_killed_rank_is_the_root_if_too_few_are_left(tmp_path: Path) -> None:
    """When too few are left, the rank that was killed last is the root cause,
    also if its node has no others left.
    """
    ended = _end(tmp_path, ["3 kill", "2 kill"])
    assert (ended.verdict.ranks, ended.verdict.category) == ((2,), "signal"), ended.verdict


def test_a_job_succeeds_after_an_exception_an_exit_and_a_hang(
    waits: dict[str, Future[Any]],
) -> None:
    """After an exception, an exit and a hang the others continue in their processes,
    and the job succeeds.

    A record names the rank that hung, not those that waited for it in a collective, and its line.
    Seconds before, a rank has left by an exit: its agent must not stop the others.
    """
    ended: Ended = waits["test_a_job_succeeds_after_an_exception_an_exit_and_a_hang"].result()
    assert (ended.codes, ended.conclusion) == ([0, 0], None), ended.logs
    assert ended.results[0] == "rank 0 of 3, began as 1, iteration 3"
    raised, left, hung = ended.job.restarts
    assert (raised.kind, raised.number, raised.rank) == (RestartKind.IN_PROCESS, 0, 3)
    assert raised.headline == "rank 3: exception, ValueError: the fault of iteration 0"
    assert (raised.world_size_before, raised.world_size_after) == (4, 4)
    assert 0 < (raised.lost_seconds or 0) < SLOW_S
    assert (left.number, left.rank, left.world_size_before, left.world_size_after) == (1, 0, 4, 3)
    assert (hung.number, hung.rank, hung.category, hung.world_size_after) == (2, 2, "hang", 3)
    assert re.fullmatch(
        r"rank 2: soft timeout, no progress for \d+\.\d s, at training\.py:\d+ in fail",
        hung.headline,
    )
