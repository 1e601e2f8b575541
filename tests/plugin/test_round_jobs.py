"""Jobs with several rounds, and failures outside of a worker's main thread, in real pods."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.plugin.running import await_exit, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.jobs

FILE = Path(__file__).parent / "jobs" / "rounds.py"
LIMIT_BYTES = 2 << 30
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


def listens(pid: int) -> bool:
    """Whether a process listens on a TCP port on any address, as the host of a store does."""
    listening = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        listening |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            held.add(str(descriptor.readlink()))
    return bool(listening & held)


def test_the_same_fault_twice(tmp_path: Path) -> None:
    """Workers that are started again meet each other, not those before them; the same error again ends the attempt."""
    with running(FILE, "again", tmp_path, {}) as run:
        ended = run.end()
    assert ended.verdict is not None, ended.logs
    assert len(list(run.marks.glob("rank-1-*"))) == 2
    assert {mark.stem for mark in run.marks.glob("sum-*")} == {f"sum-4-{rank}" for rank in range(4)}
    assert [(item.number, item.restart) for item in ended.job.restarts] == [(0, True), (1, False)]
    assert "the previous round failed with the same fault" in ended.job.restarts[1].reason
    message = ended.attempt["engine"]["error_seen"]["message"]
    assert "2 of 3 restarts (max_restarts) were not used: the previous round failed with the same fault" in message
    assert "restarted 1 time before: round 0: ValueError, rank 1" in message


def test_one_fault_on_each_node_in_turn(tmp_path: Path) -> None:
    """A job with one fault on each node succeeds; each fault is in the history under its own round."""
    with running(FILE, "in_turn", tmp_path, {}) as run:
        ended = run.end()
    assert ended.status == 0, ended.logs
    assert ended.result["outputs"] == {"o0": 2.0}
    assert ended.verdict is None
    assert ended.attempt["engine"] == {"job": "Succeeded", "error_seen": None}
    job = ended.job
    assert (job.failures, job.round) == ((), 2)
    own = {failure.place.round: failure for failure in job.history if "fails on rank" in failure.message}
    assert {number: failure.rank for number, failure in own.items()} == {0: 0, 1: 1}
    # both agents agreed on each restart; a victim's error in the same round did not count
    assert [(item.number, item.restart, item.rank, item.is_agreed) for item in job.restarts] == [
        (0, True, 0, True),
        (1, True, 1, True),
    ]
    assert {(item.world_size_before, item.world_size_after) for item in job.restarts} == {(2, 2)}
    assert run.left_over() == []


def test_a_code_bug_ends_the_attempt(tmp_path: Path) -> None:
    """The root cause decides, not a victim that failed first with a recoverable error: no restart is used."""
    with running(FILE, "code_bug", tmp_path, {}) as run:
        ended = run.end()
    assert ended.verdict is not None, ended.logs
    assert ended.verdict["ranks"] == [1]
    assert "the bug" in ended.verdict["message"]
    ended.flyte_saw_the_verdict()
    assert (ended.status, ended.attempt["decision"]["retry"]) == (10, False)
    assert "3 of 3 restarts (max_restarts) were not used" in ended.attempt["decision"]["reason"]
    job = ended.job
    assert (job.round, job.history) == (0, ())
    assert {failure.place.restart_count for failure in job.failures} == {0}
    (record,) = job.restarts
    assert (record.number, record.restart, record.rank, record.is_agreed) == (0, False, 1, True)
    assert record.category == "user_code"
    assert {mark.name for mark in run.marks.glob("rank-*")} == {"rank-0-0.json", "rank-1-0.json"}
    assert run.left_over() == []


def test_a_rendezvous_that_times_out(tmp_path: Path) -> None:
    """If a node does not come to the new round, the one that waited reports it, and the fault that began the round."""
    with running(FILE, "not_together_again", tmp_path, {}) as run:
        agents = {rank: run.mark(f"rank-{rank}-0")["agent"] for rank in (0, 1)}
        # the node that hosts the store must live, because the rendezvous needs it
        rank = 0 if listens(agents[0]) else 1
        os.kill(agents[1 - rank], signal.SIGSTOP)
        try:
            go = run.marks / "part"
            go.write_text(str(rank))
            go.rename(run.marks / "go")
            await_exit(agents[rank])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(agents[1 - rank], signal.SIGCONT)
        ended = run.end()
    assert ended.verdict is not None, ended.logs
    assert ended.verdict["ranks"] == [rank]
    assert "the fault before the rendezvous" in ended.verdict["headline"]
    assert "the fault before the rendezvous" in ended.attempt["engine"]["error_seen"]["message"].splitlines()[0]
    # the other node reports it too, once it runs again
    waits = {failure.node: failure for failure in ended.job.failures if failure.category == "rendezvous"}
    waited = waits[ended.verdict["node"]]
    assert waited.exception is not None
    assert waited.exception.type.endswith("RendezvousTimeoutError")
    assert run.left_over() == []


def test_a_node_that_comes_later(tmp_path: Path) -> None:
    """In an elastic range, a second node makes the first begin a new round with it; no failure is reported."""
    with running(FILE, "growing", tmp_path, {}) as run:
        ended = run.end()
    assert ended.status == 0, ended.logs
    assert ended.verdict is None
    assert ended.result["outputs"] == {"o0": 2.0}
    assert (run.mark("rank-0-0")["world"], run.mark("rank-1-0")["world"]) == (1, 2)
    job = ended.job
    assert (job.round, job.failures) == (1, ())
    assert {entry.place.group_world_size for entry in job.roster} == {2}
    assert run.left_over() == []


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """Make a control group with a limit of 2 GiB."""
    group = MEMORY_GROUPS / f"firstfault-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no control group of our own can be made here: {error}")
    yield group
    group.rmdir()


def test_a_worker_that_the_kernel_kills_for_memory(tmp_path: Path, memory_group: Path) -> None:
    """The agent's document has the category host_oom and the memory figures that show it."""
    with running(FILE, "out_of_memory", tmp_path, {}) as run:
        (memory_group / "cgroup.procs").write_text(str(run.process.pid))
        ended = run.end()
    root = ended.of_rank(1)
    assert ended.verdict["ranks"] == [1]
    assert ended.verdict["category"] == "host_oom"
    assert root.resources.oom_kill == 1
    assert root.resources.memory_limit_bytes == LIMIT_BYTES
    assert (root.resources.memory_peak_bytes or 0) > LIMIT_BYTES * 0.9


def test_a_data_loader_that_fails_beside_a_thread_that_died(tmp_path: Path) -> None:
    """A data loader's exception is the root cause; a rank that waited for a dead thread is a victim and reports it."""
    with running(FILE, "loading", tmp_path, {}) as run:
        ended = run.end()
    root, stuck = ended.of_rank(0), ended.of_rank(1)
    assert ended.verdict["ranks"] == [0]
    assert root.exception is not None
    assert root.exception.type == "LookupError"
    assert "DataLoader worker process 0" in root.message
    assert "shard 2 is gone" in ended.verdict["message"]
    assert stuck.stopped_by_agent
    (thread,) = stuck.thread_failures
    assert thread.thread == "prefetch"
    assert thread.exception.message == "the prefetch thread found nothing"
