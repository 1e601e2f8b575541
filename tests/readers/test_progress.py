"""How far ranks came in their collectives, by what torch's watchdogs print, beside or without a flight recorder."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.evidence.hangs import progress_by_group, progress_in_text
from firstfault.model import Collective, CollectiveProgress, Scope
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error, make_job
from tests.readers.scenes import died, own, stopped

if TYPE_CHECKING:
    from firstfault.model import WorkerError

PATIENCE_S = 30
"""A pattern that backtracks takes minutes."""
WORK = (
    "WorkNCCL(SeqNum=31, OpType=ALLREDUCE, NumelIn=512, NumelOut=512, Timeout(ms)=600000) ran for 600021 milliseconds"
)
TORCH_2_1 = f"[E ProcessGroupNCCL.cpp:474] [Rank 2] Watchdog caught collective operation timeout: {WORK}\n"
TORCH_2_4 = f"""\
[rank2]:[E314 ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog caught collective operation timeout: {WORK}
[rank2]:[E314 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank 2] Exception (either an error or timeout) detected by \
watchdog at work: 31, last enqueued NCCL work: 34, last completed NCCL work: 30.
"""
TORCH_2_7 = f"""\
[rank2]:[E314 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: {WORK}
[rank2]:[E314 ProcessGroupNCCL.cpp:2268] [PG ID 3 PG GUID 5(tensor) Rank 0]  failure detected by watchdog at work \
sequence id: 31 PG status: last enqueued work: 34, last completed work: 30
[rank2]:[E314 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a \
collective timeout from this local rank and we will try our best to dump the debug info. Last enqueued NCCL work: 7, \
last completed NCCL work: 7.
"""
OUTSTANDING = Collective(31, "ALLREDUCE", "512 -> 512 elements", state="started")
TOO_LARGE = "CUDA out of memory. Tried to allocate 184.13 GiB. GPU 0 has a total capacity of 79.10 GiB"
UNWANTED = "[PG ID 1 PG GUID 1 Rank 0] work: 3, last enqueued work: 4, last completed work: "


@pytest.mark.parametrize(
    ("text", "progress"),
    [
        (TORCH_2_1, [CollectiveProgress("", "", 31, 30, (OUTSTANDING,))]),
        (TORCH_2_4, [CollectiveProgress("default_pg", "", 34, 30, (OUTSTANDING,))]),
        (
            TORCH_2_7,
            [CollectiveProgress("tensor (5)", "", 34, 30, (OUTSTANDING,)), CollectiveProgress("default_pg", "", 7, 7)],
        ),
        (
            "[PG ID 2 PG GUID 9 Rank 4] Timeout at work: 3, last enqueued work: 3, last completed work: -1",
            [CollectiveProgress("9", "", 3, 0)],
        ),
        ("Loading 3 shards\nlast enqueued work: 3\n", []),
        ("", []),
    ],
)
def test_what_a_watchdog_prints(text: str, progress: list[CollectiveProgress]) -> None:
    """The counters of each group, and the collective that is outstanding, are read in the words of each torch."""
    assert list(progress_in_text(text)) == progress


@pytest.mark.parametrize(
    "part", [TORCH_2_7, UNWANTED, "[PG ID 1 PG GUID 1 ", "WorkNCCL(SeqNum=3, OpType=", "work: 3, "]
)
def test_a_large_log_is_read_at_once(part: str) -> None:
    """Text that nearly fits, again and again, takes seconds at most."""
    text = part * (1_000_000 // len(part))
    began = time.thread_time()
    progress_in_text(text)
    assert time.thread_time() - began < PATIENCE_S


def test_a_group_without_a_name_is_the_only_one() -> None:
    """The words of torch 2.1 name no group: they are about the one that the job has, if it has one."""
    silent = make_error(0, exception=None, log_tail=TORCH_2_1)
    spoken = make_error(1, collectives=(CollectiveProgress("world (0)", "nccl:all_reduce", 30, 30),))
    recorded, printed = progress_by_group([silent, spoken])
    assert recorded.keys() == printed.keys() == {"world (0)"}
    assert (printed["world (0)"][0].enqueued, recorded["world (0)"][1].enqueued) == (31, 30)
    more = replace(spoken, collectives=(*spoken.collectives, CollectiveProgress("tensor (1)", "", 4, 4)))
    recorded, printed = progress_by_group([silent, more])
    assert printed.keys() == {""}


def came(rank: int, enqueued: int, completed: int, **more: Any) -> WorkerError:
    """A worker that its agent stopped, with the counters of its flight recorder."""
    progress = (CollectiveProgress("default_pg", "nccl:all_reduce", enqueued, completed),)
    return stopped(rank, **{"collectives": progress, "boot_id": "", **more})


def aborted(rank: int, printed: str, **more: Any) -> WorkerError:
    """A worker that a watchdog ended."""
    return died(rank, "SIGABRT", -6, log_tail=printed, boot_id="", **more)


def test_a_recorder_and_a_log_together() -> None:
    """The rank that was stopped has counters, the one that aborted a log: together they name the one that is behind."""
    verdict = evidence(make_job(aborted(2, TORCH_2_4), came(0, 30, 30)))
    assert (verdict.scope, verdict.ranks, verdict.category) == (Scope.RANK, (0,), "hang")
    assert "it called 30 collectives of group default_pg, the others 34" in verdict.headline


@pytest.mark.parametrize("outstanding", [True, False])
def test_ranks_that_continue_after_an_abort(outstanding: bool) -> None:
    """Three ranks fail alike with a collective outstanding that the fourth has not called: it is the suspect."""
    fields = {"collectives": (CollectiveProgress("default_pg", "nccl:all_reduce", 10, 8 if outstanding else 10),)}
    failures = [own(rank, 0, "torch.OutOfMemoryError", TOO_LARGE, world_size=4, **fields) for rank in range(3)]
    verdict = evidence(make_job(*failures, came(3, 8, 8)))
    assert verdict.ranks == ((3,) if outstanding else (0, 1, 2))
    assert verdict.confidence in ({"low"} if outstanding else {"low", "medium"})


@pytest.mark.parametrize("count", [77, 76])
def test_several_ranks_that_diverged_together(count: int) -> None:
    """Two ranks that are behind by the same are named together; with different counts both are suspects."""
    text = "[PG ID 0 PG GUID 0(default_pg) Rank {}] failure detected by watchdog at work sequence id: 78 PG status: "
    text += "last enqueued work: 79, last completed work: 77\n"
    waiting = [aborted(rank, f"[rank{rank}]:[E314 a.cpp:7] {text.format(rank)}") for rank in (0, 2, 3, 5, 6, 7)]
    verdict = evidence(make_job(*waiting, came(1, 77, 77), came(4, count, count)))
    if count == 76:
        assert verdict.scope is Scope.UNDETERMINED
        assert {suspect.rank for suspect in verdict.suspects} == {1, 4}
        return
    assert (verdict.scope, verdict.ranks, verdict.confidence) == (Scope.RANKS, (1, 4), "low")
    assert verdict.headline == (
        "hang, ranks 1, 4: each called 77 collectives of group default_pg, the others 79; "
        "each did not time out when 6 others waited in a collective"
    )
    assert {rank for rank, _ in verdict.victims.by_rank} == {0, 2, 3, 5, 6, 7}


def test_ranks_that_ran_ahead_by_different_distances() -> None:
    """Under NCCL a call only enqueues: who has called the stuck collective waits, however few it called since."""
    first = aborted(0, TORCH_2_4, collectives=came(0, 14, 8).collectives)
    verdict = evidence(make_job(first, came(1, 12, 8), came(2, 12, 8), came(3, 8, 8), came(4, 11, 8)))
    assert verdict.ranks == (3,)
    assert verdict.headline.endswith("it called 8 collectives of group default_pg, the others 14")
