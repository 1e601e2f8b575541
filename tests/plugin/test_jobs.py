"""Jobs on real pods: a killed worker and its deck; a fault that comes again."""

import html
import re
from pathlib import Path

import pytest

from firstfault.model import Writer
from tests.plugin.running import running

pytestmark = pytest.mark.jobs

FOLDER = Path(__file__).parent / "jobs"


def test_a_worker_is_killed(tmp_path: Path) -> None:
    """The agent reports rank, node, signal and exit code; the deck has the report,
    then the killed rank 0's deck.
    """
    options = ("--env", "FLYTE_SDK_LOGGING_LEVEL=20", "--env", "FIRSTFAULT=1")
    with running(FOLDER / "decks.py", "train", tmp_path, {}, *options) as run:
        killed = run.end()
    assert run.find_leftovers() == []
    verdict = killed.verdict
    root = killed.find_failure(0)
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
    assert (
        "Signal: SIGKILL: killed, sender unknown, "
        in killed.attempt["engine"]["error_seen"]["message"]
    )
    assert killed.attempt["seconds"]["fault_to_durable"] > 0
    killed.flyte_saw_the_verdict()
    page = (killed.prefix / "deck.html").read_text()
    tabs = [
        html.unescape(name)
        for name in re.findall(r'<li onclick="handleLinkClick\(this\)">(.*?)</li>', page)
    ]
    assert tabs == ["firstfault", "progress of rank 0", "Timeline"]
    assert page.count("<p>loss 0.25 at step 7</p>") == 1
    assert "SIGKILL" in page
    assert html.escape(verdict["node"]) in page
    assert "firstfault: failed while" not in killed.logs
    assert "more: firstfault show" not in killed.logs
    decks = find_log_times(killed.logs, "Upload data to .*/deck.html")
    ends = find_log_times(killed.logs, "User-scoped IgnoreOutputs")
    assert len(ends) == 2, "the verdict is in the storage: flytekit uploads nothing"
    assert len(decks) == 1
    assert min(decks) <= min(ends), "a pod that has its verdict may be the first to exit"


def test_the_same_fault_twice_ends_the_task_despite_flytes_retries(tmp_path: Path) -> None:
    """Flyte would retry three times; the second attempt only repeats the first one,
    which ends the task.
    """
    with running(FOLDER / "raises.py", "repeated", tmp_path, {}, "--retries=3") as run:
        attempts = run.end().result["attempts"]
    assert [attempt["decision"]["action"] for attempt in attempts] == ["retry", "stop"]


def find_log_times(logs: str, message: str) -> list[str]:
    """Return when flytekit logged a message, as text that sorts by time."""
    return re.findall(rf'"asctime": "([^"]+)".*"message": "{message}', logs)


def test_reports_count_the_retries_of_firstfault_run(tmp_path: Path) -> None:
    """The pods know that `firstfault run --retries 0` allows no retry, and their reports say so."""
    with running(FOLDER / "raises.py", "retried", tmp_path, {}) as run:
        ended = run.end()
    assert ended.status == 11
    assert "no retries left" in ended.logs
