"""What happened to all ranks alike: an interruption,
or an exception that not all of them recorded.
"""

from dataclasses import replace

import pytest

from firstfault.model import ExceptionInfo, WorkerError
from firstfault.strategies.rules import evidence
from tests.readers.scenes import agent_failure, died, own_fault, reported_job, stopped, victim
from tests.readers.test_evidence import BUG, GLOO, IN_FINALISER, TRACE, raised, summarize

INTERRUPTED = {
    "external worker-1 high: interrupted, terminated-node": {
        "Ctrl-C reached the workers before their agent": reported_job(
            *(
                own_fault(rank, rank - 9, "KeyboardInterrupt", "", fingerprint=f"v1:{rank}")
                for rank in (2, 3)
            ),
            agent_failure(1, "interrupted", signal="SIGINT"),
            victim(0),
            stopped(1),
        )
    },
    "ranks 0 1 2 3 high: interrupted, own-fault": {
        "ranks without an agent that stood in different lines": reported_job(
            *(
                own_fault(rank, rank, "KeyboardInterrupt", "", fingerprint=f"v1:{rank}")
                for rank in range(4)
            )
        )
    },
    "rank 3 high: interrupted, own-fault": {
        "a worker": reported_job(
            own_fault(3, 0, "KeyboardInterrupt", ""), victim(0), stopped(1), stopped(2)
        ),
        "a clean-up that failed after it": reported_job(
            own_fault(
                3,
                0,
                exception=ExceptionInfo(
                    "ValueError", "lock", causes=(ExceptionInfo("KeyboardInterrupt", ""),)
                ),
            ),
            victim(0),
            stopped(1),
            stopped(2),
        ),
        "a program without Python": reported_job(
            died(3, "SIGINT", -2), victim(0), stopped(1), stopped(2)
        ),
        "a program that printed it": reported_job(
            died(3, "", 1, log_tail=f"{TRACE}KeyboardInterrupt\n"),
            victim(0),
            stopped(1),
            stopped(2),
        ),
    },
    "rank 3 medium: interrupted, own-fault": {
        "a shell's exit code": reported_job(died(3, "", 130), victim(0), stopped(1), stopped(2))
    },
}
"""By verdict, the jobs that have it."""


@pytest.mark.parametrize(
    ("name", "verdict"), [(name, verdict) for verdict, jobs in INTERRUPTED.items() for name in jobs]
)
def test_sigint_is_a_category_whoever_got_it(name: str, verdict: str) -> None:
    """SIGINT is a category of its own, whether an agent, all ranks or one rank got it."""
    assert summarize(evidence(INTERRUPTED[verdict][name])) == verdict


@pytest.mark.parametrize(
    ("counts", "headline"),
    [
        ((4, 4, 4), "ValueError, rank 0 on worker-0, and probably all: bad batch"),
        ((4, 5, 4), "ValueError, rank 0 on worker-0, and probably 2 more: bad batch"),
        ((5, 5, 5), "ValueError, rank 0 on worker-0: bad batch"),
    ],
    ids=["level", "one is ahead", "all are ahead"],
)
def test_a_rank_in_the_same_finalizer_probably_raised_it_too(
    counts: tuple[int, ...], headline: str
) -> None:
    """A rank whose finaliser ran there probably raised it, too,
    unless it had called a collective more than the first.

    That one may have met a peer's error in it.
    """
    others = [
        stopped(rank, IN_FINALISER, world_size=4, **GLOO[called])
        for rank, called in enumerate(counts, 1)
    ]
    first = replace(raised(0), place=replace(BUG.place, world_size=4), **GLOO[4])
    verdict = evidence(reported_job(first, *others))
    likely = counts.count(4)
    assert (verdict.headline, verdict.ranks) == (headline, (0,))
    assert verdict.confidence == ("medium" if likely else "high")


@pytest.mark.parametrize(
    ("end", "confidence"),
    [
        (own_fault(0, 308, "torch.SignalException", "Process 7 got signal: 15"), "high"),
        (died(0, "SIGTERM", -15, at_ms=308), "high"),
        (died(0, "SIGTERM", -15, at_ms=-308), "low"),
    ],
    ids=["its handler raised", "no handler", "it was the first"],
)
def test_a_sibling_that_torch_terminated_is_a_victim(end: WorkerError, confidence: str) -> None:
    """If torch notices a failure before its agent,
    torch sends SIGTERM to the node's other workers.
    """
    verdict = evidence(reported_job(died(1, at_ms=0), end, victim(2), victim(3)))
    assert (1 in verdict.ranks) is (confidence == "high")
    assert (verdict.confidence == "high") is (confidence == "high")
