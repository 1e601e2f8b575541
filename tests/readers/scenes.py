"""Failures and jobs for tests of the strategy `evidence`: two ranks on each node, one boot."""

from dataclasses import replace
from typing import Any

from firstfault import model
from firstfault.testing import make_error, make_job, make_presence

BOOT = "0f0f"
PEER_CLOSED = "[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.{}]:4711"
WAIT_TIMED_OUT = "Timed out waiting 6000ms for recv operation to complete"
STACK = (
    'Thread 0x1 (most recent call first):\n  File "{}", line 12 in {}\n  File "/app/train.py", line'
    " 40 in main\n"
)
IN_COLLECTIVE = STACK.format("/x/site-packages/torch/distributed/distributed_c10d.py", "all_reduce")
IN_SLEEP = STACK.format("/app/train.py", "load")
IN_TORCHS_WAIT = (
    "Thread 0x1 (most recent call first):\n  File"
    ' "/x/lib/python3.11/multiprocessing/synchronize.py", line 6 in wait\n  File'
    ' "/x/site-packages/torch/distributed/elastic/multiprocessing/api.py", line 708 in _wrap\n '
    ' File "/app/launch.py", line 9 in main\n'
)
TOO_LONG = "[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 160 vs 16"
WATCHDOG = (
    "[rank{rank}]:[E314 09:26:53.589793 ProcessGroupNCCL.cpp:640] [Rank {rank}] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn=512,"
    " NumelOut=512, Timeout(ms)=90000) ran for 90012 milliseconds before timing"
    " out.\n[rank{rank}]:[E314 09:26:54.264338 ProcessGroupNCCL.cpp:690] [Rank {rank}] To avoid"
    " data inconsistency, we are taking the entire process down.\nterminate called after throwing"
    " an instance of 'c10::DistBackendError'\n"
)


def own_fault(
    rank: int,
    at_ms: float = 0,
    exception: str = "ValueError",
    message: str = "bad batch",
    **more: Any,
) -> model.WorkerError:
    """A worker with an exception of its own."""
    fields = {
        "boot_id": BOOT,
        "monotonic_ns": int((at_ms + 10_000) * 1e6),
        "node": f"worker-{rank // 2}",
        **more,
    }
    return make_error(rank, at_ms=at_ms, exception=exception, message=message, **fields)


def victim(rank: int, at_ms: float = 40, peer: int = 1, **more: Any) -> model.WorkerError:
    """A worker that names a peer."""
    return own_fault(rank, at_ms, "RuntimeError", PEER_CLOSED.format(peer), **more)


def timed_out_waiting(rank: int, at_ms: float = 6000, **more: Any) -> model.WorkerError:
    """A worker that timed out waiting."""
    return own_fault(rank, at_ms, "RuntimeError", WAIT_TIMED_OUT, **more)


def died(
    rank: int,
    signal: str = "SIGKILL",
    code: int = -9,
    at_ms: float = 50,
    **more: Any,
) -> model.WorkerError:
    """A worker that ended without an exception, as its agent reports."""
    return own_fault(
        rank,
        at_ms,
        writer=model.Writer.AGENT,
        signal=signal,
        exit_code=code,
        **{"exception": None, **more},
    )


def stopped(rank: int, stack: str = "", **more: Any) -> model.WorkerError:
    """A worker that its agent stopped."""
    dumps = (model.StackDump(1, rank, stack),) if stack else ()
    sent = (model.SentSignal("SIGTERM", "rank 9 failed"),)
    return died(rank, "SIGTERM", -15, 6100, sent_signals=sent, stack_dumps=dumps, **more)


def agent_failure(
    group_rank: int, category: str, at_ms: float = 0, **more: Any
) -> model.WorkerError:
    """Something about an agent."""
    fields = {
        "subject": model.Subject.AGENT,
        "writer": model.Writer.AGENT,
        "category": category,
        "node": f"worker-{group_rank}",
    }
    failure = own_fault(0, at_ms, **{**fields, "exception": None, "group_rank": group_rank, **more})
    return replace(failure, place=replace(failure.place, rank=None))


def reported_job(*failures: model.WorkerError, nodes: int = 2, **more: Any) -> model.JobErrors:
    """A job of which every node has reported."""
    roster = tuple(
        make_presence(
            model.Phase.FAILED,
            node=f"worker-{node}",
            group_rank=node,
            nodes=nodes,
            ranks=(2 * node, 2 * node + 1),
        )
        for node in range(nodes)
    )
    return make_job(*failures, **{"roster": roster, **more})


def aborted_by_gloo(rank: int) -> model.WorkerError:
    """A worker that gloo aborted for a message that is too long."""
    text = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what(): "
        f" {TOO_LONG}"
    )
    return died(rank, "SIGABRT", -6, log_tail=text)


def lost_peer_in_collective(rank: int, size: int) -> model.WorkerError:
    """A worker that lost its peer in collective 4, with the size that it passed."""
    call = model.Collective(4, "gloo:all_reduce", f"[[{size}]] -> [[{size}]]")
    return victim(
        rank,
        collectives=(model.CollectiveProgress("default_pg", "gloo:all_reduce", 4, 4, (call,)),),
    )


def one_collective_ahead(failure: model.WorkerError) -> model.WorkerError:
    """A rank that has called one collective more."""
    (progress,) = failure.collectives
    number = progress.enqueued + 1
    last = (*progress.last, replace(progress.last[-1], sequence=number, sizes="[[4]] -> [[4]]"))
    return replace(
        failure, collectives=(replace(progress, enqueued=number, completed=number, last=last),)
    )


def flyte_error(message: str, at_ms: float) -> model.WorkerError:
    """A file of Flyte's own."""
    text = f"Trace:\n\n    Traceback (most recent call last):\n\nMessage:\n\n    {message}"
    return make_error(
        None,
        at_ms=at_ms,
        node="",
        exception=None,
        message=text,
        writer=model.Writer.STOCK,
    )


def collectives_called(
    enqueued: int, operation: str = "allreduce", completed: int | None = None
) -> dict[str, Any]:
    """How many collectives a rank had called."""
    return {
        "collectives": (model.CollectiveProgress("default_pg", operation, enqueued, completed),)
    }


def timed_out_in_collective(*ranks: int, **more: Any) -> list[model.WorkerError]:
    """Workers that timed out in collective 6."""
    return [timed_out_waiting(rank, **{**collectives_called(6), **more}) for rank in ranks]


def watchdog_output(rank: int, number: int = 31, operation: str = "ALLREDUCE") -> str:
    """What a rank's watchdog printed."""
    return WATCHDOG.format(rank=rank, number=number, operation=operation)


def crashed_while_stopped(rank: int) -> model.WorkerError:
    """A worker that crashed while its agent stopped it."""
    return replace(stopped(rank), signal="SIGSEGV", exit_code=-11)
