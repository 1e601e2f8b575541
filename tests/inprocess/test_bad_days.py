"""Real ranks on bad days: hooks that fail, machines that are gone, a store that is lost,
reserves that wait.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import firstfault_inprocess as inprocess
from firstfault_inprocess.rank_assignment import (
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
    ShiftRanks,
)
from firstfault_inprocess.store import TCPStore
from tests.inprocess.training import BLOCKED, FAST, FAULTY, Failing, Run, run
from tests.nodes import forkserver
from tests.waiting import run_in_background

pytestmark = pytest.mark.jobs


@pytest.fixture(scope="module", autouse=True)
def waits(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Run]]]:
    """Begin the runs that mostly wait."""
    finalize = Failing({2: "raise", 4: "store", 5: "hang"}, 0)
    health_check = Failing({3: "raise"}, 1)
    # a health check is also called before the first iteration
    hooks = partial(run, "raise", world=6, finalize=finalize, health_check=health_check, **BLOCKED)
    gone = partial(run, "frozen", **{**FAST, "heartbeat_interval": 0.5, "heartbeat_timeout": 8.0})
    with run_in_background(
        request,
        {
            "test_a_rank_with_a_failing_hook_leaves_and_its_peers_continue": hooks,
            "test_peers_continue_without_an_unresponsive_machine": gone,
        },
    ) as begun:
        yield begun


def _serve(answer: Any) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer.send(server.port)
    time.sleep(1000)


@pytest.fixture
def store() -> Iterator[tuple[int, int]]:
    """Run a store in a process that a rank can kill; its port and process."""
    ours, its = forkserver().Pipe()
    process = forkserver().Process(target=_serve, args=(its,), daemon=True)
    process.start()
    yield ours.recv(), process.pid or 0
    process.kill()
    process.join()


def test_every_rank_ends_if_the_store_is_lost(store: tuple[int, int]) -> None:
    """Every rank ends, with an error that says so."""
    factory = partial(TCPStore, "127.0.0.1", store[0])
    ended = run(f"store:{store[1]}", world=3, store_factory=factory, **BLOCKED)
    raised = ended.values("raised")
    assert {name for name, *_ in raised.values()} == {"RestartAbort"}
    assert all(
        "the store of the in-process restart is lost" in text for _, text, *_ in raised.values()
    )
    assert set(raised) | {FAULTY} == {0, 1, 2}
    assert 0 not in ended.codes


def test_a_reserve_waits_beyond_the_completion_timeout() -> None:
    """`completion_timeout` is for ranks that have completed; a reserve takes over after a fault,
    and only then.

    A further call is refused at once, because the ranks that are left cannot be numbered.
    """
    few = MaxActiveWorldSize(2)
    ended = run("slow", world=3, rank_filter=few, completion_timeout=4.0, **FAST)
    assert set(ended.of("enter", 0)) == {0, 1}
    assert ended.values("done") == {0: (0, 2), 1: (1, 2), 2: None}
    ended = run("twice", world=3, rank_assignment=inprocess.Compose(few, ShiftRanks()), **FAST)
    assert ended.values("done") == {0: (0, 2), 2: (1, 2)}
    refused = (
        "rank 1 was lost in an earlier call; call the function in new processes, or both in one"
    )
    raised = {rank: value[:2] for rank, value in ended.values("raised").items()}
    assert raised == dict.fromkeys((0, 2), ("RestartError", refused))


def test_a_rank_that_completes_too_late_is_a_fault() -> None:
    """A rank that takes longer than `completion_timeout` after another has completed
    is a fault of that one.
    """
    limit = inprocess.initialize.RetryController(max_iterations=1)
    ended = run("late", world=2, initialize=limit, completion_timeout=1.0, **FAST)
    told = [event.value for event in ended.of("raised").values()]
    assert len(told) == 2
    assert any(
        "completion_timeout" in f"{text}" or cause == "RestartError" for _, text, cause, _ in told
    )


def test_every_rank_ends_if_the_assignment_leaves_none() -> None:
    """A rank assignment that leaves no rank ends every one with a message that says so."""
    assignment = inprocess.Compose(ActiveWorldSizeDivisibleBy(4), ShiftRanks())
    ended = run("kill", rank_assignment=assignment, **FAST)
    raised = ended.values("raised")
    assert set(raised) == {0, 1, 2, 3} - {FAULTY}
    assert all("no rank is active" in text for _, text, *_ in raised.values())


def test_a_rank_with_a_failing_hook_leaves_and_its_peers_continue(
    waits: dict[str, Future[Run]],
) -> None:
    """A rank whose hook raises leaves with that exception, one whose hook hangs is ended;
    the others continue.
    """
    ended = waits["test_a_rank_with_a_failing_hook_leaves_and_its_peers_continue"].result()
    assert ended.values("done") == {0: (0, 2), 1: (1, 2)}
    told = {rank: event.value[:2] for rank, event in ended.of("raised").items()}
    assert {rank: name for rank, (name, _) in told.items()} == {
        2: "OSError",
        3: "HealthCheckError",
        4: "RuntimeError",
    }
    assert all("this machine is broken" in told[rank][1] for rank in (2, 3))
    assert told[4][1] == "`finalize` failed: DistStoreError: a store of the hook's own"
    assert ended.codes[5] in {-15, -9}


def test_peers_continue_without_an_unresponsive_machine(waits: dict[str, Future[Run]]) -> None:
    """Of a rank that is frozen with its monitor process nothing is heard;
    the others continue without it.
    """
    ended = waits["test_peers_continue_without_an_unresponsive_machine"].result()
    assert ended.values("done") == {0: (0, 3), 2: (1, 3), 3: (2, 3)}
