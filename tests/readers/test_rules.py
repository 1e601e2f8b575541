"""The table of rules: each has a case that needs it and one that it must not touch,
and the docs list it.
"""

from dataclasses import replace
from typing import Any

import pytest

from firstfault import model
from firstfault.evidence.diagnosis import Diagnosis, diagnose
from firstfault.evidence.faults import find_faults
from firstfault.strategies.rules import CONFIDENCES_ASCENDING, RULES, Rule, apply_rules
from firstfault.testing import make_job, make_presence
from lab.cascades.replay import RECORDED, load
from tests.readers.scenes import (
    IN_COLLECTIVE,
    IN_SLEEP,
    IN_TORCHS_WAIT,
    STACK,
    aborted_by_gloo,
    collectives_called,
    died,
    flyte_error,
    lost_peer_in_collective,
    own_fault,
    reported_job,
    stopped,
    timed_out_in_collective,
    timed_out_waiting,
    victim,
    watchdog_output,
)
from tools.describe_fields import DOCS, with_rules

BOX = "ChildFailedError: {} FAILED. Root Cause (first observed failure): rank : {} exitcode : 1"


def gave_up_in_nccl(rank: int, **more: object) -> model.WorkerError:
    """A rank that NCCL's watchdog ended after 90 s of waiting."""
    return died(rank, "SIGABRT", -6, 120_000, log_tail=watchdog_output(rank), **more)


def fault_of_all_ranks(rank: int) -> model.WorkerError:
    """A rank that raises what torch's checkpoint tells of rank 3."""
    trace = (
        'Traceback (most recent call last): (RANK 3)\n  File "/x/torch/futures.py", line 9, in'
        " wait\n    run()\n"
    )
    text = (
        f"CheckpointException ranks:dict_keys([3])\n{trace}OSError: [Errno 28] No space left on"
        " device\n"
    )
    return own_fault(rank, 0, "torch.distributed.checkpoint.api.CheckpointException", text)


def late_fault(at_ms: float) -> model.JobErrors:
    """Three ranks waited for 90 s, the fourth stood elsewhere, and another one raised nonsense."""
    waiting = [gave_up_in_nccl(rank) for rank in (0, 1, 2)]
    return reported_job(*waiting, own_fault(4, at_ms, boot_id="c"), stopped(3, IN_SLEEP), nodes=3)


def raised_in_hang() -> model.JobErrors:
    """The rank for which the others waited was stopped in its clean-up."""
    dumps, sent = (
        (model.StackDump(1, 3, IN_SLEEP),),
        (model.SentSignal("SIGTERM", "rank 0 failed"),),
    )
    root = own_fault(3, 7000, in_flight=True, sent_signals=sent, stack_dumps=dumps)
    return reported_job(*(timed_out_waiting(rank) for rank in (0, 1, 2)), root)


def out_of_step(called: int) -> model.JobErrors:
    """Rank 3 handled an exception, and was stopped after it had called so
    many of six collectives.
    """
    frames = (
        model.FrameInfo("/app/train.py", 40, "main"),
        model.FrameInfo("/app/train.py", 12, "step"),
    )
    handled = model.HandledException(
        None, model.ExceptionInfo("ValueError", "no labels", (), frames), calls_since=1
    )
    rank_3 = stopped(3, IN_COLLECTIVE, handled_exceptions=(handled,), **collectives_called(called))
    return reported_job(*timed_out_in_collective(0, 1, 2), rank_3)


def blamed_node(*receipts: model.Receipt) -> model.JobErrors:
    """Two ranks name worker-1, which has reported."""
    roster = [
        make_presence(node=f"worker-{at}", group_rank=at, nodes=2, ip=f"10.0.0.{at}")
        for at in (0, 1)
    ]
    return make_job(
        victim(0),
        victim(1),
        roster=(roster[0], replace(roster[1], receipts=receipts, ranks=(2, 3))),
    )


def operation_timed_out(
    rank: int,
    operation: str,
    line: int,
    code: str = "dist.{}(values)",
) -> model.WorkerError:
    """A rank whose wait in an operation timed out, without counts of its collectives."""
    called = model.FrameInfo("/x/site-packages/torch/distributed/distributed_c10d.py", 9, operation)
    frames = (model.FrameInfo("/app/train.py", line, "step", code.format(operation)), called)
    failure = timed_out_waiting(rank, world_size=4)
    return replace(
        failure, exception=model.ExceptionInfo("RuntimeError", failure.message, frames=frames)
    )


def ended_in_teardown(*finished: int) -> model.JobErrors:
    """Rank 3 aborted and rank 2 was stopped when the ranks `finished` had returned;
    ranks 0 and 1 had ended well.
    """
    at = {node: {"node": f"worker-{node}", "group_rank": node, "nodes": 2} for node in (0, 1)}
    roster = (
        make_presence(model.Phase.SUCCEEDED, ranks=(0, 1), **at[0]),
        make_presence(model.Phase.FAILED, ranks=(2, 3), finished_ranks=finished, **at[1]),
    )
    return make_job(
        died(3, "SIGABRT", -6, world_size=4), stopped(2, IN_SLEEP, world_size=4), roster=roster
    )


IN_FAULT = STACK.format("/app/train.py", "fault")
LAST_TRIES = [victim(rank) for rank in (0, 1, 2)]
LEFT = stopped(3, IN_TORCHS_WAIT)
SIZES_OF_TWO_RANKS = reported_job(aborted_by_gloo(1), lost_peer_in_collective(0, 4), nodes=1)
CASES: dict[str, tuple[str | model.JobErrors, str | model.JobErrors]] = {
    "teardown": (ended_in_teardown(2, 3), ended_in_teardown(3)),
    "long-wait": (late_fault(120_000), late_fault(31_000)),
    "lost-node": ("agent-killed-rank0-of4", "agent-told-rank0-of4"),
    "terminated-node": ("agent-told-rank0-of4", "agent-killed-rank0-of4"),
    "first-of-several": ("disk-rank5-of8", "all-ranks-rank0-of4"),
    "own-fault": ("raise-rank3-of4", "two-ranks-rank0-of4"),
    "spread-error": (
        reported_job(fault_of_all_ranks(0), stopped(1, IN_SLEEP), stopped(3, IN_SLEEP)),
        reported_job(
            fault_of_all_ranks(0),
            fault_of_all_ranks(1),
            fault_of_all_ranks(3),
            stopped(2, IN_SLEEP),
        ),
    ),
    "broadcast": ("clock-jump-clock+0-s3-rank0-of4", "raise-rank3-of4"),
    "raised-in-hang": (raised_in_hang(), "hang-rank3-of4"),
    "out-of-step": (out_of_step(5), out_of_step(6)),
    "mismatch": (
        reported_job(
            aborted_by_gloo(1),
            lost_peer_in_collective(0, 4),
            lost_peer_in_collective(2, 40),
            lost_peer_in_collective(3, 4),
        ),
        SIZES_OF_TWO_RANKS,
    ),
    "hang": ("hang-rank3-of4", "deadlock-rank0-of4"),
    "no-progress": (
        make_job(*(gave_up_in_nccl(rank, world_size=2) for rank in (0, 1))),
        "deadlock-rank0-of4",
    ),
    "left-behind": ("nccl-rubbish-version2.1-rank3-of4", "exit-1-rank3-of4"),
    "returned": (
        reported_job(*(victim(rank, world_size=4) for rank in (0, 1, 2)), LEFT),
        reported_job(*(victim(rank, world_size=4) for rank in (0, 1)), LEFT),
    ),
    "accused-node": (blamed_node(), blamed_node(model.Receipt("e.pb", durable=False, rank=3))),
    "node-without-report": ("node-killed-rank0-of4", "agent-killed-rank0-of4"),
    "lost-document": (reported_job(victim(0), victim(1), victim(2)), "deadlock-rank0-of4"),
    "mismatch-of-two": (SIZES_OF_TWO_RANKS, "exit-1-rank3-of4"),
    "waited-apart": (
        reported_job(
            *(operation_timed_out(rank, "all_reduce", 40) for rank in (0, 1, 2)),
            operation_timed_out(3, "barrier", 50),
        ),
        reported_job(
            *(operation_timed_out(rank, "all_reduce", 40) for rank in (0, 1, 2)),
            operation_timed_out(3, "barrier", 50, "dist.{}(group=PAIR)"),
        ),
    ),
    "by-elimination": ("exit-1-rank3-of4", "deadlock-rank0-of4"),
    "stock-file": (
        make_job(flyte_error(BOX.format("train", 1), 50), flyte_error(BOX.format("load", 0), 0)),
        "exit-1-rank3-of4",
    ),
    "only-failure": (make_job(victim(0, world_size=1)), make_job(victim(0, world_size=4))),
    "handled": (
        replace(
            reported_job(*LAST_TRIES, stopped(3, IN_SLEEP)),
            handled=(own_fault(3, -9000, in_flight=True), victim(0, -8900)),
        ),
        replace(
            reported_job(*LAST_TRIES, stopped(3, IN_SLEEP)),
            handled=(victim(0, -8900), victim(3, -9000)),
        ),
    ),
}
"""For each rule a recording or a scene that needs it, and one that it must not touch."""


def diagnose_case(case: str | model.JobErrors) -> Diagnosis:
    found = load(RECORDED / f"{case}.zip").job if isinstance(case, str) else case
    return find_faults(diagnose(found))


def summarize_root_cause(verdict: model.Verdict) -> tuple[object, ...]:
    """Return what a verdict tells of the root cause."""
    return verdict.headline, verdict.scope, verdict.ranks, verdict.node, verdict.confidence


@pytest.mark.parametrize("rule", RULES[:-1], ids=lambda rule: rule.name)
def test_a_rule_is_needed(rule: Rule) -> None:
    """One case gets another verdict without the rule,
    and the rule does not apply to a similar case.
    """
    needs, leaves = map(diagnose_case, CASES[rule.name])

    verdict = apply_rules(needs)

    assert verdict.rule == rule.name
    assert CONFIDENCES_ASCENDING.index(verdict.confidence) <= CONFIDENCES_ASCENDING.index(
        rule.max_confidence
    )
    assert summarize_root_cause(
        apply_rules(needs, [other for other in RULES if other is not rule])
    ) != summarize_root_cause(verdict)
    assert rule.decide(leaves) is None
    assert apply_rules(leaves).rule != rule.name


def test_the_last_rule_always_applies() -> None:
    """Without evidence the verdict is undetermined; every other rule has a case,
    and a name of its own.
    """
    verdict = apply_rules(diagnose_case("deadlock-rank0-of4"))

    assert (verdict.rule, verdict.scope.value) == ("undetermined", "undetermined")
    assert [rule.name for rule in RULES] == [*CASES, "undetermined"]


@pytest.mark.parametrize("how", ["lost", "waited", "stopped"])
def test_a_rank_that_ended_without_an_agent_is_the_root_cause(how: str) -> None:
    """It is the root cause if all others lost a peer, waited or were stopped,
    but not if one has a fault of its own.

    No launcher terminates all ranks because of one.
    """
    sent = (model.SentSignal("SIGTERM", model.TERMINATED_ALONE),)
    ends = {
        "lost": victim,
        "waited": timed_out_waiting,
        "stopped": lambda rank: died(rank, "SIGTERM", None, rank, sent_signals=sent),
    }
    entry = make_presence(
        model.Phase.SUCCEEDED,
        node="host-1",
        group_rank=3,
        nodes=4,
        rank=3,
        ranks=(3,),
    )
    others = [ends[how](rank) for rank in range(3)]
    verdict = apply_rules(find_faults(diagnose(make_job(*others, roster=(entry,)))))
    assert (verdict.rule, verdict.ranks, verdict.node, verdict.category) == (
        "returned",
        (3,),
        "host-1",
        "exit",
    )
    fault = apply_rules(
        find_faults(diagnose(make_job(*others[:2], own_fault(2, 0), roster=(entry,))))
    )
    assert fault.ranks == (2,)
    all_stopped = apply_rules(find_faults(diagnose(make_job(*map(ends["stopped"], range(4))))))
    assert (all_stopped.rule, all_stopped.category) == ("terminated-node", "preemption")


@pytest.mark.parametrize(
    "change",
    [
        {"handled": (own_fault(3, -7_200_000, in_flight=True),)},
        {
            "restarts": (
                model.RestartRecord(
                    model.RestartKind.IN_PROCESS,
                    0,
                    "ValueError, rank 3",
                    restart=True,
                    reason="",
                ),
            )
        },
    ],
    ids=["two hours before", "the job had recovered"],
)
def test_a_survived_exception_is_not_the_root_cause(change: dict[str, Any]) -> None:
    """An exception that a training has survived is not the root cause of what ends it later."""
    job = replace(CASES["handled"][0], **change)
    assert apply_rules(diagnose_case(job)).rule == "undetermined"


def test_the_first_try_counts_if_several_ranks_stand_out_in_the_last() -> None:
    """Of a program that tries again, the first exceptions tell more than a hang in which
    several ranks stand out.
    """
    last = reported_job(
        timed_out_waiting(0),
        timed_out_waiting(1),
        stopped(2, IN_SLEEP, world_size=4),
        stopped(3, IN_FAULT, world_size=4),
    )
    assert apply_rules(diagnose_case(last)).scope.value == "undetermined"

    verdict = apply_rules(
        diagnose_case(
            replace(last, handled=(own_fault(3, -9000, in_flight=True), victim(0, -8900)))
        )
    )

    headline = "ValueError, rank 3 on worker-1: bad batch"
    assert (verdict.rule, verdict.headline, verdict.confidence) == ("handled", headline, "low")


def test_the_documented_table_of_rules_is_current() -> None:
    """docs/guides/strategies.md has the table that tools/describe_fields.py makes."""
    page = (DOCS / "guides" / "strategies.md").read_text(encoding="utf-8")
    assert with_rules(page) == page
