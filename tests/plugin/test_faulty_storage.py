"""Jobs on S3 whose storage breaks as a worker fails, or as a pod is terminated."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.model import DocumentRef, Seal
from firstfault.wire.documents import decode
from tests.faulty_proxy import Fault, FaultyProxy, faulty_proxy_before
from tests.plugin.running import DEADLINE_S, await_exit, running
from tests.s3_server import listening
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.plugin.running import Ended, Running
    from tests.s3_server import S3

pytestmark = pytest.mark.jobs

FILE = Path(__file__).parent / "jobs" / "faulty_storage.py"
TERMINATED_S = 30.0
"""SIGTERM to the verdict: ten seconds, and more for a busy machine; Kubernetes kills a pod after 30."""


@contextlib.contextmanager
def started(s3: S3, folder: Path, task: str, nodes: int) -> Iterator[tuple[Running, FaultyProxy]]:
    """Start a job behind a proxy of its own, and wait until its workers run and its pods have said so."""
    folder.mkdir()
    with faulty_proxy_before(s3) as proxy:
        server = proxy.server
        store = ("--store", server.uri("job"))
        with running(FILE, task, folder, {}, *store, environment=server.environment(), cwd=folder) as run:
            for number in range(nodes):
                run.mark(f"rank-{number}")
                proxy.await_request("PUT", f"-{number:07d}-joined-")
            yield run, proxy


def fail(run: Running, rank: int) -> None:
    """Let a rank raise."""
    part = run.marks / "go.part"
    part.write_text(str(rank))
    part.rename(run.marks / "go")


def hosts_store(mark: dict[str, Any]) -> bool:
    """Whether a worker's agent hosts the store that the agents share."""
    port = mark["store"].rpartition(":")[2]
    return any(address.endswith(f":{port}") for address in listening(mark["agent"]))


def refused(s3: S3, folder: Path) -> Ended:
    """The storage refuses connections until the verdict is made."""
    with started(s3, folder, "one_node", 1) as (run, proxy):
        proxy.refuse()
        fail(run, 0)
        _await_text(folder, "was not uploaded: the storage did not answer")
        _await_text(folder, "root cause: ValueError, rank 0 on")
        proxy.accept()
        return run.end()


def left_alone(s3: S3, folder: Path) -> tuple[Ended, Seal, int]:
    """The storage hangs as a worker fails, and its pod, the host of the agents' store, dies.

    Return also the other pod's seal, and the rank that failed.
    """
    with started(s3, folder, "two_nodes", 2) as (run, proxy):
        rank = next(rank for rank in range(2) if hosts_store(run.mark(f"rank-{rank}")))
        failing, other = run.mark(f"rank-{rank}"), f"{1 - rank:07d}"
        before = len(proxy.requests)
        proxy.plan(Fault("stall"))
        fail(run, rank)
        proxy.await_request("PUT", f"-{other}-{other}-", since=before)  # the document of the stopped rank
        os.kill(failing["agent"], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it may have ended with its agent
            os.kill(failing["pid"], signal.SIGKILL)
        proxy.await_request("PUT", "/error.pb", since=before)
        proxy.plan()
        ended = run.end()
    key = ended.attempt["errors"].partition("/firstfault/errors")[0].split("/", 3)[3]
    with contextlib.closing(s3.client()) as client:
        data = client.get_object(Bucket=s3.bucket, Key=f"{key}/error.pb")["Body"].read()
    seal = decode(data, DocumentRef("error.pb"))
    assert isinstance(seal, Seal)
    return ended, seal, rank


def terminated(s3: S3, folder: Path) -> tuple[Ended, float]:
    """A pod gets SIGTERM while the storage hangs; return also the seconds until it has sealed."""
    with started(s3, folder, "usual", 2) as (run, proxy):
        agent = run.mark("rank-1")["agent"]
        before = len(proxy.requests)
        proxy.plan(Fault("stall"))
        began = time.monotonic()
        os.kill(agent, signal.SIGTERM)
        took = proxy.await_request("PUT", "/error.pb", since=before) - began
        proxy.plan()
        await_exit(agent)
        return run.end(), took


@pytest.fixture(scope="module")
def jobs(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Callable[..., Any], Future[Any]]]:
    """Run all jobs, two at a time: they wait more than they work."""
    folder = tmp_path_factory.mktemp("jobs")
    with ThreadPoolExecutor(2) as pool:
        scenarios = (left_alone, terminated, refused)
        yield {scenario: pool.submit(scenario, s3, folder / scenario.__name__) for scenario in scenarios}


Jobs = dict["Callable[..., Any]", "Future[Any]"]


def test_a_storage_that_refuses_connections(jobs: Jobs) -> None:
    """The exception carries the whole verdict, and the entrypoint uploads it when it can."""
    ended = jobs[refused].result()
    error = ended.attempt["engine"]["error_seen"]
    assert ended.status == 10, ended.logs
    assert "the user's own error" in error["message"]
    assert error["code"] == "USER:RuntimeError"
    assert ended.verdict["ranks"] == [0]
    assert "the document of rank 0" in error["message"]
    assert "was not uploaded" in error["message"]
    assert "only the documents at hand were read" in error["message"]


def test_the_storage_hangs_and_the_failing_pod_dies(jobs: Jobs) -> None:
    """The other pod, alone and with its own findings, names the rank of which its agent was told."""
    ended, seal, rank = jobs[left_alone].result()
    root = next(line for line in seal.message.splitlines() if line.startswith("root cause: "))
    assert f"rank {rank} on" in root
    assert "ValueError" in root
    assert "only the documents at hand were read" in seal.message
    assert ended.attempt["engine"]["job"] == "Failed"


def test_a_pod_is_terminated_while_the_storage_hangs(jobs: Jobs) -> None:
    """It seals within seconds, long before Kubernetes kills it."""
    ended, took = jobs[terminated].result()
    assert took < TERMINATED_S
    assert (ended.verdict["scope"], ended.verdict["category"]) == ("external", "preemption")
    assert (ended.attempt["decision"]["retry"], ended.attempt["decision"]["origin"]) == (True, "SYSTEM")


def _await_text(folder: Path, text: str) -> None:
    """Wait until a pod has logged a text."""
    logs = ".firstfault/logs/*/*/*.log"
    until(lambda: any(text in log.read_text(errors="replace") for log in folder.glob(logs)), text, DEADLINE_S)
