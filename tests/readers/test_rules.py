"""The table of rules: each has a case that needs it and one that it must not touch, and the docs list it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from firstfault.evidence.diagnosis import diagnose
from firstfault.evidence.faults import with_faults
from firstfault.model import (
    CausedBy,
    Collective,
    CollectiveProgress,
    Receipt,
    SentSignal,
    StackDump,
    Writer,
)
from firstfault.strategies.rules import CONFIDENCES, RULES, as_markdown, judge
from firstfault.testing import make_error, make_job, make_presence
from tests.cascades.replay import RECORDED, load

if TYPE_CHECKING:
    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import JobErrors, Verdict, WorkerError
    from firstfault.strategies.rules import Rule

STRATEGIES = Path(__file__).parents[2] / "docs" / "strategies.md"
PEER = "[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.{}]:4711"
WATCHDOG = (
    "[rank{0}]:[E314 09:26:53.589793 ProcessGroupNCCL.cpp:640] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=31, OpType=ALLREDUCE, NumelIn=512, NumelOut=512, Timeout(ms)=90000) ran for 90012 "
    "milliseconds before timing out.\n"
)
MINUTE = 60_000
SLEEPS = 'Thread 0x1 (most recent call first):\n  File "/app/train.py", line 12 in load\n'
RETURNED = (
    'Thread 0x1 (most recent call first):\n  File "/x/lib/python3.11/multiprocessing/synchronize.py", line 6 in wait\n'
    '  File "/x/site-packages/torch/distributed/elastic/multiprocessing/api.py", line 708 in _wrap\n'
)
LOST = (Receipt("e.pb", durable=False, rank=3),)
STOPPED = (SentSignal("SIGTERM", "rank 9 failed"),)
TOO_LONG = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 160 vs 16"
)
BOX = "ChildFailedError: {} FAILED. Root Cause (first observed failure): rank : {} exitcode : 1"


def failed(rank: int, text: str, at_ms: float = 0, kind: str = "RuntimeError", **more: object) -> WorkerError:
    """A rank that raised an exception, on a node of two."""
    fields = {"node": f"worker-{rank // 2}", "boot_id": "b", "monotonic_ns": int((at_ms + 200_000) * 1e6), **more}
    return make_error(rank, at_ms=at_ms, exception=kind, message=text, **fields)


def ended(rank: int, signal: str, at_ms: float = 0, **more: object) -> WorkerError:
    """A rank that ended by a signal."""
    return replace(failed(rank, "", at_ms, **more), exception=None, writer=Writer.AGENT, signal=signal, exit_code=-6)


def victim(rank: int, **more: object) -> WorkerError:
    """A rank that lost its peer on worker-1."""
    return failed(rank, PEER.format(1), 40, **more)


def stopped(rank: int, stack: str) -> WorkerError:
    """A rank that its agent stopped."""
    return ended(rank, "SIGTERM", sent_signals=STOPPED, stack_dumps=(StackDump(1, rank, stack),))


def timed_out(rank: int, **more: object) -> WorkerError:
    """A rank that NCCL's watchdog ended after 90 s of waiting."""
    return ended(rank, "SIGABRT", 2 * MINUTE, log_tail=WATCHDOG.format(rank), **more)


def passed(rank: int, size: int) -> WorkerError:
    """A rank that lost its peer in collective 4, with the size that it passed."""
    call = Collective(4, "gloo:all_reduce", f"[[{size}]] -> [[{size}]]")
    caused = CausedBy(1, "worker-0", "")
    return victim(
        rank, caused_by=caused, collectives=(CollectiveProgress("default_pg", "gloo:all_reduce", 4, 4, (call,)),)
    )


def stock(text: str, at_ms: float) -> WorkerError:
    """An error file of Flyte's own."""
    message = f"Trace:\n\n    Traceback (most recent call last):\n\nMessage:\n\n    {text}"
    return make_error(None, at_ms=at_ms, node="", exception=None, message=message, writer=Writer.STOCK)


def job(*failures: WorkerError, nodes: int = 2, receipts: tuple[Receipt, ...] = ()) -> JobErrors:
    """A job all of whose nodes have reported; the last one has the receipts."""
    roster = [
        make_presence(
            node=f"worker-{node}", group_rank=node, nodes=nodes, ip=f"10.0.0.{node}", ranks=(2 * node, 2 * node + 1)
        )
        for node in range(nodes)
    ]
    return make_job(*failures, roster=(*roster[:-1], replace(roster[-1], receipts=receipts)))


def late_fault(at_ms: float) -> JobErrors:
    """Three ranks waited for 90 s, the fourth stood elsewhere, and one of them raised nonsense."""
    waiting = [timed_out(rank) for rank in (0, 1, 2)]
    return job(*waiting, failed(4, "bad", at_ms, "ValueError", boot_id="c"), stopped(3, SLEEPS), nodes=3)


def raised_in_hang() -> JobErrors:
    """The rank for which the others waited was stopped in its clean-up."""
    root = failed(3, "bad batch", 7000, "ValueError", in_flight=True, sent_signals=STOPPED)
    root = replace(root, stack_dumps=(StackDump(1, 3, SLEEPS),))
    return job(
        *(failed(rank, "Timed out waiting 6000ms for recv operation to complete", 6000) for rank in (0, 1, 2)), root
    )


RECEIVED = ended(1, "SIGABRT", log_tail=TOO_LONG)
LEFT = stopped(3, RETURNED)
CASES: dict[str, tuple[str | JobErrors, str | JobErrors]] = {
    "long-wait": (late_fault(2 * MINUTE), late_fault(31_000)),
    "lost-node": ("agent-killed-rank0-of4", "agent-told-rank0-of4"),
    "terminated-node": ("agent-told-rank0-of4", "agent-killed-rank0-of4"),
    "first-of-several": ("disk-rank5-of8", "all-ranks-rank0-of4"),
    "own-fault": ("raise-rank3-of4", "two-ranks-rank0-of4"),
    "broadcast": ("clock-jump-clock+0-s3-rank0-of4", "raise-rank3-of4"),
    "raised-in-hang": (raised_in_hang(), "hang-rank3-of4"),
    "mismatch": (job(RECEIVED, passed(0, 4), passed(2, 40), passed(3, 4)), job(RECEIVED, passed(0, 4), nodes=1)),
    "hang": ("hang-rank3-of4", "deadlock-rank0-of4"),
    "no-progress": (
        make_job(timed_out(0, world_size=2), timed_out(1, world_size=2)),
        "deadlock-rank0-of4",
    ),
    "left-behind": ("nccl-rubbish-version2.1-rank3-of4", "exit-1-rank3-of4"),
    "returned": (
        job(*(victim(rank, world_size=4) for rank in (0, 1, 2)), LEFT),
        job(*(victim(rank, world_size=4) for rank in (0, 1)), LEFT),
    ),
    "accused-node": (
        job(victim(0), victim(1)),
        job(victim(0), victim(1), receipts=LOST),
    ),
    "node-without-report": ("node-killed-rank0-of4", "agent-killed-rank0-of4"),
    "lost-document": (job(victim(0), victim(1), victim(2)), "deadlock-rank0-of4"),
    "mismatch-of-two": (job(RECEIVED, passed(0, 4), nodes=1), "exit-1-rank3-of4"),
    "by-elimination": ("exit-1-rank3-of4", "deadlock-rank0-of4"),
    "stock-file": (make_job(stock(BOX.format("train", 1), 50), stock(BOX.format("load", 0), 0)), "exit-1-rank3-of4"),
    "only-failure": (
        make_job(failed(0, PEER.format(1), world_size=1)),
        make_job(failed(0, PEER.format(1), world_size=4)),
    ),
}
"""For each rule a recording or a scene that needs it, and one that it must not touch."""


def diagnosis_of(case: str | JobErrors) -> Diagnosis:
    """Return the diagnosis of a recording or a scene."""
    found = load(RECORDED / f"{case}.zip").job if isinstance(case, str) else case
    return with_faults(diagnose(found))


def found_by(verdict: Verdict) -> tuple[object, ...]:
    """Return what a verdict tells of the root cause."""
    return verdict.headline, verdict.scope, verdict.ranks, verdict.node, verdict.confidence


@pytest.mark.parametrize("rule", RULES[:-1], ids=lambda rule: rule.name)
def test_a_rule_is_needed(rule: Rule) -> None:
    """Its case gets another verdict without the rule, and a case beside it is none of its business."""
    needs, leaves = map(diagnosis_of, CASES[rule.name])

    verdict = judge(needs)

    assert verdict.rule == rule.name
    assert CONFIDENCES.index(verdict.confidence) <= CONFIDENCES.index(rule.confidence)
    assert found_by(judge(needs, [other for other in RULES if other is not rule])) != found_by(verdict)
    assert rule.decide(leaves) is None
    assert judge(leaves).rule != rule.name


def test_the_last_rule_always_applies() -> None:
    """Without evidence the verdict is undetermined; every other rule has a case, and a name of its own."""
    verdict = judge(diagnosis_of("deadlock-rank0-of4"))

    assert (verdict.rule, verdict.scope.value) == ("undetermined", "undetermined")
    assert [rule.name for rule in RULES] == [*CASES, "undetermined"]


def test_the_rules_in_the_docs() -> None:
    """docs/strategies.md has the table that `as_markdown` makes."""
    assert as_markdown() in STRATEGIES.read_text(encoding="utf-8")
