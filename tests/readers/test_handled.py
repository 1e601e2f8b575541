"""Exceptions that a program handled, after which its rank was out of step with its peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from firstfault import model
from firstfault.strategies.rules import evidence
from firstfault.wire.documents import decode, encode
from tests.readers.scenes import (
    IN_COLLECTIVE,
    IN_SLEEP,
    PEER_CLOSED,
    STACK,
    collectives_called,
    own_fault,
    reported_job,
    stopped,
    timed_out_in_collective,
    victim,
)

_IN_TRAIN = model.FrameInfo("/app/train.py", 40, "main")
_IN_STEP = model.FrameInfo("/app/train.py", 12, "step", 'raise ValueError("no labels")')
_ELSEWHERE = model.FrameInfo("/app/metrics.py", 7, "push")
TORCH_FRAME = model.FrameInfo(
    "/x/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce"
)
_HEADLINE = "ValueError, rank 3 on worker-1: no labels"


def _handled(
    *frames: model.FrameInfo,
    kind: str = "ValueError",
    message: str = "no labels",
    since: int | None = 1,
) -> model.HandledException:
    exception = model.ExceptionInfo(kind, message, ("Exception",), frames or (_IN_TRAIN, _IN_STEP))
    return model.HandledException(1_000_000_000, exception, 1, since)


def _calls(*operations: str) -> dict[str, Any]:
    """Return the collectives that a rank had called."""
    last = tuple(model.Collective(number, name) for number, name in enumerate(operations, 1))
    return {
        "collectives": (
            model.CollectiveProgress("default_pg", operations[-1], len(last), len(last) - 1, last),
        )
    }


def _behind(
    *handled: model.HandledException, stack: str = IN_COLLECTIVE, **more: Any
) -> model.JobErrors:
    """Ranks 0 to 2 timed out in a collective that rank 3 didn't call."""
    return reported_job(
        *timed_out_in_collective(0, 1, 2),
        stopped(3, stack, handled_exceptions=handled, **{**collectives_called(5), **more}),
    )


def test_a_handled_exception_of_a_rank_behind_is_the_root_cause() -> None:
    """The exception is the root cause, with less than high confidence,
    and the reasons say that it was handled.
    """
    verdict = evidence(_behind(_handled()))

    assert (verdict.rule, verdict.headline, verdict.ranks) == ("out-of-step", _HEADLINE, (3,))
    assert (verdict.confidence, verdict.category) == ("medium", "user_code")
    assert "which its program handled before it continued" in verdict.why[0]
    assert (
        verdict.why[1]
        == "it was out of step with its peers: it called 5 collectives of group default_pg, its"
        " peers 6"
    )


def test_a_rank_that_repeats_a_step_is_out_of_step() -> None:
    """A rank that repeats a step calls another collective than its peers,
    also if it then fails by itself.
    """
    peers = [
        own_fault(
            rank, 6000, "RuntimeError", PEER_CLOSED.format(3), **_calls("all_reduce", "barrier")
        )
        for rank in (0, 1, 2)
    ]
    repeated = victim(3, handled_exceptions=(_handled(),), **_calls("all_reduce", "all_reduce"))

    verdict = evidence(reported_job(*peers, repeated))

    assert (verdict.rule, verdict.headline) == ("out-of-step", _HEADLINE)


def test_without_a_majority_the_rank_that_handled_an_exception_is_blamed() -> None:
    """Where no majority shows who is out of step, the only rank with a handled exception is,
    with low confidence.
    """
    handled = {"handled_exceptions": (_handled(),)}
    one = _calls("all_reduce", "barrier")
    another = _calls("all_reduce", "all_reduce")

    verdict = evidence(
        reported_job(
            *timed_out_in_collective(0, **one),
            *timed_out_in_collective(1, **another, **handled),
            nodes=1,
        )
    )

    assert (verdict.rule, verdict.ranks, verdict.confidence) == ("out-of-step", (1,), "low")
    both = evidence(
        reported_job(
            *timed_out_in_collective(0, **one, **handled),
            *timed_out_in_collective(1, **another, **handled),
            nodes=1,
        )
    )
    assert both.rule != "out-of-step"


def test_the_first_handled_exception_of_a_retry_loop_counts() -> None:
    """Of several exceptions it is the first that a running function handled,
    not what was handled elsewhere before.
    """
    away = _handled(_ELSEWHERE, kind="ConnectionError", message="no metrics")
    later = _handled(kind="KeyError", message="step")

    assert evidence(_behind(away, _handled(), later)).headline == _HEADLINE


@pytest.mark.parametrize(
    "job",
    [
        # its peers had it, too
        reported_job(
            *timed_out_in_collective(0, 1, handled_exceptions=(_handled(),)),
            *timed_out_in_collective(2),
            stopped(3, IN_SLEEP, handled_exceptions=(_handled(),), **collectives_called(5)),
        ),
        # rank 2 is in step
        reported_job(
            *timed_out_in_collective(0, 1),
            *timed_out_in_collective(2, handled_exceptions=(_handled(),)),
            stopped(3, IN_SLEEP, **collectives_called(5)),
        ),
        # long ago
        _behind(_handled(since=400), stack=IN_SLEEP),
        # about a peer
        _behind(
            _handled(_IN_TRAIN, TORCH_FRAME, kind="RuntimeError", message=PEER_CLOSED.format(1)),
            stack=IN_SLEEP,
        ),
    ],
    ids=["of all ranks", "of a rank in step", "long ago", "about a peer"],
)
def test_a_hang_keeps_its_verdict_beside_a_handled_exception(job: model.JobErrors) -> None:
    """A hang keeps its verdict, whatever else was handled."""
    verdict = evidence(job)
    none = evidence(
        replace(job, failures=tuple(replace(item, handled_exceptions=()) for item in job.failures))
    )

    assert verdict.rule == "hang"
    assert replace(verdict, root=None) == replace(none, root=None)


def test_an_exception_handled_where_raised_leaves_no_step_undone() -> None:
    """An exception that didn't leave the function that raised it, and which has returned,
    leaves no step undone.
    """
    cache = _handled(_ELSEWHERE, kind="FileNotFoundError", message="no cache")

    assert evidence(_behind(cache, stack=IN_SLEEP)).rule == "hang"


def test_an_exception_that_left_its_program_outweighs_handled_ones() -> None:
    """An exception that left its program is the root cause,
    although another rank is behind and handled one.
    """
    hung = stopped(3, IN_SLEEP, handled_exceptions=(_handled(),), **collectives_called(5))

    verdict = evidence(
        reported_job(
            own_fault(1, 0, "KeyError", "step", **collectives_called(6)),
            *timed_out_in_collective(0, 2),
            hung,
        )
    )

    assert (verdict.rule, verdict.ranks) == ("own-fault", (1,))


def test_a_traceback_of_a_running_function_counts_as_handled() -> None:
    """Without a worker's answer, a traceback that a running function printed counts;
    one printed elsewhere doesn't.
    """
    text = (
        'Traceback (most recent call last):\n  File "{}", line 40, in {}\n    step()\nValueError:'
        " no labels\n"
    )
    printed = text.format("/app/train.py", "main") + "trying again\n" * 12

    assert evidence(_behind(log_tail=printed)).rule == "out-of-step"
    elsewhere = text.format("/app/metrics.py", "push") + "trying again\n" * 12
    assert evidence(_behind(log_tail=elsewhere)).rule == "hang"


def test_a_document_keeps_the_last_handled_exceptions() -> None:
    """A document keeps the last handled exceptions, each with its time,
    its number and the collectives since.
    """
    exceptions = tuple(
        _handled(message=f"batch {number}", since=number or None) for number in range(12)
    )
    failure = stopped(3, STACK.format("/app/train.py", "step"), handled_exceptions=exceptions)

    read = decode(encode(failure), model.DocumentRef("e.pb"))

    assert isinstance(read, model.WorkerError)
    assert read.handled_exceptions == exceptions[-8:]
