"""Ranks that left by themselves because nothing moved, and the rank that they had waited for."""

from dataclasses import replace
from typing import Any

import pytest

from firstfault.model import (
    ExceptionInfo,
    FrameInfo,
    Kind,
    Scope,
    SentSignal,
    Unopened,
    Verdict,
    WorkerError,
)
from firstfault.render.terminal import terminal_text
from firstfault.report import build_report
from firstfault.retry import decide
from firstfault.strategies.rules import evidence
from tests.readers.scenes import (
    IN_COLLECTIVE,
    IN_SLEEP,
    STACK,
    collectives_called,
    died,
    own_fault,
    reported_job,
    stopped,
    timed_out_waiting,
    victim,
)

KEY = "wait timeout after 60000ms, keys: /default_pg/0//my/ready"
STUCK = stopped(0, IN_SLEEP, **collectives_called(3, completed=3))
LATE = stopped(0, IN_SLEEP)
"""It had called no collective yet."""
WAITS = {"stack": IN_COLLECTIVE, **collectives_called(4, completed=3)}
PRINTED = "Timeout (0:01:00)!\n{}"


def exited(
    rank: int, words: str = "", code: int = 42, signal: str = "", **more: Any
) -> WorkerError:
    """A worker that ended by itself, and what it printed last."""
    return died(rank, signal, code, log_tail=words, **more)


def key_timed_out(rank: int, text: str = KEY, name: str = "DistStoreError") -> WorkerError:
    """A worker whose wait outside of a collective timed out in `step`."""
    frames = (FrameInfo("/app/train.py", 30, "step", "store.get(key)"),)
    return replace(
        timed_out_waiting(rank),
        exception=ExceptionInfo(name, text, bases=("RuntimeError",), frames=frames),
    )


def summarize(verdict: Verdict) -> tuple[str, tuple[int, ...], str]:
    """Return the rule, the ranks and the confidence."""
    return verdict.rule, verdict.ranks, verdict.confidence


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("[rank 1] no progress for 66 s, exiting", {}),
        ("heartbeat: the step is late, ending this process", {}),
        ("watchdog: stalled", {"signal": "SIGKILL", "code": -9}),
        ("watchdog: stalled", {"signal": "SIGTERM", "code": -15}),
        ("the training hangs, aborting", {"signal": "SIGABRT", "code": -6}),
        ("all_reduce did not finish within 60 s", {"code": 1}),
        (PRINTED.format(IN_COLLECTIVE), {"code": 1}),
        ("Did not get subsequent heartbeat. Waited 45.0 seconds.", {}),
        ("Seit 66 s kein Fortschritt, beende den Prozess", {}),
        ("训练卡住,退出", {"code": 17}),
        ("", {}),
        ("", {"code": 1}),
    ],
)
def test_the_rank_elsewhere_is_the_cause_if_all_others_left(
    words: str, end: dict[str, Any]
) -> None:
    """The rank that stood elsewhere is the cause, and never with certainty;
    those that left are suspects.
    """
    verdict = evidence(reported_job(*(exited(rank, words, **end) for rank in (1, 2, 3)), STUCK))
    assert summarize(verdict) == ("hang", (0,), "medium")
    assert {suspect.rank for suspect in verdict.suspects} == {1, 2, 3}
    assert not decide(verdict).retry


@pytest.mark.parametrize(
    "raised",
    [
        ("RuntimeError", "rank 2 gave up waiting for its peers"),
        ("TimeoutError", "the step took longer than 60 s"),
        ("app.StepTimeout", "step 7"),
        ("KeyboardInterrupt", ""),
    ],
)
def test_exceptions_about_a_wait_blame_the_rank_that_did_not_raise(raised: tuple[str, str]) -> None:
    """An exception that tells of a wait, also one that a watchdog's thread
    raised in the main thread.
    """
    ends = [
        own_fault(
            rank, 0, *raised, log_tail="watchdog: stalled", **collectives_called(4, completed=3)
        )
        for rank in (1, 2, 3)
    ]
    assert summarize(evidence(reported_job(*ends, STUCK))) == ("hang", (0,), "medium")


def test_ranks_stopped_while_waiting_blame_the_straggler_not_the_first_exit() -> None:
    """One rank's watchdog fired first: the others were stopped while they waited,
    on either node.
    """
    others = (stopped(2, **WAITS), stopped(3, **WAITS))
    assert summarize(evidence(reported_job(exited(1, "no progress for 66 s"), *others, STUCK))) == (
        "hang",
        (0,),
        "medium",
    )
    # without words it may as well have failed by itself
    verdict = evidence(reported_job(exited(1), *others, STUCK))
    assert summarize(verdict) == ("own-fault", (1,), "medium")
    assert [suspect.rank for suspect in verdict.suspects] == [0]


@pytest.mark.parametrize(
    ("ends", "stuck", "ranks", "confidence"),
    [
        (
            [exited(rank, "error: unknown optimizer 'adamm'", 3) for rank in (1, 2, 3)],
            LATE,
            (1, 2, 3),
            "high",
        ),
        (
            [exited(rank, "error: unknown optimizer 'adamm'", 3) for rank in (1, 2, 3)],
            STUCK,
            (1, 2, 3),
            "medium",
        ),
        ([exited(rank, code=3) for rank in (1, 2, 3)], LATE, (1, 2, 3), "medium"),
        (
            [exited(rank, "error: unknown argument --timeout", 2) for rank in (1, 2, 3)],
            LATE,
            (1, 2, 3),
            "high",
        ),
        (
            [own_fault(rank, 0, "KeyError", "'watchdog'") for rank in (1, 2, 3)],
            STUCK,
            (1, 2, 3),
            "high",
        ),
        (
            [own_fault(1, 0, "RuntimeError", "it did not return enough rows"), stopped(2, **WAITS)],
            STUCK,
            (1,),
            "high",
        ),
        (
            [exited(1, "bad shard, exiting"), *(stopped(rank, **WAITS) for rank in (0, 2))],
            None,
            (1,),
            "high",
        ),
        (
            [exited(1, "watchdog: stalled"), *(stopped(rank, **WAITS) for rank in (0, 2))],
            None,
            (1,),
            "medium",
        ),
        (
            [exited(1, "watchdog: stalled"), *(stopped(rank, IN_SLEEP) for rank in (2, 3))],
            LATE,
            (1,),
            "medium",
        ),
    ],
    ids=[
        "late",
        "exits during the training",
        "no words",
        "usage",
        "a key",
        "rows",
        "a shard",
        "its own watchdog",
        "all busy",
    ],
)
def test_ranks_that_exit_for_an_own_reason_stay_the_cause(
    ends: list[WorkerError],
    stuck: WorkerError | None,
    ranks: tuple[int, ...],
    confidence: str,
) -> None:
    """Ranks that exit for a reason of their own stay the cause,
    with less confidence where the reason is not clear.
    """
    verdict = evidence(reported_job(*ends, *([stuck] if stuck else [])))
    assert summarize(verdict) == ("own-fault", ranks, confidence)


@pytest.mark.parametrize(
    ("end", "confidence"),
    [
        (own_fault(3, 0, "RuntimeError", "the tokenizer's server did not answer"), "high"),
        (
            own_fault(
                3, 0, "subprocess.TimeoutExpired", "Command 'ffmpeg' timed out after 30 seconds"
            ),
            "high",
        ),
        (own_fault(3, 0, "queue.Empty", "", log_tail="the reader is stuck"), "high"),
        (exited(3, "waited too long for a license", 3), "medium"),
    ],
)
def test_a_slow_rank_is_not_blamed_for_another_wait(end: WorkerError, confidence: str) -> None:
    """A rank that is only slow meanwhile is not accused:
    nothing shows that the wait was for a peer.
    """
    verdict = evidence(reported_job(end, stopped(1, **WAITS), stopped(2, **WAITS), STUCK))
    assert summarize(verdict) == ("own-fault", (3,), confidence)


def test_a_programs_recoverable_exception_decides_on_the_retry() -> None:
    """Its exception decides on the retry, also if it tells of a wait."""
    ends = [
        own_fault(rank, 0, "RecoverableError", "the step timed out", kind=Kind.RECOVERABLE)
        for rank in (1, 2, 3)
    ]
    assert decide(evidence(reported_job(*ends, STUCK))).retry


def test_another_ranks_own_fault_explains_the_stall() -> None:
    """It explains why nothing moved, if it was not certainly later."""
    ends = [exited(rank, "no progress for 66 s", monotonic_ns=None) for rank in (1, 2, 3)]
    assert evidence(reported_job(*ends, own_fault(0, 40, boot_id="b"))).ranks == (0,)


@pytest.mark.parametrize("printed", [False, True])
def test_any_rank_may_be_the_cause_if_all_left(printed: bool) -> None:
    """Then any of them may be the cause, unless each printed where it stood."""
    stacks = [IN_SLEEP, *[IN_COLLECTIVE] * 3]
    words = [
        PRINTED.format(stack) if printed else "no progress for 66 s, exiting" for stack in stacks
    ]
    verdict = evidence(reported_job(*(exited(rank, text, 1) for rank, text in enumerate(words))))
    assert (verdict.category, verdict.ranks) == ("hang", (0,) if printed else ())


def test_unopened_ranks_count_with_the_opened_one_of_their_fault() -> None:
    """Ranks whose documents were not opened count with the opened one of their fault."""
    opened = exited(1, world_size=1024, fingerprint="2:abc")
    others = tuple(range(2, 1024))
    job = reported_job(opened, STUCK, unopened=(Unopened("2:abc", len(others), others),))
    assert summarize(evidence(job)) == ("hang", (0,), "medium")
    assert summarize(evidence(replace(job, unopened=()))) == ("own-fault", (1,), "medium")


IN_BARRIER = STACK.format("/x/site-packages/torch/distributed/distributed_c10d.py", "barrier")
ANSWER = {
    "sent_signals": (SentSignal("SIGTERM", "rank 1 failed"),),
    "stack_dumps": STUCK.stack_dumps,
}


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (stopped(0, IN_SLEEP), KEY),
        (stopped(0, IN_SLEEP), "Socket Timeout"),
        (stopped(0, IN_BARRIER), KEY),
        (own_fault(0, 6100, "SystemExit", "143", **ANSWER), KEY),
    ],
    ids=["sleeps", "words of an older torch", "waits in a collective instead", "ends on SIGTERM"],
)
def test_the_rank_that_did_not_set_a_key_is_the_cause(last: WorkerError, text: str) -> None:
    """The rank that stood elsewhere is the cause, also if it went on to a collective."""
    assert summarize(
        evidence(reported_job(*(key_timed_out(rank, text) for rank in (1, 2, 3)), last))
    ) == (
        "hang",
        (0,),
        "medium",
    )


def test_a_rank_in_the_same_wait_is_not_the_straggler() -> None:
    """It came later to the same wait, so it is not the one that the others waited for."""
    same = stopped(3, STACK.format("/app/train.py", "step").replace("line 12", "line 30"))
    assert summarize(evidence(reported_job(key_timed_out(1), key_timed_out(2), same, STUCK))) == (
        "hang",
        (0,),
        "medium",
    )
    # a loop of the program's own: another line of the same function
    ends = [key_timed_out(rank, "2 of 4 ranks came", name="TimeoutError") for rank in (1, 2)]
    near = stopped(3, STACK.format("/app/train.py", "step"))
    assert summarize(evidence(reported_job(*ends, near, STUCK))) == ("hang", (0,), "medium")
    assert (
        evidence(reported_job(key_timed_out(1), key_timed_out(2), key_timed_out(0), same)).scope
        is Scope.UNDETERMINED
    )


def test_two_ranks_elsewhere_are_shown_with_their_stacks() -> None:
    """If two ranks were elsewhere, the next step has both places, and -v a stack of each."""
    other = stopped(3, STACK.format("/app/data.py", "fetch"))
    job = reported_job(key_timed_out(1), victim(2, 6050), STUCK, other)
    verdict = evidence(job)
    text = terminal_text(build_report(job, verdict, decide(verdict)), verbose=True)
    assert verdict.scope is Scope.UNDETERMINED
    assert "rank 0 was at train.py:12 in load, rank 3 was at data.py:12 in fetch" in " ".join(
        text.split()
    )
    assert "\nStack: rank 0\n" in text
    assert '"/app/data.py", line 12 in fetch' in text
