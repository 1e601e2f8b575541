"""The base class of an integration, with the smallest launcher: it spawns a process for each rank,
and repeats a failed training.
"""

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from firstfault.attempt import read
from firstfault.conclude import find_judgment
from firstfault.layout import VERDICT_JSON
from firstfault.model import Action
from firstfault_torch.engine import RecoverableError
from firstfault_torch.torchrun.integration import Integration
from tests.prefix import Prefix
from tests.torchrun.test_rank import await_last_roster_entries

pytestmark = pytest.mark.slow

RANKS = 2
ERRORS = {
    "bug": TypeError("learning_rate is None"),
    "recoverable": RecoverableError("the queue is full"),
}


class _SpawningLauncher(Integration):
    launcher = "the test"


def _run_rank(training: _SpawningLauncher, rank: int, fault: str) -> None:
    """Run the training's function, which fails on the last rank."""
    training.begin(rank, rank, RANKS)
    try:
        _train(rank, fault)
    except Exception as error:
        training.record_exception(error)
        raise
    training.record_exit()


def _train(rank: int, fault: str) -> None:
    if rank == RANKS - 1:
        raise ERRORS[fault]


def _run_attempt(training: _SpawningLauncher, fault: str) -> Prefix:
    """Run the ranks of the next attempt to their end; return where they recorded."""
    training.begin_attempt(RANKS)
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_run_rank, args=(training, rank, fault)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 1]
    prefix = Prefix(Path(training.run, str(training._attempt)))
    await_last_roster_entries(prefix, RANKS)
    return prefix


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """The folder of a training that failed twice with a fault that may go away;
    and what was judged.
    """
    training = _SpawningLauncher()
    training.begin_run(str(tmp_path_factory.mktemp("storage")), "training-1")
    reports = []
    for _ in range(2):
        _run_attempt(training, "recoverable")
        reports.append(training.judge())
    return training.run, reports


def _begin_first_attempt(run: str | Path) -> _SpawningLauncher:
    training = _SpawningLauncher()
    training.run = str(run)
    training.begin_attempt(RANKS)
    return training


@pytest.fixture
def unjudged(repeated: tuple[str, list[str]], tmp_path: Path) -> Path:
    """Return a copy of the two attempts without what was judged."""
    run = shutil.copytree(repeated[0], tmp_path / "run")
    for number in range(2):
        (run / str(number) / VERDICT_JSON).unlink()
    return run


def test_a_bug_ends_the_retries_at_once(tmp_path: Path) -> None:
    """The report names the rank that failed, is returned once, and readers find the decision."""
    training = _SpawningLauncher()
    training.begin_run(str(tmp_path), "training-1")
    prefix = _run_attempt(training, "bug")
    assert training.judge().startswith("TypeError rank 1 ")
    assert training.judge() == "", "Ray asks again until all ranks have ended"
    assert prefix.uri == f"{tmp_path}/firstfault-runs/training-1/0"
    conclusion = read(prefix.uri).conclusion
    assert conclusion is not None
    assert find_judgment(conclusion).decision.action is Action.STOP
    assert conclusion.verdict.coverage.reported == RANKS, "the other rank recorded its end"


def test_a_repeated_fault_ends_the_retries(repeated: tuple[str, list[str]]) -> None:
    """The first failure is left to the launcher; the same one again isn't."""
    first, second = repeated[1]
    assert first == ""
    assert "the previous attempt failed with the same fault" in second


def test_a_failure_with_a_budget_of_its_own_is_not_judged(unjudged: Path) -> None:
    """After a preemption the next attempt is judged as if none was before it."""
    training = _begin_first_attempt(unjudged)
    assert training.judge(lambda: False) == ""
    assert training.judge() == "", "it was this failure's turn"
    training.begin_attempt(RANKS)
    assert training.judge() == ""


def test_a_launcher_that_cannot_be_asked_is_asked_once(unjudged: Path) -> None:
    """An attempt whose kind of failure is unknown isn't judged later, either."""
    training = _begin_first_attempt(unjudged)
    with pytest.raises(AttributeError):
        training.judge(lambda: Integration().has_preempted_worker())  # type: ignore[attr-defined]
    assert training.judge() == ""


def test_observe_only_logs(
    unjudged: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the mode "observe" the launcher decides, and the log has what would have happened."""
    monkeypatch.setenv("FIRSTFAULT_DECISIONS", "observe")
    training = _begin_first_attempt(unjudged)
    assert training.judge() == ""
    assert "would have stopped" not in caplog.text
    training.begin_attempt(RANKS)
    assert training.judge() == ""
    assert "observed: would have stopped after attempt 1: " in caplog.text


def test_without_documents_the_launcher_decides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of a worker that didn't start."""
    monkeypatch.setattr("firstfault_torch.torchrun.integration.CONTROLLER_SETTLE_SECONDS", 0.0)
    training = _begin_first_attempt(tmp_path)
    assert training.judge() == ""
    assert f"left no document in {tmp_path}/0; the test decides on a retry" in caplog.text


def test_switched_off_nothing_is_recorded_or_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FIRSTFAULT=0 nothing is recorded or judged, and the process stays as it is."""
    monkeypatch.setenv("FIRSTFAULT", "0")
    training = _SpawningLauncher()
    training.begin_run(str(tmp_path), "training-1")
    training.begin_attempt(RANKS)
    before = dict(os.environ)
    training.begin(0, 0, RANKS)
    assert training.judge() == ""
    assert os.environ == before
    assert list(tmp_path.iterdir()) == []
