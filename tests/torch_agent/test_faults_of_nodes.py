"""Faults on one of two nodes while the other sleeps or waits: all agents are told, all nodes end,
all ranks report.

``make agent-faults`` runs more cases, repeats them and prints what they took.
"""

import contextlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from firstfault.model import Origin, Scope
from firstfault_torch import Options, Watchdog
from tests.nodes import DEADLINE_S, Ended, Job
from tests.torch_agent import trainings
from tests.waiting import wait_until

pytestmark = pytest.mark.jobs

TIMES = int(os.environ.get("FIRSTFAULT_REPEAT", "1"))
SLEEPING_S = 5.0
BLOCKED_S = 3.0
TERMINATED_S = 5.0
GRACE_S = 30.0
"""Kubernetes' grace period: what must hold on any machine. Limits of speed hold
for `make agent-faults`.
"""
_taken: dict[str, list[float]] = {}


@pytest.fixture(autouse=True, scope="module")
def _table() -> Iterator[None]:
    """Print what each case took."""
    yield
    if TIMES > 1:
        print(f"\n{'seconds: median':>15} {'max':>7} {'runs':>5}  case")
        for case, seconds in _taken.items():
            print(
                f"{statistics.median(seconds):15.2f} {max(seconds):7.2f} {len(seconds):5d}  {case}"
            )


def took(case: str, began: float, limit: float) -> None:
    """Record how long a case took, and check it against the limit."""
    _taken.setdefault(case, []).append(time.monotonic() - began)
    assert _taken[case][-1] < (limit if TIMES > 1 else GRACE_S), case


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that starts the nodes of a job;
    what remains of them at the end of the test is killed.
    """
    with contextlib.ExitStack() as stack:

        def begin(
            function: Callable[..., Any],
            *arguments: Any,
            nodes: int = 2,
            options: Options | None = None,
            **config: Any,
        ) -> Job:
            return stack.enter_context(Job(tmp_path, function, arguments, options, config)).start(
                nodes
            )

        yield begin


repeated = pytest.mark.parametrize("number", range(TIMES))
ONE_NODE = {"nodes": 1, "min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2}


@repeated
@pytest.mark.parametrize(
    ("peers", "limit"), [("sleep", SLEEPING_S)] + [("gloo", BLOCKED_S)] * (TIMES > 1)
)
def test_all_nodes_end_soon_after_a_rank_raises(
    job: Callable[..., Job], peers: str, limit: float, number: int
) -> None:
    """A rank raises: the verdict names it, its peers were stopped because of it or failed,
    and all nodes end soon.
    """
    running = job(trainings.one_fails, "raise", peers)
    running.await_mark("fault")
    began = time.monotonic()
    ended = running.end()
    took(f"a rank raises, its peers {peers}", began, limit)
    assert (ended.codes, ended.waiting_threads) == ([1, 1], set())
    assert (ended.verdict.ranks, ended.verdict.victims.count) == ((1,), 1)
    assert "the first fault" in ended.verdict.headline
    assert ended.verdict.coverage.complete
    if peers == "sleep":
        victim = ended.find_failure(0)
        assert victim.caused_by.rank == 1
        assert "rank 1 on " in victim.sent_signals[0].reason
        (stack,) = victim.stack_dumps
        assert "in one_fails" in stack.text, "the line it slept in"


@repeated
def test_an_exception_is_durable_before_a_slow_clean_up_ends(
    job: Callable[..., Job], number: int
) -> None:
    """An exception has its own durable document before its first victim fails,
    even if its clean-up is slow.
    """
    ended = job(trainings.one_fails, "finally-destroy", "gloo").end()
    assert ended.verdict.ranks == (1,)
    root = ended.find_failure(1)
    victim = ended.find_failure(0)
    assert (root.exception.type, root.exception.frames[-1].function) == ("ValueError", "_fail")
    (receipt,) = {
        receipt
        for entry in ended.job.roster
        for receipt in entry.receipts
        if receipt.name == root.documents[0].name and receipt.fault_to_durable_ns
    }
    assert (root.timestamp_ns or 0) + (receipt.fault_to_durable_ns or 0) < (
        victim.timestamp_ns or 0
    )


def test_an_early_exit_with_code_0_is_a_failure(job: Callable[..., Job]) -> None:
    """An exit with code 0 before the training function has returned is a failure."""
    ended = job(trainings.one_fails, "exit 0", **ONE_NODE).end()
    assert (ended.verdict.ranks, ended.verdict.category) == ((1,), "exit")
    assert "exited with code 0 before its training returned" in ended.find_failure(1).message


def test_a_rank_that_exits_with_an_open_group_is_named(job: Callable[..., Job]) -> None:
    """After sys.exit(0) its peer's collective fails soon, though the program keeps the group,
    and the rank is named.
    """
    ended = job(trainings.one_fails, "leave", "gloo", **ONE_NODE).end()
    assert (ended.verdict.ranks, ended.verdict.category) == ((1,), "exit")
    assert ended.verdict.headline.startswith("SystemExit, rank 1 on ")
    assert "onnection" in ended.find_failure(0).message, "the collective did not time out"


def test_an_aborts_stack_and_output_are_recorded(job: Callable[..., Job]) -> None:
    """The document has the stack and the output of a failed check in native code;
    the node's log has them too.
    """
    ended = job(trainings.one_fails, "terminate", **ONE_NODE).end()
    root = ended.find_failure(1)
    assert (ended.verdict.ranks, ended.verdict.category) == ((1,), "signal")
    assert "terminate called without an active exception" in f"{root.message}\n{root.log_tail}"
    (dump,) = root.stack_dumps
    assert "Fatal Python error: Aborted" in dump.text
    for text in ("terminate called without an active exception", "Fatal Python error: Aborted"):
        assert text in ended.logs, "stderr still reaches the node's log"


def test_a_frozen_recorder_loses_no_document(job: Callable[..., Job]) -> None:
    """Frozen, it loses nothing: worker and agent upload by themselves."""
    ended = job(trainings.one_fails, "freeze the recorder", **ONE_NODE).end()
    assert ended.verdict.ranks == (1,)
    assert "the first fault" in ended.verdict.headline
    assert not ended.job.coverage.unreadable


def test_a_rank_that_hangs_in_a_step_is_named(job: Callable[..., Job]) -> None:
    """The verdict names the rank that hung, not those that waited for it; its stderr is teed,
    and in its document.
    """
    options = Options(watchdog=Watchdog(heartbeat_timeout=120))
    fields = {"nproc_per_node": 2, "log_line_prefix_template": "[${role_name} rank ${rank}] "}
    ended = job(trainings.one_hangs_in_a_step, 2, options=options, **fields).end()
    root = ended.find_failure(2)
    assert (ended.verdict.ranks, ended.verdict.category) == ((2,), "hang")
    assert "trainings.py:" in ended.verdict.headline
    assert "in one_hangs_in_a_step" in root.stack_dumps[0].text
    assert "the loader reads shard 7" in root.log_tail
    expired = [failure for failure in ended.job.failures if failure.expired is not None]
    assert {failure.expired.scope for failure in expired if failure.expired} == {"train step"}
    assert {(failure.signal, failure.category) for failure in expired} == {("SIGKILL", "hang")}


def test_a_finished_node_learns_of_a_failure(job: Callable[..., Job]) -> None:
    """A node whose workers have succeeded does not report success when
    another one fails after it.
    """
    running = job(trainings.one_is_late, "raise", 1.0)
    running.await_mark("fault")
    began = time.monotonic()
    ended = running.end()
    took("a rank raises, its peer has finished", began, SLEEPING_S)
    assert ended.codes == [1, 1]
    assert ended.verdict.ranks == (0,)
    assert "the first fault" in ended.verdict.headline


@pytest.mark.parametrize(
    ("rank", "with_worker"), [(0, False)] + [(1, True), (0, True), (1, False)] * (TIMES > 1)
)
def test_a_killed_agent_is_reported_by_recorder_and_peer(
    job: Callable[..., Job], rank: int, with_worker: bool
) -> None:
    """The recorder and the other node's agent report the killed agent,
    on whichever node the store is.
    """
    running = job(trainings.one_fails, "hang")
    killed = running.await_mark(f"rank-{rank}")
    running.await_mark("fault")
    time.sleep(1)  # the agents connect in the background
    began = time.monotonic()
    os.kill(killed["agent"], signal.SIGKILL)
    if with_worker:
        os.kill(killed["pid"], signal.SIGKILL)
    ended = running.end()
    took(f"the agent of rank {rank} is killed", began, 2 * SLEEPING_S)
    assert sorted(map(str, ended.codes)) == ["-9", "1"]
    assert (ended.verdict.scope, ended.verdict.category) == (Scope.NODE, "node_lost")
    assert ended.verdict.coverage.reported == 2
    assert ended.find_failure(1 - rank).stopped_by_agent
    assert (ended.folder / "0" / "error.pb").exists(), "the survivor has sealed a verdict"


def _training(job: Callable[..., Job], peers: str) -> tuple[Job, int]:
    running = job(trainings.one_fails, "hang", peers)
    running.await_mark("fault")
    time.sleep(1)  # the agents connect in the background
    return running, running.await_mark("rank-1")["agent"]


def _barrier(job: Callable[..., Job]) -> tuple[Job, int]:
    running = job(trainings.one_is_late, "hang", 0.0)
    agent = running.await_mark("rank-1")["agent"]
    running.await_mark("fault")
    return running, agent


def _rendezvous(job: Callable[..., Job]) -> tuple[Job, int]:
    running = job(trainings.one_fails, "hang", nodes=1)
    wait_until(
        lambda: list(running.temporary.glob("firstfault-*/recorder.sock")), seconds=DEADLINE_S
    )
    time.sleep(1)  # by now it has entered the rendezvous
    pid = running.processes[0].pid
    assert pid is not None
    return running, pid


PHASES: dict[str, Callable[[Any], tuple[Job, int]]] = {
    "training, asleep": lambda job: _training(job, "sleep"),
    "training, in gloo": lambda job: _training(job, "gloo"),
    "exit barrier": _barrier,
    "rendezvous": _rendezvous,
}


def _await_exit(running: Job, agent: int) -> None:
    (process,) = [process for process in running.processes if process.pid == agent]
    process.join(DEADLINE_S)
    assert process.exitcode == 1


@repeated
@pytest.mark.parametrize("phase", [phase for phase in PHASES if TIMES > 1 or "gloo" not in phase])
def test_a_terminated_agent_ends_its_node_within_seconds(
    job: Callable[..., Job], phase: str, number: int
) -> None:
    """In any phase SIGTERM ends the node within seconds,
    with a document and a verdict on the system's budget.
    """
    running, agent = PHASES[phase](job)
    began = time.monotonic()
    os.kill(agent, signal.SIGTERM)
    _await_exit(running, agent)
    took(f"SIGTERM: {phase}", began, TERMINATED_S)
    ended = running.end()
    assert (ended.verdict.scope, ended.verdict.category) == (
        Scope.EXTERNAL,
        "preemption",
    ), ended.verdict
    assert (ended.conclusion.decision.retry, ended.conclusion.decision.origin) == (
        True,
        Origin.SYSTEM,
    )
    assert (ended.folder / "0" / "error.pb").exists()


@repeated
@pytest.mark.parametrize("frozen_seconds", [3.0] + [0.0] * (TIMES > 1))
def test_a_node_terminated_while_settling_seals_its_best_verdict(
    job: Callable[..., Job], number: int, frozen_seconds: float
) -> None:
    """A node that is terminated while it waits for a silent one, the store's host,
    seals the best verdict so far.

    torch asks the store's host every second for nodes that wait to join.
    """
    running = job(trainings.one_fails, "raise", "sleep, once told")
    failing, silent = running.await_mark("rank-1")["agent"], running.await_mark("rank-0")["agent"]
    os.kill(silent, signal.SIGSTOP)
    time.sleep(frozen_seconds)
    (running.folder / "go").touch()
    running.await_files("0/firstfault/roster/*failed*")
    began = time.monotonic()
    os.kill(failing, signal.SIGTERM)
    _await_exit(running, failing)
    took("SIGTERM: settling", began, TERMINATED_S)
    sealed = (running.folder / "0" / "error.pb").read_bytes()
    os.kill(silent, signal.SIGCONT)
    ended = running.end()
    # frozen so early, it may have missed the broadcast, and then learns of the failure from the
    # storage
    took("a node that was frozen", began, 6 * SLEEPING_S)
    assert ended.verdict.ranks == (1,)
    assert b"the first fault" in sealed


def _concluded(folder: Path) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in folder.glob("concludes-*")]


def _disturbed(job: Callable[..., Job], folder: Path, how: str, nodes: int = 2) -> Job:
    options = Options(retry_policy=trainings.disturbing(folder, how))
    fields = {"nodes": nodes, "min_nodes": nodes, "max_nodes": nodes}
    return job(trainings.one_fails, "raise", "sleep", nodes - 1, options=options, **fields)


def _told_alike(ended: Ended, nodes: int) -> None:
    """Check that so many nodes have told one root cause."""
    said = [line for line in ended.logs.splitlines() if line.startswith("Cause:")]
    assert (len(set(said)), len(said)) == (1, nodes), ended.logs


@pytest.mark.parametrize(
    ("nodes", "how", "concluded"),
    [(2, "slow", 2), (2, "SIGKILL", 2)]
    + [(4, "none", 1), (4, "SIGKILL", 2), (4, "slow", 2)] * (TIMES > 1),
)
def test_the_next_node_concludes_if_the_leader_dies(
    nodes: int,
    how: str,
    concluded: int,
    tmp_path: Path,
    job: Callable[..., Job],
) -> None:
    """The job has one verdict, which is right, and few nodes have read for it. The first
    node hosts the store too.
    """
    ended = _disturbed(job, tmp_path, how, nodes).end()
    assert len(_concluded(tmp_path)) == concluded
    assert ended.verdict.ranks == (nodes - 1,)
    assert "the first fault" in ended.verdict.headline
    assert [path.name for path in (tmp_path / "0").glob("error*")] == ["error.pb"]
    _told_alike(ended, nodes - (how == "SIGKILL"))


@pytest.mark.skipif(TIMES == 1, reason="make agent-faults runs it")
def test_a_frozen_node_reaches_the_sealed_verdict_later(
    tmp_path: Path, job: Callable[..., Job]
) -> None:
    """The other node seals a verdict without it; when it runs again, it reaches the same one."""
    running = _disturbed(job, tmp_path, "SIGSTOP")
    running.await_files("0/error.pb")
    (frozen,) = [
        pid
        for pid in _concluded(tmp_path)
        if "State:\tT" in Path(f"/proc/{pid}/status").read_text()
    ]
    os.kill(frozen, signal.SIGCONT)
    ended = running.end()
    assert ended.verdict.ranks == (1,)
    _told_alike(ended, 2)
