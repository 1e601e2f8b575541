"""Deaths by a signal or an exit, judged by what the process printed."""

from __future__ import annotations

import pytest

from firstfault.evidence.classification import FailureClass, classify_failures
from firstfault.model import CausedBy, SentSignal, StackDump, Writer
from firstfault.strategies.rules import evidence
from firstfault.testing import make_error, make_job, make_presence

TIMED_OUT = (
    "[rank2]:[E314 ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
    "OpType=ALLREDUCE, NumelIn=512, NumelOut=512, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.\n"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in fit\n    step()\n'
FOLLOWS = "\nDuring handling of the above exception, another exception occurred:\n\n"
PEER = "RuntimeError: Connection closed by peer [10.0.0.1]:41\n"


@pytest.mark.parametrize(
    ("printed", "failure_class"),
    [
        (TIMED_OUT, FailureClass.UNCLEAR),
        ("[rank2]:[E314 a.cpp:7] CUDA error: device-side assert triggered\n", FailureClass.OWN_FAULT),
        ("[rank2]:[E314 a.cpp:7] ncclRemoteError: Connection closed by remote peer\n", FailureClass.CONSEQUENCE),
        ("", FailureClass.UNCLEAR),
    ],
)
def test_an_abort_while_the_agent_stops_the_worker(printed: str, failure_class: FailureClass) -> None:
    """It is judged by its last words, as an abort at any other time."""
    aborted = make_error(
        2,
        exception=None,
        signal="SIGABRT",
        exit_code=-6,
        writer=Writer.AGENT,
        log_tail=printed,
        sent_signals=(SentSignal("SIGTERM", "rank 0 failed"),),
    )
    (judged,) = classify_failures(make_job(aborted))
    assert (judged.failure_class, judged.waited) == (failure_class, printed == TIMED_OUT)


def test_the_headline_of_a_crash_during_a_stop() -> None:
    """It tells why the process crashed, not for whom its agent stopped it."""
    assertion = "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: device-side assert"
    stopped = (SentSignal("SIGTERM", "rank 0 failed"),)
    crashed = make_error(
        2, exception=None, signal="SIGABRT", exit_code=-6, log_tail=f"{assertion} triggered\n", sent_signals=stopped
    )
    verdict = evidence(make_job(crashed, make_error(0, exception=None, signal="SIGTERM", sent_signals=stopped)))

    assert verdict.ranks == (2,)
    assert verdict.headline.endswith(": CUDA error: device-side assert triggered")


@pytest.mark.parametrize(
    ("printed", "failure_class"),
    [
        ("Traceback (most recent call last):\nRuntimeError: Connection closed by peer [10.0.0.1]:41", "consequence"),
        ("Traceback (most recent call last):\nKeyError: 'labels'", "own"),
        ("RuntimeError: Connection closed by peer [10.0.0.1]:41", "consequence"),
        ("3 shards loaded", "exit"),
    ],
)
def test_an_exit_after_a_printed_traceback(printed: str, failure_class: str) -> None:
    """A program that prints its exception and exits later is judged by that exception, with a traceback or not."""
    left = make_error(1, exception="SystemExit", message="1", exit_code=1, log_tail=printed)
    (judged,) = classify_failures(make_job(left))
    wanted = {"consequence": FailureClass.CONSEQUENCE, "own": FailureClass.OWN_FAULT, "exit": FailureClass.OWN_EXIT}
    assert judged.failure_class is wanted[failure_class]


@pytest.mark.parametrize(
    ("dump", "printed", "confidence"),
    [
        (
            'Fatal Python error: Aborted\n\nThread 0x00007f12 (most recent call first):\n  File "a.py", line 1 in f',
            "",
            "low",
        ),
        (
            'Fatal Python error: Aborted\n\nCurrent thread 0x00007f12 (most recent call first):\n  File "a.py"',
            "",
            "high",
        ),
        ("Fatal Python error: Aborted\n\nThread 0x00007f12", "free(): invalid pointer\n", "high"),
    ],
)
def test_an_abort_without_a_reason(dump: str, printed: str, confidence: str) -> None:
    """A thread that Python does not know may be a watchdog, whose words went elsewhere: the verdict is not sure."""
    aborted = make_error(
        2,
        exception=None,
        signal="SIGABRT",
        exit_code=-6,
        writer=Writer.AGENT,
        log_tail=printed,
        stack_dumps=(StackDump(7, 2, dump),),
    )
    stopped = make_error(
        0,
        exception=None,
        signal="SIGTERM",
        writer=Writer.AGENT,
        sent_signals=(SentSignal("SIGTERM", "rank 2 failed"),),
        caused_by=CausedBy(2, "worker-0", ""),
    )
    verdict = evidence(make_job(aborted, stopped, roster=(make_presence(nodes=1, ranks=(0, 2)),)))
    assert (verdict.ranks, verdict.confidence) == ((2,), confidence)


@pytest.mark.parametrize(
    ("printed", "failure_class"),
    [
        (TRACEBACK + "ValueError: all arrays must have the same shape\nuploading logs\n", FailureClass.OWN_FAULT),
        (TRACEBACK + PEER, FailureClass.CONSEQUENCE),
        (TRACEBACK + PEER + FOLLOWS + TRACEBACK + "ValueError: training failed\n", FailureClass.CONSEQUENCE),
        ("uploading logs\n", FailureClass.UNCLEAR),
        ("", FailureClass.UNCLEAR),
    ],
)
def test_an_exit_with_code_1(printed: str, failure_class: FailureClass) -> None:
    """The last traceback tells why, with those that it was raised from."""
    left = make_error(1, exception=None, exit_code=1, writer=Writer.AGENT, log_tail=printed)
    (judged,) = classify_failures(make_job(left))
    assert judged.failure_class is failure_class


def test_a_worker_that_had_to_be_killed() -> None:
    """The agent sends SIGKILL to a worker that does not end at its SIGTERM: that is no end of its own."""
    killed = make_error(
        1,
        exception=None,
        signal="SIGKILL",
        exit_code=-9,
        writer=Writer.AGENT,
        sent_signals=(SentSignal("SIGTERM", "rank 0 failed"),),
    )
    (judged,) = classify_failures(make_job(killed))
    assert judged.failure_class is FailureClass.CONSEQUENCE


@pytest.mark.parametrize(("raised_at_s", "ranks"), [(600, (3,)), (1, (0,))])
def test_what_was_raised_at_the_end_of_a_long_wait(raised_at_s: int, ranks: tuple[int, ...]) -> None:
    """An exception cannot be why the others had waited for ten minutes, unless it was raised when they began to."""
    raised = make_error(0, at_ms=raised_at_s * 1000, exception="UnpicklingError", message="invalid load key")
    waited = [
        make_error(
            rank,
            at_ms=601_000,
            exception=None,
            signal="SIGABRT",
            exit_code=-6,
            writer=Writer.AGENT,
            log_tail=TIMED_OUT.replace("ank2", f"ank{rank}"),
        )
        for rank in (1, 2, 4, 5)
    ]
    stopped = make_error(
        3,
        at_ms=601_500,
        exception=None,
        signal="SIGTERM",
        writer=Writer.AGENT,
        sent_signals=(SentSignal("SIGTERM", "rank 1 failed"),),
    )
    verdict = evidence(make_job(raised, *waited, stopped))
    assert verdict.ranks == ranks
    if ranks == (3,):
        assert [suspect.rank for suspect in verdict.suspects] == [0]


_GPU = """Indexing.cu:1255: select: block: [0,0,0], thread: [3,0,0] Assertion `index < size` failed.
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: device-side assert triggered
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
_HOOK = """terminate called after throwing an instance of 'pybind11::error_already_set'
  what():  ValueError: bad gradient

At:
  /root/train.py(12): hook
  /usr/lib/python3.11/site-packages/torch/autograd/graph.py(824): _engine_run_backward
"""
_THROWN = "terminate called after throwing an instance of 'E'\n  what():  "


@pytest.mark.parametrize(
    ("printed", "category", "told"),
    [
        (_GPU, "gpu_kernel", "SIGABRT: CUDA error: device-side assert triggered"),
        (
            (
                "[rank2]:[E1124 ProcessGroupNCCL.cpp:1370] [PG ID 0 Rank 2] Process group watchdog "
                "thread terminated with exception: CUDA error: unspecified launch failure\n"
            ),
            "gpu_kernel",
            "SIGABRT: CUDA error: unspecified launch failure",
        ),
        (
            "NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus.\n",
            "gpu_hardware",
            "SIGABRT: NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus.",
        ),
        (
            f"{_THROWN}cuDNN error: CUDNN_STATUS_EXECUTION_FAILED\n",
            "gpu_kernel",
            "SIGABRT: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        ),
        (
            f"{_THROWN}cannot copy: No space left on device\n",
            "disk_full",
            "SIGABRT: cannot copy: No space left on device",
        ),
        (_HOOK, "user_code", "ValueError: bad gradient; printed before SIGABRT"),
        (f"{_THROWN}shard 7 is empty\n", "signal", "SIGABRT: shard 7 is empty"),
        ("fatal: no licence\nAborted (core dumped)\n", "signal", "SIGABRT: fatal: no licence"),
        ("reader.cpp:12: void read(): Assertion `n > 0' failed.\n", "signal", "SIGABRT: Assertion `n > 0' failed."),
        ("", "signal", "SIGABRT: the process aborted (a failed check in native code)"),
    ],
)
def test_an_abort_with_a_reason(printed: str, category: str, told: str) -> None:
    """The last lines of an abort give its headline and its category."""
    aborted = make_error(2, exception=None, signal="SIGABRT", exit_code=-6, writer=Writer.AGENT, log_tail=printed)
    verdict = evidence(make_job(aborted))
    assert (verdict.category, verdict.headline.replace(", rank 2 on worker-0", "")) == (category, told)


@pytest.mark.parametrize(
    ("kind", "text", "category"),
    [
        ("RuntimeError", "PytorchStreamWriter failed writing file data/0: file write failed", "storage"),
        ("RuntimeError", "[enforce fail at inline_container.cc:603] . unexpected pos 704 vs 598", "storage"),
        ("PermissionError", "[Errno 13] Permission denied: '/data/checkpoint.pt'", "config"),
        ("OSError", "[Errno 28] No space left on device: '/data/checkpoint.pt'", "disk_full"),
    ],
)
def test_a_file_that_cannot_be_written(kind: str, text: str, category: str) -> None:
    """A refused file is no matter of credentials, and a failed write is not the program's fault."""
    assert evidence(make_job(make_error(2, exception=kind, message=text))).category == category
