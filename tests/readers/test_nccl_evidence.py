"""What deaths of NCCL's ranks say: watchdogs, dump signals, native code; and what stderr says that is no evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.evidence import Role, classify
from firstfault.evidence.classification import FailureClass, classify_failures
from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.exceptions.stderr import text_of_death
from firstfault.model import (
    Collective,
    CollectiveProgress,
    ExceptionInfo,
    FrameInfo,
    Phase,
    Resources,
    Scope,
    SentSignal,
    StackDump,
    Writer,
)
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error, make_job, make_presence

if TYPE_CHECKING:
    from firstfault.model import JobErrors, Verdict, WorkerError

PER_NODE = 4
WATCHDOG = (
    "[rank{rank}]:[E314 09:26:53.589793 ProcessGroupNCCL.cpp:640] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=512, NumelOut=512, Timeout(ms)=90000) ran for "
    "90012 milliseconds before timing out.\n"
    "[rank{rank}]:[E314 09:26:54.264338 ProcessGroupNCCL.cpp:690] [Rank {rank}] To avoid data inconsistency, we are "
    "taking the entire process down.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
)
ASSERTED = "/build/Loss.cu:77: nll: block: [0,0,0], thread: [5,0,0] Assertion `t >= 0 && t < n_classes` failed.\n"
CRASH = (
    "Fatal Python error: Segmentation fault\n\nThread 0x00007f0000000001 (most recent call first):\n"
    '  File "/job/a.py", line 3 in step\n\n'
    "Extension modules: numpy._core, aiohttp._websocket, s3fs.core (total: 3)\n"
)
LOGGED_DISK = "2031-05-01 WARNING cache: [Errno 28] No space left on device: '/tmp/c'; going on without a cache\n"
LOGGED_PEER = "2031-05-01 WARNING probe: RuntimeError: Connection closed by peer [10.1.2.3]:4242; trying again\n"


def timed_out(rank: int, number: int = 31, operation: str = "ALLREDUCE") -> str:
    """What a rank's watchdog printed."""
    return WATCHDOG.format(rank=rank, number=number, operation=operation)


def died(rank: int, stderr: str = "", signal: str = "SIGABRT", at_ms: float = 0, **more: Any) -> WorkerError:
    """A worker that its agent did not stop."""
    return make_error(
        rank,
        node=f"worker-{rank // PER_NODE}",
        at_ms=at_ms,
        exception=None,
        writer=Writer.AGENT,
        **{"signal": signal, "exit_code": -6, "log_tail": stderr, **more},
    )


def stopped(rank: int, stderr: str = "") -> WorkerError:
    """A worker that its agent stopped."""
    return died(rank, stderr, "SIGTERM", 15_000, sent_signals=(SentSignal("SIGTERM", "rank 0 failed"),))


def job(*failures: WorkerError, nodes: int = 2) -> JobErrors:
    """A job of which every node has reported."""
    roster = tuple(
        make_presence(node=f"worker-{node}", group_rank=node, nodes=nodes, ranks=tuple(range(4 * node, 4 * node + 4)))
        for node in range(nodes)
    )
    return make_job(*failures, roster=roster)


# --- watchdogs --------------------------------------------------------------------------------------------------------


def test_the_rank_that_did_not_time_out() -> None:
    """Seven ranks timed out; the eighth was stopped, or came too late and found the others gone."""
    waiting = [died(rank, timed_out(rank)) for rank in range(7)]
    late = died(7, "NCCL WARN socketProgress: Connection closed by remote peer worker-0<4711>", at_ms=30_000)
    for eighth in (stopped(7), late):
        verdict = evidence(job(*waiting, eighth))
        assert (verdict.scope, verdict.ranks, verdict.category) == (Scope.RANK, (7,), "hang")
        assert verdict.confidence == "medium"


def test_a_rank_that_timed_out_before_it_was_stopped() -> None:
    """Its stderr says that it waited too: it is no suspect."""
    waiting = [died(rank, timed_out(rank)) for rank in range(5)]
    verdict = evidence(
        job(*waiting, stopped(5, timed_out(5)), stopped(6, timed_out(6)), stopped(7, "loading shard 9\n"))
    )
    assert verdict.ranks == (7,)


def test_the_fingerprint_of_a_stopped_rank_says_whether_it_waited() -> None:
    """A reader opens some documents of each fingerprint: the one that did not wait must have its own."""
    prints = [fingerprint_of(stopped(rank, text)) for rank, text in ((1, timed_out(1)), (2, timed_out(2)), (3, ""))]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("silent", [2, 4, 6])
def test_too_few_timed_out(silent: int) -> None:
    """The first abort ends the others early: where many did not time out, none stands out."""
    waiting = [died(rank, timed_out(rank)) for rank in range(silent, 4)] or [died(0, timed_out(0))]
    verdict = evidence(job(*waiting, *(stopped(rank) for rank in range(len(waiting), 8))))
    assert verdict.scope is Scope.UNDETERMINED


def test_all_ranks_of_a_node_in_one_collective() -> None:
    """No rank was missing: the node is named, with low confidence."""
    failures = [died(rank, timed_out(rank), world_size=4) for rank in range(4)]
    verdict = evidence(job(*failures, nodes=1))
    assert (verdict.scope, verdict.node, verdict.category, verdict.confidence) == (
        Scope.NODE,
        "worker-0",
        "network",
        "low",
    )
    assert "all 4 ranks waited in ALLREDUCE number 31" in verdict.headline
    failures[2] = died(2, timed_out(2, 32, "BROADCAST"), world_size=4)
    assert evidence(job(*failures, nodes=1)).scope is Scope.UNDETERMINED


def test_a_desync_report_names_a_rank() -> None:
    """Torch's own comparison of the ranks' collectives is evidence against the rank that it names."""
    report = (
        "[rank0]:[E314 ProcessGroupNCCL.cpp:1950] Rank 0\n"
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
        "\t   [6] finished collective #4, but didn't join collective #5 (count from 1)\n"
    )
    verdict = evidence(job(died(0, timed_out(0) + report), *(stopped(rank) for rank in range(1, 8))))
    assert verdict.ranks == (6,)


@pytest.mark.parametrize(
    ("enqueued", "completed", "role"),
    [
        (9, 9, Role.AMBIGUOUS),
        (10, 9, Role.SECONDARY),
        (123456, 123455, Role.SECONDARY),
        (123456, 123456, Role.AMBIGUOUS),
    ],
)
def test_a_dump_signal(enqueued: int, completed: int, role: Role) -> None:
    """A rank with a collective outstanding waits as well; one without may be the one that the others wait for."""
    text = (
        "[PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout from  rank 5 and we "
        f"will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: "
        f"{completed}."
    )
    assert classify(text).role is role
    # through the cache, which knows texts without their numbers
    (judged,) = classify_failures(make_job(died(2, text)))
    wanted = FailureClass.CONSEQUENCE if role is Role.SECONDARY else FailureClass.UNCLEAR
    assert judged.failure_class is wanted
    assert judged.pointer is None, "the rank that signals first is the first victim"


@pytest.mark.parametrize(("asked", "role"), [("96.00 GiB", Role.AMBIGUOUS), ("96.00 MiB", Role.PRIMARY)])
def test_more_memory_than_the_gpu_has(asked: str, role: Role) -> None:
    """A size that no model asks for may be rubbish from a collective that was given up."""
    text = (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 1 has a total capacity of 39.50 GiB of which 3.00 GiB is."
    )
    found = classify(text, "torch.OutOfMemoryError")
    assert (found.role, found.category) == (role, "cuda_oom")


IN_CUDA = (
    "Current thread 0x1 (most recent call first):\n"
    '  File "/usr/lib/python3.11/site-packages/torch/cuda/__init__.py", line 985 in synchronize\n'
    '  File "/job/train.py", line 80 in step\n'
)
IN_LOADER = 'Current thread 0x1 (most recent call first):\n  File "/job/data.py", line 31 in next_batch\n'
REMOTE = (
    "NCCL error in: NCCLUtils.hpp:7, remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketProgress: Connection closed by remote peer worker-0<4711>"
)
STUCK = (
    "[rank7]:[F314 09:26:53 ProcessGroupNCCL.cpp:1570] [PG ID 0 PG GUID 0(default_pg) Rank 7] Terminating the process "
    "after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.\n"
)


def _signalled(rank: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E314 09:26:53 ProcessGroupNCCL.cpp:1750] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received "
        "a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last "
        f"enqueued NCCL work: 31, last completed NCCL work: {completed}.\n"
    )


def _at(rank: int, stack: str) -> WorkerError:
    return replace(stopped(rank), stack_dumps=(StackDump(1, rank, stack),))


def _raised(rank: int, kind: str, message: str, at_ms: float) -> WorkerError:
    return make_error(
        rank, node=f"worker-{rank // PER_NODE}", at_ms=at_ms, exception=kind, message=message, boot_id="b"
    )


FIRST = died(0, timed_out(0))
ALL_BUT_ONE = [died(rank, timed_out(rank), at_ms=90_000 + rank, boot_id="b") for rank in range(7)]
CUDA = "[rank7]:[E3 9:2 ProcessGroupNCCL.cpp:2] Process group watchdog thread terminated with exception: CUDA error: "


@pytest.mark.parametrize(
    ("failures", "category"),
    [
        ([FIRST, *(_at(rank, IN_CUDA) for rank in range(1, 7)), _at(7, IN_LOADER)], "hang"),
        (
            [FIRST, *(stopped(rank, _signalled(rank, 30)) for rank in range(1, 7)), stopped(7, _signalled(7, 31))],
            "hang",
        ),
        ([*ALL_BUT_ONE, died(7, STUCK, at_ms=80_000)], "hang"),
        ([*ALL_BUT_ONE, _raised(7, "torch.distributed.DistBackendError", REMOTE, 120_000)], "hang"),
        (
            [
                *ALL_BUT_ONE[1:],
                _raised(0, "RuntimeError", "expects same model across all ranks, but inconsistent 0 params", 95_000),
                stopped(7),
            ],
            "hang",
        ),
        ([*ALL_BUT_ONE, died(7, CUDA + "uncorrectable ECC error encountered\n", at_ms=90_500)], "gpu_hardware"),
        ([*ALL_BUT_ONE, died(7, "", "SIGKILL", resources=Resources(oom_kill=1))], "host_oom"),
    ],
    ids=[
        "first abort ended the others; one stack is in the loader",
        "one rank had nothing outstanding",
        "one watchdog was stuck",
        "one came late",
        "the abort let a victim run on",
        "ECC",
        "OOM killer",
    ],
)
def test_a_cascade(failures: list[WorkerError], category: str) -> None:
    """Rank 7 is the root cause."""
    verdict = evidence(job(*failures))
    assert (verdict.ranks, verdict.category) == ((7,), category)


def test_a_lost_node() -> None:
    """The survivors' adapters get no answer, and the node never reports."""
    text = "w:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4711> with status=12 opcode=0 len=0 (Recv)\n"
    text += "w:1:2 [0] NCCL INFO transport/net.cc:1302 -> 6\n"
    verdict = evidence(
        make_job(
            *(died(rank, text, group_world_size=2) for rank in range(4)),
            roster=(
                make_presence(node="worker-0", nodes=2, ranks=(0, 1, 2, 3)),
                make_presence(Phase.JOINED, node="worker-1", group_rank=1, nodes=2, ranks=(4, 5, 6, 7)),
            ),
        )
    )
    assert (verdict.scope, verdict.node, verdict.category) == (Scope.NODE, "worker-1", "node_lost")


# --- flight recorders ------------------------------------------------------------------------------------------------

REDUCE = Collective(9, "nccl:all_reduce", "[[8]] -> [[8]]", "Float -> Float", "started")


def _progress(
    *last: Collective, group: str = "default_pg", completed: int | None = None, members: tuple[int, ...] = ()
) -> CollectiveProgress:
    number = last[-1].sequence if last else 8
    name = last[-1].operation if last else "nccl:all_reduce"
    return CollectiveProgress(group, name, number, number - 1 if completed is None else completed, last, members)


def _hung(progress: dict[int, tuple[CollectiveProgress, ...]]) -> Verdict:
    """Return the verdict on a job whose ranks had this progress; rank 0's watchdog ended it."""
    first = died(0, timed_out(0), collectives=progress[0])
    others = [replace(stopped(rank), collectives=seen) for rank, seen in progress.items() if rank]
    return evidence(job(first, *others))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (replace(REDUCE, operation="nccl:broadcast"), "as collective 9 of group default_pg it called broadcast"),
        (replace(REDUCE, dtypes="Half -> Half"), "it used Half -> Half, the others Float -> Float"),
        (replace(REDUCE, sizes="[[4]] -> [[4]]"), "it passed [[4]] -> [[4]], the others [[8]] -> [[8]]"),
        (replace(REDUCE, state="scheduled"), "it had not started the last collective of group default_pg"),
    ],
    ids=["operation", "type", "size", "state"],
)
def test_a_rank_that_differs_in_a_collective(odd: Collective, why: str) -> None:
    """Torch's analyzer's rules: the odd one out in operation, type, size, or whether its GPU has started."""
    verdict = _hung({rank: (_progress(odd if rank == 6 else REDUCE),) for rank in range(8)})
    assert verdict.ranks == (6,)
    assert why in verdict.headline


def test_the_first_collective_of_a_group() -> None:
    """The rank that has called none is behind, however far each of the others has run ahead."""
    called = {0: 7, 1: 5, 2: 6, 3: 0}
    progress = {
        rank: (CollectiveProgress("default_pg", "nccl:all_reduce", count, 0),) for rank, count in called.items()
    }
    verdict = _hung(progress)
    assert (verdict.category, verdict.ranks) == ("hang", (3,))
    assert "it called 0 collectives of group default_pg" in verdict.headline


def test_ranks_that_ran_ahead_of_a_mismatch() -> None:
    """The first collective in which a rank differs counts, not the last one."""
    usual = tuple(replace(REDUCE, sequence=number) for number in (7, 8, 9))
    odd = (replace(REDUCE, sequence=7, operation="nccl:all_gather"), *usual[1:])
    verdict = _hung({rank: (_progress(*(odd if rank == 3 else usual)),) for rank in range(8)})
    assert verdict.ranks == (3,)
    assert "as collective 7" in verdict.headline


def test_sizes_that_may_differ() -> None:
    """A gather's ranks pass different sizes by design."""
    calls = [replace(REDUCE, operation="nccl:gather", sizes=f"[[8]] -> [[{rank}]]") for rank in range(8)]
    assert _hung({rank: (_progress(calls[0 if rank < 7 else 7]),) for rank in range(8)}).scope is Scope.UNDETERMINED


def test_the_group_that_is_stuck_first_explains_the_others() -> None:
    """Rank 1 is late for its tensor group because it waits in its pipeline group for rank 5, which is late there."""
    tensor, pipeline = "tensor (1)", "pipeline (2)"
    verdict = _hung(
        {
            0: (_progress(REDUCE, group=tensor),),
            1: (
                _progress(replace(REDUCE, sequence=8), group=tensor, completed=8),
                _progress(replace(REDUCE, sequence=4), group=pipeline),
            ),
            5: (_progress(replace(REDUCE, sequence=3), group=pipeline, completed=3),),
        }
    )
    assert verdict.ranks == (5,)
    assert "pipeline (2)" in verdict.headline


def test_a_member_that_has_called_no_collective_of_its_group() -> None:
    """It is in no dump of the group; the group's members tell that it is missing."""
    group = {"group": "tensor (1)", "members": (0, 1, 2)}
    verdict = _hung({0: (_progress(REDUCE, **group),), 1: (_progress(REDUCE, **group),), 2: (_progress(REDUCE),)})
    assert verdict.ranks == (2,)


# --- what stderr is worth ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stderr", "signal"),
    [
        (CRASH, "SIGSEGV"),
        (LOGGED_DISK, "SIGKILL"),
        (LOGGED_DISK + CRASH, "SIGSEGV"),
        (LOGGED_PEER + "epoch 3\nepoch 4\nterminate called after throwing an instance of 'Oops'\n", "SIGABRT"),
        (LOGGED_DISK + "epoch 3\nepoch 4\n", "SIGABRT"),
    ],
    ids=["loaded modules", "handled before a kill", "handled before a crash", "a peer long ago", "a disk long ago"],
)
def test_what_does_not_belong_to_the_death(stderr: str, signal: str) -> None:
    """An error that was handled and logged gives an end by a signal neither a cause nor a category."""
    (judged,) = classify_failures(make_job(died(3, stderr, signal)))
    assert (judged.failure_class, judged.category, judged.signature) == (FailureClass.OWN_EXIT, "", "")


@pytest.mark.parametrize(
    ("stderr", "signal", "category"),
    [
        (ASSERTED + "terminate called after throwing an instance of 'c10::Error'\n", "SIGABRT", "gpu_kernel"),
        (
            "epoch 3\n[rank3]:[E1 1:2 a.cpp:7] CUDA error: uncorrectable ECC error encountered\n",
            "SIGABRT",
            "gpu_hardware",
        ),
        ("epoch 3\nMisc: shm.cc NCCL WARN Error: failed to extend /dev/shm/nccl-Ab to 9 bytes\n", "SIGBUS", "config"),
        (
            'Traceback (most recent call last):\n  File "a.py", line 1\nOSError: [Errno 28] No space left\n',
            "",
            "disk_full",
        ),
    ],
)
def test_what_belongs_to_the_death(stderr: str, signal: str, category: str) -> None:
    """What native code printed, and the last traceback of a process that exited, tell the cause."""
    exit_code = -6 if signal else 1
    (judged,) = classify_failures(make_job(died(3, LOGGED_PEER + stderr, signal, exit_code=exit_code)))
    assert (judged.failure_class, judged.category) == (FailureClass.OWN_FAULT, category)


def test_the_last_traceback_counts() -> None:
    """Of two tracebacks the first was handled: the process went on after it."""
    first = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: old\n'
    text = f"{first}epoch 2\n{first.replace('old', 'new')}"
    assert text_of_death(text, "") == first.replace("old", "new").strip()


def test_the_time_for_any_stderr_is_bounded() -> None:
    """Lines of any shape take linear time."""
    for line in (":1:" * 20_000, "[E1 " * 20_000, "Assertion `" * 8000, " " * 60_000, "\n" * 60_000):
        text_of_death(line, "SIGABRT")  # pytest-timeout would end it


def test_deaths_by_one_signal_are_one_fault_only_if_they_say_the_same() -> None:
    """A device-side assertion on one rank is not joined with other aborts."""
    aborted = "terminate called without an active exception\n"
    verdict = evidence(job(died(5, ASSERTED), *(died(rank, aborted) for rank in (0, 1, 2))))
    assert verdict.ranks == (5,)
    assert evidence(job(*(died(rank, ASSERTED) for rank in (2, 3)))).ranks == (2, 3)


# --- exits ------------------------------------------------------------------------------------------------------------

PEER_GONE = ExceptionInfo(
    "RuntimeError", "gloo/tcp/pair.cc:9] Connection closed by peer [10.1.2.3]:4242", relation="context"
)
NO_LABEL = ExceptionInfo("KeyError", "'label'", relation="context")


@pytest.mark.parametrize(
    ("cause", "failure_class"),
    [(PEER_GONE, FailureClass.CONSEQUENCE), (NO_LABEL, FailureClass.OWN_FAULT), (None, FailureClass.OWN_EXIT)],
    ids=["a peer's end", "an own fault", "nothing"],
)
def test_an_exit_is_what_led_to_it(cause: ExceptionInfo | None, failure_class: FailureClass) -> None:
    """``except Exception: sys.exit(1)`` makes a victim's exit no fault of its own."""
    exit_ = ExceptionInfo("SystemExit", "1", causes=(cause,) if cause is not None else ())
    (judged,) = classify_failures(make_job(make_error(3, exception=exit_)))
    assert judged.failure_class is failure_class


def test_an_exception_raised_from_none() -> None:
    """The context that ``from None`` hides still tells that it is a consequence."""
    own = ExceptionInfo("train.StepError", "step failed", causes=(PEER_GONE,))
    (judged,) = classify_failures(make_job(make_error(3, exception=own)))
    assert judged.failure_class is FailureClass.CONSEQUENCE


def test_an_error_that_a_checkpoint_spreads_to_all_ranks() -> None:
    """torch.distributed.checkpoint raises one rank's error on every rank."""
    text = "CheckpointException ranks:dict_keys([3])\nTraceback (most recent call last): (RANK 3)\nOSError: disk gone\n"
    frame = FrameInfo("/x/site-packages/torch/distributed/checkpoint/utils.py", 7, "reduce_scatter", "raise")
    raised = ExceptionInfo("torch.distributed.checkpoint.api.CheckpointException", text, ("BaseException",), (frame,))
    verdict = evidence(job(*(make_error(rank, node=f"worker-{rank // 4}", exception=raised) for rank in range(8))))
    assert (verdict.ranks, verdict.category) == ((3,), "checkpoint")


def test_what_a_program_made_of_the_agents_signal() -> None:
    """A library that wraps the exception of a signal handler has not failed."""
    told = ExceptionInfo("torch.distributed.elastic.multiprocessing.api.SignalException", "got signal: 15")
    wrapped = ExceptionInfo("OSError", "cannot load", causes=(told,))
    sent = (SentSignal("SIGTERM", "rank 0 failed"),)
    (judged,) = classify_failures(make_job(make_error(3, exception=wrapped, sent_signals=sent)))
    assert judged.failure_class is FailureClass.CONSEQUENCE


def test_an_exception_whose_clean_up_outlasts_the_others_patience() -> None:
    """Seven ranks timed out while rank 7 was still cleaning up after its exception: the exception is the root cause."""
    boot = {"boot_id": "b", "world_size": 8}
    waiting = [died(rank, timed_out(rank), at_ms=100 + rank, **boot) for rank in range(7)]
    raised = make_error(
        7,
        node="worker-1",
        at_ms=400,
        message="bad batch",
        in_flight=True,
        sent_signals=(SentSignal("SIGTERM", "rank 0 failed"),),
        stack_dumps=(StackDump(1, 7, IN_LOADER),),
        **boot,
    )
    verdict = evidence(job(*waiting, raised))
    assert (verdict.ranks, verdict.category, verdict.confidence) == ((7,), "user_code", "medium")
    assert verdict.headline == "ValueError, rank 7 on worker-1: bad batch"


def test_an_exit_after_a_peers_end() -> None:
    """A script that a shell runs leaves no exception: its last traceback tells that it is a victim."""
    text = f'epoch 3\nTraceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: {PEER_GONE.message}\n'
    (judged,) = classify_failures(make_job(died(3, text, "", exit_code=1)))
    assert (judged.failure_class, judged.signature) == (FailureClass.CONSEQUENCE, "gloo-peer")
