"""How an attempt ended: every command and every reader gives the same answer."""

import json
from collections.abc import Callable

import pytest

from firstfault import model
from firstfault.attempt import sibling_attempts
from firstfault.cli import EXIT
from firstfault.conclude import conclude
from firstfault.evidence.completion import classify_outcome
from firstfault.model import Outcome, Phase
from firstfault.testing import make_job, make_presence
from tests.readers.commands import Ran
from tests.readers.conftest import Attempt
from tests.readers.scenes import died, own_fault, stopped
from tests.seals import encode_sealed_verdict

Run = Callable[..., Ran]

FINISHED = make_presence(Phase.FAILED, ranks=(0, 1), finished_ranks=(0, 1))
ABORTED = died(1, "SIGABRT", -6, world_size=2)
INTERRUPTED = own_fault(0, exception="KeyboardInterrupt", message="", category="interrupted")


@pytest.mark.parametrize(
    ("failures", "roster", "outcome", "code", "title"),
    [
        ((own_fault(0),), (), Outcome.FAILED, EXIT.ROOT_CAUSE, "# Failed: "),
        ((INTERRUPTED,), (), Outcome.INTERRUPTED, EXIT.ROOT_CAUSE, "# Interrupted: "),
        (
            (ABORTED,),
            (FINISHED,),
            Outcome.TEARDOWN_FAILED,
            EXIT.OK,
            "# Finished, teardown failed: ",
        ),
    ],
)
def test_all_commands_agree_on_how_an_attempt_ended(  # noqa: PLR0917 - parameters
    attempt: Attempt,
    run: Run,
    failures: tuple[model.WorkerError, ...],
    roster: tuple[model.NodePresence, ...],
    outcome: Outcome,
    code: int,
    title: str,
) -> None:
    """The exit code, the JSON, the brief, the list and the comparison of attempts agree."""
    first, second = attempt.at(0), attempt.at(1)
    for one in (first, second):
        one.write(*failures)
        one.join(*roster)
    shown = run("show", first.uri, "--json")
    assert (shown.code, json.loads(shown.out)["outcome"]) == (code, outcome.value)
    brief = run("show", first.uri, "--brief")
    assert (brief.code, brief.out[: len(title)]) == (code, title)
    listed = [json.loads(line) for line in run("ls", attempt.uri, "--json").out.splitlines()]
    assert [one["outcome"] for one in listed] == [outcome.value] * 2
    conclusion = first.reader().conclude()
    assert conclusion is not None
    others = sibling_attempts(first.uri, conclusion)
    assert [one.outcome for one in others] == [outcome] * 2
    report = first.reader().report(conclusion, attempts=others)
    ended = "failed too" if outcome.has_failed else outcome.value
    assert report.answers.retry == f"retried, attempt 1 {ended}"
    first.put("outputs.pb", b"")
    assert first.reader().is_error() is outcome.has_failed


def test_a_proven_end_counts_for_every_strategy() -> None:
    """All ranks had returned: that is so, whichever rank a strategy blames."""
    job = make_job(ABORTED, stopped(0, world_size=2), roster=(FINISHED,))
    conclusion = conclude(job, strategy="earliest")
    assert conclusion is not None
    assert conclusion.verdict.category != "teardown"
    assert classify_outcome(conclusion.verdict, job) is Outcome.TEARDOWN_FAILED


def test_a_published_error_means_the_attempt_failed(attempt: Attempt) -> None:
    """Nodes that published an error told Flyte that the attempt failed, finished or not."""
    attempt.write(ABORTED)
    attempt.join(FINISHED)
    attempt.put("outputs.pb", b"")
    assert not attempt.reader().is_error()
    assert not attempt.reader(strategy="earliest").is_error()
    conclusion = attempt.reader(strategy="earliest").conclude()
    assert conclusion is not None
    assert classify_outcome(conclusion.verdict, conclusion.job) is Outcome.TEARDOWN_FAILED
    attempt.put("error.pb", encode_sealed_verdict(conclusion.verdict, conclusion.decision))
    assert attempt.reader().is_error()
    assert classify_outcome(conclusion.verdict, attempt.reader().job()) is Outcome.FAILED
