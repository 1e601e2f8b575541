"""Faults on one of two nodes while the other sleeps or waits: all agents are told, all pods end, all ranks report.

Real pods through the command line. ``make agent-faults`` runs more cases, repeats them and prints what they took.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.recorder import NodeFolder
from tests.plugin.running import DEADLINE_S, Running, await_exit, kill_all, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


pytestmark = pytest.mark.jobs

FILE = Path(__file__).parent / "jobs" / "faults_of_agents.py"
TIMES = int(os.environ.get("FIRSTFAULT_REPEAT", "1"))
SLEEPING_S = 5.0
BLOCKED_S = 3.0
TERMINATED_S = 5.0
GRACE_S = 30.0
"""Kubernetes' grace period: what must hold on any machine. Limits of speed hold for `make agent-faults`."""
_taken: dict[str, list[float]] = {}


@pytest.fixture(autouse=True, scope="module")
def _table() -> Iterator[None]:
    """Print what each case took."""
    yield
    if TIMES > 1:
        print(f"\n{'seconds: median':>15} {'max':>7} {'runs':>5}  case")
        for case, seconds in _taken.items():
            print(f"{statistics.median(seconds):15.2f} {max(seconds):7.2f} {len(seconds):5d}  {case}")


def took(case: str, seconds: float, limit: float) -> None:
    """Record how long a case took, and check it against the limit."""
    _taken.setdefault(case, []).append(seconds)
    assert seconds < (limit if TIMES > 1 else GRACE_S), case


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Return a function that starts a run; at the end of the test, end it and check that nothing remains of it."""
    runs = []

    def begin(task: str, *options: str, **inputs: Any) -> Running:
        context = running(FILE, task, tmp_path, inputs, *options)
        runs.append((context, context.__enter__()))
        return runs[-1][1]

    yield begin
    for context, run in runs:
        context.__exit__(None, None, None)
        assert run.left_over() == []


repeated = pytest.mark.parametrize("number", range(TIMES))


# --- all pods end ---------------------------------------------------------------------------------------------------


@repeated
@pytest.mark.parametrize(("peers", "limit"), [("sleep", SLEEPING_S)] + [("gloo", BLOCKED_S)] * (TIMES > 1))
def test_all_pods_end(start: Callable[..., Running], peers: str, limit: float, number: int) -> None:
    """A rank raises: the verdict names it, its peers were stopped because of it or failed, and all pods end soon."""
    ended = start("forked", kind="raise", peers=peers).end()
    assert ended.status == 10, ended.stderr
    assert ended.verdict["ranks"] == [1]
    assert "the first fault" in ended.verdict["headline"]
    assert ended.verdict["victims"]["count"] == 1
    assert ended.verdict["coverage"]["complete"]
    ended.flyte_saw_the_verdict()
    assert not (ended.prefix / "deck.html").exists(), "the task has no decks"
    if peers == "sleep":
        victim = ended.of_rank(0)
        assert victim.caused_by is not None
        assert victim.caused_by.rank == 1
        assert "rank 1 on " in victim.sent_signals[0].reason
        (stack,) = victim.stack_dumps
        assert "in train" in stack.text, "the line it slept in"
    took(f"a rank raises, its peers {peers}", ended.attempt["seconds"]["fault_to_ended"], limit)


# --- every failure reports ------------------------------------------------------------------------------------------


@repeated
@pytest.mark.parametrize("clean_up", ["finally", "finally-destroy"] if TIMES > 1 else ["finally-destroy"])
@pytest.mark.parametrize("task", ["spawned", "forked"] if TIMES > 1 else ["forked"])
def test_a_slow_finally(start: Callable[..., Running], task: str, clean_up: str, number: int) -> None:
    """An exception has its own durable document before its first victim fails, even if its clean-up is slow."""
    rank = 3 if task == "spawned" else 1
    ended = start(task, kind=clean_up, rank=rank).end()
    assert ended.verdict["ranks"] == [rank]
    assert "ValueError" in ended.verdict["headline"]
    ended.flyte_saw_the_verdict()
    root = ended.of_rank(rank)
    assert root.exception is not None
    assert root.exception.frames[-1].function == "raise_in"
    others = [failure for failure in ended.job.failures if failure.rank != rank]
    first_victim = min(failure.timestamp_ns or 0 for failure in others)
    durable = (root.timestamp_ns or 0) + int(ended.attempt["seconds"]["fault_to_durable"] * 1e9)
    assert durable < first_victim
    took(f"{clean_up} ({task}): durable before the first victim", (first_victim - durable) / 1e9, GRACE_S)


def test_an_exit_without_an_error(start: Callable[..., Running]) -> None:
    """An exit with code 0 before the task has returned is a failure, also if each pod has its own error file."""
    ended = start("forked", "--env", "_F_DES=Earliest", kind="os._exit(0)", peers="sleep").end()
    root = ended.of_rank(1)
    assert (ended.verdict["ranks"], ended.verdict["category"]) == ([1], "exit")
    assert "exited with code 0 before the task function returned" in root.message
    assert not (ended.prefix / "error.pb").exists()
    assert len(list(ended.prefix.glob("error-*.pb"))) == 1, "one for all pods"
    ended.flyte_saw_the_verdict()


def test_an_abort(start: Callable[..., Running]) -> None:
    """The document has the stack and the output of a failed check in native code; the pod's log has them too."""
    ended = start("forked", kind="terminate", peers="sleep").end()
    root = ended.of_rank(1)
    assert (ended.verdict["ranks"], ended.verdict["category"]) == ([1], "signal")
    assert "terminate called without an active exception" in f"{root.message}\n{root.log_tail}"
    assert "terminate called without an active exception" in ended.logs, "stderr still reaches the pod's log"
    (dump,) = root.stack_dumps
    assert "Fatal Python error: Aborted" in dump.text
    assert "Fatal Python error: Aborted" in ended.logs
    ended.flyte_saw_the_verdict()


# --- agents that die ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "with_worker"),
    [(0, False)] + [(1, True), (0, True), (1, False)] * (TIMES > 1),
)
def test_an_agent_is_killed(start: Callable[..., Running], rank: int, with_worker: bool) -> None:
    """The recorder and the other node's agent report the killed agent, on whichever node the store is."""
    run = start("forked", kind="hang", peers="sleep")
    killed = run.mark(f"rank-{rank}")
    run.mark("fault")
    time.sleep(1)  # the agents connect in the background
    began = time.monotonic()
    kill_all(killed["agent"], *([killed["pid"]] if with_worker else []))
    ended = run.end()
    took(f"the agent of rank {rank} is killed", time.monotonic() - began, 2 * SLEEPING_S)
    assert ended.attempt["engine"] == {"job": "Failed", "error_seen": None}
    assert (ended.verdict["scope"], ended.verdict["category"]) == ("node", "node_lost")
    assert not ended.attempt["decision"]["enforced"]
    assert ended.verdict["coverage"]["reported"] == 2
    victim = ended.of_rank(1 - rank)
    assert victim.stopped_by_agent
    assert (ended.prefix / "error.pb").exists(), "the survivor has sealed a verdict"


# --- signals --------------------------------------------------------------------------------------------------------


def _training(start: Callable[..., Running], peers: str) -> tuple[Running, int]:
    run = start("forked", kind="hang", peers=peers)
    run.mark("fault")
    return run, run.mark("rank-1")["agent"]


def _barrier(start: Callable[..., Running]) -> tuple[Running, int]:
    run = start("uneven", seconds=60.0)
    agent = run.mark("rank-1")["agent"]
    while not list(run.marks.parent.glob("store/*/0/firstfault/roster/*succeeded*")):
        time.sleep(0.02)
    return run, agent


def _rendezvous(start: Callable[..., Running]) -> tuple[Running, int]:
    run = start("forked", "--env", "PET_NNODES=3")
    while not list(run.temporary.glob("firstfault-*/recorder.sock")):
        time.sleep(0.02)
    (folder, *_) = run.temporary.glob("firstfault-*")
    time.sleep(1)  # by now it has entered the rendezvous
    return run, NodeFolder(folder).read_settings().agent_pid


PHASES: dict[str, Callable[[Any], tuple[Running, int]]] = {
    "training, asleep": lambda start: _training(start, "sleep"),
    "training, in gloo": lambda start: _training(start, "gloo"),
    "exit barrier": _barrier,
    "rendezvous": _rendezvous,
}


@repeated
@pytest.mark.parametrize("phase", [phase for phase in PHASES if TIMES > 1 or "gloo" not in phase])
def test_an_agent_is_terminated(start: Callable[..., Running], phase: str, number: int) -> None:
    """In any phase SIGTERM ends the pod within seconds, with a document and a verdict on the system's budget."""
    run, agent = PHASES[phase](start)
    os.kill(agent, signal.SIGTERM)
    seconds = await_exit(agent)
    ended = run.end()
    took(f"SIGTERM: {phase}", seconds, TERMINATED_S)
    assert (ended.verdict["scope"], ended.verdict["category"]) == ("external", "preemption"), ended.verdict
    assert (ended.attempt["decision"]["retry"], ended.attempt["decision"]["origin"]) == (True, "SYSTEM")
    ended.flyte_saw_the_verdict()


@repeated
@pytest.mark.parametrize("frozen_seconds", [3.0] + [0.0] * (TIMES > 1))
def test_sigterm_while_settling(start: Callable[..., Running], number: int, frozen_seconds: float) -> None:
    """A pod that is terminated while it waits for a silent node, the store's host, seals the best verdict so far.

    torch asks the store's host every second for nodes that wait to join.
    """
    run = start("forked", kind="raise", peers="sleep", wait=True)
    failing, silent = run.mark("rank-1")["agent"], run.mark("rank-0")["agent"]
    os.kill(silent, signal.SIGSTOP)
    time.sleep(frozen_seconds)
    (run.marks / "go").touch()
    began = time.monotonic()
    while not list(run.marks.parent.glob("store/*/0/firstfault/roster/*failed*")):
        assert time.monotonic() - began < DEADLINE_S, "the failing node reported nothing"
        time.sleep(0.01)
    os.kill(failing, signal.SIGTERM)
    seconds = await_exit(failing)
    os.kill(silent, signal.SIGCONT)
    ended = run.end()
    took("SIGTERM: settling", seconds, TERMINATED_S)
    # frozen so early, it may have missed the broadcast, and then learns of the failure from the storage
    took("a node that was frozen", ended.attempt["seconds"]["fault_to_ended"], 6 * SLEEPING_S)
    assert ended.verdict["ranks"] == [1]
    assert "the first fault" in ended.attempt["engine"]["error_seen"]["message"]


def test_sigterm_after_success(start: Callable[..., Running]) -> None:
    """A pod that is terminated while it waits for rank 0's outputs writes no error, because the job has succeeded."""
    run = start("slow_output", seconds=3.0)
    agent = run.mark("rank-1")["agent"]
    run.mark("pickling")
    os.kill(agent, signal.SIGTERM)
    await_exit(agent)
    ended = run.end()
    assert ended.verdict is None
    assert not list(ended.prefix.glob("error*"))
    assert not list((ended.prefix / "firstfault" / "errors").glob("*"))


# --- the first exit -------------------------------------------------------------------------------------------------


def test_a_success_after_a_handled_exception(start: Callable[..., Running]) -> None:
    """An exception that was recorded and then handled is withdrawn; no pod exits before rank 0's outputs exist."""
    run = start("handled", seconds=3.0)
    await_exit(run.mark("rank-1")["agent"])
    assert list(run.marks.parent.glob("store/*/0/outputs.pb")), "the pod of rank 1 has exited before"
    ended = run.end()
    assert ended.status == 0, ended.verdict
    assert ended.verdict is None
    documents = list((ended.prefix / "firstfault" / "errors").glob("*.pb"))
    assert len(documents) == 1, "it was recorded before the sockets closed"
    assert not MultiErrorFileOutputReader(str(ended.prefix)).is_error()


def test_a_finished_node_learns_of_a_failure(start: Callable[..., Running]) -> None:
    """A node whose workers have succeeded does not report success when another one fails after it."""
    ended = start("uneven", seconds=1.0, kind="raise").end()
    assert ended.verdict["ranks"] == [0]
    assert "the first fault" in ended.verdict["headline"]
    ended.flyte_saw_the_verdict()
    took("a rank raises, its peer has finished", ended.attempt["seconds"]["fault_to_ended"], SLEEPING_S)
