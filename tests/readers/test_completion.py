"""What proves that a job had finished before its failures, and what doesn't."""

from typing import Any

import pytest

from firstfault import model
from firstfault.conclude import conclude
from firstfault.evidence.completion import prove_completion
from firstfault.testing import make_job, make_presence
from tests.readers.scenes import agent_failure, died, own_fault, stopped

EXIT = model.ExceptionInfo("SystemExit", "its program reached its end")


def _aborted(rank: int = 3, **more: Any) -> model.WorkerError:
    return died(rank, "SIGABRT", -6, world_size=4, **more)


def _node(number: int, phase: model.Phase, *finished: int) -> model.NodePresence:
    ranks = (2 * number, 2 * number + 1)
    place = {"node": f"worker-{number}", "group_rank": number, "nodes": 2}
    return make_presence(phase, ranks=ranks, finished_ranks=finished, **place)


SUCCEEDED = _node(0, model.Phase.SUCCEEDED)
FINISHED = _node(1, model.Phase.FAILED, 2, 3)
ENDED = died(2, "", None, world_size=4, exception=EXIT, category="exit")
"""A rank whose program had ended before its agent stopped it: its document is about that end."""


@pytest.mark.parametrize(
    ("failures", "roster", "is_proven"),
    [
        ((_aborted(),), (SUCCEEDED, FINISHED), True),
        ((_aborted(), stopped(0), ENDED), (_node(0, model.Phase.FAILED, 0, 1), FINISHED), True),
        ((_aborted(),), (SUCCEEDED, _node(1, model.Phase.FAILED, 3)), False),
        ((_aborted(),), (_node(0, model.Phase.JOINED), FINISHED), False),
        ((_aborted(),), (FINISHED,), False),
        (
            (_aborted(), own_fault(0, world_size=4)),
            (_node(0, model.Phase.FAILED, 0, 1), FINISHED),
            False,
        ),
        ((_aborted(), agent_failure(0, "preemption")), (SUCCEEDED, FINISHED), False),
    ],
    ids=[
        "all ranks of all nodes",
        "stopped siblings",
        "a rank had not returned",
        "a node without a report",
        "an unknown node",
        "an exception",
        "a terminated node",
    ],
)
def test_a_job_had_finished_if_all_ranks_returned(
    failures: tuple[model.WorkerError, ...], roster: tuple[model.NodePresence, ...], is_proven: bool
) -> None:
    """All ranks of all nodes had returned and only their teardown failed;
    else the failure is an ordinary one.
    """
    job = make_job(*failures, roster=roster)
    assert bool(prove_completion(job)) is is_proven
    conclusion = conclude(job)
    assert conclusion is not None
    assert (conclusion.verdict.category == "teardown") is is_proven
    if is_proven:
        assert conclusion.verdict.headline == "finished, then SIGABRT in the teardown of rank 3"
        assert conclusion.verdict.why[0] == "all 4 ranks had returned before it"
        reason = "the job had finished, so its results are there"
        assert (conclusion.decision.action, conclusion.decision.reason) == (
            model.Action.STOP,
            reason,
        )


def test_ranks_that_ended_alike_are_named_together() -> None:
    """Ranks that ended alike are named together, in their order."""
    roster = (_node(0, model.Phase.FAILED, 0, 1), FINISHED)
    conclusion = conclude(make_job(_aborted(3, at_ms=9), _aborted(0, at_ms=5), roster=roster))
    assert conclusion is not None
    assert conclusion.verdict.headline == "finished, then SIGABRT in the teardown of ranks 0, 3"


def test_a_sentence_of_a_log_proves_a_success_whatever_follows() -> None:
    """The sentence from a log is the proof, whatever failed after it."""
    conclusion = conclude(
        make_job(_aborted(), completion="line 12: the last of 3 epochs had ended")
    )
    assert conclusion is not None
    assert conclusion.verdict.headline == "finished, then SIGABRT in the teardown of rank 3"
    assert conclusion.verdict.why[0] == "line 12: the last of 3 epochs had ended"


def test_an_impossible_job_size_is_ignored() -> None:
    """A size that no job has is compared with the known ranks, and nothing is made of it."""
    aborted = died(3, "SIGABRT", -6, world_size=2**32 - 1)
    assert prove_completion(make_job(aborted, roster=(SUCCEEDED, FINISHED))) == ""
