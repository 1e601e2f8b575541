"""What each built-in strategy picks, how sure it is, what its verdict says,
and what clocks can tell.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstfault import model
from firstfault.evidence.clocks import Clocks
from firstfault.layout import ErrorKey
from firstfault.strategies import (
    build_undetermined_verdict,
    build_verdict,
    get_strategy,
    run_strategy,
)
from firstfault.strategies.earliest import find_clock_warnings
from firstfault.strategies.rules import evidence
from firstfault.testing import START_NS, make_error, make_job, make_presence
from tests.readers.scenes import own_fault, reported_job, victim

_STOPPED = {
    "exception": None,
    "writer": model.Writer.AGENT,
    "sent_signals": (model.SentSignal("SIGTERM", "rank 3 failed"),),
}
_PEER = {"exception": "RuntimeError", "message": "Connection closed by peer"}


def _verdict(strategy: str, *failures: model.WorkerError, **snapshot: Any) -> model.Verdict:
    return run_strategy(get_strategy(strategy), make_job(*failures, **snapshot))


def _modified(error: model.WorkerError, ms: int) -> model.WorkerError:
    document = replace(error.documents[0], last_modified_ns=START_NS + ms * 1_000_000)
    return replace(error, documents=(document,))


# --- what they pick -------------------------------------------------------------------------------

_CASCADE = (
    _modified(make_error(3, node="w-1", at_ms=0, exception="KeyError", message="'label'"), 90),
    _modified(make_error(0, node="w-0", at_ms=31, kind=model.Kind.RECOVERABLE, **_PEER), 70),
    _modified(make_error(1, node="w-0", at_ms=32, kind=model.Kind.RECOVERABLE, **_PEER), 95),
    _modified(make_error(2, node="w-1", at_ms=-5, **_STOPPED), 99),
)


_CAUGHT = {
    **_PEER,
    "in_flight": True,
    "sent_signals": (model.SentSignal("SIGTERM", "rank 3 failed"),),
}


@pytest.mark.parametrize(
    ("others", "rank"),
    [
        ((make_error(3, at_ms=0),), 3),
        ((make_error(3, at_ms=5),), 3),
        ((make_error(3, at_ms=9),), 1),
        ((make_error(3, at_ms=9), make_error(4, at_ms=0)), 4),
        ((make_error(3, at_ms=None),), 3),
        ((make_error(3, at_ms=0, **_STOPPED),), 1),
        ((make_error(3, at_ms=9, **_CAUGHT),), 1),
        ((make_error(3, at_ms=None), make_error(1, at_ms=5, **{**_CAUGHT, "in_flight": False})), 1),
        ((), 1),
    ],
    ids=[
        "after",
        "at once",
        "before",
        "between",
        "no time",
        "a stopped one",
        "another one",
        "it had left",
        "alone",
    ],
)
def test_a_stopped_process_is_the_cause_only_if_it_raised_first(
    others: tuple[model.WorkerError, ...], rank: int
) -> None:
    """A process that was stopped with an exception in flight is the cause only if that
    was before all others.
    """
    assert _verdict("earliest", make_error(1, at_ms=5, **_CAUGHT), *others).root.rank == rank


# --- how sure earliest is -------------------------------------------------------------------------

_COMPLETE = (make_presence(nodes=1),)


@pytest.mark.parametrize(
    ("failures", "roster", "confidence"),
    [
        ([make_error(0)], _COMPLETE, "high"),
        ([make_error(0)], (), "medium"),
        ([make_error(0, boot_id="b"), make_error(1, at_ms=1, boot_id="b")], _COMPLETE, "high"),
        ([make_error(0, boot_id="b"), make_error(1, at_ms=1, boot_id="c")], _COMPLETE, "medium"),
        ([make_error(0), make_error(1, at_ms=1)], _COMPLETE, "medium"),
        ([make_error(0), make_error(1, at_ms=0)], _COMPLETE, "low"),
        ([make_error(0, at_ms=None)], _COMPLETE, "low"),
        ([make_error(0, exception=None, signal="SIGKILL", exit_code=-9)], _COMPLETE, "low"),
    ],
    ids=[
        "alone",
        "incomplete",
        "one clock",
        "two clocks",
        "unknown clocks",
        "a tie",
        "no time",
        "a bare exit",
    ],
)
def test_earliest_is_sure_only_with_one_clock_and_complete_coverage(
    failures: Sequence[model.WorkerError], roster: Any, confidence: str
) -> None:
    """Earliest is sure with one clock and complete coverage,
    and unsure where times do not decide.
    """
    assert _verdict("earliest", *failures, roster=roster).confidence == confidence


def test_the_same_fault_later_is_no_victim() -> None:
    """Ranks that failed by themselves in the same way are counted as such, not as victims."""
    same = [
        make_error(rank, at_ms=31.25 * rank, message=f"bad config on rank {rank}")
        for rank in range(3)
    ]
    verdict = _verdict("earliest", *same, make_error(3, at_ms=99, **_PEER))
    assert verdict.victims.by_rank == ((3, "RuntimeError: Connection closed by peer"),)
    first = (
        "rank 0 on worker-0 failed first; the next, rank 1 on worker-0, was recorded 31 ms later"
    )
    assert verdict.why[0] == first
    assert "2 more recorded the same fault and are not counted as victims" in verdict.why


# --- the verdict ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "scope", "ranks", "node"),
    [
        (make_error(3, node="w-1"), model.Scope.RANK, (3,), "w-1"),
        (make_error(None, node="w-1", subject=model.Subject.AGENT), model.Scope.NODE, (), "w-1"),
        (
            make_error(None, node="", writer=model.Writer.STOCK, exception=None),
            model.Scope.UNDETERMINED,
            (),
            None,
        ),
        (make_error(3, node="w-1", category="preemption"), model.Scope.EXTERNAL, (3,), "w-1"),
        (make_error(3, node="", host="host-7"), model.Scope.RANK, (3,), "host-7"),
        (make_error(3, node="", worker="w-2", host="host-7"), model.Scope.RANK, (3,), "w-2"),
        (make_error(3, node="w-1", worker="w-2", host="host-7"), model.Scope.RANK, (3,), "w-1"),
    ],
)
def test_the_scope_follows_from_the_document(
    root: model.WorkerError,
    scope: model.Scope,
    ranks: tuple[int, ...],
    node: str | None,
) -> None:
    """What the root cause is follows from what the document says of itself."""
    verdict = build_verdict(
        make_job(root),
        root,
        strategy="mine",
        why=["because"],
        confidence="low",
    )
    assert (verdict.scope, verdict.ranks, verdict.node) == (scope, ranks, node)


@pytest.mark.parametrize(
    ("changes", "category"),
    [
        ({}, "user_code"),
        ({"category": "cuda_oom"}, "cuda_oom"),
        ({"category": "cuda_oom", "kind": model.Kind.RECOVERABLE}, "cuda_oom"),
        ({"kind": model.Kind.RECOVERABLE}, "recoverable"),
        ({"kind": model.Kind.RECOVERABLE, "origin": model.Origin.UNKNOWN}, "recoverable"),
        (
            {"kind": model.Kind.RECOVERABLE, "origin": model.Origin.SYSTEM, "exception": None},
            "unknown",
        ),
        (_STOPPED, "stopped"),  # picked only because there is nothing else
        ({"exception": None, "signal": "SIGKILL", "exit_code": -9}, "signal"),
        ({"exception": None, "exit_code": 1}, "exit"),
        ({"exception": None, "writer": model.Writer.STOCK}, "user_code"),
        (
            {"exception": None, "writer": model.Writer.STOCK, "origin": model.Origin.SYSTEM},
            "infrastructure",
        ),
        ({"exception": None}, "unknown"),
    ],
)
def test_the_writers_category_counts_first(changes: dict[str, Any], category: str) -> None:
    """The writer's claim counts first, then what exception, signal and exit code allow to say."""
    verdict = _verdict("earliest", make_error(**changes))
    assert (verdict.category, verdict.root.stopped_by_agent) == (category, category == "stopped")


_DEAD = {"exception": None}
_TRACE = "Trace:\n\n    File x\n\nMessage:\n\n    ValueError: bad input"


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ({"message": "boom\nmore"}, "ValueError, {}: boom"),
        ({"message": "USER:ValueError: error=boom"}, "ValueError, {}: boom"),
        ({"exception": "torch.cuda.OutOfMemoryError"}, "OutOfMemoryError, {}: boom"),
        (
            {**_DEAD, "signal": "SIGKILL", "exit_code": -9},
            "SIGKILL, {}: killed, sender unknown, OOM kills could not be counted",
        ),
        (
            {**_DEAD, "signal": "SIGKILL", "resources": model.Resources(oom_kill=0)},
            "SIGKILL, {}: killed, sender unknown, no OOM kill counted",
        ),
        (
            {**_DEAD, "signal": "SIGKILL", "resources": model.Resources(oom_kill=1)},
            "SIGKILL, {}: out of memory, killed by the kernel's OOM killer",
        ),
        (
            {**_DEAD, "signal": "SIGSEGV"},
            "SIGSEGV, {}: crashed in native code (invalid memory access)",
        ),
        (
            {**_DEAD, "signal": "SIGABRT"},
            "SIGABRT, {}: the process aborted (a failed check in native code)",
        ),
        ({**_DEAD, "signal": "SIGRTMIN+3"}, "SIGRTMIN+3, {}: ended by SIGRTMIN+3"),
        (
            {**_DEAD, "exit_code": 137},
            "exit code 137, {}: exited without an exception (a shell's exit code for SIGKILL)",
        ),
        (
            {
                **_DEAD,
                "subject": model.Subject.AGENT,
                "rank": None,
                "message": f"{model.TERMINATED_BY} SIGTERM",
            },
            "USER, the agent of w-1: terminated by SIGTERM",
        ),
        ({**_DEAD, "exit_code": 1}, "exit code 1, {}: exited without an exception"),
        ({**_DEAD, "message": _TRACE}, "USER, {}: ValueError: bad input"),
        ({**_DEAD, "code": "", "message": ""}, "error, {}"),
        ({"node": ""}, "ValueError, rank 3: boom"),
        ({"rank": None, "node": "", "subject": model.Subject.AGENT}, "ValueError, an agent: boom"),
        ({"rank": None}, "ValueError, w-1: boom"),
        ({"rank": None, "node": ""}, "ValueError, an unnamed process: boom"),
    ],
)
def test_the_headline_is_one_line_of_what_who_and_message(
    changes: dict[str, Any], headline: str
) -> None:
    """The headline is one line: what, who, and what it said;
    of Flyte's own texts the sentence after "Message:".
    """
    verdict = _verdict("earliest", make_error(**{"rank": 3, "node": "w-1", **changes}))
    assert verdict.headline == headline.format("rank 3 on w-1")


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, " and 1 more"), (100, " and 92 more")])
def test_a_headline_lists_the_first_eight_ranks_and_the_first_cause(count: int, more: str) -> None:
    """Of many ranks the first eight are listed; the first cause is named,
    then what was raised from it.
    """
    cause = model.ExceptionInfo("OSError", "disk", relation="cause")
    raised = model.ExceptionInfo("ValueError", "bad", causes=(cause,))
    verdict = _verdict("evidence", *(make_error(rank, exception=raised) for rank in range(count)))
    assert (
        verdict.headline
        == f"OSError, ranks 0, 1, 2, 3, 4, 5, 6, 7{more}: disk; raised as ValueError: bad"
    )
    assert verdict.root.exception.causes == (cause,)


def test_victims_are_listed_by_rank() -> None:
    """Victims come by rank with what they raised, those that were stopped with why;
    without a rank they only count.
    """
    root, first, *others = _CASCADE
    first = replace(first, message="Traceback (most recent call last): ...")
    verdict = _verdict(
        "earliest",
        root,
        first,
        *others,
        make_error(None, node="w-9", at_ms=40, **_PEER),
    )
    assert verdict.root.rank == 3
    assert verdict.victims.count == 4
    assert verdict.victims.by_rank == (
        (0, "RuntimeError: Connection closed by peer"),
        (1, "RuntimeError: Connection closed by peer"),
        (2, "SIGTERM from its agent: rank 3 failed"),
    )
    first = make_error(0, at_ms=-1)
    one_rank = (
        make_error(5, node=f"w-{text}", exception="KeyError", message=text) for text in "ab"
    )
    victims = _verdict("earliest", first, *one_rank).victims
    assert (victims.by_rank, victims.count) == (((5, "KeyError: a; KeyError: b"),), 2)
    many = _verdict("earliest", first, *(make_error(n, **_PEER) for n in range(1, 500))).victims
    assert ([rank for rank, _ in many.by_rank], many.count) == ([*range(1, 101)], 499)


def test_the_verdict_carries_its_roots_fields_and_the_coverage() -> None:
    """The verdict carries the message, code, time and fingerprint of its root,
    and the job's coverage and digest.
    """
    job = make_job(
        make_error(3, at_ms=7, code="E42", message="boom"), roster=(make_presence(nodes=2),)
    )
    verdict = run_strategy(get_strategy("earliest"), replace(job, settled=False))
    assert (verdict.code, verdict.message, verdict.timestamp_ns) == (
        "E42",
        "boom",
        START_NS + 7_000_000,
    )
    assert verdict.fingerprint == job.failures[0].fingerprint
    assert (
        _verdict("earliest", make_error(fingerprint="1:0123456789ab")).fingerprint
        == "1:0123456789ab"
    )
    assert (verdict.coverage, verdict.digest, verdict.document_count) == (
        job.coverage,
        job.digest,
        1,
    )
    assert not verdict.settled


def test_a_headline_without_text_has_the_line_or_silent_nodes() -> None:
    """A bare assert has the line that raised it; without a cause, silent nodes are named,
    of four billion the first.
    """
    frame = model.FrameInfo("/app/train.py", 18, "check", "assert gradients_are_finite")
    root = own_fault(
        2, message="", exception=model.ExceptionInfo("AssertionError", "", frames=(frame,))
    )
    headline = (
        "AssertionError, rank 2 on worker-1: train.py:18 in check: assert gradients_are_finite"
    )
    assert evidence(reported_job(root, victim(0))).headline == headline
    for nodes, missing in ((3, "1, 2"), (2**32 - 1, "1, 2, 3, 4, 5, 6, 7, 8 and 4294967286 more")):
        places = ((0, {"group_rank": 0}), (1, {"group_rank": None}))
        verdict = evidence(
            make_job(*(victim(rank, group_world_size=nodes, **place) for rank, place in places))
        )
        assert verdict.headline.startswith(
            f"undetermined: no report from nodes {missing}; 2 ranks: RuntimeError: "
        )


# --- running one ----------------------------------------------------------------------------------


def test_coverage_and_digest_are_the_jobs_whatever_the_strategy_says() -> None:
    """A strategy that invents a coverage is corrected from the job."""

    def inventive(job: model.JobErrors) -> model.Verdict:
        verdict = get_strategy("earliest")(job)
        return replace(
            verdict,
            coverage=model.Coverage(9, 9, complete=True),
            digest="x",
            document_count=9,
            settled=False,
        )

    job = make_job(make_error())
    verdict = run_strategy(inventive, job)
    assert (verdict.coverage, verdict.digest, verdict.document_count) == (
        job.coverage,
        job.digest,
        1,
    )
    assert verdict.settled


def test_without_a_readable_failure_no_strategy_is_asked() -> None:
    """A job in which nothing could be read is undetermined, and the strategy is not called."""

    def never(job: model.JobErrors) -> model.Verdict:
        raise AssertionError

    verdict = run_strategy(never, make_job(notes=("why.pb was refused",)))
    assert (verdict.scope, verdict.strategy, verdict.root) == (
        model.Scope.UNDETERMINED,
        "never",
        None,
    )
    assert verdict.message == "why.pb was refused"
    assert (
        build_undetermined_verdict(make_job(), "mine").message == "no error document could be read"
    )


# --- clocks of nodes are corrected by the storage's -----------------------------------------------


S = 1_000_000_000


def _stored(failure: model.WorkerError, seconds: float, name: str) -> model.WorkerError:
    """The failure, with a document that the storage got so many seconds after
    the epoch of these tests.
    """
    assert failure.timestamp_ns is not None
    modified = (failure.timestamp_ns // S + int(seconds)) * S
    return replace(
        failure, documents=(model.DocumentRef(name, last_modified_ns=modified),), upload_delay_ns=0
    )


@pytest.mark.parametrize("wrong_s", [-600, 600])
def test_a_wrong_clock_is_corrected_and_noted(wrong_s: int) -> None:
    """A node's clock is corrected by what the storage says of its uploads,
    and that it is wrong is said.
    """
    late = own_fault(3, 8_000 + wrong_s * 1000, "KeyError", "'label'", boot_id="b")
    job = reported_job(
        _stored(own_fault(0, boot_id="a"), 0, "a.pb"), _stored(late, -wrong_s, "b.pb")
    )
    receipts = [
        (model.Receipt(name, durable=True, fault_to_durable_ns=10_000_000),)
        for name in ("a.pb", "b.pb")
    ]
    roster = (
        replace(item, receipts=found) for item, found in zip(job.roster, receipts, strict=True)
    )
    verdict = evidence(replace(job, roster=tuple(roster)))
    assert (verdict.ranks, verdict.confidence) == ((0,), "medium"), "known to be the first"
    (sources,) = [
        names for text, names in verdict.reasons if text.startswith("the clock of worker-1 is")
    ]
    assert sources == ("b.pb",)


@pytest.mark.parametrize("uuids", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("last_stored_ms", [3005, 9000])
def test_documents_of_one_process_are_compared_with_their_own_times(
    uuids: tuple[str, str], last_stored_ms: int
) -> None:
    """One process wrote of a moment in flight and again later:
    each document is compared with its own times.
    """
    final = own_fault(1)
    documents = []
    receipts = []
    assert final.timestamp_ns is not None
    for in_flight, letter, began_ms, stored_ms in (
        (True, uuids[0], 10, 15),
        (False, uuids[1], 3000, last_stored_ms),
    ):
        name = str(ErrorKey(0, final.timestamp_ns, 1, 0, "", 1, 32 * letter))
        stored = (
            model.DocumentRef(name, last_modified_ns=final.timestamp_ns + stored_ms * 1_000_000),
        )
        times = {"documents": stored, "upload_delay_ns": began_ms * 1_000_000}
        documents.append(
            replace(final, in_flight=in_flight, message=f"bad batch {in_flight}", **times)
        )
        receipts.append(
            model.Receipt(name, durable=True, fault_to_durable_ns=(began_ms + 10) * 1_000_000)
        )
    job = make_job(*documents, roster=(make_presence(receipts=tuple(receipts)),))
    assert len(job.failures) == 1
    assert (Clocks(job).describe_wrong_clocks(), find_clock_warnings(job.failures)) == ([], [])
    assert Clocks(job).get_offset("worker-0").is_known


_MOMENTS = st.builds(
    make_error,
    st.integers(0, 9),
    node=st.sampled_from(["w-0", "w-1"]),
    at_ms=st.sampled_from([0, 10_000_000, 20_000_000])
    | st.none(),  # clocks may be wrong by an hour
    boot_id=st.sampled_from(["a", "b", ""]),
    monotonic_ns=st.integers(1, 4) | st.none(),
)


@settings(max_examples=400)
@given(st.lists(_MOMENTS, max_size=5), _MOMENTS)
def test_one_pass_equals_comparing_each_with_each(
    failures: list[model.WorkerError], other: model.WorkerError
) -> None:
    """What one pass tells is the same as comparing each failure with each."""
    clocks = Clocks(make_job(*failures))
    assert clocks.make_before_all_check(failures)(other) is all(
        clocks.is_before(other, failure) for failure in failures
    )
    assert clocks.may_be_first(failures) == [
        not any(clocks.is_before(one, failure) for one in failures) for failure in failures
    ]


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_verdict_on_4096_ranks_takes_no_quadratic_time() -> None:
    """A verdict on 4,096 ranks, whatever order they are in, takes no quadratic time."""
    failures = [victim(rank, 40 + rank % 7, peer=rank % 200) for rank in range(4_096)]
    failures[711] = own_fault(711)
    job = make_job(*random.Random(1).sample(failures, len(failures)))
    began = time.thread_time()
    assert evidence(job).ranks == (711,)
    assert time.thread_time() - began < 4
