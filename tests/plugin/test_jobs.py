"""Jobs on real pods: a killed worker and its deck, several attempts, restarts on S3 and within the processes."""

from __future__ import annotations

import html
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.model import RestartKind, Writer
from tests.plugin.running import Ended, running
from tests.waiting import beside

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from tests.s3_server import S3

pytestmark = pytest.mark.jobs

FOLDER = Path(__file__).parent / "jobs"
SAME_FAULT = "the previous attempt failed with the same fault"


def _impatient(folder: Path) -> Ended:
    with running(FOLDER / "again.py", "impatient", folder, {}, "--retries", "3") as run:
        return run.end()


@pytest.fixture(scope="module", autouse=True)
def waits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """Begin the run whose attempts come one after the other."""
    folder = tmp_path_factory.mktemp("impatient")
    with beside(request, {"test_a_policy_stops_retries_of_the_same_fault": partial(_impatient, folder)}) as begun:
        yield begun


def test_a_worker_is_killed(tmp_path: Path) -> None:
    """The agent reports rank, node, signal and exit code; the deck has the report, then the killed rank 0's deck.

    The variable of torchrun's jobs changes nothing in a task.
    """
    options = ("--env", "FLYTE_SDK_LOGGING_LEVEL=20", "--env", "FIRSTFAULT=1")
    with running(FOLDER / "decks.py", "spawned", tmp_path, {}, *options) as run:
        killed = run.end()
    assert run.left_over() == []
    verdict, root = killed.verdict, killed.of_rank(0)
    assert killed.status == 10
    assert (verdict["scope"], verdict["ranks"]) == ("rank", [0])
    assert (verdict["category"], verdict["code"]) == ("signal", "USER:SIGKILL")
    assert verdict["victims"]["count"] == 1, killed.job.failures
    assert verdict["coverage"]["complete"]
    assert root.writer is Writer.AGENT
    assert (root.signal, root.exit_code, root.exception) == ("SIGKILL", -9, None)
    # the rendezvous decides which pod is which node
    assert verdict["node"] == root.node == root.worker
    assert "-worker-" in root.node
    assert "signal: SIGKILL: killed, sender unknown, " in killed.attempt["engine"]["error_seen"]["message"]
    assert killed.attempt["seconds"]["fault_to_durable"] > 0
    killed.flyte_saw_the_verdict()
    page = (killed.prefix / "deck.html").read_text()
    tabs = [html.unescape(name) for name in re.findall(r'<li onclick="handleLinkClick\(this\)">(.*?)</li>', page)]
    assert tabs == ["firstfault", "progress of rank 0", "Timeline"]
    assert page.count("<p>loss 0.25 at step 7</p>") == 1
    assert "SIGKILL" in page
    assert html.escape(verdict["node"]) in page
    assert "firstfault failed while" not in killed.logs
    assert "more: firstfault show" not in killed.logs
    decks, ends = _logged(killed.logs, "Upload data to .*/deck.html"), _logged(killed.logs, "User-scoped IgnoreOutputs")
    assert len(ends) == 2, "the verdict is in the storage: flytekit uploads nothing"
    assert len(decks) == 1
    assert min(decks) <= min(ends), "a pod that has its verdict may be the first to exit"


def _logged(logs: str, message: str) -> list[str]:
    """Return when flytekit logged a message, as text that sorts by time."""
    return re.findall(rf'"asctime": "([^"]+)".*"message": "{message}', logs)


def test_restarts_used_up(s3_environ: S3, tmp_path: Path) -> None:
    """Of three failed rounds, the last is judged and the others are history; the HTML report is written locally."""
    store = ("--store", s3_environ.uri("restarts"))
    with running(FOLDER / "restarting.py", "train", tmp_path, {"faulty_rounds": 3}, *store, cwd=tmp_path) as run:
        ended = run.end()
    attempt = ended.attempt
    assert ended.status == 11
    assert ended.verdict["ranks"] == [1]
    assert "round 2 is bad" in ended.verdict["message"]
    job = MultiErrorFileOutputReader(attempt["errors"].removesuffix("/firstfault/errors")).job()
    assert job.round == 2
    assert {failure.place.round for failure in job.failures} == {2}
    assert {failure.place.round for failure in job.history} == {0, 1}
    assert any("round 0 is bad" in failure.message for failure in job.history)
    assert min(failure.timestamp_ns for failure in job.failures) > max(failure.timestamp_ns for failure in job.history)
    # a recoverable error uses its restarts, each of which has a record
    assert [(record.number, record.restart, record.rank) for record in job.restarts] == [(0, True, 1), (1, True, 1)]
    assert "raised as recoverable" in job.restarts[0].reason
    assert "round 0 is bad" in job.restarts[0].headline
    assert all(0 < (record.lost_seconds or 0) < 60 for record in job.restarts)
    assert {(record.world_size_before, record.world_size_after) for record in job.restarts} == {(2, 2)}
    # outputs go to a bucket, the report to the folder of the pods' logs
    report = Path(ended.result["report"])
    assert report.parent.parent == tmp_path / ".firstfault" / "logs"
    assert (report.parent / "attempt-0").is_dir()
    assert "round 2 is bad" in report.read_text(encoding="utf-8")


def test_the_job_goes_on(tmp_path: Path) -> None:
    """After an exception, and then a SIGKILL of rank 0, the others continue in their processes; the job succeeds."""
    with running(FOLDER / "in_process.py", "train", tmp_path, {"faults": ["3 raise", "0 kill"]}) as run:
        ended = run.end()
    assert run.left_over() == []
    assert ended.status == 0, ended.stderr
    assert ended.verdict is None
    assert ended.result["outputs"]["o0"] == "rank 0 of 3, began as 1, iteration 2"
    reader = MultiErrorFileOutputReader(str(ended.prefix))
    assert not reader.is_error()
    first, second = reader.restarts()
    assert (first.kind, first.number, first.rank) == (RestartKind.IN_PROCESS, 0, 3)
    assert first.headline == "rank 3: exception, ValueError: the fault of iteration 0"
    assert (first.world_size_before, first.world_size_after) == (4, 4)
    assert (second.number, second.rank, second.headline) == (1, 0, "rank 0: terminated, its process ended")
    assert (second.world_size_before, second.world_size_after) == (4, 3)
    assert 0 < (first.lost_seconds or 0) < 60


def test_a_policy_stops_retries_of_the_same_fault(waits: dict[str, Future[Ended]]) -> None:
    """A second, different fault is retried; when it comes again, the policy ends the retries. The page shows all."""
    ended = waits["test_a_policy_stops_retries_of_the_same_fault"].result()
    attempts = ended.result["attempts"]
    assert [attempt["decision"]["retry"] for attempt in attempts] == [True, True, False]
    assert [SAME_FAULT in attempt["decision"]["reason"] for attempt in attempts] == [False, False, True]
    assert [SAME_FAULT in attempt["engine"]["error_seen"]["message"] for attempt in attempts] == [False, False, True]
    assert [attempt["engine"]["error_seen"]["kind"] for attempt in attempts] == [
        "RECOVERABLE",
        "RECOVERABLE",
        "NON_RECOVERABLE",
    ]
    ended.flyte_saw_the_verdict()
    report = Path(ended.result["report"])
    assert report.parents[1].name == "store"
    assert ended.stderr.splitlines()[-1].startswith("report: ")
    page = report.read_text(encoding="utf-8")
    assert all(f"attempt {number}" in page for number in range(3))
