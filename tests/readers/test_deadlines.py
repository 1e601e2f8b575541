"""A worker that its agent killed for a deadline: a hang of its own, unless it waited in a collective for another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.model import (
    CollectiveProgress,
    DocumentRef,
    ExpiredDeadline,
    Place,
    SentSignal,
    StackDump,
    WorkerError,
    Writer,
)
from firstfault.reading.assemble import Snapshot, assemble
from firstfault.render.json_report import json_report
from firstfault.render.plain import terminal_text
from firstfault.report import report_of
from firstfault.report.headline import first_line
from firstfault.retry import decide
from firstfault.strategies import get_strategy
from firstfault.testing import make_error
from firstfault.wire.documents import decode, encode

if TYPE_CHECKING:
    from firstfault.model import Verdict

_STEP = 'Thread 0x00007f (most recent call first):\n  File "/app/train.py", line 53 in step\n'
_COLLECTIVE = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py", line 2800 in all_reduce
  File "/app/train.py", line 50 in step
"""
_GPU = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3/site-packages/torch/cuda/streams.py", line 227 in synchronize
  File "/app/train.py", line 51 in step
"""
_WAITS = (CollectiveProgress("default_pg", "all_reduce", 8, 7),)
_KEPT_UP = (CollectiveProgress("default_pg", "all_reduce", 7, 7),)


def _rank(rank: int, stack: str, **fields: Any) -> WorkerError:
    place = Place(node=f"worker-{rank}", rank=rank, local_rank=0, group_rank=rank, world_size=2)
    error = make_error(
        code="USER:Hang",
        message="it hung",
        exception=None,
        writer=Writer.AGENT,
        place=place,
        stack_dumps=(StackDump(7, rank, stack),) if stack else (),
        **fields,
    )
    return decode(encode(error), DocumentRef(f"e{rank}.pb"))  # type: ignore[return-value]


def _killed(rank: int, stack: str, at: int = 10, heartbeat: bool = False, **fields: Any) -> WorkerError:
    expired = ExpiredDeadline("" if heartbeat else "train step", 30.0, heartbeat, "train.py:50")
    ended = {"exit_code": -9, "signal": "SIGKILL", "category": "hang", "expired": expired}
    return _rank(rank, stack, timestamp_ns=at, **{**ended, **fields})


def _stopped(rank: int, stack: str, **fields: Any) -> WorkerError:
    sent = (SentSignal("SIGTERM", "rank 1 on worker-1 failed"),)
    return _rank(rank, stack, timestamp_ns=20, exit_code=-15, signal="SIGTERM", sent_signals=sent, **fields)


def _verdict(*failures: WorkerError, strategy: str = "evidence") -> Verdict:
    return get_strategy(strategy)(assemble(Snapshot(documents=failures)))


@pytest.mark.parametrize("strategy", ["evidence", "earliest"])
@pytest.mark.parametrize(
    ("stack", "heartbeat", "told"),
    [
        (_STEP, False, '"train step" exceeded 30 s at train.py:53'),
        (_STEP, True, "no ping for 30 s at train.py:53"),
        ("", False, '"train step" exceeded 30 s'),
    ],
    ids=["a block", "a loop", "a frozen process gives no stack"],
)
def test_a_rank_that_hung_outside_of_a_collective(strategy: str, stack: str, heartbeat: bool, told: str) -> None:
    """It is the root cause, a hang without a retry, and the first line names the deadline and its line."""
    verdict = _verdict(_killed(1, stack, heartbeat=heartbeat), _stopped(0, _COLLECTIVE), strategy=strategy)
    assert (verdict.ranks, verdict.category, verdict.code) == ((1,), "hang", "USER:Hang")
    decision = decide(verdict)
    assert not decision.retry
    assert first_line(verdict, decision) == f"hang rank 1 worker-1 no retry: {told}"
    assert verdict.victims.count == 1


@pytest.mark.parametrize(("stack", "waits"), [(_COLLECTIVE, ()), (_GPU, _WAITS)])
def test_a_rank_that_waited_for_another(stack: str, waits: tuple[CollectiveProgress, ...]) -> None:
    """A deadline that ends a wait in a collective accuses the rank that was elsewhere, not the one that waited."""
    waited = _killed(0, stack, collectives=waits)
    verdict = _verdict(waited, _stopped(1, _STEP, collectives=_KEPT_UP if waits else ()))
    assert (verdict.ranks, verdict.category) == ((1,), "hang")
    both = _verdict(waited, _killed(1, _STEP, at=20))
    assert (both.ranks, both.category) == ((1,), "hang"), "it expired later"


def test_all_ranks_waited_in_one_collective() -> None:
    """Then no rank stands out, and the headline says whose deadline ended the wait."""
    verdict = _verdict(_killed(0, _COLLECTIVE), _stopped(1, _COLLECTIVE))
    assert (verdict.ranks, verdict.category) == ((), "hang")
    text = 'undetermined: "train step" exceeded 30 s on rank 0, in a collective; no rank stands out'
    assert verdict.headline == text


def test_the_fingerprint_has_the_deadline() -> None:
    """Two ranks that did not keep the same deadline at the same line have the same fault; another deadline differs."""
    assert fingerprint_of(_killed(0, _STEP)) == fingerprint_of(_killed(1, _STEP, at=20))
    others = [_killed(0, _COLLECTIVE), _killed(0, _STEP, heartbeat=True), _killed(0, _STEP, expired=None)]
    assert fingerprint_of(_killed(0, _STEP)) not in {fingerprint_of(other) for other in others}


def test_a_report_has_the_deadline() -> None:
    """The report's facts and its JSON name scope, seconds and where the block began; the signal is the agent's."""
    job = assemble(Snapshot(documents=(_killed(1, _STEP), _stopped(0, _COLLECTIVE))))
    verdict = get_strategy("evidence")(job)
    report = report_of(job, verdict, decide(verdict))
    root = json.loads(json_report(report))["root"]
    assert root["deadline"] == {"scope": "train step", "seconds": 30.0, "heartbeat": False, "since": "train.py:50"}
    text = terminal_text(report, verbose=True)
    assert "begun at train.py:50" in text
    assert "which process sent SIGKILL" not in text
