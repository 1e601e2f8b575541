"""Summaries of the other attempts of a task."""

import asyncio
import time
from pathlib import Path

import pytest

from firstfault.attempt import find_run_logs, sibling_attempts
from firstfault.attempt_reader import AttemptReader
from firstfault.errors import AccessDeniedError
from firstfault.layout import parse_attempt_number
from firstfault.model import JobErrors, Kind, Phase
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.report.data import AttemptSummary, changes_between
from firstfault.testing import make_error, make_presence
from tests.readers.conftest import Attempt


def _fails(attempt: Attempt, number: int, rank: int = 3) -> None:
    attempt.at(number).write(
        make_error(rank, node=f"w-{rank}", attempt=number, kind=Kind.RECOVERABLE)
    )


def _siblings(
    attempt: Attempt,
    number: int,
    below: str = "",
    **options: float,
) -> tuple[AttemptSummary, ...]:
    uri = f"{attempt.uri}/{number}{below}"
    conclusion = MultiErrorFileOutputReader(uri).conclude()
    assert conclusion is not None
    return sibling_attempts(uri, conclusion, **options)


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("s3://bucket/f00/n0/data/2", ("s3://bucket/f00/n0/data", 2)),
        ("s3://bucket/f00/n0/data/2/", ("s3://bucket/f00/n0/data", 2)),
        ("s3://bucket/f00/n0/data/12/firstfault/errors", ("s3://bucket/f00/n0/data", 12)),
        ("s3://bucket/f00/n0/data/12/error.pb", ("s3://bucket/f00/n0/data", 12)),
        ("runs/0", ("runs", 0)),
        ("0", (".", 0)),
        ("runs/00", None),
        ("runs/a2", None),
        ("runs/-1", None),
        ("runs/\u0663", None),
        ("runs", None),
        ("s3://bucket", None),
    ],
)
def test_the_last_part_of_a_prefix_is_the_attempts_number(
    uri: str, found: tuple[str, int] | None
) -> None:
    """The last part of an output prefix is the attempt's number, if it is one."""
    assert parse_attempt_number(uri) == found


def test_an_unreadable_attempt_has_a_note_and_spares_the_others(attempt: Attempt) -> None:
    """An unreadable attempt has a note with the reason; the others are not affected."""
    _fails(attempt, 0, rank=3)
    attempt.at(1).folder.symlink_to(attempt.at(1).folder)
    _fails(attempt, 2, rank=1)
    for number in (0, 2):
        first, second, third = _siblings(attempt, number)
        assert [item.number for item in (first, second, third)] == [0, 1, 2]
        assert first.summary == "ValueError, rank 3 on w-3: boom"
        assert first.decision.retry
        assert first.nodes == ("w-3",)
        assert second.verdict is None
        assert second.note.startswith("could not be read: cannot list ")
        assert third.summary == "ValueError, rank 1 on w-1: boom"


@pytest.mark.parametrize("number", [0, 1])
def test_an_undecodable_attempt_is_not_compared(attempt: Attempt, number: int) -> None:
    """An attempt with an undecodable document is not compared with the others."""
    _fails(attempt, 0)
    attempt.at(1).put("error.pb", b"\xff\xff")
    _fails(attempt, 2)
    found = _siblings(attempt, number)
    assert [item.verdict is None for item in found] == [False, True, False]
    assert found[1].note.startswith("could not be read: error.pb is not an error document: ")
    changes = changes_between(found)
    assert not any("unknown" in change for change in changes)
    assert changes[1] == "attempt 0 to 2: the same fault again, on the same rank"


def test_other_attempts_succeeded_run_or_are_missing(attempt: Attempt) -> None:
    """An attempt with outputs succeeded; one with a roster alone may still run;
    behind a missing one none is read.
    """
    _fails(attempt, 0)
    attempt.at(1).put("outputs.pb")
    for number, phase in ((2, Phase.JOINED), (3, Phase.FAILED)):
        attempt.at(number).join(make_presence(phase, node="w-1"))
    for number in range(3):
        attempt.at(4).put(f"firstfault/errors/e1-damaged-{number}.pb", b"\xff\xff")
    _fails(attempt, 6)
    found = _siblings(attempt, 0, below="/firstfault/errors")
    assert [item.outcome.value for item in found] == [
        "failed",
        "succeeded",
        "unknown",
        "failed",
        "failed",
    ]
    notes = [item.note for item in found]
    assert notes[:3] == ["", "", "has neither an error nor outputs; it may still run"]
    assert (
        notes[3]
        == "could not be read: a node reported that it failed, but its error documents are not"
        " there"
    )
    assert notes[4].startswith("could not be read: e1-damaged-0.pb")
    assert notes[4].endswith(", and 2 more documents")
    assert len(notes) == 5


@pytest.mark.parametrize("below", ["0", "0/", "0/firstfault/errors", "here"])
def test_without_other_attempts_the_result_is_empty(attempt: Attempt, below: str) -> None:
    """Without other attempts, and for a prefix without an attempt's number, the result is empty."""
    name = below.partition("/")[0]
    attempt.at(name).write(make_error())
    if name == "here":
        _fails(attempt, 1)
    conclusion = attempt.at(name).reader().conclude()
    assert conclusion is not None
    assert sibling_attempts(f"{attempt.uri}/{below}", conclusion) == ()


def test_at_most_ten_other_attempts_are_read(attempt: Attempt) -> None:
    """At most ten other attempts are read: the nearest earlier ones, then later ones."""
    for number in range(20):
        _fails(attempt, number)
    assert [item.number for item in _siblings(attempt, 15)] == list(range(5, 16))
    assert [item.number for item in _siblings(attempt, 4)] == list(range(11))


def test_the_time_for_other_attempts_is_limited(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for other attempts is limited, for any number of them;
    a refusal is the attempt's note.
    """
    for number in range(5):
        _fails(attempt, number)
    answers = AttemptReader.job_async

    async def hang(self: AttemptReader) -> JobErrors:
        if self.errors_uri.startswith(f"{attempt.uri}/1/"):
            raise AccessDeniedError("cannot list it: refused")
        if not self.errors_uri.startswith(f"{attempt.uri}/2/"):
            await asyncio.sleep(60)
        return await answers(self)

    monkeypatch.setattr(AttemptReader, "job_async", hang)
    began = time.monotonic()
    found = _siblings(attempt, 2, seconds=0.2)
    assert time.monotonic() - began < 30
    assert [item.number for item in found] == [0, 1, 2, 3]
    assert [item.note for item in found[:2]] == [
        "could not be read: no answer within 0.2 s",
        "could not be read: cannot list it: refused",
    ]
    assert found[3].note.startswith("could not be read: no answer within ")


def test_only_a_local_runs_logs_are_found_by_pod(tmp_path: Path) -> None:
    """The logs of ``firstfault run`` are found by pod; any other attempt has none."""
    log = tmp_path / "logs" / "attempt-1" / "f00-n0-0-worker-1.log"
    log.parent.mkdir(parents=True)
    log.touch()
    assert find_run_logs(f"{tmp_path}/1") == {"f00-n0-0-worker-1": str(log)}
    assert find_run_logs(f"{tmp_path}/0") == {}
    assert find_run_logs(f"{tmp_path}/x") == {}
    assert find_run_logs("s3://bucket/data/1") == {}
