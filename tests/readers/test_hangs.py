"""Where ranks stood, how far they came in their collectives,
and deadlines that they did not keep.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from firstfault import model
from firstfault.evidence.progress import get_waited_ns, group_progress, parse_progress
from firstfault.exceptions.stack_position import (
    PositionKind,
    add_source_lines,
    format_stack_dump,
    locate_main_thread,
)
from firstfault.render.json_report import json_report
from firstfault.render.terminal import terminal_text
from firstfault.report import build_report
from firstfault.report.first_line import first_line
from firstfault.retry import decide
from firstfault.strategies import get_strategy
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error, make_job
from firstfault.wire.documents import decode, encode
from tests.readers.scenes import (
    IN_COLLECTIVE,
    IN_SLEEP,
    IN_TORCHS_WAIT,
    PEER_CLOSED,
    STACK,
    WAIT_TIMED_OUT,
    collectives_called,
    died,
    own_fault,
    reported_job,
    stopped,
    timed_out_in_collective,
    victim,
)

# --- where a stopped process stood, by its stack --------------------------------------------------


def test_the_same_hang_has_the_same_fingerprint() -> None:
    """By where it stood, without the line: the next attempt's verdict can be compared."""

    def hang(stack: str) -> str:
        return evidence(
            reported_job(
                *timed_out_in_collective(0, 1, 2), stopped(3, stack, **collectives_called(5))
            )
        ).fingerprint

    assert hang(IN_SLEEP) == hang(IN_SLEEP.replace("line 12", "line 14")) != ""
    assert hang(IN_SLEEP) != hang(STACK.format("/app/train.py", "save"))


def test_retries_after_a_timeout_do_not_stand_out() -> None:
    """Neither the counters of a rank that tries again after its timeout,
    nor a victim's dead thread, stand out.
    """
    dead = model.ThreadFailure(
        "metrics", None, model.ExceptionInfo("ConnectionError", "the server is away")
    )
    hangs = stopped(2, STACK.format("/app/train.py", "fault"))
    again = stopped(
        0, IN_SLEEP, log_tail=f"step 4 failed: {WAIT_TIMED_OUT}\n", **collectives_called(7)
    )
    verdict = evidence(
        reported_job(
            *timed_out_in_collective(3, **collectives_called(9)),
            victim(1, thread_failures=(dead,), **collectives_called(9)),
            again,
            hangs,
        )
    )
    assert (verdict.ranks, verdict.rule, verdict.confidence) == ((2,), "hang", "medium")


PYTHON, PACKAGES = "/usr/lib/python3.11", "/x/site-packages"
C10D = f"{PACKAGES}/torch/distributed/distributed_c10d.py"


def frames(*places: str, thread: str = "Thread 0x1") -> str:
    """Return a thread's stack: "file:line in function", the innermost first."""
    lines = "".join('  File "{}", line {}\n'.format(*place.rsplit(":", 1)) for place in places)
    return f"{thread} (most recent call first):\n{lines}"


@pytest.mark.parametrize(
    "stack",
    [
        frames() + "  Garbage-collecting\n  <no Python frame>\n",
        frames(f"{PYTHON}/threading.py:1590 in _shutdown"),
        frames(f"{PYTHON}/multiprocessing/util.py:360 in _exit_function"),
        frames(
            f"{PACKAGES}/torch/library.py:665 in _del_library",
            f"{PYTHON}/weakref.py:666 in _exitfunc",
        ),
        frames(
            f"{PACKAGES}/urllib3/connection.py:9 in request",
            f"{PACKAGES}/tracker/run.py:80 in _atexit_finish",
        ),
    ],
    ids=["no frame", "waits for threads", "waits for processes", "finalisers", "exit handlers"],
)
def test_a_main_thread_without_frames_had_ended(stack: str) -> None:
    """Python was about to end the process: nothing of the program is on the main thread's stack."""
    where = locate_main_thread(stopped(3, stack.replace("Thread", "Current thread")))
    assert where.exit_stage == "its program had ended"


def test_peers_lose_a_rank_that_leaves_its_group() -> None:
    """Its peers lose it before the call has come back. A victim that handles its
    peer's error may leave, too.
    """
    leaving = (
        f"{C10D}:9 in destroy_process_group",
        "/app/train.py:30 in main",
        "/app/train.py:40 in <module>",
    )
    rank = stopped(3, frames(*leaving, thread="Current thread 0x1"))
    job = reported_job(*(victim(rank, world_size=4) for rank in range(3)), rank)
    headline = (
        "ended early, rank 3 on worker-1: it was leaving the process group when its peers lost it"
    )
    assert evidence(job).headline == headline
    handles = reported_job(
        *job.failures[:3], replace(rank, log_tail=f"RuntimeError: {PEER_CLOSED.format(1)}")
    )
    assert evidence(handles).headline.startswith("undetermined")


POOL = (
    f"{PYTHON}/concurrent/futures/thread.py:58 in run",
    f"{PYTHON}/threading.py:1002 in _bootstrap",
)
IN_FETCH = "/app/data.py:5 in fetch"
IN_C10D = f"{PACKAGES}/torch/distributed/c10d.py:9 in all_reduce"
IN_DCP = f"{PACKAGES}/torch/distributed/checkpoint/utils.py:9 in reduce_scatter"
IN_QUEUE = f"{PYTHON}/queue.py:171 in get"


@pytest.mark.parametrize(
    ("thread", "stood", "frame"),
    [
        ((IN_FETCH,), PositionKind.ELSEWHERE, "data.py:5 in fetch"),
        ((IN_C10D, IN_FETCH), PositionKind.COLLECTIVE, "data.py:5 in fetch"),
        ((IN_DCP,), PositionKind.COLLECTIVE, "train.py:40 in main"),
        ((IN_QUEUE, IN_FETCH), PositionKind.ELSEWHERE, "train.py:40 in main"),
    ],
    ids=["works", "in a collective", "a library's, in a collective", "waits for work"],
)
def test_the_position_is_that_of_the_thread_it_waits_for(
    thread: tuple[str, ...], stood: PositionKind, frame: str
) -> None:
    """The position is that of the one thread that runs the program's own code for it."""
    loop = (f"{PYTHON}/selectors.py:468 in select", f"{PYTHON}/asyncio/runners.py:190 in run")
    main = frames(*loop, "/app/train.py:40 in main", thread="Thread 0x2")
    where = locate_main_thread(stopped(1, f"{frames(*thread, *POOL)}\n{main}"))
    assert (where.kind, where.frame) == (stood, frame)


def test_a_hook_waits_only_with_a_collective_outstanding() -> None:
    """A hook of the program waits there if a collective is outstanding; else it may hang."""
    backward = f"{PACKAGES}/torch/autograd/graph.py:979 in _engine_run_backward"
    text = frames("/app/train.py:95 in hook", backward, "/app/train.py:40 in main")
    assert locate_main_thread(stopped(1, text)).kind is PositionKind.ELSEWHERE
    assert (
        locate_main_thread(stopped(1, text, **collectives_called(5, completed=4))).kind
        is PositionKind.TORCH
    )
    # everything may be installed below a folder with this package's name
    file = "/home/a/firstfault/.venv/lib/python3.11/site-packages/torch/distributed/c10d.py"
    assert (
        locate_main_thread(stopped(1, STACK.format(file, "all_reduce"))).kind
        is PositionKind.COLLECTIVE
    )


def test_own_frames_of_a_stack_get_their_source_lines() -> None:
    """The program's own frames get their source line,
    which a person sees and the position does not change.
    """
    text = add_source_lines(IN_COLLECTIVE, lambda file, line: f"    {file}:{line}()\n")
    assert '  File "/app/train.py", line 40 in main\n    /app/train.py:40()' in format_stack_dump(
        text
    )
    assert text.count("()") == 1
    assert add_source_lines(text, lambda *_: "again") == text
    assert locate_main_thread(stopped(1, text)) == locate_main_thread(stopped(1, IN_COLLECTIVE))


# --- what torch's watchdogs print, beside or without a flight recorder ----------------------------


WORK = (
    "WorkNCCL(SeqNum=31, OpType=ALLREDUCE, NumelIn=512, NumelOut=512, Timeout(ms)=600000) ran for"
    " 600021 milliseconds"
)
TORCH_2_1 = (
    f"[E ProcessGroupNCCL.cpp:474] [Rank 2] Watchdog caught collective operation timeout: {WORK}\n"
)
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
OUTSTANDING = model.Collective(31, "ALLREDUCE", "512 -> 512 elements", state="started")
TOO_LARGE = (
    "CUDA out of memory. Tried to allocate 184.13 GiB. GPU 0 has a total capacity of 79.10 GiB"
)


@pytest.mark.parametrize(
    ("text", "progress"),
    [
        (TORCH_2_1, [model.CollectiveProgress("", "", 31, 30, (OUTSTANDING,))]),
        (TORCH_2_4, [model.CollectiveProgress("default_pg", "", 34, 30, (OUTSTANDING,))]),
        (
            TORCH_2_7,
            [
                model.CollectiveProgress("tensor (5)", "", 34, 30, (OUTSTANDING,)),
                model.CollectiveProgress("default_pg", "", 7, 7),
            ],
        ),
        *(
            (
                (
                    f"[PG ID 2 PG GUID 9{named} Rank 4] Timeout at work: 3, last enqueued work: 3,"
                    " last completed work: -1"
                ),
                [model.CollectiveProgress("9", "", 3, 0)],
            )
            for named in ("", "(undefined)")  # as the flight recorder's group of the same name
        ),
        ("Loading 3 shards\nlast enqueued work: 3\n", []),
        ("", []),
    ],
)
def test_watchdog_counters_are_read_for_each_torch(
    text: str, progress: list[model.CollectiveProgress]
) -> None:
    """The counters of each group, and the collective that is outstanding,
    are read in the words of each torch.
    """
    assert list(parse_progress(text)) == progress


@pytest.mark.parametrize(
    ("text", "waited_s"),
    [
        (TORCH_2_1.rstrip() + " before timing out.", 600.021),
        ("[E WorkNCCL.cpp:4] [TC][rank=2][name=0] Operation timed out after 600021 ms\n", 600.021),
        ("Operation timed out after 600021 ms", 0),
    ],
)
def test_the_time_waited_is_read_for_both_nccl_backends(text: str, waited_s: float) -> None:
    """The time is read in the words of both NCCL backends, and not in a program's own."""
    assert get_waited_ns(make_error(2, exception=None, log_tail=text)) == waited_s * 1e9


def test_a_watchdog_without_a_group_name_means_the_only_group() -> None:
    """The words of torch 2.1 name no group: they are about the one that the job has,
    if it has one.
    """
    silent = make_error(0, exception=None, log_tail=TORCH_2_1)
    spoken = make_error(
        1, collectives=(model.CollectiveProgress("world (0)", "nccl:all_reduce", 30, 30),)
    )
    recorded, printed = group_progress([silent, spoken])
    assert recorded.keys() == printed.keys() == {"world (0)"}
    assert (printed["world (0)"][0].enqueued, recorded["world (0)"][1].enqueued) == (31, 30)
    more = replace(
        spoken, collectives=(*spoken.collectives, model.CollectiveProgress("tensor (1)", "", 4, 4))
    )
    recorded, printed = group_progress([silent, more])
    assert printed.keys() == {""}


def stopped_with_counters(
    rank: int, enqueued: int, completed: int, **more: Any
) -> model.WorkerError:
    """A worker that its agent stopped, with the counters of its flight recorder."""
    progress = (model.CollectiveProgress("default_pg", "nccl:all_reduce", enqueued, completed),)
    return stopped(rank, **{"collectives": progress, "boot_id": "", **more})


def aborted(rank: int, printed: str, **more: Any) -> model.WorkerError:
    """A worker that a watchdog ended."""
    return died(rank, "SIGABRT", -6, log_tail=printed, boot_id="", **more)


def test_counters_and_a_log_together_name_the_rank_behind() -> None:
    """The rank that was stopped has counters, the one that aborted a log:
    together they name the one that is behind.
    """
    verdict = evidence(make_job(aborted(2, TORCH_2_4), stopped_with_counters(0, 30, 30)))
    assert (verdict.scope, verdict.ranks, verdict.category) == (model.Scope.RANK, (0,), "hang")
    assert "it called 30 collectives of group default_pg, its peers 34" in verdict.headline


@pytest.mark.parametrize("outstanding", [True, False])
def test_a_rank_that_did_not_call_the_collective_is_the_suspect(outstanding: bool) -> None:
    """Three ranks fail alike with a collective outstanding that the fourth has not called:
    it is the suspect.
    """
    fields = {
        "collectives": (
            model.CollectiveProgress("default_pg", "nccl:all_reduce", 10, 8 if outstanding else 10),
        )
    }
    failures = [
        own_fault(rank, 0, "torch.OutOfMemoryError", TOO_LARGE, world_size=4, **fields)
        for rank in range(3)
    ]
    verdict = evidence(make_job(*failures, stopped_with_counters(3, 8, 8)))
    assert verdict.ranks == ((3,) if outstanding else (0, 1, 2))
    assert verdict.confidence in ({"low"} if outstanding else {"low", "medium"})


@pytest.mark.parametrize("count", [77, 76])
def test_two_ranks_equally_behind_are_named_together(count: int) -> None:
    """Two ranks that are behind by the same are named together;
    with different counts both are suspects.
    """
    text = (
        "[PG ID 0 PG GUID 0(default_pg) Rank {}] failure detected by watchdog at work sequence id:"
        " 78 PG status: "
    )
    text += "last enqueued work: 79, last completed work: 77\n"
    waiting = [
        aborted(rank, f"[rank{rank}]:[E314 a.cpp:7] {text.format(rank)}")
        for rank in (0, 2, 3, 5, 6, 7)
    ]
    verdict = evidence(
        make_job(*waiting, stopped_with_counters(1, 77, 77), stopped_with_counters(4, count, count))
    )
    if count == 76:
        assert verdict.scope is model.Scope.UNDETERMINED
        assert {suspect.rank for suspect in verdict.suspects} == {1, 4}
        return
    assert (verdict.scope, verdict.ranks, verdict.confidence) == (model.Scope.RANKS, (1, 4), "low")
    assert (
        verdict.headline
        == "hang, ranks 1, 4: each called 77 collectives of group default_pg, its peers 79, "
        "and each did not time out while 6 peers waited in a collective"
    )
    assert {rank for rank, _ in verdict.victims.by_rank} == {0, 2, 3, 5, 6, 7}


def test_ranks_that_called_the_stuck_collective_wait() -> None:
    """Under NCCL a call only enqueues: who has called the stuck collective waits,
    however few it called since.
    """
    first = aborted(0, TORCH_2_4, collectives=stopped_with_counters(0, 14, 8).collectives)
    verdict = evidence(
        make_job(
            first,
            stopped_with_counters(1, 12, 8),
            stopped_with_counters(2, 12, 8),
            stopped_with_counters(3, 8, 8),
            stopped_with_counters(4, 11, 8),
        )
    )
    assert verdict.ranks == (3,)
    assert verdict.headline.endswith("it called 8 collectives of group default_pg, its peers 14")


# --- a worker that its agent killed for a deadline ------------------------------------------------


_STEP = frames("/app/train.py:53 in step")
_COLLECTIVE = frames(f"{C10D}:2800 in all_reduce", "/app/train.py:50 in step")
_GPU = frames(f"{PACKAGES}/torch/cuda/streams.py:227 in synchronize", "/app/train.py:51 in step")
_WAITS = (model.CollectiveProgress("default_pg", "all_reduce", 8, 7),)
_KEPT_UP = (model.CollectiveProgress("default_pg", "all_reduce", 7, 7),)


def _rank(rank: int, stack: str, **fields: Any) -> model.WorkerError:
    place = {"node": f"worker-{rank}", "local_rank": 0, "group_rank": rank, "world_size": 2}
    told = {
        "code": "USER:Hang",
        "message": "it hung",
        "exception": None,
        "writer": model.Writer.AGENT,
    }
    dumps = (model.StackDump(7, rank, stack),) if stack else ()
    error = make_error(rank, stack_dumps=dumps, **place, **told, **fields)
    return decode(encode(error), model.DocumentRef(f"e{rank}.pb"))  # type: ignore[return-value]


def _killed(
    rank: int,
    stack: str,
    at: int = 10,
    heartbeat: bool = False,
    **fields: Any,
) -> model.WorkerError:
    expired = model.ExpiredDeadline(
        "" if heartbeat else "train step",
        30.0,
        heartbeat,
        "train.py:50",
    )
    ended = {"exit_code": -9, "signal": "SIGKILL", "category": "hang", "expired": expired}
    return _rank(rank, stack, timestamp_ns=at, **{**ended, **fields})


def test_a_rank_killed_after_its_return_has_no_line() -> None:
    """A rank that had returned was killed at no line, and the headline has the reason instead."""
    verdict = evidence(make_job(_killed(1, IN_TORCHS_WAIT)))
    assert verdict.headline.endswith(': "train step" exceeded 30 s: its function had returned')


def _stopped(rank: int, stack: str, **fields: Any) -> model.WorkerError:
    sent = (model.SentSignal("SIGTERM", "rank 1 on worker-1 failed"),)
    return _rank(
        rank,
        stack,
        timestamp_ns=20,
        exit_code=-15,
        signal="SIGTERM",
        sent_signals=sent,
        **fields,
    )


@pytest.mark.parametrize("strategy", ["evidence", "earliest"])
@pytest.mark.parametrize(
    ("stack", "heartbeat", "told"),
    [
        (_STEP, False, '"train step" exceeded 30 s at train.py:53'),
        (_STEP, True, "no ping for 30 s at train.py:53"),
        ("", False, '"train step" exceeded 30 s'),
    ],
    ids=["a block", "a loop", "a frozen process gives no stack"],
)
def test_a_hang_outside_of_a_collective_is_the_root_cause(
    strategy: str,
    stack: str,
    heartbeat: bool,
    told: str,
) -> None:
    """It is the root cause, a hang without a retry,
    and the first line names the deadline and its line.
    """
    verdict = get_strategy(strategy)(
        make_job(_killed(1, stack, heartbeat=heartbeat), _stopped(0, _COLLECTIVE))
    )
    assert (verdict.ranks, verdict.category, verdict.code) == ((1,), "hang", "USER:Hang")
    decision = decide(verdict)
    assert not decision.retry
    assert first_line(verdict, decision) == f"hang rank 1 worker-1 no retry: {told}"
    assert verdict.victims.count == 1


@pytest.mark.parametrize(("stack", "waits"), [(_COLLECTIVE, ()), (_GPU, _WAITS)])
def test_a_deadline_in_a_collective_blames_the_rank_elsewhere(
    stack: str, waits: tuple[model.CollectiveProgress, ...]
) -> None:
    """A deadline that ends a wait in a collective accuses the rank that was elsewhere,
    not the one that waited.
    """
    waited = _killed(0, stack, collectives=waits)
    stopped_or_later = (
        _stopped(1, _STEP, collectives=_KEPT_UP if waits else ()),
        _killed(1, _STEP, at=20),
    )
    for other in stopped_or_later:
        verdict = evidence(make_job(waited, other))
        assert (verdict.ranks, verdict.category) == ((1,), "hang")


def test_no_rank_stands_out_if_all_waited_in_one_collective() -> None:
    """Then no rank stands out, and the headline has the deadline and
    the rank that missed it.
    """
    verdict = evidence(make_job(_killed(0, _COLLECTIVE), _stopped(1, _COLLECTIVE)))
    assert (verdict.ranks, verdict.category) == ((), "hang")
    text = 'undetermined: "train step" exceeded 30 s on rank 0, in a collective, no rank stands out'
    assert verdict.headline == text


def test_waits_in_different_collectives_blame_no_rank() -> None:
    """Then the headline has each rank's call, and blames none."""

    def called(operation: str) -> tuple[model.CollectiveProgress, ...]:
        call = model.Collective(16, f"gloo:{operation}", "[[3]] -> [[3]]", "Float -> Float")
        return (model.CollectiveProgress("default_pg", call.operation, 16, 15, (call,)),)

    lost = make_error(
        1,
        at_ms=9000,
        exception="RuntimeError",
        message="Connection closed by peer [127.0.0.1]:234",
        collectives=called("broadcast"),
    )
    verdict = evidence(make_job(_killed(0, _COLLECTIVE, collectives=called("all_reduce")), lost))
    assert (verdict.ranks, verdict.category) == ((), "hang")
    assert verdict.headline.startswith(
        'undetermined: "train step" exceeded 30 s on rank 0, in different collectives: rank 0 in'
        " all_reduce at "
    )
    assert ", rank 1 in broadcast at " in verdict.headline


def test_a_report_has_the_deadlines_scope_seconds_and_place() -> None:
    """The report's facts and its JSON name scope, seconds and where the block began;
    the signal is the agent's.
    """
    job = make_job(_killed(1, _STEP), _stopped(0, _COLLECTIVE))
    verdict = evidence(job)
    report = build_report(job, verdict, decide(verdict))
    root = json.loads(json_report(report))["root"]
    assert root["deadline"] == {
        "scope": "train step",
        "seconds": 30.0,
        "heartbeat": False,
        "since": "train.py:50",
    }
    text = terminal_text(report, verbose=True)
    assert '\n  Deadline: "train step" exceeded 30 s, started at train.py:50\n' in text
    assert "which process sent SIGKILL" not in text


IN_LOADER = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 947 in wait
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 113 in get
  File "/x/site-packages/torch/utils/data/dataloader.py", line 1291 in _try_get_data
  File "/x/site-packages/torch/utils/data/dataloader.py", line 725 in __next__
  File "/app/train.py", line 7 in <module>
"""


def test_a_hang_in_a_data_loader_says_what_the_rank_waited_for() -> None:
    """The verdict on a hang tells that the rank itself waited, for a process of its own."""
    verdict = evidence(reported_job(*timed_out_in_collective(0, 1, 2), stopped(3, IN_LOADER)))
    assert verdict.headline.startswith(
        "hang, rank 3 on worker-1: it waited for a process of its data loader at train.py:7 in"
        " <module> while "
    )


def test_a_process_stopped_while_python_ended_is_told_by_its_output() -> None:
    """The process was stopped while Python ended; what it had printed tells why,
    if it tells of a fault of its own.
    """
    ends = (
        'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 1590'
        " in _shutdown\n"
    )
    trace = (
        'Traceback (most recent call last):\n  File "/app/train.py", line 24, in main\nOSError: no'
        " file left\n"
    )
    verdict = evidence(
        reported_job(victim(0), victim(1), victim(2), stopped(3, ends, log_tail=trace))
    )
    assert verdict.headline.startswith("OSError, rank 3 on worker-1: no file left")
