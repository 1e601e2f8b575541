"""The strategy `evidence`: faults and victims, inferred root causes, and what clocks can tell."""

from dataclasses import replace
from typing import Any

import pytest

from firstfault import model
from firstfault.evidence.classification import FailureClass, classify_failures
from firstfault.exceptions.stack_position import add_raise_point
from firstfault.layout import ErrorKey
from firstfault.strategies.rules import evidence
from firstfault.testing import make_job, make_presence
from tests.readers.scenes import (
    BOOT,
    IN_COLLECTIVE,
    IN_SLEEP,
    IN_TORCHS_WAIT,
    PEER_CLOSED,
    STACK,
    WAIT_TIMED_OUT,
    aborted_by_gloo,
    agent_failure,
    collectives_called,
    crashed_while_stopped,
    died,
    flyte_error,
    lost_peer_in_collective,
    one_collective_ahead,
    own_fault,
    reported_job,
    stopped,
    timed_out_in_collective,
    timed_out_waiting,
    victim,
)

RAISED = model.FrameInfo("/app/train.py", 12, "step")
IN_FINALISER = STACK.format("/x/site-packages/torch/utils/data/dataloader.py", "__del__")
IN_STEP = STACK.format("/app/train.py", "step")
FRAME_IN_COLLECTIVE = model.FrameInfo(
    "/x/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce"
)
GROUP_INITIALIZED_TWICE = "trying to initialize the default process group twice!"
DISK_FULL = "[Errno 28] No space left on device: '/checkpoints/last.pt'"
CAUSED_BY_RANK_3 = model.CausedBy(3, "worker-1", "")
STOPPED_BECAUSE_OF_RANK_3 = {
    "caused_by": CAUSED_BY_RANK_3,
    "sent_signals": (model.SentSignal("SIGTERM", "rank 3 failed: KeyError"),),
}
SENT = (model.SentSignal("SIGTERM", "rank 0 failed"),)
STOPPED = {"sent_signals": SENT}
ASSERT = "RuntimeError: CUDA error: device-side assert triggered"
TRACE = (
    'Traceback (most recent call last):\n  File "/app/train.py", line 12, in step\n    return'
    ' row["label"]\n'
)
RECORDING = STACK.format("/x/site-packages/firstfault_torch/worker/worker_monitor.py", "record_end")


def summarize(verdict: model.Verdict) -> str:
    """Return what a verdict says of the root cause, in short: "rank 3 high: user_code,
    own-fault".
    """
    who = " ".join(map(str, verdict.ranks)) or verdict.node or "-"
    return f"{verdict.scope.value} {who} {verdict.confidence}: {verdict.category}, {verdict.rule}"


GLOO = [collectives_called(called, "gloo:all_reduce", called) for called in range(8)]
"""How many collectives of gloo a rank had called."""


def raising(rank: int, raised_at: model.FrameInfo = RAISED) -> model.WorkerError:
    """A worker that was stopped while an exception was on its way out."""
    return stopped(rank, add_raise_point(IN_FINALISER, raised_at))


def raised(
    rank: int,
    at_ms: float = 0,
    *,
    frame: model.FrameInfo = RAISED,
    **more: Any,
) -> model.WorkerError:
    """A worker that raised at a frame."""
    exception = model.ExceptionInfo(
        "ValueError",
        "bad batch",
        frames=(model.FrameInfo("/app/train.py", 40, "main"), frame),
        **more,
    )
    return own_fault(rank, at_ms, exception=exception)


def failed_retry(rank: int, at_ms: float = 6000, **more: Any) -> model.WorkerError:
    """A worker whose second try failed, after collective 5 of the first."""
    return own_fault(rank, at_ms, message=GROUP_INITIALIZED_TWICE, **{**GLOO[5], **more})


def failed_checkpoint(rank: int, *causes: model.ExceptionInfo, **more: Any) -> model.WorkerError:
    """A worker whose emergency checkpoint failed."""
    exception = model.ExceptionInfo("OSError", DISK_FULL, ("Exception",), causes=causes)
    return own_fault(rank, 40, exception, DISK_FULL, **more)  # type: ignore[arg-type]


def roster_entry(
    node: int, phase: model.Phase = model.Phase.FAILED, **more: Any
) -> model.NodePresence:
    """A roster entry of one of two nodes."""
    place = {"node": f"worker-{node}", "group_rank": node, "nodes": 2, "ip": f"10.0.0.{node + 1}"}
    return replace(make_presence(phase, **place, ranks=(2 * node, 2 * node + 1)), **more)


def aborted(rank: int, text: str = "", function: str = "step", **more: Any) -> model.WorkerError:
    """A worker in which Python met SIGABRT, in a function of the program."""
    dump = "Fatal Python error: Aborted\n\n" + STACK.format("/app/train.py", function).replace(
        "Thread", "Current thread"
    )
    more = {"log_tail": text, "stack_dumps": (model.StackDump(1, rank, dump),), **more}
    return died(rank, "SIGABRT", -6, 20 * rank, **more)


def wrote_and_exited(rank: int, at_ms: float = 0, **more: Any) -> model.WorkerError:
    """A worker that wrote why, and called sys.exit(7)."""
    exception = model.ExceptionInfo("SystemExit", "7", frames=(RAISED,))
    return own_fault(
        rank,
        at_ms,
        exception=exception,
        exit_code=7,
        **{"log_tail": "fatal: no license", **more},
    )


def raised_with_cause(
    outer: tuple[str, str], inner: tuple[str, str], relation: str = "cause"
) -> model.ExceptionInfo:
    """An exception with a cause or a context."""
    return model.ExceptionInfo(*outer, causes=(model.ExceptionInfo(*inner, relation=relation),))


def lost_connection(*frames: model.FrameInfo) -> model.WorkerError:
    """A worker that lost a connection."""
    bases = ("ConnectionError", "OSError")
    return own_fault(
        0,
        exception=model.ExceptionInfo(
            "ConnectionResetError",
            "[Errno 104] Connection reset by peer",
            bases,
            frames,
        ),
    )


def in_checkpoint(main: str) -> str:
    """Return the stack of a rank whose checkpoint's thread waits for the other ranks."""
    file = "/x/site-packages/torch/distributed/checkpoint/utils.py"
    pool = '  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 58 in run\n'
    head = "Thread 0x1 (most recent call first):\n"
    return f'{head}  File "{file}", line 9 in reduce_scatter\n{pool}\n{main.replace("0x1", "0x2")}'


JOINED = roster_entry(1, model.Phase.JOINED)
HUNG = stopped(3, IN_SLEEP, **collectives_called(5))
HOSTILE_WORDS = (
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: A, but Rank 3 is"
    " running B"
)
BARRIER = "[Rank {}]: Rank {} failed to pass monitoredBarrier in 9000 ms"
PARSED = model.ExceptionInfo(
    "ValueError",
    "Rendezvous of keys failed: missing column",
    frames=(model.FrameInfo("/app/train.py", 7, "parse", "raise ValueError(text)"),),
)
NOT_JOINED = "wait timeout after 6000ms, keys: /default_pg/0//cpu//0/3"
UNREAD = "<no text: reading the exception took too long>"
CLIENT = model.FrameInfo("/app/client.py", 7, "fetch", "self.socket.recv(4)")
LOADER = model.FrameInfo(
    "/x/torch/utils/data/dataloader.py",
    1284,
    "_try_get_data",
    "data = self._data_queue.get()",
)
PIPE = model.FrameInfo(
    "/usr/lib/python3.11/multiprocessing/connection.py",
    395,
    "_recv",
    "chunk = read(handle, remaining)",
)
COLLECTIVE = model.FrameInfo(
    "/x/torch/distributed/distributed_c10d.py",
    9,
    "all_reduce",
    "work.wait()",
)
DEAD = {
    "thread_failures": (
        model.ThreadFailure("prefetch", None, model.ExceptionInfo("LookupError", "no shard")),
    )
}
IN_WRITER = model.FrameInfo(
    "/x/site-packages/torch/distributed/checkpoint/filesystem.py", 9, "write_data"
)
NOT_SAVED = model.ExceptionInfo("OSError", DISK_FULL, ("Exception",), (IN_WRITER,))
UNSAVED = {"thread_failures": (model.ThreadFailure("saver", None, NOT_SAVED),)}
IN_RESULT = STACK.format("/usr/lib/python3.11/concurrent/futures/_base.py", "result")
ECC = "CUDA error: uncorrectable ECC error encountered"
PRINTED = (
    'Traceback (most recent call last):\n  File "train.py", line 8, in train\nRuntimeError:'
    f" {WAIT_TIMED_OUT}"
)
CLOSED = "torch.distributed.elastic.rendezvous.api.RendezvousClosedError"


FIRST_FAILURE_RANK_3 = {
    "first_failure": CAUSED_BY_RANK_3,
    "first_failure_reason": "rank 3 on worker-1 failed: KeyError",
}
TERMINATED_FROM_OUTSIDE = {"sent_signals": (model.SentSignal("SIGTERM", model.TERMINATED),)}
IN_FLIGHT = {"in_flight": True, "sent_signals": SENT}
BUG = raised(0)
SHARD = own_fault(2, 0, message="shard 8 is corrupt")
UNKNOWN = model.CausedBy(None, "node 1", "")
FORBIDDEN = model.Receipt("e.pb", durable=False, error="403 Forbidden", rank=3)


VERDICTS: dict[str, dict[str, model.JobErrors]] = {
    "rank 3 medium: hang, hang": {
        "a retry after a timeout": reported_job(
            *map(failed_retry, range(3)), stopped(3, IN_SLEEP, **GLOO[4])
        ),
        "a node terminated long after a timeout": reported_job(
            *timed_out_in_collective(0, 1, at_ms=0),
            agent_failure(1, "preemption", 60_000),
            replace(HUNG, boot_id=BOOT),
        ),
        "a broadcast timeout": reported_job(
            *timed_out_in_collective(1),
            replace(
                stopped(2, IN_COLLECTIVE, **collectives_called(6)),
                caused_by=model.CausedBy(0, "worker-0", ""),
            ),
            HUNG,
        ),
        "a rank that never joined": reported_job(
            *(
                own_fault(rank, 6000, "torch.distributed.DistStoreError", NOT_JOINED)
                for rank in (0, 1, 2)
            ),
            stopped(3, IN_SLEEP),
        ),
        "printed timeouts": reported_job(
            died(0, "", 1, log_tail=PRINTED),
            replace(
                stopped(1, STACK.format("/app/train.py", "report")),
                signal="",
                exit_code=1,
                log_tail=PRINTED,
            ),
            stopped(3, IN_SLEEP),
        ),
        "a checkpoint's thread that failed, while its rank waits for it": reported_job(
            timed_out_waiting(0),
            *(stopped(rank, in_checkpoint(IN_RESULT)) for rank in (1, 2)),
            stopped(3, IN_RESULT, **UNSAVED),
        ),
        "a checkpoint's thread that failed, while its rank trains": reported_job(
            timed_out_waiting(0),
            *(stopped(rank, in_checkpoint(IN_SLEEP)) for rank in (1, 2)),
            stopped(3, IN_COLLECTIVE, **UNSAVED),
        ),
        "others wait for a rank that returned": reported_job(
            *timed_out_in_collective(0, 1, 2, collectives=(), world_size=4),
            stopped(3, IN_TORCHS_WAIT),
        ),
    },
    "rank 3 medium: exit, returned": {
        "others lose a node that finished": reported_job(
            *(victim(rank, node="worker-0", world_size=4) for rank in (0, 1, 2)),
            roster=[roster_entry(0), roster_entry(1, model.Phase.SUCCEEDED, ranks=(3,))],
        ),
        "others wait for a rank that exited with 0": reported_job(
            *(timed_out_waiting(rank, world_size=4, **collectives_called(6)) for rank in (0, 1, 2)),
            roster=[
                roster_entry(node, receipts=(model.Receipt("e.pb", durable=True, rank=2 * node),))
                for node in (0, 1)
            ],
        ),
    },
    "rank 0 high: user_code, own-fault": {
        "a finaliser elsewhere": reported_job(BUG, stopped(1, IN_FINALISER)),
        "a peer's error on its way out": reported_job(BUG, raising(1, FRAME_IN_COLLECTIVE)),
        "stopped in another function": reported_job(
            BUG, stopped(1, IN_SLEEP), stopped(2, IN_COLLECTIVE)
        ),
        "a victim is named": reported_job(
            own_fault(0, 0, "RuntimeError", HOSTILE_WORDS), victim(3, 5)
        ),
        "a crash during a stop, beside a fault": reported_job(
            own_fault(0), crashed_while_stopped(1), victim(2), victim(3)
        ),
    },
    "rank 3 high: user_code, own-fault": {
        "a retry after a logged peer's error": reported_job(
            own_fault(3),
            *(
                failed_retry(
                    rank, 40, collectives=(), log_tail=f"attempt 0 failed: {PEER_CLOSED.format(1)}"
                )
                for rank in (0, 2)
            ),
        ),
        "a full disk in a handler of a peer's error": reported_job(
            own_fault(3),
            *(
                failed_checkpoint(rank, model.ExceptionInfo("RuntimeError", PEER_CLOSED.format(1)))
                for rank in (0, 2)
            ),
            stopped(1),
        ),
        "a retry after a peer's fault": reported_job(
            own_fault(3, 0, **GLOO[4]), failed_retry(0, 40), failed_retry(2, 41)
        ),
        "a rank with a fault is named": reported_job(
            own_fault(0, 0, "RuntimeError", HOSTILE_WORDS), own_fault(3, 5)
        ),
        "a text about a preemption": reported_job(
            own_fault(3, 0, "ValueError", "the job got preempted")
        ),
    },
    "undetermined - low: hang, undetermined": {
        "another size at one of two ranks, of which the other waits": reported_job(
            replace(
                lost_peer_in_collective(0, 4),
                message=WAIT_TIMED_OUT,
                exception=timed_out_waiting(0).exception,
            ),
            one_collective_ahead(lost_peer_in_collective(1, 2)),
            nodes=1,
        ),
        "all retried": reported_job(*map(failed_retry, range(4))),
        "a handled error in the log of a rank that timed out": reported_job(
            died(
                0,
                "",
                2,
                log_tail=(
                    f"no cache, going on\n{TRACE}OSError: no cache\nfatal: RuntimeError: {WAIT_TIMED_OUT}"
                ),
            ),
            died(2, "", 2, log_tail=f"fatal: RuntimeError: {WAIT_TIMED_OUT}"),
            stopped(1),
            stopped(3),
        ),
        "accusations in a circle": reported_job(
            *(
                own_fault(rank, 0, "RuntimeError", BARRIER.format(rank, (rank + 1) % 4))
                for rank in range(4)
            )
        ),
        "a rank that waited": reported_job(
            timed_out_waiting(3), stopped(0), stopped(1), stopped(2)
        ),
        "dead threads of ranks that wait": reported_job(
            timed_out_waiting(0, **DEAD),
            stopped(1, IN_COLLECTIVE, **DEAD),
            *(stopped(rank, IN_COLLECTIVE) for rank in (2, 3)),
        ),
        "a crash during a stop after a wait": reported_job(
            *timed_out_in_collective(0, 1, 2), crashed_while_stopped(3)
        ),
    },
    "rank 0 medium: user_code, own-fault": {
        "another exception on its way out": reported_job(
            BUG, raising(1, model.FrameInfo("/app/data.py", 7, "load")), stopped(2, IN_COLLECTIVE)
        ),
        "stopped in the function that raised": reported_job(
            BUG, stopped(1, IN_STEP), stopped(2, IN_COLLECTIVE)
        ),
        "wrappers that are raised at one line": reported_job(
            raised(0, causes=(BUG.exception,)), raising(1), raising(2)
        ),
        "words of a rendezvous": make_job(own_fault(0, 0, PARSED, PARSED.message)),
    },
    "undetermined - low: unknown, undetermined": {
        "a broadcast failure with a document": reported_job(
            victim(3),
            replace(stopped(1), **STOPPED_BECAUSE_OF_RANK_3),
            replace(stopped(2), **STOPPED_BECAUSE_OF_RANK_3),
            roster=(JOINED,),
        ),
        "a connection in a collective": reported_job(
            lost_connection(CLIENT, COLLECTIVE),
            victim(1),
            victim(2),
            stopped(3),
        ),
        "an exit after the stop": reported_job(
            own_fault(3, 0, "SystemExit", "3", sent_signals=SENT),
            victim(0),
            stopped(1),
            victim(2),
        ),
        "files about peers": make_job(
            *(flyte_error(f"RuntimeError: {PEER_CLOSED.format(at)}", at) for at in (1, 2))
        ),
    },
    "ranks 0 1 2 3 high: user_code, own-fault": {
        "notices about the store": reported_job(
            *(
                own_fault(rank, rank, log_tail="Using TCPStore at host-0:29500" if rank else "")
                for rank in range(4)
            )
        )
    },
    "rank 0 low: user_code, first-of-several": {
        "two faults of unknown order": reported_job(
            own_fault(0, boot_id="a"), own_fault(3, 5, "KeyError", "'label'", boot_id="b")
        ),
        "a rank that names itself": reported_job(
            SHARD, own_fault(0, 0, "RuntimeError", "rank 0: shard 8 is corrupt")
        ),
        "a rank that names another without its words": reported_job(
            SHARD, own_fault(0, 0, "RuntimeError", "rank 2 gave too few samples")
        ),
    },
    "rank 3 medium: signal, first-of-several": {
        "one signal at two times": reported_job(died(3, at_ms=0), died(0, at_ms=60_000)),
        "a broadcast death beside a wrapper": reported_job(
            died(3, boot_id=""),
            own_fault(0, 10, "train.TrainError", "step failed", boot_id=""),
            roster=(
                roster_entry(0, first_failure=CAUSED_BY_RANK_3),
                roster_entry(1, first_failure=CAUSED_BY_RANK_3),
            ),
        ),
        "a worker died long before its agent": reported_job(
            agent_failure(1, "node_lost", 60_000), died(3, at_ms=10), victim(0)
        ),
    },
    "rank 3 medium: unknown, broadcast": {
        "a node that was told": make_job(
            victim(0, peer=2), roster=(roster_entry(0, **FIRST_FAILURE_RANK_3),)
        ),
        "a broadcast failure without a document": reported_job(
            stopped(0),
            replace(stopped(1), **STOPPED_BECAUSE_OF_RANK_3),
            replace(stopped(2), **STOPPED_BECAUSE_OF_RANK_3),
            roster=(JOINED,),
        ),
    },
    "rank 3 medium: exit, own-fault": {
        "an exit in flight": reported_job(
            own_fault(3, 0, "SystemExit", "3", **IN_FLIGHT), victim(0), victim(2)
        ),
        "an exit with success": reported_job(
            own_fault(3, 0, "SystemExit", "0"), victim(0), stopped(1)
        ),
        "an exit without a text": reported_job(died(3, "", 7), victim(0), stopped(1)),
    },
    "rank 3 medium: user_code, own-fault": {
        "an exception in flight": reported_job(victim(0), own_fault(3, **IN_FLIGHT), stopped(1))
    },
    "rank 2 high: user_code, own-fault": {
        "ranks that tell of another rank": reported_job(
            SHARD,
            *(
                own_fault(rank, 0, "RuntimeError", "another rank failed, stopping")
                for rank in (0, 1, 3)
            ),
        ),
        "ranks that repeat another rank's words": reported_job(
            SHARD,
            *(
                own_fault(rank, 0, "RuntimeError", "stop: rank 2: shard 8 is corrupt")
                for rank in (0, 1, 3)
            ),
        ),
    },
    "external worker-1 medium: preemption, terminated-node": {
        "a terminated node without a document": reported_job(
            *(replace(stopped(rank), **TERMINATED_FROM_OUTSIDE) for rank in (2, 3)),
            victim(0),
            stopped(1),
        ),
        "a node terminated while others waited": reported_job(
            *(
                replace(item, boot_id="")
                for item in (
                    timed_out_waiting(0, 0),
                    timed_out_waiting(1, 0),
                    agent_failure(1, "preemption", 60_000),
                )
            )
        ),
    },
    "rank 3 medium: unknown, lost-document": {
        "a node that reported is not lost": reported_job(
            victim(0, peer=2),
            victim(1, peer=2),
            roster=(roster_entry(0, first_failure=UNKNOWN), roster_entry(1, receipts=(FORBIDDEN,))),
        ),
        "an exit that answers a signal": reported_job(
            *timed_out_in_collective(0, 2), own_fault(1, 6100, "SystemExit", "143", **IN_FLIGHT)
        ),
    },
    "ranks 0 1 2 3 medium: disk_full, own-fault": {
        "lines about a full disk, perhaps of emergency checkpoints": reported_job(
            *(
                died(rank, "", 2, 100 * rank, log_tail="fatal: OSError: " + DISK_FULL)
                for rank in range(4)
            )
        )
    },
    "ranks 0 1 2 3 medium: user_code, own-fault": {
        "three were about to leave": reported_job(BUG, raising(1), raising(2), raising(3))
    },
    "ranks 0 1 high: user_code, own-fault": {
        "one raised, one had the same fault in flight": reported_job(
            own_fault(0), own_fault(1, **IN_FLIGHT), stopped(2)
        )
    },
    "rank 0 medium: exit, own-fault": {
        "one left, another was stopped after the same harmless line": reported_job(
            own_fault(0, 0, "SystemExit", "0", exit_code=1, log_tail="joining the others\n"),
            replace(stopped(3), signal="", exit_code=1, log_tail="joining the others\n"),
            victim(1),
            victim(2),
        )
    },
    "ranks 0 3 medium: signal, own-fault": {
        "one aborted, one was aborting when stopped": reported_job(
            aborted(0),
            aborted(3, **STOPPED),
            victim(1),
            victim(2),
        )
    },
    "ranks 0 3 medium: user_code, own-fault": {
        "two printed one exception, and one was stopped while it exited": reported_job(
            died(0, "", 1, log_tail=f"{TRACE}KeyError: 'label'"),
            replace(stopped(3), signal="", exit_code=1, log_tail=f"{TRACE}KeyError: 'label'\n"),
            replace(
                stopped(1),
                signal="",
                exit_code=1,
                log_tail=f"{TRACE}RuntimeError: {PEER_CLOSED.format(0)}",
            ),
            stopped(2),
        )
    },
    "ranks 0 3 high: gpu_kernel, own-fault": {
        "a kernel's failed check, also at a rank that was being stopped": reported_job(
            aborted(0, ASSERT),
            aborted(3, ASSERT, "fit", **STOPPED),
            victim(1),
            stopped(2),
        )
    },
    "ranks 0 3 high: exit, own-fault": {
        "exits with one text at two times": reported_job(
            wrote_and_exited(0), wrote_and_exited(3, 700), stopped(1), stopped(2)
        ),
        "an exit that was on record before the stop": reported_job(
            wrote_and_exited(0),
            wrote_and_exited(
                3, 40, sent_signals=SENT, stack_dumps=(model.StackDump(1, 3, RECORDING),)
            ),
            stopped(1),
            stopped(2),
        ),
    },
    "rank 0 high: exit, own-fault": {
        "an exit after the stop": reported_job(
            wrote_and_exited(0),
            wrote_and_exited(3, 40, sent_signals=SENT),
            stopped(1),
            stopped(2),
        )
    },
    "ranks 0 1 medium: user_code, own-fault": {
        "a finaliser at the line that raised": reported_job(
            BUG, stopped(1, IN_FINALISER.replace("line 40 in main", "line 12 in step"))
        )
    },
    "ranks 0 2 medium: disk_full, first-of-several": {
        "a full disk first": reported_job(
            own_fault(3, 900), failed_checkpoint(0), failed_checkpoint(2), stopped(1)
        )
    },
    "rank 3 medium: user_code, first-of-several": {
        "an exception of any name": reported_job(
            own_fault(3, 0, "train.Oops", "at 7"),
            own_fault(0, 40, "RuntimeError", "what now"),
            victim(2),
        )
    },
    "rank 1 medium: user_code, own-fault": {
        "an exit code of one beside a traceback": reported_job(
            own_fault(1, 500), died(3, "", 1, 0), victim(0)
        )
    },
    "undetermined - low: unknown, lost-document": {
        "an exit beside a closed rendezvous": reported_job(
            died(0, "", 1), agent_failure(0, "rendezvous", exception=CLOSED, message="")
        )
    },
    "rank 1 medium: user_code, first-of-several": {
        "two faults": reported_job(
            own_fault(2, 300, "KeyError", "'label'"), victim(0), own_fault(1, 0)
        )
    },
    "rank 3 low: user_code, first-of-several": {
        "a broadcast decides between two": reported_job(
            own_fault(0, boot_id="a"),
            own_fault(3, 5, "KeyError", "'label'", boot_id="b"),
            replace(stopped(1), caused_by=CAUSED_BY_RANK_3),
        )
    },
    "rank 0 medium: gpu_hardware, first-of-several": {
        "a broadcast death beside a fault of a GPU": reported_job(
            died(3, boot_id=""),
            own_fault(0, 10, "RuntimeError", ECC, boot_id=""),
            roster=(
                roster_entry(0, first_failure=CAUSED_BY_RANK_3),
                roster_entry(1, first_failure=CAUSED_BY_RANK_3),
            ),
        )
    },
    "rank 999 medium: hang, hang": {
        "a rank that does not exist": reported_job(
            victim(0), own_fault(1, 0, "RuntimeError", BARRIER.format(1, 999))
        )
    },
    "rank 3 high: disk_full, own-fault": {
        "a future of a checkpoint": reported_job(
            replace(own_fault(3), exception=NOT_SAVED),
            *(stopped(rank, in_checkpoint(IN_SLEEP)) for rank in (0, 1, 2)),
        )
    },
    "rank 2 medium: user_code, first-of-several": {
        "an exception long before": reported_job(
            agent_failure(1, "preemption"), victim(0), own_fault(2, -60_000)
        )
    },
    "node worker-1 medium: unknown, node-without-report": {
        "a node for which others waited": reported_job(
            *timed_out_in_collective(0, 1), roster=(roster_entry(0), JOINED)
        )
    },
    "rank 0 high: signal, own-fault": {
        "a loader's process was killed": reported_job(
            lost_connection(LOADER, PIPE), victim(1), victim(2), stopped(3)
        )
    },
    "rank 0 medium: network, by-elimination": {
        "a connection that is none to a peer": reported_job(
            lost_connection(CLIENT), victim(1), victim(2), stopped(3)
        )
    },
    "rank 1 medium: signal, by-elimination": {
        "a crash during a stop": reported_job(
            victim(0), crashed_while_stopped(1), victim(2), victim(3)
        )
    },
    "rank 3 medium: signal, own-fault": {
        "a text that could not be read": reported_job(
            own_fault(0, 0, "RuntimeError", UNREAD),
            died(3, "SIGABRT", -6),
            victim(1),
            victim(2),
        )
    },
    "rank 1 high: user_code, own-fault": {
        "a peer's error before an in-process restart": reported_job(
            own_fault(
                1,
                log_tail=(
                    f"RuntimeError: {PEER_CLOSED.format(0)}\nin-process restart 1: rank 2:"
                    f" {PEER_CLOSED.format(3)}"
                ),
                **GLOO[6],
            ),
            own_fault(0, 500, "RestartError", "rank 1: ValueError", **GLOO[7]),
            own_fault(2, 500, "RestartError", "rank 1: ValueError", **GLOO[7]),
        )
    },
    "undetermined - low: collective, only-failure": {
        "one file of Flyte's": make_job(flyte_error(f"RuntimeError: {PEER_CLOSED.format(1)}", 0))
    },
}
"""By verdict, the jobs that have it."""
WORDS = {
    "three were about to leave": (
        "3 more were stopped with an exception in flight that was raised at the same"
    ),
    "a finaliser at the line that raised": (
        "1 more was stopped with an exception in flight that was raised at the same"
    ),
    "another exception on its way out": "rank 1 on worker-0 was stopped at data.py:7 in load",
    "stopped in the function that raised": (
        "in step and not waiting for a peer: it may have failed, too"
    ),
    "an exception of any name": "raised its own exception",
    "an exit code of one beside a traceback": "suspect 3",
    "two faults": "rank 2 on worker-1 raised its own exception too, at least 300 ms later",
    "two faults of unknown order": "at about the same time",
    "one signal at two times": "suspect 0",
    "a rank that names itself": "suspect 2",
    "a rank that names another without its words": "suspect 2",
    "a node terminated while others waited": "suspect 1",
    "a node terminated long after a timeout": "the agent of worker-1 was terminated",
    "a node that reported is not lost": "403 Forbidden",
    "a node that was told": "KeyError",
    "a checkpoint's thread that failed, while its rank trains": (
        "its thread 'saver' ended with OSError: [Errno 28]"
    ),
    "a broadcast failure without a document": (
        "its agent broadcast its failure (KeyError), but its error document is"
    ),
    "others lose a node that finished": "it had exited with code 0 when its peers lost it",
    "others wait for a rank that exited with 0": (
        "it had exited with code 0 while its peers waited for it"
    ),
    "others wait for a rank that returned": (
        "its function had returned while its peers waited for it"
    ),
}
"""Part of the headline, of a reason or of a suspect of a job."""


@pytest.mark.parametrize(
    ("name", "verdict"), [(name, verdict) for verdict, jobs in VERDICTS.items() for name in jobs]
)
def test_each_job_has_its_root_cause_confidence_and_rule(name: str, verdict: str) -> None:
    """Each job has this root cause, confidence, category and rule, and tells why."""
    found = evidence(VERDICTS[verdict][name])
    suspects = [f"suspect {suspect.rank} {suspect.why}" for suspect in found.suspects]
    assert summarize(found) == verdict
    assert WORDS.get(name, "") in "\n".join([found.headline, found.message, *found.why, *suspects])


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGTERM", "SIGABRT"])
def test_a_death_recorded_after_its_victims_is_the_root_cause(signal: str) -> None:
    """An end by a signal is recorded after its victims, and is still the root cause."""
    verdict = evidence(
        reported_job(victim(0, 10), died(3, signal, -9, 2000), victim(2, 12), stopped(1))
    )
    # torch's watchdog may have made an abort that left no text
    assert (verdict.ranks, verdict.confidence) == (
        (3,),
        "medium" if signal == "SIGABRT" else "high",
    )
    assert ", not sent by its agent" in verdict.why[0]


@pytest.mark.parametrize(
    ("exception", "failure_class"),
    [
        (
            raised_with_cause(
                ("RuntimeError", "training failed"), ("RuntimeError", PEER_CLOSED.format(1))
            ),
            FailureClass.CONSEQUENCE,
        ),
        (
            raised_with_cause(
                ("RuntimeError", PEER_CLOSED.format(1)), ("ValueError", "bad batch"), "context"
            ),
            FailureClass.OWN_FAULT,
        ),
        (
            raised_with_cause(
                ("RuntimeError", "training failed"), ("RuntimeError", WAIT_TIMED_OUT)
            ),
            FailureClass.UNCLEAR,
        ),
        (
            raised_with_cause(
                ("RuntimeError", PEER_CLOSED.format(1)), ("RuntimeError", ECC), "context"
            ),
            FailureClass.OWN_FAULT,
        ),
        (
            raised_with_cause(
                ("c10::DistBackendError", ECC), ("RuntimeError", PEER_CLOSED.format(1)), "context"
            ),
            FailureClass.OWN_FAULT,
        ),
        (
            model.ExceptionInfo("train.run.<locals>.BrokenShardError", "at 7 on rank 3"),
            FailureClass.OWN_FAULT,
        ),
        (model.ExceptionInfo("train.ShardNotReady", "at 7 on rank 3"), FailureClass.OWN_FAULT),
    ],
)
def test_the_first_exception_of_a_chain_decides_its_class(
    exception: model.ExceptionInfo, failure_class: FailureClass
) -> None:
    """What came first in a chain counts, local evidence wherever it stands,
    and a class may have any name.
    """
    (judged,) = classify_failures(reported_job(replace(own_fault(3), exception=exception)))
    assert judged.failure_class is failure_class


@pytest.mark.parametrize(
    ("failures", "sentence", "sources"),
    [
        ([*timed_out_in_collective(0, 1, 2), HUNG], "no rank raised its own error", "0123"),
        (
            [
                stopped(0),
                replace(stopped(1), **STOPPED_BECAUSE_OF_RANK_3),
                replace(stopped(2), **STOPPED_BECAUSE_OF_RANK_3),
            ],
            "rank 3 on worker-1: its agent broadcast its failure",
            "12",
        ),
        (
            [
                replace(stopped(2), **TERMINATED_FROM_OUTSIDE),
                replace(stopped(3), **TERMINATED_FROM_OUTSIDE),
                victim(0),
            ],
            "worker-1: 2 of its workers were stopped",
            "23",
        ),
        (
            [timed_out_waiting(rank, 6000 + rank, **collectives_called(7)) for rank in range(4)],
            "no rank shows its own fault, and no single rank stands out",
            "0123",
        ),
        ([died(3, "", 1, boot_id=""), stopped(0)], "no other rank shows its own fault", "0"),
    ],
    ids=["a hang", "broadcast", "terminated", "none stands out", "by elimination"],
)
def test_an_inferred_root_refers_to_the_documents_of_its_evidence(
    failures: list[model.WorkerError], sentence: str, sources: str
) -> None:
    """The root cause left no document; the sentence refers to the ranks' documents
    that are evidence for it.
    """
    documented = [
        replace(failure, documents=(model.DocumentRef(f"{failure.rank}"),)) for failure in failures
    ]
    verdict = evidence(reported_job(*documented, roster=(JOINED,)))
    assert [set(names) for text, names in verdict.reasons if text.startswith(sentence)] == [
        {*sources}
    ]


def test_lost_documents_of_victims_are_known_by_their_names() -> None:
    """Of several documents that were lost, the names of some say that they told
    what other victims tell.
    """
    heard = [replace(victim(rank), fingerprint="1:" + "a" * 12) for rank in (0, 1, 2)]
    lost = [
        (rank, str(ErrorKey(0, 1, rank, 2, print_ * 12, 1, "0" * 32)))
        for rank, print_ in ((4, "a"), (5, "b"))
    ]
    receipts = tuple(model.Receipt(name, durable=False, rank=rank) for rank, name in lost)
    third = make_presence(
        model.Phase.FAILED,
        node="worker-2",
        group_rank=2,
        nodes=3,
        ranks=(4, 5),
        receipts=receipts,
    )
    job = reported_job(
        *heard,
        died(3, "SIGTERM", -15, sent_signals=(model.SentSignal("SIGTERM", "rank 5 failed"),)),
    )
    assert (
        summarize(evidence(replace(job, roster=(*job.roster, third))))
        == "rank 5 medium: unknown, lost-document"
    )


@pytest.mark.parametrize(
    ("failures", "verdict", "suspects"),
    [
        (
            (
                aborted_by_gloo(1),
                lost_peer_in_collective(0, 4),
                lost_peer_in_collective(2, 40),
                lost_peer_in_collective(3, 4),
            ),
            "rank 2 medium: collective, mismatch",
            [],
        ),
        (
            (
                aborted_by_gloo(1),
                lost_peer_in_collective(0, 4),
                lost_peer_in_collective(2, 4),
                lost_peer_in_collective(3, 4),
            ),
            "rank 1 medium: collective, mismatch",
            [],
        ),
        (
            (aborted_by_gloo(1), lost_peer_in_collective(0, 4)),
            "rank 1 low: user_code, mismatch-of-two",
            [0],
        ),
    ],
    ids=["another rank differs", "the receiver differs", "two ranks"],
)
def test_the_rank_whose_size_differs_from_most_is_named(
    failures: tuple[model.WorkerError, ...], verdict: str, suspects: list[int]
) -> None:
    """The rank that differs from most is named, be it the one that aborted or not; of two ranks,
    both are.
    """
    caused = (replace(item, caused_by=model.CausedBy(1, "worker-0", "")) for item in failures[1:])
    found = evidence(reported_job(failures[0], *caused, nodes=len(failures) // 2))
    assert (summarize(found), [suspect.rank for suspect in found.suspects]) == (verdict, suspects)
