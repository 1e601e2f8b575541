"""Jobs with several rounds, and failures outside of a worker's main thread."""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstfault_torch import Options
from tests.nodes import DEADLINE_S, Job
from tests.s3_server import S3
from tests.torch_agent import trainings
from tests.torch_agent.interrupted import MOMENTS, InterruptedStart

pytestmark = pytest.mark.jobs

LIMIT_BYTES = 2 << 30
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
SHORT_STOP = Options(stop_seconds=trainings.SAVING_S / 4, terminated_stop_seconds=DEADLINE_S)
"""The siblings of a failure have little time to end, and healthy workers much."""
ONE_NODE = {"min_nodes": 1, "max_nodes": 1}


def test_the_same_fault_twice(tmp_path: Path) -> None:
    """Workers that are started again meet each other, not those before them;
    the same error again ends the attempt.
    """
    options = Options(retry_policy=trainings.retries_user_code)
    fields = {**ONE_NODE, "nproc_per_node": 4, "max_restarts": 3}
    with Job(tmp_path, trainings.the_same_again, options=options, config=fields).start() as job:
        ended = job.end()
    assert len(list(tmp_path.glob("rank-1-*"))) == 2
    assert {mark.stem for mark in tmp_path.glob("sum-*")} == {f"sum-4-{rank}" for rank in range(4)}
    assert [(item.number, item.restart) for item in ended.job.restarts] == [(0, True), (1, False)]
    assert "the previous round failed with the same fault" in ended.job.restarts[1].reason
    assert (
        "2 of 3 restarts (max_restarts) left unused: the previous round failed with the same"
        " fault" in ended.logs
    )
    assert "Restarts: 1 restart\n  round 0: ValueError, rank 1" in ended.logs


def test_restarts_that_are_used_up(s3_environ: S3, tmp_path: Path) -> None:
    """Of three failed rounds, the last is judged and the others are history; also on S3,
    whose clients do not fork.
    """
    fields = {**ONE_NODE, "nproc_per_node": 2, "max_restarts": 2}
    with Job(
        tmp_path,
        trainings.not_there_yet,
        config=fields,
        store=s3_environ.uri("restarts"),
    ).start() as job:
        ended = job.end()
    found = ended.job
    assert ended.verdict.ranks == (1,)
    assert "shard 2 is not there yet" in ended.verdict.message
    assert (found.round, {failure.place.round for failure in found.failures}) == (2, {2})
    assert {failure.place.round for failure in found.history} == {0, 1}
    assert any("shard 0 is not there yet" in failure.message for failure in found.history)
    last, before = [
        [failure.timestamp_ns or 0 for failure in items]
        for items in (found.failures, found.history)
    ]
    assert min(last) > max(before)
    # a recoverable error uses its restarts, each of which has a record
    assert [(item.number, item.restart, item.rank) for item in found.restarts] == [
        (0, True, 1),
        (1, True, 1),
    ]
    assert "raised as recoverable" in found.restarts[0].reason
    assert "shard 0 is not there yet" in found.restarts[0].headline
    assert all(0 < (item.lost_seconds or 0) < 60 for item in found.restarts)
    assert {(item.world_size_before, item.world_size_after) for item in found.restarts} == {(2, 2)}


def test_the_same_fault_in_two_attempts(tmp_path: Path) -> None:
    """A fault is retried; when it comes again, the policy ends the retries."""
    options = Options(retry_policy=trainings.retries_other_faults)
    decisions = []
    for attempt in range(2):
        fields = {**ONE_NODE, "nproc_per_node": 2}
        with Job(
            tmp_path,
            trainings.not_there_yet,
            (),
            options,
            fields,
            attempt=attempt,
        ).start() as job:
            conclusion = job.end().conclusion
        decisions.append(conclusion.decision)
    assert [decision.retry for decision in decisions] == [True, False]
    said = [
        "the previous attempt failed with the same fault" in decision.reason
        for decision in decisions
    ]
    assert said == [False, True]


def test_one_fault_on_each_node_in_turn(tmp_path: Path) -> None:
    """A job with one fault on each node succeeds;
    each fault is in the history under its own round.
    """
    with Job(tmp_path, trainings.in_turn, config={"max_restarts": 2}).start(2) as job:
        ended = job.end()
    assert (ended.codes, ended.results, ended.conclusion) == (
        [0, 0],
        {0: 2.0, 1: 2.0},
        None,
    ), ended.logs
    assert (ended.job.failures, ended.job.round) == ((), 2)
    own = {
        failure.place.round: failure
        for failure in ended.job.history
        if "fails on rank" in failure.message
    }
    assert {number: failure.rank for number, failure in own.items()} == {0: 0, 1: 1}
    # both agents agreed on each restart; a victim's error in the same round did not count
    assert [
        (item.number, item.restart, item.rank, item.is_agreed) for item in ended.job.restarts
    ] == [
        (0, True, 0, True),
        (1, True, 1, True),
    ]
    assert {(item.world_size_before, item.world_size_after) for item in ended.job.restarts} == {
        (2, 2)
    }


def test_a_code_bug_ends_the_attempt(tmp_path: Path) -> None:
    """The root cause decides, not a victim that failed first with a recoverable error:
    no restart is used.
    """
    with Job(tmp_path, trainings.code_bug, config={"max_restarts": 3}).start(2) as job:
        ended = job.end()
    assert ended.verdict.ranks == (1,)
    assert "the bug" in ended.verdict.message
    assert not ended.conclusion.decision.retry
    assert "3 of 3 restarts (max_restarts) left unused" in ended.logs
    assert (ended.job.round, ended.job.history) == (0, ())
    assert {failure.place.restart_count for failure in ended.job.failures} == {0}
    (record,) = ended.job.restarts
    assert (record.number, record.restart, record.rank, record.is_agreed) == (0, False, 1, True)
    assert record.category == "user_code"
    assert {mark.name for mark in tmp_path.glob("rank-*")} == {"rank-0-0.json", "rank-1-0.json"}


def test_a_rendezvous_that_times_out(tmp_path: Path) -> None:
    """If a node does not come to the new round, the one that waited reports it,
    and the fault that began the round.
    """
    options = Options(restarts_follow_policy=False)
    fields = {"max_restarts": 1, "rdzv_configs": {"join_timeout": 15}}
    with Job(tmp_path, trainings.once_told, options=options, config=fields).start(2) as job:
        agents = {rank: job.await_mark(f"rank-{rank}-0")["agent"] for rank in (0, 1)}
        # the node that hosts the store must live, because the rendezvous needs it
        rank = job.host(agents)
        os.kill(agents[1 - rank], signal.SIGSTOP)
        try:
            job.go(rank)
            next(process for process in job.processes if process.pid == agents[rank]).join(
                DEADLINE_S
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agents[1 - rank], signal.SIGCONT)
        ended = job.end()
    assert ended.verdict.ranks == (rank,)
    assert "the fault that was asked for" in ended.verdict.headline
    # the other node reports it too, once it runs again
    waits = {
        failure.node: failure for failure in ended.job.failures if failure.category == "rendezvous"
    }
    waited = waits[ended.verdict.node]
    assert waited.exception.type.endswith("RendezvousTimeoutError")


def test_a_node_that_comes_later(tmp_path: Path) -> None:
    """In an elastic range, a second node makes the first save and begin a new round with it;
    no failure is reported.
    """
    fields = {"min_nodes": 1, "rdzv_configs": {"last_call_timeout": 1}}
    with Job(tmp_path, trainings.growing, options=SHORT_STOP, config=fields).start() as job:
        assert job.await_mark("rank-0-0")["world"] == 1
        ended = job.start().end()
    assert (ended.codes, ended.results, ended.conclusion) == (
        [0, 0],
        {0: 2.0, 1: 2.0},
        None,
    ), ended.logs
    assert ended.waiting_threads == set()
    assert (tmp_path / "saved-0.json").exists(), "a healthy worker has the time that torch gives it"
    assert ended.job.round >= 1, "on a busy machine the second node may miss a round"
    assert ended.job.failures == ()
    assert {entry.place.group_world_size for entry in ended.job.roster} == {2}


@pytest.mark.parametrize(("first", "then"), [(0, 1), (1, None)])
def test_a_signal_to_one_node(first: int, then: int | None, tmp_path: Path) -> None:
    """After a signal to any node all ranks save their state, each asked once,
    also if another agent gets one later.
    """
    with Job(tmp_path, trainings.saving, options=SHORT_STOP).start(2) as job:
        agents = {rank: job.await_mark(f"rank-{rank}")["agent"] for rank in (0, 1)}
        os.kill(agents[first], signal.SIGTERM)
        for rank in (0, 1):
            job.await_mark(f"asked-{rank}")
        time.sleep(3 * SHORT_STOP.stop_seconds)  # nobody tells that a worker is left alone
        if then is not None:
            os.kill(agents[then], signal.SIGTERM)
            time.sleep(3 * SHORT_STOP.stop_seconds)
        (tmp_path / "go").touch()
        ended = job.end()
    assert (ended.codes, ended.waiting_threads) == ([1, 1], set())
    assert [job.await_mark(f"saved-{rank}")["times"] for rank in (0, 1)] == [1, 1], ended.logs
    assert ended.verdict.category == "preemption"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_while_a_node_starts(moment: str, tmp_path: Path) -> None:
    """A signal reaches the other node at whatever moment of the start it comes:
    its worker is asked, and saves.
    """
    with Job(tmp_path, trainings.saving, (InterruptedStart(moment),), SHORT_STOP).start(2) as job:
        job.await_mark("asked-0")
        (tmp_path / "go").touch()
        ended = job.end()
    assert (ended.codes, ended.waiting_threads) == ([1, 1], set())
    assert job.await_mark("saved-0")["times"] == 1, ended.logs
    assert ended.verdict.category == "preemption"


@pytest.fixture
def memory_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a control group with a limit of 2 GiB, for all nodes."""
    group = MEMORY_GROUPS / f"firstfault-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no control group of our own can be made here: {error}")
    monkeypatch.setenv("MEMORY_GROUP", str(group))
    yield
    group.rmdir()


@pytest.mark.usefixtures("memory_group")
def test_a_worker_that_the_kernel_kills_for_memory(tmp_path: Path) -> None:
    """The agent's document has the category host_oom and the memory figures that show it."""
    with Job(
        tmp_path, trainings.out_of_memory, config={**ONE_NODE, "nproc_per_node": 2}
    ).start() as job:
        ended = job.end()
    root = ended.find_failure(1)
    assert (ended.verdict.ranks, ended.verdict.category) == ((1,), "host_oom")
    assert (root.resources.oom_kill, root.resources.memory_limit_bytes) == (1, LIMIT_BYTES)
    assert (root.resources.memory_peak_bytes or 0) > LIMIT_BYTES * 0.9


def test_a_data_loader_that_fails_beside_a_thread_that_died(tmp_path: Path) -> None:
    """A data loader's exception is the root cause;
    a rank that waited for a dead thread is a victim and reports it.
    """
    with Job(tmp_path, trainings.loading, config={**ONE_NODE, "nproc_per_node": 2}).start() as job:
        ended = job.end()
    root = ended.find_failure(0)
    stuck = ended.find_failure(1)
    assert ended.verdict.ranks == (0,)
    assert root.exception.type == "LookupError"
    assert "DataLoader worker process 0" in root.message
    assert "shard 2 is gone" in ended.verdict.message
    assert stuck.stopped_by_agent
    (thread,) = stuck.thread_failures
    assert (thread.thread, thread.exception.message) == (
        "prefetch",
        "the prefetch thread found nothing",
    )
