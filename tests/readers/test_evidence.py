"""The strategy `evidence`: faults and victims, inferred root causes, and what clocks can tell."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.evidence.classification import FailureClass, classify_failures
from firstfault.evidence.clocks import Clocks
from firstfault.exceptions.stack_position import Stood, readable_stack, where_it_stood, with_raise_point, with_source
from firstfault.layout import ErrorKey
from firstfault.model import (
    TERMINATED,
    CausedBy,
    CollectiveProgress,
    DocumentRef,
    ExceptionInfo,
    FrameInfo,
    Phase,
    Receipt,
    Resources,
    Scope,
    SentSignal,
    ThreadFailure,
    Writer,
)
from firstfault.strategies.earliest import clock_warnings
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error, make_job, make_presence
from tests.readers.scenes import (
    BOOT,
    IN_COLLECTIVE,
    IN_SLEEP,
    IN_TORCHS_WAIT,
    PEER,
    STACK,
    WAITED,
    agent,
    died,
    done,
    own,
    passed,
    received,
    stock,
    stopped,
    victim,
    waited,
)

if TYPE_CHECKING:
    from firstfault.model import JobErrors, Verdict, WorkerError

S = 1_000_000_000


def names(verdict: Verdict) -> tuple[str, tuple[int, ...], str]:
    """Return a verdict's scope, ranks and confidence."""
    return verdict.scope.value, verdict.ranks, verdict.confidence


# --- ranks that were stopped where another one raised ---------------------------------------------------------------

RAISED = FrameInfo("/app/train.py", 12, "step")
IN_FINALISER = STACK.format("/x/site-packages/torch/utils/data/dataloader.py", "__del__")


def raising(rank: int, raised_at: FrameInfo = RAISED) -> WorkerError:
    """A worker that was stopped while an exception was on its way out."""
    return stopped(rank, with_raise_point(IN_FINALISER, raised_at))


def raised(rank: int, at_ms: float = 0, *, frame: FrameInfo = RAISED) -> WorkerError:
    """A worker that raised at a frame."""
    exception = ExceptionInfo("ValueError", "bad batch", frames=(FrameInfo("/app/train.py", 40, "main"), frame))
    return replace(own(rank, at_ms), exception=exception)


def test_ranks_that_were_stopped_in_mid_raise() -> None:
    """All ranks raise at one line, and the first one's agent stops the others before they have: they are named too."""
    verdict = evidence(done(raised(0), raising(1), raising(2), raising(3)))
    assert (names(verdict), verdict.victims.count) == (("ranks", (0, 1, 2, 3), "medium"), 0)
    assert "3 more were stopped while an exception raised at the same line was on its way out" in verdict.why


def test_a_finaliser_at_the_line_that_raised() -> None:
    """A rank that could not answer, and whose stack has a finaliser at that line, is named too."""
    verdict = evidence(done(raised(0), stopped(1, IN_FINALISER.replace("line 40 in main", "line 12 in step"))))
    assert verdict.ranks == (0, 1)
    assert evidence(done(raised(0), stopped(1, IN_FINALISER))).ranks == (0,)


def test_another_exception_on_its_way_out() -> None:
    """A rank that was stopped while it raised elsewhere may have failed first; one that raised a peer's error not."""
    elsewhere = FrameInfo("/app/data.py", 7, "load")
    verdict = evidence(done(raised(0), raising(1, elsewhere), stopped(2, IN_COLLECTIVE)))
    assert names(verdict) == ("rank", (0,), "medium")
    assert "rank 1 on worker-0 was stopped at data.py:7 in load" in verdict.why[1]
    of_a_peer = FrameInfo("/x/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
    assert names(evidence(done(raised(0), raising(1, of_a_peer)))) == ("rank", (0,), "high")


@pytest.mark.parametrize(
    ("stack", "confidence"),
    [
        (STACK.format("/app/train.py", "step"), "medium"),
        (STACK.format("/app/train.py", "load"), "high"),
        (STACK.format("/x/site-packages/torch/distributed/distributed_c10d.py", "all_reduce"), "high"),
    ],
    ids=["in the function that raised", "in another one", "in a collective"],
)
def test_ranks_that_may_have_been_about_to_fail(stack: str, confidence: str) -> None:
    """A rank that was stopped in the function that raised, and did not wait for a peer, lowers the confidence."""
    verdict = evidence(done(raised(0), stopped(1, stack), stopped(2, IN_COLLECTIVE)))
    assert names(verdict) == ("rank", (0,), confidence)
    assert any("may have been about to fail" in why for why in verdict.why) is (confidence == "medium")


# --- what ranks raise after a peer's error --------------------------------------------------------------------------

TWICE = "trying to initialize the default process group twice!"


def retried(rank: int, at_ms: float = 6000, **more: Any) -> WorkerError:
    """A worker whose second try failed, after collective 5 of the first."""
    progress = (CollectiveProgress("default_pg", "gloo:all_reduce", 5, 5),)
    return own(rank, at_ms, message=TWICE, **{"collectives": progress, **more})


def test_a_retry_after_a_timeout() -> None:
    """The ranks whose second try fails waited for the one that never called the collective."""
    behind = stopped(3, IN_SLEEP, collectives=(CollectiveProgress("default_pg", "gloo:all_reduce", 4, 4),))
    verdict = evidence(done(retried(0), retried(1), retried(2), behind))
    assert (names(verdict), verdict.rule) == (("rank", (3,), "medium"), "hang")
    assert names(evidence(done(retried(0), retried(1), retried(2), retried(3)))) == ("ranks", (0, 1, 2, 3), "high")


def test_a_full_disk_after_the_first_fault() -> None:
    """Ranks whose emergency checkpoint fails after a peer's error are victims of the one that raised first."""
    full = "[Errno 28] No space left on device: '/checkpoints/last.pt'"
    peer = ExceptionInfo("RuntimeError", PEER.format(1), relation="context")
    saved = [own(rank, 40, "OSError", full) for rank in (0, 2)]
    after = [replace(item, exception=ExceptionInfo("OSError", full, ("Exception",), causes=(peer,))) for item in saved]
    assert names(evidence(done(own(3), *after, stopped(1)))) == ("rank", (3,), "high")
    counted = [replace(item, collectives=retried(0).collectives) for item in saved]
    first = own(3, collectives=(CollectiveProgress("default_pg", "gloo:all_reduce", 4, 4),))
    assert names(evidence(done(first, *counted, stopped(1)))) == ("rank", (3,), "high")
    assert names(evidence(done(own(3, 900), *saved, stopped(1)))) == ("ranks", (0, 2), "medium")


def test_a_retry_after_a_peers_fault() -> None:
    """The rank with the fault is named alone, whether the counters or the log tell of the others' first error."""
    progress = (CollectiveProgress("default_pg", "gloo:all_reduce", 4, 4),)
    fault = own(3, 0, collectives=progress)
    assert names(evidence(done(fault, retried(0, 40), retried(2, 41)))) == ("rank", (3,), "high")
    logged = {"collectives": (), "log_tail": f"attempt 0 failed: {PEER.format(1)}"}
    verdict = evidence(done(own(3, 0), retried(0, 40, **logged), retried(2, 41, **logged)))
    assert names(verdict) == ("rank", (3,), "medium")


@pytest.mark.parametrize(
    "notice",
    [
        "Using TCPStore at host-0:29500",
        "[W1124 03:31:27 socket.cpp:752] [c10d] The client socket has failed to connect to [host-0]:29500 (errno: 111)",
        "2026-11-24 03:31:27 INFO store based barrier completed for rank: 0",
    ],
)
def test_a_notice_about_the_store(notice: str) -> None:
    """What torch prints while it connects does not make a rank's own exception a consequence."""
    alike = [own(rank, rank, log_tail=notice if rank else "") for rank in range(4)]

    assert evidence(done(*alike)).ranks == (0, 1, 2, 3)


def test_wrappers_that_are_raised_at_one_line() -> None:
    """Ranks that were stopped while a wrapper was on its way out may have wrapped a peer's error at the same line."""
    cause = replace(raised(0).exception, relation="cause")
    wrapped = replace(raised(0), exception=replace(raised(0).exception, type="TrainingError", causes=(cause,)))

    assert evidence(done(wrapped, raising(1), raising(2))).ranks == (0,)


# --- who failed by itself -------------------------------------------------------------------------------------------


def test_a_fault_and_its_victims() -> None:
    """One exception of its own: that is it, whatever the times say."""
    verdict = evidence(done(victim(0, -900), own(3), victim(2, -800), stopped(1)))
    assert names(verdict) == ("rank", (3,), "high")
    assert verdict.victims.count == 3
    assert "raised an exception of its own" in verdict.why[0]


@pytest.mark.parametrize("name", ["train.run.<locals>.BrokenShardError", "train.ShardNotReady", "train.Oops"])
def test_an_exception_of_any_name(name: str) -> None:
    """What was raised is an exception, whatever its class is called and wherever it was made."""
    (judged,) = classify_failures(make_job(own(3, 0, name, "at 7 on rank 3")))
    assert judged.failure_class is FailureClass.OWN_FAULT
    assert evidence(done(own(3, 0, name, "at 7"), own(0, 40, "RuntimeError", "what now"), victim(2))).ranks == (3,)


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGTERM", "SIGABRT"])
def test_a_death_that_is_noticed_late(signal: str) -> None:
    """An end by a signal is recorded after its victims, and is still the root cause."""
    verdict = evidence(done(victim(0, 10), died(3, signal, -9, 2000), victim(2, 12), stopped(1)))
    # torch's watchdog may have made an abort that left no text
    assert names(verdict) == ("rank", (3,), "medium" if signal == "SIGABRT" else "high")
    assert "which its agent did not send" in verdict.why[0]


def test_an_exit_code_of_one_says_nothing() -> None:
    """It is no evidence beside a traceback, and all there is without one."""
    bare = died(3, "", 1, 0)
    assert evidence(done(own(1, 500), bare, victim(0))).ranks == (1,)
    assert names(evidence(done(victim(1, 500), bare, victim(0), stopped(2)))) == ("rank", (3,), "medium")


def test_the_kernel_killed_it() -> None:
    """The container's memory makes the category."""
    verdict = evidence(done(died(3, resources=Resources(oom_kill=1)), victim(0)))
    assert (verdict.ranks, verdict.category) == ((3,), "host_oom")


def test_what_it_wrote_before_it_died() -> None:
    """The end of stderr makes an abort a fault of its own, or the consequence of a peer's."""
    said = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: misaligned address"
    verdict = evidence(done(died(3, "SIGABRT", -6, log_tail=said), died(1, "SIGABRT", -6, 10, log_tail=PEER.format(1))))
    assert (names(verdict), verdict.category) == (("rank", (3,), "high"), "gpu_kernel")


@pytest.mark.parametrize(
    ("outer", "inner", "relation", "failure_class"),
    [
        (("RuntimeError", "training failed"), ("RuntimeError", PEER.format(1)), "cause", FailureClass.CONSEQUENCE),
        (("RuntimeError", PEER.format(1)), ("ValueError", "bad batch"), "context", FailureClass.OWN_FAULT),
        (("RuntimeError", "training failed"), ("RuntimeError", WAITED), "cause", FailureClass.UNCLEAR),
        (
            ("RuntimeError", PEER.format(1)),
            ("RuntimeError", "CUDA error: misaligned address"),
            "context",
            FailureClass.OWN_FAULT,
        ),
        (
            ("c10::DistBackendError", "watchdog: CUDA error: an illegal memory access"),
            ("RuntimeError", PEER.format(1)),
            "context",
            FailureClass.OWN_FAULT,
        ),
    ],
)
def test_a_chain(outer: tuple[str, str], inner: tuple[str, str], relation: str, failure_class: FailureClass) -> None:
    """What came first counts, and local evidence wherever it stands."""
    chained = ExceptionInfo(*outer, causes=(ExceptionInfo(*inner, relation=relation),))
    (judged,) = classify_failures(done(replace(own(3), exception=chained)))
    assert judged.failure_class is failure_class


def test_an_exception_in_flight_is_a_fault() -> None:
    """It had not left a slow `finally` when its process was stopped for a victim's sake."""
    hidden = own(3, 0, in_flight=True, sent_signals=(SentSignal("SIGTERM", "rank 0 failed"),))
    verdict = evidence(done(victim(0), hidden, stopped(1)))
    assert (verdict.ranks, verdict.confidence) == ((3,), "medium")


def test_who_names_a_rank_that_failed_by_itself() -> None:
    """A mismatch that one rank reports of another is that one's, if that one has a fault of its own."""
    seen = "Detected mismatch between collectives on ranks. Rank 0 is running collective: A, but Rank 3 is running B"
    assert evidence(done(own(0, 0, "RuntimeError", seen), own(3, 5))).ranks == (3,)
    assert evidence(done(own(0, 0, "RuntimeError", seen), victim(3, 5))).ranks == (0,)


def test_an_exit_beside_a_rendezvous_that_others_closed() -> None:
    """An agent that says so has a worker that exited because of them."""
    closed = agent(
        0, "rendezvous", exception="torch.distributed.elastic.rendezvous.api.RendezvousClosedError", message=""
    )
    verdict = evidence(done(died(0, "", 1), closed))
    assert (verdict.scope, verdict.confidence) == (Scope.UNDETERMINED, "low")


# --- several --------------------------------------------------------------------------------------------------------


def test_the_same_fault_on_all_ranks() -> None:
    """One fault, several ranks."""
    verdict = evidence(done(*(own(rank, rank) for rank in (2, 0, 3, 1))))
    assert (verdict.scope, verdict.ranks) == (Scope.RANKS, (0, 1, 2, 3))


def test_two_faults() -> None:
    """The first is the verdict, as far as the clock tells; the other one is named."""
    first, second = own(1, 0), own(2, 300, "KeyError", "'label'")
    verdict = evidence(done(second, victim(0), first))
    assert names(verdict) == ("rank", (1,), "medium")
    assert [(suspect.rank, "300 ms later" in suspect.why) for suspect in verdict.suspects] == [(2, True)]


def test_two_faults_in_an_unknown_order() -> None:
    """Two machines whose clocks are not known: low confidence, and what the agents broadcast decides."""
    one = own(0, 0, boot_id="a")
    other = own(3, 5, "KeyError", "'label'", boot_id="b")
    told = replace(stopped(1), caused_by=CausedBy(3, "worker-1", ""))
    assert names(evidence(done(one, other))) == ("rank", (0,), "low")
    assert names(evidence(done(one, other, told))) == ("rank", (3,), "low")


def _stored(failure: WorkerError, seconds: float, name: str) -> WorkerError:
    """The failure, with a document that the storage got so many seconds after the epoch of these tests."""
    assert failure.timestamp_ns is not None
    modified = (failure.timestamp_ns // S + int(seconds)) * S
    return replace(failure, documents=(DocumentRef(name, last_modified_ns=modified),), upload_delay_ns=0)


@pytest.mark.parametrize("wrong_s", [-600, 600])
def test_a_clock_that_is_wrong(wrong_s: int) -> None:
    """A node's clock is corrected by what the storage says of its uploads, and that it is wrong is said."""
    late = own(3, 8_000 + wrong_s * 1000, "KeyError", "'label'", boot_id="b")
    early = own(0, 0, boot_id="a")
    job = done(_stored(early, 0, "a.pb"), _stored(late, -wrong_s, "b.pb"))
    receipts = [
        replace(entry, receipts=(Receipt(name, durable=True, fault_to_durable_ns=10_000_000),))
        for entry, name in zip(job.roster, ("a.pb", "b.pb"), strict=True)
    ]
    verdict = evidence(replace(job, roster=tuple(receipts)))
    assert verdict.ranks == (0,)
    assert verdict.confidence == "medium", "known to be the first"
    (sources,) = [names for text, names in verdict.reasons if text.startswith("the clock of worker-1 is")]
    assert sources == ("b.pb",)


def _written_twice(uuids: tuple[str, str], last_stored_ms: int) -> JobErrors:
    """One process wrote of one moment in flight and again 3 s later, and its clock is right."""
    final, documents, receipts = own(1), [], []
    assert final.timestamp_ns is not None
    for in_flight, letter, began_ms, stored_ms in ((True, uuids[0], 10, 15), (False, uuids[1], 3000, last_stored_ms)):
        key = ErrorKey(0, final.timestamp_ns, 1, 0, "", 1, 32 * letter)
        stored = DocumentRef(str(key), last_modified_ns=final.timestamp_ns + stored_ms * 1_000_000)
        message = f"{final.message}, {'in flight' if in_flight else 'all frames'}"
        documents.append(
            replace(
                final,
                in_flight=in_flight,
                message=message,
                documents=(stored,),
                upload_delay_ns=began_ms * 1_000_000,
            )
        )
        receipts.append(Receipt(str(key), durable=True, fault_to_durable_ns=(began_ms + 10) * 1_000_000))
    return make_job(*documents, roster=(make_presence(receipts=tuple(receipts)),))


@pytest.mark.parametrize("uuids", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("last_stored_ms", [3005, 9000])
def test_a_clock_that_is_right(uuids: tuple[str, str], last_stored_ms: int) -> None:
    """Each document is compared with its own times, in any order, also if an upload that had hung stores it again."""
    job = _written_twice(uuids, last_stored_ms)
    assert len(job.failures) == 1
    assert (Clocks(job).sentences(), clock_warnings(job.failures)) == ([], [])
    assert Clocks(job).offset("worker-0").is_known


# --- nodes ----------------------------------------------------------------------------------------------------------


def test_an_agent_that_is_gone() -> None:
    """Its workers' deaths come of it."""
    verdict = evidence(done(agent(1, "node_lost"), died(2, at_ms=10), died(3, at_ms=12), victim(0)))
    assert (verdict.scope, verdict.node, verdict.confidence) == (Scope.NODE, "worker-1", "high")


def test_a_worker_that_died_long_before_its_agent() -> None:
    """Then it is the worker."""
    assert evidence(done(agent(1, "node_lost", 60_000), died(3, at_ms=10), victim(0))).ranks == (3,)


def test_a_terminated_node() -> None:
    """External, whatever becomes of its workers; an exception long before is not."""
    told = agent(1, "preemption")
    ended = own(3, 20, "torch.distributed.elastic.multiprocessing.api.SignalException", "got signal: 15")
    assert evidence(done(told, ended, victim(0))).scope is Scope.EXTERNAL
    assert evidence(done(told, victim(0), own(2, -60_000))).ranks == (2,)


def test_a_node_that_sent_no_report() -> None:
    """It joined the round, sent no report, and its peers name it."""
    roster = (
        make_presence(Phase.FAILED, node="worker-0", group_rank=0, nodes=2, ip="10.0.0.1", ranks=(0, 1)),
        make_presence(Phase.JOINED, node="worker-1", group_rank=1, nodes=2, ip="10.0.0.2", ranks=(2, 3)),
    )
    verdict = evidence(done(victim(0, peer=2), victim(1, peer=2), roster=roster))
    assert (verdict.scope, verdict.node, verdict.category) == (Scope.NODE, "worker-1", "node_lost")
    assert "2 failures name it" in verdict.headline


# --- inferred root causes -------------------------------------------------------------------------------------------


def _count(enqueued: int) -> dict[str, Any]:
    return {"collectives": (CollectiveProgress("default_pg", "allreduce", enqueued, None),)}


def test_a_rank_that_hangs() -> None:
    """It was given fewer collectives, and stood outside of any while the others waited."""
    hung = stopped(3, IN_SLEEP, **_count(5))
    verdict = evidence(
        done(waited(0, **_count(6)), stopped(1, IN_COLLECTIVE, **_count(6)), waited(2, **_count(6)), hung)
    )
    assert (names(verdict), verdict.category) == (("rank", (3,), "medium"), "hang")
    assert "train.py:12 in load" in verdict.headline
    assert "train.py" in verdict.message


def _documented(failure: WorkerError) -> WorkerError:
    """The failure, with a document of its own."""
    return replace(failure, documents=(DocumentRef(f"{failure.node}-{failure.rank}.pb"),))


def _hang() -> list[WorkerError]:
    return [*(waited(rank, **_count(6)) for rank in (0, 1, 2)), stopped(3, IN_SLEEP, **_count(5))]


def _broadcast() -> list[WorkerError]:
    sent = (SentSignal("SIGTERM", "rank 3 failed: KeyError"),)
    return [
        stopped(0),
        *(replace(stopped(1 + at), caused_by=CausedBy(3, "worker-1", ""), sent_signals=sent) for at in (0, 1)),
    ]


@pytest.mark.parametrize(
    ("failures", "sentence", "sources"),
    [
        (
            _hang(),
            "no rank raised an error of its own",
            {"worker-0-0.pb", "worker-0-1.pb", "worker-1-2.pb", "worker-1-3.pb"},
        ),
        (
            _broadcast(),
            "rank 3 on worker-1: its agent reported its failure to the other nodes",
            {"worker-0-1.pb", "worker-1-2.pb"},
        ),
        (
            [replace(stopped(rank), sent_signals=(SentSignal("SIGTERM", TERMINATED),)) for rank in (2, 3)]
            + [victim(0)],
            "worker-1: 2 of its workers were stopped",
            {"worker-1-2.pb", "worker-1-3.pb"},
        ),
        (
            [waited(rank, 6000 + rank, **_count(7)) for rank in range(4)],
            "no rank shows a fault of its own, and none stands out",
            {"worker-0-0.pb", "worker-0-1.pb", "worker-1-2.pb", "worker-1-3.pb"},
        ),
        (
            [make_error(3, node="worker-1", exception=None, writer=Writer.AGENT, exit_code=1), stopped(0)],
            "no other rank shows a fault of its own",
            {"worker-0-0.pb"},
        ),
    ],
    ids=["a hang", "broadcast", "terminated", "none stands out", "by elimination"],
)
def test_the_documents_of_an_inferred_root(failures: list[WorkerError], sentence: str, sources: set[str]) -> None:
    """The root cause left no document; the sentence refers to the documents that are evidence for it."""
    roster = (make_presence(Phase.JOINED, node="worker-1", group_rank=1, nodes=2, ranks=(2, 3)),)
    verdict = evidence(done(*map(_documented, failures), roster=roster))
    assert [set(names) for text, names in verdict.reasons if text.startswith(sentence)] == [sources]


def test_a_rank_that_waited_is_not_named_by_elimination() -> None:
    """One rank that timed out is a victim of the rank that it waited for, also if no other rank is suspect."""
    verdict = evidence(done(waited(3), stopped(0), stopped(1), stopped(2)))
    assert verdict.scope is Scope.UNDETERMINED
    assert verdict.category == "hang"


def test_what_is_counted_is_named_in_the_right_number() -> None:
    """One other is one, several are several."""
    assert "1 other failed because of it: stopped, or without its peer" in evidence(done(own(3), victim(0))).why
    assert (
        "2 others failed because of it: stopped, or without its peer"
        in evidence(done(own(3), victim(0), victim(1))).why
    )


def test_the_same_hang_has_the_same_fingerprint() -> None:
    """By where it stood, without the line: the next attempt's verdict can be compared."""

    def hang(stack: str) -> str:
        return evidence(
            done(*(waited(rank, **_count(6)) for rank in (0, 1, 2)), stopped(3, stack, **_count(5)))
        ).fingerprint

    assert hang(IN_SLEEP) == hang(IN_SLEEP.replace("line 12", "line 14")) != ""
    assert hang(IN_SLEEP) != hang(STACK.format("/app/train.py", "save"))


def test_a_stack_of_nothing_but_lines() -> None:
    """64 KB of newlines and blanks in a stack take no time, and the frame before them is found."""
    began = time.thread_time()
    for fill in ("\n", " ", " \n", "  File \n"):
        where = where_it_stood(stopped(3, IN_SLEEP + fill * (65_000 // len(fill))))
        assert where.frame == "train.py:12 in load"
    assert time.thread_time() - began < 0.5


def test_a_rank_that_left_a_collective_out() -> None:
    """All wait, all have been given as many collectives; one of them another one."""
    apart = {"collectives": (CollectiveProgress("default_pg", "barrier", 7, None),)}
    verdict = evidence(done(*(waited(rank, **_count(7)) for rank in (0, 1, 2)), waited(3, **apart)))
    assert names(verdict) == ("rank", (3,), "medium")
    assert "it called barrier, the others allreduce" in verdict.headline


def test_a_thread_that_died() -> None:
    """It explains why its rank waits."""
    dead = (ThreadFailure("prefetch", None, ExceptionInfo("LookupError", "no shard")),)
    verdict = evidence(done(waited(0), stopped(3, thread_failures=dead), stopped(1)))
    assert verdict.ranks == (3,)
    assert "LookupError: no shard" in verdict.headline


def test_all_waited_and_none_stands_out() -> None:
    """Equal counters, all in the same collective: undetermined, whatever the clocks say."""
    verdict = evidence(done(*(waited(rank, 6000 + rank, **_count(7)) for rank in range(4))))
    assert verdict.scope is Scope.UNDETERMINED
    assert (verdict.ranks, verdict.confidence, verdict.category) == ((), "low", "hang")


def test_a_document_that_was_lost() -> None:
    """All others name a peer, and the document of one rank of a node that is done is missing."""
    verdict = evidence(done(victim(0), victim(1), victim(2)))
    assert names(verdict) == ("rank", (3,), "medium")


def _lost(rank: int, fingerprint: str) -> Receipt:
    """What an agent says of a document that could not be uploaded; its name tells the fingerprint."""
    return Receipt(str(ErrorKey(0, 1, rank, rank // 2, fingerprint, 1, "0" * 32)), durable=False, rank=rank)


def test_lost_documents_of_victims() -> None:
    """Of several documents that were lost, the names of some say that they told what other victims tell."""
    heard = [replace(victim(rank), fingerprint="1:" + "a" * 12) for rank in (0, 1, 2)]
    entry = make_presence(Phase.FAILED, node="worker-2", group_rank=2, nodes=3, ranks=(4, 5))
    entry = replace(entry, receipts=(_lost(4, "a" * 12), _lost(5, "b" * 12)))
    job = done(*heard, died(3, "SIGTERM", -15, sent_signals=(SentSignal("SIGTERM", "rank 5 failed"),)))
    verdict = evidence(replace(job, roster=(*job.roster, entry)))
    assert names(verdict) == ("rank", (5,), "medium")


def test_a_broadcast_failure_without_a_document() -> None:
    """The root's document and its node's report are missing, but the others were stopped because of it."""
    told = {
        "caused_by": CausedBy(3, "worker-1", ""),
        "sent_signals": (SentSignal("SIGTERM", "rank 3 failed: KeyError"),),
    }
    roster = (make_presence(Phase.JOINED, node="worker-1", group_rank=1, nodes=2, ranks=(2, 3)),)
    verdict = evidence(done(stopped(0), replace(stopped(1), **told), replace(stopped(2), **told), roster=roster))
    assert names(verdict) == ("rank", (3,), "medium")
    assert "its agent reported its failure to the other nodes (KeyError)" in verdict.headline
    # a rank with a document of its own is no missing root
    heard = evidence(done(victim(3), replace(stopped(1), **told), replace(stopped(2), **told), roster=roster))
    assert heard.ranks != (3,)


def test_a_broadcast_failure_is_not_the_root_of_a_wait() -> None:
    """When all wait, the failure that the agents notice first is a timeout: no evidence."""
    told = {"caused_by": CausedBy(0, "worker-0", "")}
    hung = stopped(3, IN_SLEEP, **_count(5))
    verdict = evidence(done(waited(1, **_count(6)), replace(stopped(2, IN_COLLECTIVE, **_count(6)), **told), hung))
    assert verdict.ranks == (3,)


def test_a_terminated_node_without_a_document() -> None:
    """Its workers' documents tell why they were stopped."""
    to_go = (SentSignal("SIGTERM", TERMINATED),)
    verdict = evidence(done(*(replace(stopped(rank), sent_signals=to_go) for rank in (2, 3)), victim(0), stopped(1)))
    assert (verdict.scope, verdict.node, verdict.category) == (Scope.EXTERNAL, "worker-1", "preemption")


def test_a_rank_that_is_frozen() -> None:
    """It answered nothing and had to be killed, while the others waited for it."""
    killed = replace(stopped(3), signal="SIGKILL", exit_code=-9, sent_signals=(SentSignal("SIGKILL", "another one"),))
    verdict = evidence(done(*(waited(rank, **_count(6)) for rank in (0, 1, 2)), killed))
    assert (names(verdict), verdict.category) == (("rank", (3,), "medium"), "hang")
    assert "it answered no signal" in verdict.headline


def test_a_rank_that_never_joined() -> None:
    """The others wait at the store for its key, each until its time is up."""
    late = [
        own(rank, 6000, "torch.distributed.DistStoreError", "wait timeout after 6000ms, keys: /default_pg/0//cpu//0/3")
        for rank in (0, 1, 2)
    ]
    verdict = evidence(done(*late, stopped(3, IN_SLEEP)))
    assert (names(verdict), verdict.category) == (("rank", (3,), "medium"), "hang")


def test_a_connection_that_is_none_to_a_peer() -> None:
    """What no frame of torch's collectives has raised may be about any service; from inside of one it names a peer."""
    lost = ExceptionInfo("ConnectionResetError", "[Errno 104] Connection reset by peer", ("ConnectionError", "OSError"))
    own_client = FrameInfo("/app/client.py", 7, "fetch", "self.socket.recv(4)")
    collective = FrameInfo("/x/torch/distributed/distributed_c10d.py", 9, "all_reduce", "work.wait()")
    others = (victim(1), victim(2), stopped(3))

    fetched = replace(own(0), exception=replace(lost, frames=(own_client,)))
    reduced = replace(own(0), exception=replace(lost, frames=(own_client, collective)))

    assert names(evidence(done(fetched, *others))) == ("rank", (0,), "medium")
    assert evidence(done(reduced, *others)).ranks != (0,)


def _crashed_while_stopped(rank: int) -> WorkerError:
    return replace(stopped(rank), signal="SIGSEGV", exit_code=-11)


def test_a_crash_while_being_stopped() -> None:
    """A root cause only if there is no other, and no rank had waited: then its agent may have noticed it too late."""
    assert evidence(done(own(0), _crashed_while_stopped(1), victim(2), victim(3))).ranks == (0,)
    assert evidence(done(victim(0), _crashed_while_stopped(1), victim(2), victim(3))).ranks == (1,)
    everybody = [waited(rank, **_count(6)) for rank in (0, 1, 2)]
    assert evidence(done(*everybody, _crashed_while_stopped(3))).scope is Scope.UNDETERMINED


def test_a_text_that_could_not_be_read() -> None:
    """Of a type that torch raises too: it is no evidence against an unexpected end by a signal."""
    unread = own(0, 0, "RuntimeError", "<no text: reading the exception took too long>")
    assert evidence(done(unread, died(3, "SIGABRT", -6), victim(1), victim(2))).ranks == (3,)
    assert evidence(done(own(0, 0, "MyError", unread.exception.message if unread.exception else ""))).ranks == (0,)


def test_a_fault_long_after_a_timeout() -> None:
    """A hang stays one, whatever the clean-up a minute later looks like."""
    timed_out = [waited(0, 0, **_count(6)), waited(1, 0, **_count(6))]
    told = agent(1, "preemption", 60_000)
    verdict = evidence(done(*timed_out, told, replace(stopped(3, IN_SLEEP, **_count(5)), boot_id=BOOT)))
    assert (verdict.ranks, verdict.category) == ((3,), "hang")
    assert any(suspect.node == "worker-1" for suspect in verdict.suspects)


def test_a_death_without_a_reason_makes_a_verdict_doubtful() -> None:
    """Exit code 1 says nothing against a traceback, but the verdict is no longer sure, and names it."""
    verdict = evidence(done(own(1, 500), died(3, "", 1, 0), victim(0)))
    assert names(verdict) == ("rank", (1,), "medium")
    assert [suspect.rank for suspect in verdict.suspects] == [3]


def test_files_of_flytes_own() -> None:
    """A single file is the root cause; of several summaries the first is, without certainty; peers' errors are none."""
    box = "ChildFailedError: train FAILED. Root Cause (first observed failure): rank : 1 exitcode : 1"
    alone = evidence(make_job(stock(f"RuntimeError: {PEER.format(1)}", 0)))
    assert alone.root is not None
    assert alone.confidence == "low"
    several = evidence(make_job(stock(box, 50), stock(box.replace("rank : 1", "rank : 0"), 0)))
    assert several.root is not None
    assert several.root.timestamp_ns == stock(box, 0).timestamp_ns
    assert several.confidence != "high"
    victims = evidence(make_job(*(stock(f"RuntimeError: {PEER.format(peer)}", peer) for peer in (1, 2))))
    assert victims.root is None


def test_a_node_that_was_terminated_while_others_waited() -> None:
    """If the order is not known, the verdict is not certain."""
    apart = [replace(item, boot_id="") for item in (waited(0, 0), waited(1, 0), agent(1, "preemption", 60_000))]
    verdict = evidence(done(*apart))
    assert (verdict.scope, verdict.confidence) == (Scope.EXTERNAL, "medium")
    assert [suspect.rank for suspect in verdict.suspects] == [0, 1]


def test_a_text_never_makes_a_node_lost() -> None:
    """An exception's text never gives a category that is retried on the system's budget."""
    for text in ("node gpu-7 is down", "the job got preempted"):
        verdict = evidence(done(own(3, 0, "ValueError", text)))
        assert verdict.category not in {"node_lost", "preemption"}
        assert verdict.ranks == (3,)


@pytest.mark.parametrize(
    "text",
    [
        "bad --on SIGTERM value",
        "invalid layer name 'TCPStore'",
        "Rendezvous of keys failed: missing column",
        "Broken pipe symbol in expression",
    ],
)
def test_the_only_failure_is_the_root_cause(text: str) -> None:
    """Whatever its text reminds of: no transport raises such an exception, and one rank has no peers."""
    frames = (FrameInfo("/app/train.py", 7, "parse", "raise ValueError(text)"),)
    failure = own(0, 0, "ValueError", text)
    assert failure.exception is not None
    alone = make_job(replace(failure, exception=replace(failure.exception, bases=("Exception",), frames=frames)))
    assert evidence(alone).ranks == (0,)
    assert evidence(make_job(own(0, 0, "RuntimeError", PEER.format(1), world_size=1))).ranks == (0,)
    assert evidence(make_job(own(0, 0, "RuntimeError", PEER.format(1), world_size=4))).scope is Scope.UNDETERMINED


def test_a_node_that_has_not_reported_yet() -> None:
    """If other ranks timed out waiting for it, the node may hang or be late: the verdict does not call it lost."""
    roster = (
        make_presence(Phase.FAILED, node="worker-0", group_rank=0, nodes=2, ranks=(0, 1)),
        make_presence(Phase.JOINED, node="worker-1", group_rank=1, nodes=2, ranks=(2, 3)),
    )
    verdict = evidence(done(waited(0, **_count(6)), waited(1, **_count(6)), roster=roster))
    assert (verdict.node, verdict.category) == ("worker-1", "unknown")


def test_a_node_that_reported_is_not_lost() -> None:
    """Its documents could not be uploaded; a report about an unknown node does not count."""
    lost = Receipt("e.pb", durable=False, error="403 Forbidden", rank=3)
    unknown = CausedBy(None, "node 1", "")
    roster = (
        replace(
            make_presence(Phase.FAILED, node="worker-0", group_rank=0, nodes=2, ranks=(0, 1)), first_failure=unknown
        ),
        replace(make_presence(Phase.FAILED, node="worker-1", group_rank=1, nodes=2, ranks=(2, 3)), receipts=(lost,)),
    )
    verdict = evidence(done(victim(0, peer=2), victim(1, peer=2), roster=roster))
    assert (verdict.scope, verdict.ranks, verdict.category) == (Scope.RANK, (3,), "unknown")
    assert "403 Forbidden" in verdict.headline


def test_a_node_that_only_knows_itself() -> None:
    """A pod that cannot read the storage has its own files alone: what its agent was told names the root cause."""
    told = CausedBy(3, "worker-1", "")
    entry = make_presence(Phase.FAILED, node="worker-0", group_rank=0, nodes=2, ranks=(0, 1))
    verdict = evidence(make_job(replace(stopped(0), caused_by=told), roster=(entry,)))
    assert (verdict.ranks, verdict.node) == ((3,), "worker-1")
    entry = replace(entry, first_failure=told, first_failure_reason="rank 3 on worker-1 failed: KeyError")
    verdict = evidence(make_job(victim(0, peer=2), roster=(entry,)))
    assert (verdict.ranks, verdict.node) == ((3,), "worker-1")
    assert "KeyError" in verdict.headline


def test_an_exit_that_answers_a_signal() -> None:
    """A process that exits when its agent stops it is a victim."""
    left = own(
        1, 6100, "SystemExit", "143", sent_signals=(SentSignal("SIGTERM", "another one failed"),), in_flight=True
    )
    assert evidence(done(waited(0, **_count(6)), left, waited(2, **_count(6)))).ranks != (1,)


def test_a_signal_long_after_the_same_signal() -> None:
    """Two deaths by one signal are one fault only at the same time."""
    verdict = evidence(done(died(3, at_ms=0), died(0, at_ms=60_000)))
    assert verdict.ranks == (3,)
    assert [suspect.rank for suspect in verdict.suspects] == [0]


def test_a_broadcast_failure_beats_an_exception_without_evidence() -> None:
    """A program that puts its own exception in place of what it caught hides that it is a victim."""
    told = {"first_failure": CausedBy(3, "worker-1", "")}
    roster = tuple(
        replace(
            make_presence(
                Phase.FAILED, node=f"worker-{node}", group_rank=node, nodes=2, ranks=(2 * node, 2 * node + 1)
            ),
            **told,
        )
        for node in (0, 1)
    )
    wrapped = own(0, 10, "train.TrainError", "step failed", boot_id="")
    assert evidence(done(died(3, boot_id=""), wrapped, roster=roster)).ranks == (3,)
    known = own(0, 10, "RuntimeError", "CUDA error: uncorrectable ECC error encountered", boot_id="")
    assert evidence(done(died(3, boot_id=""), known, roster=roster)).ranks == (0,)


def test_pointers_that_lie() -> None:
    """Circular accusations, a peer that is healthy, a rank that does not exist: never a confident verdict."""
    barrier = "[Rank {}]: Rank {} failed to pass monitoredBarrier in 9000 ms"
    circle = [own(rank, 0, "RuntimeError", barrier.format(rank, (rank + 1) % 4)) for rank in range(4)]
    verdict = evidence(done(*circle))
    assert (verdict.scope, verdict.confidence) == (Scope.UNDETERMINED, "low")
    assert evidence(done(victim(0), own(1, 0, "RuntimeError", barrier.format(1, 999)))).confidence != "high"


# --- many -----------------------------------------------------------------------------------------------------------


def test_sixteen_thousand() -> None:
    """A verdict on 16,384 ranks takes at most a few seconds, whatever order they are in."""
    failures = [victim(rank, 40 + rank % 7, peer=rank % 200) for rank in range(16_384)]
    failures[4711] = own(4711)
    random.Random(1).shuffle(failures)
    job = make_job(*failures)
    began = time.thread_time()
    verdict = evidence(job)
    seconds = time.thread_time() - began
    assert verdict.ranks == (4711,)
    assert seconds < 6, seconds


# --- a collective with another size at one rank ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "rank", "rule"),
    [
        ((received(1), passed(0, 4), passed(2, 40), passed(3, 4)), 2, "mismatch"),
        ((received(1), passed(0, 4), passed(2, 4), passed(3, 4)), 1, "mismatch"),
        ((received(1), passed(0, 4)), 1, "mismatch-of-two"),
    ],
    ids=["another rank differs", "the receiver differs", "two ranks"],
)
def test_another_size_at_one_rank(failures: tuple[WorkerError, ...], rank: int, rule: str) -> None:
    """The rank that differs from most is named, be it the one that aborted or not; of two ranks, both are."""
    caused = tuple(replace(item, caused_by=CausedBy(1, "worker-0", "")) for item in failures[1:])
    verdict = evidence(done(failures[0], *caused, nodes=len(failures) // 2))
    is_of_two = rule == "mismatch-of-two"
    assert (names(verdict), verdict.rule) == (("rank", (rank,), "low" if is_of_two else "medium"), rule)
    assert verdict.category == "user_code"
    assert [suspect.rank for suspect in verdict.suspects] == ([0] if is_of_two else [])


# --- exits, threads and positions -----------------------------------------------------------------------------------


def test_an_exit_in_flight() -> None:
    """An exit that was recorded before its agent stopped it is the fault of the others; one after it is not."""
    exits = own(3, 0, "SystemExit", "3", sent_signals=(SentSignal("SIGTERM", "rank 0 failed"),))
    assert names(evidence(done(replace(exits, in_flight=True), victim(0), victim(2)))) == ("rank", (3,), "medium")
    assert evidence(done(exits, victim(0), stopped(1), victim(2))).ranks == ()


def test_an_exit_that_may_follow_any_error() -> None:
    """An exit with success, or without any text, is not certain to be the cause."""
    for failure in (own(3, 0, "SystemExit", "0"), died(3, "", 7)):
        assert names(evidence(done(failure, victim(0), stopped(1)))) == ("rank", (3,), "medium")
    assert names(evidence(done(died(3, "", 7, log_tail="fatal: license server"), victim(0)))) == ("rank", (3,), "high")


def test_an_exception_without_a_text() -> None:
    """The headline of a bare assert has the line that raised it, as Python's traceback has."""
    frame = FrameInfo("/app/train.py", 18, "check", "assert gradients_are_finite")
    root = own(2, 0, "AssertionError", "")
    root = replace(
        root,
        message="Traceback (most recent call last):\n",
        exception=ExceptionInfo("AssertionError", "", frames=(frame,)),
    )
    headline = evidence(done(root, victim(0))).headline
    assert headline == "AssertionError, rank 2 on worker-1: train.py:18 in check: assert gradients_are_finite"


def test_ranks_that_tell_each_other_of_an_error() -> None:
    """Ranks that end because they were told of another rank's exception are not its cause, whatever their number."""
    root = own(2, 0, message="shard 8 is corrupt")
    for words in ("another rank failed, stopping", "error on another rank", "stopping: rank 2: shard 8 is corrupt"):
        told = (own(rank, 0, "RuntimeError", words) for rank in (0, 1, 3))
        assert names(evidence(done(root, *told)))[:2] == ("rank", (2,))


def test_ranks_that_say_alike_of_themselves() -> None:
    """A rank that names itself, or another rank without what that one said, has an error of its own."""
    root = own(2, 0, message="shard 8 is corrupt")
    for words in ("rank 0: shard 8 is corrupt", "rank 2 gave too few samples"):
        verdict = evidence(done(root, own(0, 0, "RuntimeError", words)))
        assert {*verdict.ranks, *(suspect.rank for suspect in verdict.suspects)} == {0, 2}


def test_a_rank_that_returned_early() -> None:
    """A rank that had fewer batches returned: the others wait for it, or lose their connection to it."""
    left = stopped(3, IN_TORCHS_WAIT)
    others = (0, 1, 2)
    wait = evidence(done(*(waited(rank, world_size=4) for rank in others), left))
    assert (wait.ranks, wait.category, wait.rule) == ((3,), "hang", "hang")
    assert wait.headline.endswith("its function had returned while the others waited for it")
    loss = evidence(done(*(victim(rank, world_size=4) for rank in others), left))
    assert (loss.ranks, loss.category, loss.rule) == ((3,), "exit", "returned")
    assert loss.headline == "returned early, rank 3 on worker-1: its function had returned when the others lost a peer"
    assert evidence(done(*(victim(rank, world_size=4) for rank in others[:2]), left)).rule == "lost-document"


def test_timeouts_that_were_printed() -> None:
    """Ranks that print their timeout and exit waited for the one that stands elsewhere, stopped meanwhile or not."""
    printed = f'Traceback (most recent call last):\n  File "train.py", line 8, in train\nRuntimeError: {WAITED}'
    late = replace(stopped(1, STACK.format("/app/train.py", "report")), signal="", exit_code=1, log_tail=printed)
    verdict = evidence(done(died(0, "", 1, log_tail=printed), late, stopped(3, IN_SLEEP)))
    assert (names(verdict), verdict.rule) == (("rank", (3,), "medium"), "hang")


def test_a_dead_thread_of_a_rank_that_waits() -> None:
    """A helper thread's error does not make a rank that waits, or has timed out, the one that others wait for."""
    dead = (ThreadFailure("metrics", None, ExceptionInfo("ZeroDivisionError", "division by zero")),)
    waiting = stopped(1, IN_COLLECTIVE, thread_failures=dead)
    others = (waited(0, thread_failures=dead), waiting, stopped(3, IN_COLLECTIVE))
    assert evidence(done(*others, stopped(2, IN_COLLECTIVE))).ranks == ()
    assert evidence(done(*others, stopped(2, IN_SLEEP))).ranks == (2,)


IN_SELECT = 'Thread 0x2 (most recent call first):\n  File "/usr/lib/python3.11/selectors.py", line 468 in select\n'
POOL = '  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 58 in run\n'
POOL += '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n'


@pytest.mark.parametrize(
    ("thread", "stood", "frame"),
    [
        ('  File "/app/data.py", line 5 in fetch\n' + POOL, Stood.ELSEWHERE, "data.py:5 in fetch"),
        (
            '  File "/x/site-packages/torch/distributed/c10d.py", line 9 in all_reduce\n'
            '  File "/app/data.py", line 6 in sync\n' + POOL,
            Stood.COLLECTIVE,
            "data.py:6 in sync",
        ),
        (
            '  File "/x/site-packages/torch/distributed/checkpoint/utils.py", line 9 in reduce_scatter\n' + POOL,
            Stood.COLLECTIVE,
            "train.py:40 in main",
        ),
        (
            '  File "/usr/lib/python3.11/queue.py", line 171 in get\n  File "/app/data.py", line 5 in fetch\n' + POOL,
            Stood.ELSEWHERE,
            "train.py:40 in main",
        ),
    ],
    ids=["works", "in a collective", "a library's, in a collective", "waits for work"],
)
def test_a_main_thread_that_waits_for_another(thread: str, stood: Stood, frame: str) -> None:
    """The position is that of the one thread that runs the program's own code for it."""
    main = IN_SELECT + '  File "/usr/lib/python3.11/asyncio/runners.py", line 190 in run\n'
    main += '  File "/app/train.py", line 40 in main\n'
    where = where_it_stood(stopped(1, f"Thread 0x1 (most recent call first):\n{thread}\n{main}"))
    assert (where.stood, where.frame) == (stood, frame)


def test_a_hook_in_a_backward_pass() -> None:
    """A hook of the program waits there if a collective is outstanding; else it may hang."""
    text = 'Thread 0x1 (most recent call first):\n  File "/app/train.py", line 95 in hook\n'
    text += '  File "/x/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward\n'
    text += '  File "/app/train.py", line 40 in main\n'
    assert where_it_stood(stopped(1, text)).stood is Stood.ELSEWHERE
    outstanding = (CollectiveProgress("default_pg", "gloo:all_reduce", 5, 4),)
    assert where_it_stood(stopped(1, text, collectives=outstanding)).stood is Stood.TORCH


def test_source_lines_of_a_stack() -> None:
    """The program's own frames get their source line, which a person sees and the position does not change."""
    text = with_source(IN_COLLECTIVE, lambda file, line: f"    {file}:{line}()\n")
    assert '  File "/app/train.py", line 40 in main\n    /app/train.py:40()' in readable_stack(text)
    assert text.count("()") == 1
    assert with_source(text, lambda *_: "again") == text
    assert where_it_stood(stopped(1, text)) == where_it_stood(stopped(1, IN_COLLECTIVE))


def test_a_folder_named_like_this_package() -> None:
    """A stack in a collective is one also if everything is installed below a folder with this package's name."""
    stack = STACK.format(
        "/home/a/firstfault/.venv/lib/python3.11/site-packages/torch/distributed/c10d.py", "all_reduce"
    )

    assert where_it_stood(stopped(1, stack)).stood is Stood.COLLECTIVE
