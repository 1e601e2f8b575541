"""The verdict that an attempt passes to the next one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.conclude import Conclusion
from firstfault.evidence.diagnosis import diagnose
from firstfault.model import Kind, Origin
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job
from firstfault_torch.verdict.seal import VERDICT, leave_verdict, previous_attempt, retries_left
from tests.recordings import concluded, recording_at
from tests.recordings import sealed as sealed_of

if TYPE_CHECKING:
    from pathlib import Path

    from firstfault_torch.context import Recording
    from tests.s3_server import S3

AGAIN = "the previous attempt failed with the same fault"


def _sealed(recording: Recording, message: str) -> tuple[Conclusion, bytes]:
    job = make_job(make_error(3, message=message))
    verdict = run_strategy(get_strategy("earliest"), job)
    conclusion = Conclusion(job, verdict, decide(verdict), diagnose(job))
    return conclusion, sealed_of(conclusion, recording).document


@pytest.mark.parametrize("place", ["folder", pytest.param("s3", marks=pytest.mark.s3)])
def test_a_verdict_is_found_by_the_next_attempt(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """An attempt reads the verdict that the one before wrote below its raw output prefix."""
    server: S3 | None = request.getfixturevalue("s3_environ") if place == "s3" else None
    raw = str(tmp_path) if server is None else server.uri("raw")
    first = recording_at(f"{raw}/out/0", handover_uri=f"{raw}/0")
    second = recording_at(f"{raw}/out/1", handover_uri=f"{raw}/1", previous_handover_uri=f"{raw}/0")

    conclusion, document = _sealed(first, "the batch has no labels")
    assert previous_attempt(second) is None
    leave_verdict(first, document)

    found = previous_attempt(second)
    assert found is not None
    assert found.verdict.fingerprint == conclusion.verdict.fingerprint
    assert found.verdict.headline == conclusion.verdict.headline


@pytest.mark.parametrize("content", [b"", b"\xff\xff not a message", None], ids=["empty", "rubbish", "a folder"])
def test_a_verdict_that_cannot_be_read(content: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An unreadable verdict is ignored with one log line, and this attempt's verdict does not change."""
    path = tmp_path / "0" / VERDICT
    if content is None:
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    recording = recording_at(str(tmp_path / "out"), previous_handover_uri=str(tmp_path / "0"), attempt=1)

    with caplog.at_level(logging.WARNING):
        conclusion = concluded(recording, [make_error(3)])

    assert conclusion.verdict.ranks == (3,)
    assert AGAIN not in conclusion.decision.reason
    assert "reading the verdict on the attempt before" in caplog.text


def test_settling_compares(tmp_path: Path) -> None:
    """The decision says that this attempt failed in the same way as the one before."""
    first = recording_at(str(tmp_path / "out"), handover_uri=str(tmp_path / "0"))
    second = recording_at(
        str(tmp_path / "out"), handover_uri=str(tmp_path / "1"), previous_handover_uri=str(tmp_path / "0"), attempt=1
    )
    leave_verdict(first, _sealed(first, "the batch has no labels")[1])

    same = concluded(second, [make_error(3, message="the batch has no labels")])
    other = concluded(second, [make_error(3, message="no space left")])

    assert same.decision.reason.endswith(AGAIN)
    assert AGAIN not in other.decision.reason


@pytest.mark.parametrize(
    ("attempt", "retries", "before", "left"),
    [
        (0, 3, None, 3),
        (0, 0, None, 0),
        (4, 0, None, 0),
        (1, 3, {"origin": Origin.USER, "retries_left": 3}, 2),
        (1, 3, {"origin": Origin.SYSTEM, "retries_left": 3}, 3),
        (2, 1, {"origin": Origin.USER, "retries_left": 0}, 0),
        (1, 3, {"origin": Origin.USER, "retries_left": None}, None),
        (1, 3, {"origin": Origin.USER, "retries_left": 3, "enforced": False}, None),
        (1, 3, None, None),
        (1, None, None, None),
    ],
)
def test_how_many_retries_are_left(
    attempt: int, retries: int | None, before: dict[str, Any] | None, left: int | None
) -> None:
    """Each attempt counts its retries from the one before; without a verdict from that they are unknown."""
    previous = None
    if before is not None:
        verdict = run_strategy(get_strategy("earliest"), make_job(make_error(3)))
        previous = replace(decide(verdict), retry=True, **before)
    assert retries_left(attempt, retries, previous) == left


def test_the_last_attempt_knows_that_it_is(tmp_path: Path) -> None:
    """Through the storage: attempt 1 of a task with one retry has none left."""
    first = recording_at(str(tmp_path / "out"), handover_uri=str(tmp_path / "0"))
    second = recording_at(
        str(tmp_path / "out"), handover_uri=str(tmp_path / "1"), previous_handover_uri=str(tmp_path / "0"), attempt=1
    )
    error = make_error(3, kind=Kind.RECOVERABLE)
    one = concluded(first, [error], retries=1)
    leave_verdict(first, sealed_of(one, first).document)
    other = concluded(second, [error], retries=1)
    assert (one.decision.is_spent, other.decision.is_spent) == (False, True)
