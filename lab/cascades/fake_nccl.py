"""A process group that fails as NCCL's does, without a GPU: the backend "lab_nccl".

What it imitates:

- Collectives are asynchronous: a call only enqueues. The main thread runs ahead, and blocks when it
  waits for the GPU, in a C call during which Python runs no signal handler.
- A collective ends when all members have started it with the same operation and size; otherwise
  never.
- A watchdog thread finds timeouts, connections that a peer on another node has closed, and errors
  of the GPU. It prints torch's words, waits for the dump, aborts the communicators, and ends the
  process with SIGABRT.
- The abort comes from a thread that Python does not know.
- A peer on the same node, or on another one with another local rank, is not missed before the
  timeout.
- A rank that times out signals its dump through the store, and the other ranks' monitors print that
  they saw it.
- torch 2.15's ProcessGroupNCCL2 has no monitor and no signal. It aborts after the time for dumps,
  or it aborts the communicators only: then the main thread's wait for the GPU ends, and its next
  collective raises.
- The flight recorder's JSON, in the place where a build with NCCL has it.

What it does not: data (tensors stay as they are), the communicators' set-up, NCCL's own threads,
CUDA contexts that hold a lock, and time (seconds stand for minutes). Its watchdog is a Python
thread, so it stops where the GIL is held.
"""

from __future__ import annotations

import asyncio
import ctypes
import datetime as dt
import functools
import json
import mmap
import os
import queue
import struct
import threading
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from lab.cascades import nccl_words

POLL_S = 0.1
DUMP_S = 1.0
CLOSED_S = 1.0
"""How long after its end a peer's closed connection is noticed."""
UNBLOCKED_S = 1.0
"""From the abort to the end of a process whose main thread goes on."""
HEARTBEAT_S = 2.5
_WITHOUT_MONITOR = {"2.1", *nccl_words.SECOND}
_MOST = 400
"""Collectives of one group."""
_ROW = struct.Struct(f"qq{_MOST}q")
_SIGNAL = "exception_dump"


def say(text: str) -> None:
    """Write to stderr past Python, as native code does."""
    os.write(2, text.encode())


def abort() -> None:
    """End this process by SIGABRT from a thread that Python does not know,
    as torch's watchdog does.
    """
    library = ctypes.CDLL(None)
    library.pthread_create(
        ctypes.byref(ctypes.c_ulong()),
        None,
        ctypes.cast(library.abort, ctypes.c_void_p),
        None,
    )
    threading.Event().wait()


@dataclass(slots=True)
class _Work:
    group: _Group
    number: int
    operation: str
    size: int
    dtype: str
    enqueued_at: float
    state: str = "scheduled"

    @property
    def signature(self) -> int:
        return zlib.crc32(f"{self.operation} {self.size}".encode())


class _Fabric:
    """What the members of a group know of each other: a mapped file with a row for each."""

    def __init__(self, folder: Path, name: str, rank: int, size: int) -> None:
        file = folder / f"fabric-{name}"
        with file.open("ab"):
            os.truncate(file, _ROW.size * size)  # the same for all
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), _ROW.size * size)
        self._base, self.size = rank * _ROW.size, size
        self._put(self._base, os.getpid())

    def _put(self, at: int, value: int) -> None:
        self._map[at : at + 8] = struct.pack("q", value)

    def _get(self, at: int) -> int:
        return int(struct.unpack("q", self._map[at : at + 8])[0])

    def start(self, work: _Work) -> None:
        self._put(self._base + 16 + 8 * work.number, work.signature)
        self._put(self._base + 8, work.number)

    def is_done(self, work: _Work) -> bool:
        rows = [rank * _ROW.size for rank in range(self.size)]
        return all(
            self._get(row + 8) >= work.number
            and self._get(row + 16 + 8 * work.number) == work.signature
            for row in rows
        )

    def is_gone(self, rank: int) -> bool:
        pid = self._get(rank * _ROW.size)
        if not pid:
            return False
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - often
                return file.read().rpartition(b")")[2].split()[0] in {b"Z", b"X"}
        except OSError:
            return True


class Gpu:
    """One GPU with one stream, in which collectives run in order.

    ``lock(mutex)`` waits until the stream is empty, as ``torch.cuda.synchronize`` does;
    ``unlock(mutex)`` and `check` have to follow.
    """

    def __init__(self, version: str) -> None:
        library = ctypes.CDLL(None)
        self._mutex = ctypes.create_string_buffer(64)
        self._try = functools.partial(library.pthread_mutex_trylock, self._mutex)
        self.lock = functools.partial(library.pthread_mutex_lock, self._mutex)
        self.unlock = functools.partial(library.pthread_mutex_unlock, self._mutex)
        self.version = version
        self.error = ""
        self.unblocks = False
        """Whether an abort ends the main thread's wait; NCCL has both."""
        self.aborted = False
        self.stuck = False
        """Whether the watchdog does not come back from a CUDA call."""
        self.cut_after: int | None = None
        """Collectives of a group after which the network transports nothing."""
        self._guard = threading.Lock()
        self._waiting = 0
        self._stream: queue.Queue[_Work | tuple[str, str]] = queue.Queue()
        threading.Thread(target=self._run, name="cuda-stream", daemon=True).start()

    def submit(self, item: _Work | tuple[str, str]) -> None:
        """Enqueue a collective, or an error and what its kernel prints."""
        with self._guard:
            if not self._waiting:
                self._try()
            self._waiting += 1
        self._stream.put(item)

    def check(self) -> None:
        """Raise what a CUDA call raises after an error, from native code as CUDA calls do."""
        if self.error:
            future = asyncio.new_event_loop().create_future()
            future.set_exception(torch.AcceleratorError(nccl_words.cuda_error(self.error)))
            future.result()

    def abort(self) -> None:
        """End the communicators."""
        if self.unblocks:
            self.aborted = True
            time.sleep(UNBLOCKED_S)

    def _run(self) -> None:
        while True:
            item = self._stream.get()
            if isinstance(item, tuple):
                self.error = item[0]
                say(item[1])
            else:
                self._collective(item)
            with self._guard:
                self._waiting -= 1
                if not self._waiting:
                    self.unlock()

    def _collective(self, work: _Work) -> None:
        fabric = work.group.fabric
        if self.error:
            return
        work.state = "started"
        fabric.start(work)
        while not fabric.is_done(work) or (
            self.cut_after is not None and work.number > self.cut_after
        ):
            if self.aborted:
                return
            time.sleep(0.005)
        work.state = "completed"


@dataclass(slots=True)
class _Group:
    """A group's works, watchdog and, for the default group, monitor."""

    gpu: Gpu
    fabric: _Fabric
    number: str
    name: str
    rank: int
    members: list[int]
    per_node: int
    timeout_s: float
    store: Any
    works: list[_Work] = field(default_factory=list)
    failure: nccl_words.Failure | None = None
    """What the watchdog has found."""
    beat: float = field(default_factory=time.monotonic)

    def enqueue(self, operation: str, tensor: torch.Tensor) -> None:
        if self.failure is not None and self.gpu.version == nccl_words.ABORTS:
            threading.Event().wait()  # it aborts the process itself, after the same time
        if self.failure is not None and self.gpu.version == nccl_words.RAISES:
            raise RuntimeError(nccl_words.raised_after(self.failure))
        work = _Work(
            self,
            len(self.works) + 1,
            operation,
            tensor.numel(),
            str(tensor.dtype)[6:],
            time.monotonic(),
        )
        self.works.append(work)
        self.gpu.submit(work)

    def watch(self) -> None:
        """Look after the works until one fails."""
        gone_since: dict[int, float] = {}
        while self.failure is None:
            time.sleep(POLL_S)
            if self.gpu.stuck:
                threading.Event().wait()
            self.beat = time.monotonic()
            open_works = [work for work in self.works if work.state != "completed"]
            if not open_works:
                continue
            now = time.monotonic()
            for member in self._connected():
                if self.fabric.is_gone(member):
                    gone_since.setdefault(member, now)
            closed = next(
                (member for member, since in gone_since.items() if now - since > CLOSED_S), None
            )
            if self.gpu.error:
                self._end(self._failure(open_works[0], cuda_error=self.gpu.error))
            elif closed is not None:
                self._end(
                    self._failure(
                        open_works[0], peer=f"node-{self.members[closed] // self.per_node}<41772>"
                    )
                )
            elif now - open_works[0].enqueued_at > self.timeout_s:
                self._end(self._failure(open_works[0]), signals=True)

    def _connected(self) -> list[int]:
        """Return the members on other nodes to which this rank has a connection:
        those with its local rank.
        """
        me = self.members[self.rank]
        return [
            place
            for place, member in enumerate(self.members)
            if member // self.per_node != me // self.per_node
            and member % self.per_node == me % self.per_node
        ]

    def _failure(self, work: _Work, **more: str) -> nccl_words.Failure:
        return nccl_words.Failure(
            rank=self.members[self.rank],
            group=self.number,
            group_name=self.name,
            group_rank=self.rank,
            number=work.number,
            operation=work.operation,
            size=work.size,
            timeout_ms=int(self.timeout_s * 1000),
            ran_ms=int((time.monotonic() - work.enqueued_at) * 1000),
            enqueued=len(self.works),
            completed=self.completed,
            **more,
        )

    @property
    def completed(self) -> int:
        """How many works have ended."""
        return sum(work.state == "completed" for work in self.works)

    @property
    def idle(self) -> nccl_words.Failure:
        """A failure of no work."""
        return self._failure(_Work(self, 0, "", 0, "", 0.0))

    def shut_down(self) -> None:
        """Wait for the works in flight, as ncclCommAbort may: for ever, if one does not end.

        torch 2.15 stops the watchdog first, and aborts the communicators when a work has timed out.
        """
        if self.gpu.version in nccl_words.SECOND and self.failure is None:
            self.failure, until = self.idle, time.monotonic() + self.timeout_s
            while self.completed < len(self.works) and time.monotonic() < until:
                time.sleep(POLL_S)
            self.gpu.aborted = True
        self.gpu.lock()
        self.gpu.unlock()

    def _end(self, failure: nccl_words.Failure, signals: bool = False) -> None:
        found, last = nccl_words.printed_at_error(failure, self.gpu.version)
        say(found)
        if self.gpu.version in nccl_words.SECOND:
            self.failure = failure
        if self.gpu.version == nccl_words.RAISES:
            for group in _groups:  # their works wait behind this one, and time out with it
                group.failure = group.failure or failure
            self.gpu.aborted = True
            return
        if signals and self.gpu.version not in _WITHOUT_MONITOR:
            self._signal()
        if not failure.cuda_error and self.gpu.version != "2.1":
            time.sleep(DUMP_S)
        self.gpu.abort()
        say(last)
        abort()

    def _signal(self) -> None:
        try:
            self.store.set(_SIGNAL, str(self.members[self.rank]))
        except RuntimeError as error:
            say(f"[W ProcessGroupNCCL.cpp:1771] Failed to set the dump flag on TCPStore: {error}\n")

    def monitor(self) -> None:
        """Look for dump signals, and after the watchdog."""
        seen = False
        while True:
            time.sleep(0.3)
            if time.monotonic() - self.beat > HEARTBEAT_S:
                say(nccl_words.printed_at_stuck_watchdog(self.idle, self.gpu.version))
                abort()
            if seen:
                continue
            try:
                seen = self.store.check([_SIGNAL])
                source = int(self.store.get(_SIGNAL)) if seen else -1
            except RuntimeError:
                say('[W ProcessGroupNCCL.cpp:1771] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore '
                    "server has shut down too early), with error: Broken pipe\n")  # fmt: skip
                return
            if seen and source != self.members[self.rank]:
                say(nccl_words.printed_at_dump_signal(self.idle, source, self.gpu.version))


class _Done(dist.Work):
    """What a collective returns: on a GPU its ``wait`` makes the stream wait, not the caller."""

    def wait(self, timeout: dt.timedelta | None = None) -> bool:  # noqa: ARG002 - torch's signature
        return True


def _fake(kind: Any, name: str, group: _Group) -> Any:
    """Return a process group, or a backend of one,
    with the collectives that the lab's trainings call.
    """

    class Fake(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            kind.__init__(self, group.rank, len(group.members))

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return name

        def allreduce(self, tensors: list[torch.Tensor], _options: Any = None) -> _Done:
            group.enqueue("ALLREDUCE", tensors[0])
            return _Done()

        def broadcast(self, tensors: list[torch.Tensor], _options: Any = None) -> _Done:
            group.enqueue("BROADCAST", tensors[0])
            return _Done()

        def shutdown(self) -> None:
            group.shut_down()

    return Fake()


_kept: list[Any] = []
"""torch keeps the native half of a backend only."""
_groups: list[_Group] = []


def install(version: str, folder: Path) -> Gpu:
    """Register the backend, and the flight recorder; return the GPU.

    `version` is one of ``nccl_words.VERSIONS``; all ranks share the folder, which has the GPUs'
    connections.
    """
    version = nccl_words.ABORTS if version == "nccl2" else version
    gpu = Gpu(version)
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])

    # torch 2.15 hooks its own recorder into a backend that Python defines
    is_hooked = version in nccl_words.SECOND and hasattr(
        dist.distributed_c10d._world, "pg_flight_recorder_hooks"
    )

    def create(options: Any, _backend_options: Any) -> Any:
        name = str(options.group_id)
        members = list(options.global_ranks_in_group) or list(range(options.group_size))
        group = _Group(
            gpu,
            _Fabric(folder, name.replace("/", "_"), options.group_rank, options.group_size),
            str(len(_groups)),
            "default_pg" if not _groups else f"group_{'_'.join(map(str, members))}",
            options.group_rank,
            members,
            per_node,
            options.timeout.total_seconds(),
            options.store,
        )
        threading.Thread(target=group.watch, name="watchdog", daemon=True).start()
        if not _groups and version not in _WITHOUT_MONITOR:
            threading.Thread(target=group.monitor, name="heartbeat-monitor", daemon=True).start()
        _groups.append(group)
        _kept.append(
            _fake(
                *((c10d.Backend, "nccl2") if is_hooked else (dist.ProcessGroup, "lab_nccl")), group
            )
        )
        return _kept[-1]

    dist.Backend.register_backend("lab_nccl", create, extended_api=True, devices=["cpu"])
    if version in nccl_words.SECOND and not is_hooked:
        c10d._dump_fr_trace_json = _recorded_by  # type: ignore[attr-defined]
    elif not is_hooked:
        c10d._dump_nccl_trace_json = _recorded  # type: ignore[attr-defined]
    return gpu


def _recorded_by(backend: str = "gloo") -> str:
    """Return what torch 2.15's hook has recorded, which counts from 0, and sees no work start;
    backend: a name.
    """
    trace = json.loads(_recorded()) if backend == "nccl2" else {}
    for entry in trace.get("entries", ()):
        entry["profiling_name"] = entry["profiling_name"].replace("nccl:", "nccl2:")
        entry["state"] = entry["state"].replace("started", "scheduled")
    for status in trace.get("pg_status", {}).values():
        status.update(
            {name: str(max(count - 1, -1)) for name, count in status.items()},
            last_started_collective="-1",
        )
    return json.dumps(trace)


def _recorded(**_options: Any) -> str:
    """Return the flight recorder's JSON."""
    entries = [
        {
            "record_id": place,
            "pg_id": int(work.group.number),
            "process_group": [work.group.number, work.group.name],
            "collective_seq_id": work.number,
            "p2p_seq_id": 0,
            "op_id": work.number,
            "profiling_name": f"nccl:{work.operation.lower().replace('allreduce', 'all_reduce')}",
            "input_sizes": [[work.size]],
            "input_dtypes": [work.dtype.capitalize()],
            "output_sizes": [[work.size]],
            "output_dtypes": [work.dtype.capitalize()],
            "state": work.state,
            "retired": work.state == "completed",
            "is_p2p": False,
        }
        for place, work in enumerate(
            sorted((w for g in _groups for w in g.works), key=lambda w: w.enqueued_at)
        )
    ]
    status = {
        group.number: {
            "last_enqueued_collective": len(group.works) or -1,
            "last_started_collective": sum(work.state != "scheduled" for work in group.works) or -1,
            "last_completed_collective": group.completed or -1,
        }
        for group in _groups
    }
    config = {
        group.number: {"name": group.number, "desc": group.name, "ranks": json.dumps(group.members)}
        for group in _groups
    }
    return json.dumps(
        {"version": "2.10", "entries": entries, "pg_status": status, "pg_config": config}
    )
