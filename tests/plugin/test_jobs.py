"""Jobs in which one of four workers is killed or raises, their decks, and a job with several attempts."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from firstfault.model import Writer
from tests.plugin.running import Ended, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.jobs

FOLDER = Path(__file__).parent / "jobs"
FILE, AGAIN = FOLDER / "decks.py", FOLDER / "again.py"
SAME_FAULT = "the previous attempt failed with the same fault"


def _ended(folder: Path, task: str, kind: str) -> Iterator[Ended]:
    with running(FILE, task, folder, {"kind": kind}, "--env", "FLYTE_SDK_LOGGING_LEVEL=20") as run:
        yield run.end()
    assert run.left_over() == []


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """Run spawned workers; rank 0 makes a deck and is killed."""
    yield from _ended(tmp_path_factory.mktemp("killed"), "spawned", "SIGKILL")


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """Run forked workers; rank 0 makes a deck and rank 3 raises."""
    yield from _ended(tmp_path_factory.mktemp("raised"), "forked", "raise")


def test_a_worker_is_killed(killed: Ended) -> None:
    """The agent reports a worker killed by SIGKILL with rank, node, signal and exit code; the others are victims."""
    verdict, root = killed.verdict, killed.of_rank(0)
    assert killed.status == 10
    assert (verdict["scope"], verdict["ranks"]) == ("rank", [0])
    assert (verdict["category"], verdict["code"]) == ("signal", "USER:SIGKILL")
    assert verdict["victims"]["count"] == 3, killed.job.failures
    assert verdict["coverage"]["complete"]
    assert root.writer is Writer.AGENT
    assert (root.signal, root.exit_code, root.exception) == ("SIGKILL", -9, None)
    # the rendezvous decides which pod is which node
    assert verdict["node"] == root.node == root.worker
    assert "-worker-" in root.node
    assert "signal: SIGKILL: killed, sender unknown, " in killed.attempt["engine"]["error_seen"]["message"]
    assert killed.attempt["seconds"]["fault_to_durable"] > 0
    killed.flyte_saw_the_verdict()


def test_a_worker_raises(raised: Ended) -> None:
    """The verdict names the worker that raised, and its exception; the others, in a collective, are victims."""
    verdict, root = raised.verdict, raised.of_rank(3)
    assert raised.status == 10
    assert verdict["ranks"] == [3]
    assert verdict["headline"].startswith("ValueError, rank 3 on ")
    assert verdict["victims"]["count"] == 3, raised.job.failures
    assert root.writer is Writer.WORKER
    raised.flyte_saw_the_verdict()


@pytest.mark.parametrize(
    ("fixture", "said"),
    [
        ("killed", "SIGKILL"),
        ("raised", "ValueError: bad batch 17 <script>"),
    ],
)
def test_the_deck_of_a_job(fixture: str, said: str, request: pytest.FixtureRequest) -> None:
    """When Flyte reads the deck, it has the report, then rank 0's deck, also if rank 0 was killed."""
    ended: Ended = request.getfixturevalue(fixture)
    page = (ended.prefix / "deck.html").read_text()
    tabs = [html.unescape(name) for name in re.findall(r'<li onclick="handleLinkClick\(this\)">(.*?)</li>', page)]
    assert tabs == ["firstfault", "progress of rank 0", "Timeline"]
    assert page.count("<p>loss 0.25 at step 7</p>") == 1
    assert html.escape(said) in page
    assert "bad batch 17 <script>" not in page
    assert html.escape(ended.verdict["node"]) in page
    assert "firstfault failed while" not in ended.logs
    decks, ends = _logged(ended.logs, "Upload data to .*/deck.html"), _logged(ended.logs, "User-scoped IgnoreOutputs")
    assert len(ends) == 2, "the verdict is in the storage: flytekit uploads nothing"
    assert len(decks) == 1
    assert min(decks) <= min(ends), "a pod that has its verdict may be the first to exit"


def _logged(logs: str, message: str) -> list[str]:
    """Return when flytekit logged a message, as text that sorts by time."""
    return re.findall(rf'"asctime": "([^"]+)".*"message": "{message}', logs)


# --- attempts -------------------------------------------------------------------------------------------------------


def test_a_policy_stops_retries_of_the_same_fault(tmp_path: Path) -> None:
    """A second, different fault is retried; when it comes again, the policy ends the retries."""
    with running(AGAIN, "impatient", tmp_path, {}, "--retries", "3") as run:
        ended = run.end()
    attempts = ended.result["attempts"]
    assert [attempt["decision"]["retry"] for attempt in attempts] == [True, True, False]
    assert [SAME_FAULT in attempt["decision"]["reason"] for attempt in attempts] == [False, False, True]
    assert [attempt["engine"]["error_seen"]["kind"] for attempt in attempts] == [
        "RECOVERABLE",
        "RECOVERABLE",
        "NON_RECOVERABLE",
    ]
    ended.flyte_saw_the_verdict()
