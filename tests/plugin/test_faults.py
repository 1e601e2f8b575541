"""Killed agents, time limits and slow outputs, with real pods started through the command line."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firstfault import MultiErrorFileOutputReader
from tests.plugin.running import DEADLINE_S, Ended, running
from tests.processes import is_gone
from tests.waiting import run_in_background, wait_until

FAULTS = Path(__file__).parent / "jobs" / "faults.py"
pytestmark = pytest.mark.jobs


def run_into_timeout(folder: Path) -> tuple[Ended, list[str]]:
    """Run a job into its time limit; return its end, and what it leaves."""
    # long enough for workers to begin on a busy machine
    with running(FAULTS, "one_node", folder, {}, "--timeout", "40") as run:
        run.mark("0")
        run.mark("1")
        ended = run.end()
    return ended, run.find_leftovers()


@pytest.fixture(scope="module", autouse=True)
def waits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """Begin the run that only waits."""
    folder = tmp_path_factory.mktemp("timed-out")
    with run_in_background(
        request, {"test_a_timeout_ends_every_process": partial(run_into_timeout, folder)}
    ) as begun:
        yield begun


def test_workers_report_a_killed_agent(tmp_path: Path) -> None:
    """The workers report that their agent died; the job fails,
    Flyte reads no file and the decision is not enforced.
    """
    with running(FAULTS, "one_node", tmp_path, {}) as run:
        run.mark("0")
        os.kill(run.mark("1")["agent"], signal.SIGKILL)
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 11
    assert attempt["engine"] == {"job": "Failed", "error_seen": None}
    assert (
        attempt["verdict"]["why"][-1]
        == f"the pod {attempt['verdict']['node']} was killed by SIGKILL"
    )
    assert (attempt["verdict"]["scope"], attempt["verdict"]["category"]) == ("node", "node_lost")
    assert (attempt["decision"]["retry"], attempt["decision"]["enforced"]) == (True, False)
    assert run.find_leftovers() == []


def test_a_job_with_a_master_names_the_workers_pod_that_failed_first(tmp_path: Path) -> None:
    """Without an agent each pod writes its own document; the verdict names the worker's pod,
    which failed first.
    """
    with running(FAULTS, "with_master", tmp_path, {"rank": 1}) as run:
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 10
    assert attempt["verdict"]["ranks"] == [1]
    assert attempt["verdict"]["node"].endswith("-worker-0")
    assert attempt["verdict"]["victims"]["count"] == 1
    ended.flyte_saw_the_verdict()


def test_a_handled_exception_is_withdrawn_and_pods_wait_for_the_outputs(tmp_path: Path) -> None:
    """An exception that was recorded and then handled is withdrawn;
    no pod exits before rank 0's outputs exist.
    """
    with running(FAULTS, "handled", tmp_path, {"seconds": 3.0}) as run:
        waiting, terminated = (run.mark(rank)["agent"] for rank in ("1", "2"))
        run.mark("pickling")
        os.kill(terminated, signal.SIGTERM)
        wait_until(lambda: is_gone(terminated) and is_gone(waiting), seconds=DEADLINE_S)
        assert list(tmp_path.glob("store/*/0/outputs.pb")), "the pod of rank 1 has exited before"
        ended = run.end()
    assert run.find_leftovers() == []
    assert ended.status == 0, ended.verdict
    assert ended.verdict is None
    assert not list(ended.prefix.glob("error*"))
    documents = list((ended.prefix / "firstfault" / "errors").glob("*.pb"))
    assert len(documents) == 1, "it was recorded before the sockets closed"
    assert not MultiErrorFileOutputReader(str(ended.prefix)).is_error()


def test_a_timeout_ends_every_process(waits: dict[str, Future[Any]]) -> None:
    """After the timeout the command exits with 4, the verdict tells the limit,
    and no process remains.
    """
    ended, left = waits["test_a_timeout_ends_every_process"].result()
    assert ended.status == 4
    assert (ended.result["status"], ended.attempt["engine"]["job"]) == ("timeout", None)
    assert "time limit of 40 s" in ended.verdict["headline"]
    assert left == []
