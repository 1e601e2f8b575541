"""What torch's NCCL process group and NCCL itself print, by torch's version;
the lab's process group prints it too.
"""

import datetime as dt
from dataclasses import dataclass

VERSIONS = ("2.1", "2.4", "2.7", "2.13", "nccl2")
"""What is recorded as "nccl2" has words that were guessed before torch 2.15;
now it has those of `ABORTS`.
"""
ABORTS, RAISES = SECOND = ("2.15", "2.15-raises")
"""ProcessGroupNCCL2 of torch 2.15: a process aborts. ``TORCH_NCCL_ASYNC_ERROR_HANDLING=2``:
its main thread raises.
"""
_USUALLY = (
    "This is most likely caused by incorrect usages of collectives, e.g., wrong sizes used across"
    " ranks, the order of collectives is not same for all ranks or the scheduled collective, for"
    " some reason, didn't run. Additionally, this can be caused by GIL deadlock or other reasons"
    " such as network errors or bugs in the communications library (e.g. NCCL), etc. "
)
_ASYNCHRONOUS = (
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels,"
    " subsequent GPU operations might run on corrupted/incomplete data."
)
_TAKEN_DOWN = "To avoid data inconsistency, we are taking the entire process down."
_REMOTE = (
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    " prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer {peer}"
)
_PEER_GONE = "remote process exited or there was a network error"
_FOUND = "timeout watchdog detected operation "
_CUDA = (
    "CUDA error: {error}\nCUDA kernel errors might be asynchronously reported at some other API"
    " call, so the stacktrace below might be incorrect.\nFor debugging consider passing"
    " CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank's watchdog has found."""

    rank: int
    """The global rank."""
    group: str
    """The group's number; torch counts them."""
    group_name: str
    group_rank: int
    number: int
    """The collective's, counted from 1."""
    operation: str
    size: int
    """Elements."""
    timeout_ms: int
    ran_ms: int
    enqueued: int
    completed: int
    peer: str = ""
    """Address of the peer that has closed its connection."""
    cuda_error: str = ""


def printed_at_error(failure: Failure, version: str) -> tuple[str, str]:
    """Return what the watchdog prints when it finds a failure, and when it ends the process."""
    if version in SECOND:
        return _nccl2(failure, version)
    what = _what(failure, version)
    found = [
        (
            f"{_at(failure.rank, version, 632)} {_who(failure, version)} {what}"
            if failure.peer
            else f"{_at(failure.rank, version, 632)} [Rank {failure.group_rank}] {what}"
        )
    ]
    if failure.cuda_error:
        found = []
    elif version != "2.1":
        found += [
            _status(failure, version, line)
            for line in ("Exception (either an error or timeout)", "failure")
        ]
    if version in {"2.7", "2.13"} and not failure.cuda_error:
        known = version == "2.13"
        found.append(
            f"{_at(failure.rank, version, 683)} Stack trace of the failed collective: \n#0"
            " all_reduce from"
            " /usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py:3108\n#1 step"
            " from train.py:53\n"
            if known
            else (
                f"{_at(failure.rank, version, 683)} Stack trace of the failed collective not found,"
                " potentially because FlightRecorder is disabled. You can enable it by setting"
                " TORCH_NCCL_TRACE_BUFFER_SIZE to a non-zero value."
            )
        )
        found.append(
            f"{_at(failure.rank, version, 1780)} {_who(failure, version)} First PG on this rank to"
            " signal dumping."
        )
    ended = []
    if not failure.cuda_error:
        ended += [
            f"{_at(failure.rank, version, 697)} [Rank {failure.group_rank}] {_ASYNCHRONOUS}",
            f"{_at(failure.rank, version, 703)} [Rank {failure.group_rank}] {_TAKEN_DOWN}",
        ]
    thread = "NCCL watchdog thread" if version == "2.1" else "Process group watchdog thread"
    thrown = "std::runtime_error" if version == "2.1" else "c10::DistBackendError"
    last = f"{_who(failure, version)} {thread} terminated with exception: {what}"
    ended += [
        f"{_at(failure.rank, version, 1896)} {last}",
        _frames(version),
        f"terminate called after throwing an instance of '{thrown}'",
        f"  what():  {last}",
    ]
    return "\n".join(found) + "\n" * bool(found), "\n".join(ended) + "\n"


def printed_at_dump_signal(failure: Failure, source: int, version: str) -> str:
    """Return what another rank's heartbeat monitor prints when a rank has
    signalled that it dumps.
    """
    counts = (
        f"Last enqueued NCCL work: {failure.enqueued}, last completed NCCL work:"
        f" {failure.completed}."
    )
    who = _who(failure, version)
    return (
        f"{_at(failure.rank, version, 1682)} {who} Observed flight recorder dump signal from"
        f" another rank via TCPStore.\n{_at(failure.rank, version, 1743)} {who} Received a dump"
        f" signal due to a collective timeout from  rank {source} and we will try our best to dump"
        f" the debug info. {counts}{_USUALLY}\n"
    )


def printed_at_stuck_watchdog(failure: Failure, version: str) -> str:
    """Return what a rank's heartbeat monitor prints before it ends a process whose
    watchdog does not answer.
    """
    who = _who(failure, version)
    return (
        f"{_at(failure.rank, version, 1525)} {who} ProcessGroupNCCL's watchdog got stuck for 480"
        " seconds without making progress in monitoring enqueued collectives. This typically"
        " indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, and could"
        " be triggered by another thread holding the GIL inside a CUDA api (for example,"
        " CudaEventDestroy), or other deadlock-prone"
        f" behaviors.\n{_at(failure.rank, version, 1560, 'F')} {who} Terminating the process after"
        " attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.\n"
    )


def cuda_error(error: str) -> str:
    return _CUDA.format(error=error)


def _what(failure: Failure, version: str) -> str:
    if failure.cuda_error:
        return cuda_error(failure.cuda_error)
    if failure.peer:
        number = "2.18.1" if version == "2.1" else "2.21.5"
        found = (
            "Found async exception when checking for NCCL errors"
            if version == "2.1"
            else "NCCL error"
        )
        return (
            f"{found}: NCCL error: remote process exited or there was a network error, NCCL version"
            f" {number}\n" + (_REMOTE.format(peer=failure.peer))
        )
    return (
        f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum={failure.number},"
        f" OpType={failure.operation}, NumelIn={failure.size}, NumelOut={failure.size},"
        f" Timeout(ms)={failure.timeout_ms}) ran for {failure.ran_ms} milliseconds before timing"
        " out."
    )


def _nccl2(failure: Failure, version: str) -> tuple[str, str]:
    at = f"{_at(failure.rank, version, 638)} [TC][rank={failure.group_rank}][name={failure.group}]"
    if failure.cuda_error:
        found, why = (
            f"CUDA error during end event query: {cuda_error(failure.cuda_error)}",
            "error - " + _FOUND + "error",
        )
    elif failure.peer:
        found = f"nccl hit async error on rank {failure.group_rank}: {_PEER_GONE}"
        why = f"error - nccl hit async error: {_PEER_GONE}"
    else:
        found, why = (
            f"Operation timed out after {failure.ran_ms} ms",
            "timeout - " + _FOUND + "timeout",
        )
    file = f"/tmp/nccl_trace_rank_{failure.rank}"  # noqa: S108 - torch's
    lines = [
        f"{at} {found}",
        (
            f"{_at(failure.rank, version, 812)} FlightRecorderHook: dumping trace on collective"
            " failure"
        ),
        (
            f"{_at(failure.rank, version, 160)} Writing Flight Recorder debug info to a static file"
            " name"
        ),
        f"{_at(failure.rank, version, 182)} Finished writing Flight Recorder debug info to {file}",
    ]
    if version == ABORTS:
        lines.append(f"{at} Aborting process on rank {failure.group_rank} due to {why}")
        lines.append(
            f"{at} Waiting 15000 ms for health check and flight recorder dump before aborting"
        )
    return "\n".join(lines) + "\n", ""


def raised_after(failure: Failure) -> str:
    """Return what a collective of torch 2.15 raises after its communicators were aborted."""
    is_error = failure.peer or failure.cuda_error
    return (
        "NCCL communicator was aborted after a previous error"
        if is_error
        else "NCCL operation timed out"
    )


def _at(rank: int, version: str, line: int, letter: str = "E") -> str:
    if version == "2.1":
        return f"[E ProcessGroupNCCL.cpp:{line}]"
    now = dt.datetime.now(tz=dt.timezone.utc)
    return f"[rank{rank}]:[{letter}{now:%m%d %H:%M:%S.%f} ProcessGroupNCCL.cpp:{line}]"


def _who(failure: Failure, version: str) -> str:
    if version == "2.1":
        return f"[Rank {failure.group_rank}]"
    if version == "2.4":
        return f"[PG {failure.group} ({failure.group_name}) Rank {failure.group_rank}]"
    return (
        f"[PG ID {failure.group} PG GUID {failure.group}({failure.group_name}) Rank"
        f" {failure.group_rank}]"
    )


def _status(failure: Failure, version: str, what: str) -> str:
    at = _at(failure.rank, version, 1834)
    who = _who(failure, version)
    if version == "2.4":
        kind = (
            "Timeout at NCCL work" if what == "failure" else f"{what} detected by watchdog at work"
        )
        counts = (
            f"last enqueued NCCL work: {failure.enqueued}, last completed NCCL work:"
            f" {failure.completed}."
        )
        return f"{at} {who} {kind}: {failure.number}, {counts}"
    counts = f"last enqueued work: {failure.enqueued}, last completed work: {failure.completed}"
    if what == "failure":
        return (
            f"{at} {who} failure detected by watchdog at work sequence id: {failure.number} PG"
            f" status: {counts}"
        )
    return f"{at} {who} {what} detected by watchdog at work: {failure.number}, {counts}."


def _frames(version: str) -> str:
    method = "Watchdog::runLoop()" if version == "2.13" else "ncclCommWatchdog()"
    return (
        "Exception raised from checkTimeout at"
        " /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:635 (most recent call"
        " first):\nframe #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f3b in"
        f" libc10.so)\nframe #1: c10d::ProcessGroupNCCL::{method} + 0x14d (0x7f3c in"
        " libtorch_cuda.so)\nframe #2: <unknown function> + 0xdbbf4 (0x7f3d in libstdc++.so.6)\n"
    )
