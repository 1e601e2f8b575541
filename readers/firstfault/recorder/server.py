"""The recorder's process: answers requests, uploads, samples the container's memory, and reports the agent's death."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from firstfault import model
from firstfault.errors import BadDocumentError
from firstfault.layout import ERRORS, ROSTER, error_key_for, roster_key_for
from firstfault.model.failure import fatal_error
from firstfault.recorder.folder import (
    DOCUMENT,
    PRESENCE,
    RECEIVED,
    NodeFolder,
    Spool,
    SpooledDocument,
    Target,
    get_stack_tail,
)
from firstfault.recorder.orphans import kill_orphan_processes, relay_late_stderr
from firstfault.recorder.process import IGNORED_SIGNALS, Settings
from firstfault.recorder.time_limits import (
    AGENT_POLL_SECONDS,
    IMPORT_DELAY_SECONDS,
    MEMORY_SAMPLE_INTERVAL_SECONDS,
    OPEN_REQUESTS_POLL_SECONDS,
    QUIET_PERIOD_SECONDS,
    SLOW_UPLOAD_SECONDS,
    UPLOADS_DRAIN_TIMEOUT_SECONDS,
)
from firstfault.store import Store, open_store
from firstfault.utils.run_sync import attempted, run_sync
from firstfault.utils.text import parse_json

T = TypeVar("T")
_END_SHARE = 0.8
"""Share of a client's timeout for uploads in progress; the rest is for the answer and the exit."""
_PARALLEL = 16
"""Uploads at a time."""
_SPARE_THREADS = 2
"""Threads for imports, in addition to those of uploads to a storage that isn't asynchronous."""


def serve(folder: NodeFolder, settings: Settings) -> None:
    """Serve until the agent ends, then remove the folder and exit. Does not return."""
    # The agent started this process with these signals blocked. Ignore them first, then unblock: the kernel discards a
    # pending signal when its action becomes SIG_IGN, so a Ctrl-C during the start is lost on purpose.
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    if not os.environ.get("FIRSTFAULT_DEBUG"):
        logging.getLogger("stamina").setLevel(logging.ERROR)  # the recorder logs lost documents, not retries
    asyncio.run(_run(folder, settings))


async def _run(folder: NodeFolder, settings: Settings) -> None:
    _, error = await attempted(_Server(folder, settings).live())
    if error:
        log_line(f"ended by {error}")
    folder.remove()
    # Exit inside the loop: asyncio.run() would join executor threads, which may hang in a storage request.
    os._exit(0)


class _Server:
    """The recorder of one node."""

    def __init__(self, folder: NodeFolder, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._memory = MemoryWatch()
        self._uploads = Uploads(settings.output_prefix)
        self._ended = asyncio.Event()
        self._connections = 0
        self._last_request = time.monotonic()

    async def live(self) -> None:
        """Serve until the agent sends "end" or dies, or the folder is gone."""
        # The agent has already bound this socket: clients may have connected before this process could run.
        listener = socket.socket(fileno=self._settings.listener)
        await asyncio.start_unix_server(self._serve, sock=listener, backlog=socket.SOMAXCONN)
        agent = asyncio.create_task(_agent_gone(self._settings.agent_pid))
        ends = (agent, asyncio.create_task(self._ended.wait()), asyncio.create_task(self._watch_memory_and_folder()))
        preparing = asyncio.create_task(self._prepare())  # noqa: F841, RUF006 - a reference, so that it isn't garbage-collected
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        # The request may arrive and the agent exit in the same turn of the loop; then there is nothing left to upload.
        if self._ended.is_set():
            return  # the request "end" has already waited for the uploads
        if agent.done():
            await self._outlive_agent()
        else:
            await self._uploads.drain(UPLOADS_DRAIN_TIMEOUT_SECONDS)

    async def _prepare(self) -> None:
        await self._uploads.warm()
        await asyncio.sleep(IMPORT_DELAY_SECONDS)
        await asyncio.to_thread(importlib.import_module, "firstfault.wire.documents")  # before the agent dies

    async def _watch_memory_and_folder(self) -> None:
        """Sample the memory; return when the folder is gone."""
        while os.path.isdir(self._folder.path):  # noqa: PTH112, ASYNC240 - often, and cheap on a local file
            self._memory.sample()
            await asyncio.sleep(MEMORY_SAMPLE_INTERVAL_SECONDS)

    # --- requests -----------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request in two lines, at once and with the result; close the connection if it is invalid."""
        self._connections += 1
        self._last_request = time.monotonic()
        request: dict[str, Any] = {}
        try:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                request = dict(parse_json(await reader.readline()))
                # The client may be killed, or time out, before it reads an answer: its document is uploaded anyway.
                writer.write(RECEIVED)
                answer = await self._answer(request)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        finally:
            # Also after an error: once the agent is dead, the recorder stays until no connection is left.
            writer.close()
            self._connections -= 1
        if request.get("op") == "end":
            self._ended.set()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "put":
            file, target = Path(request["file"]), Target(**request["target"])
            spool = Spool(file.parent) if file.is_relative_to(self._folder.path) else None
            return asdict(await self._uploads.put(target, file, spool))
        if request["op"] == "end":
            await self._uploads.drain(min(UPLOADS_DRAIN_TIMEOUT_SECONDS, _END_SHARE * request["seconds"]))
            return {}
        if request["op"] == "resources":
            return asdict(self._memory.report())
        if request["op"] == "roster":
            names, error = await self._uploads.names(ROSTER)
            return {"names": names, "error": error}
        raise ValueError(request["op"])

    # --- the agent's death --------------------------------------------------------------------------------------

    async def _outlive_agent(self) -> None:
        # The dead agent was the only reader of the workers' stderr: open the FIFOs before anything slow, because a
        # worker that writes without a reader gets SIGPIPE.
        stderr = self._folder.open_stderr()
        reading = asyncio.create_task(asyncio.to_thread(_read_on, stderr)) if stderr else None
        _, error = await attempted(self._report_death())
        if error:
            log_line(f"the agent's death was not recorded: {error}")
        # Surviving workers may still send documents: stay until no request is open and none has come for a while.
        deadline = time.monotonic() + self._settings.deadline_seconds
        while time.monotonic() < deadline:
            if not self._connections and time.monotonic() - self._last_request > QUIET_PERIOD_SECONDS:
                break
            await asyncio.sleep(OPEN_REQUESTS_POLL_SECONDS)
        if reading is not None:
            await reading
        # Last: until here a surviving worker may still be sending its document.
        folder = self._folder
        await asyncio.to_thread(kill_orphan_processes, folder.path, self._settings.left_seconds, folder.sessions)

    async def _report_death(self) -> None:
        """Upload the document about the agent's death and all spooled documents at once, then the roster entry.

        There is little time: if the agent was the container's first process, the kernel is killing this one too.
        """
        words = self._folder.last_words.folder
        uploads = [self._upload_spooled(spool, item) for spool in self._folder.spools() for item in spool.documents()]
        if (data := _read(words / DOCUMENT)) is not None:
            uploads.insert(0, self._upload_death(data, time.time_ns(), time.monotonic_ns()))
        uploaded = []
        for outcome in await asyncio.gather(*uploads, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log_line(f"a document of the dead agent was not uploaded: {type(outcome).__name__}: {outcome}")
            else:
                uploaded.append(outcome)
        # The roster entry lists the receipts, so it comes last. If this process is killed first, readers find documents
        # without an entry.
        if (data := _read(words / PRESENCE)) is None:
            return
        from firstfault.wire.documents import decode_presence, encode_presence  # noqa: PLC0415 - heavy, seldom needed

        presence = decode_presence(data, PRESENCE)
        receipts = tuple(receipt for receipt, round_ in uploaded if round_ in {None, presence.place.round})
        presence = replace(presence, receipts=receipts, timestamp_ns=time.time_ns())
        target = Target(f"{ROSTER}/{roster_key_for(presence)}")
        await self._in_time(target, self._uploads.put(target, encode_presence(presence)))

    async def _upload_death(self, data: bytes, wall_ns: int, monotonic_ns: int) -> tuple[model.Receipt, int | None]:
        """Upload the document about the agent's death at this moment; return receipt and round."""
        from firstfault.wire.documents import decode, encode  # noqa: PLC0415 - as above

        failure, resources = decode(data, model.DocumentRef(DOCUMENT)), self._memory.report()
        if not isinstance(failure, model.WorkerError):
            raise TypeError(f"{DOCUMENT} of the agent is not an error document")
        failure = replace(
            failure, timestamp_ns=wall_ns, monotonic_ns=monotonic_ns, writer=model.Writer.RECORDER, resources=resources
        )
        if failure.subject is model.Subject.WORKER:  # a rank that no agent has started
            failure = _with_its_end(failure, self._folder)
        target = Target(f"{ERRORS}/{error_key_for(failure)}", monotonic_ns, failure.rank)
        return await self._in_time(target, self._uploads.put(target, encode(failure))), failure.place.round

    async def _upload_spooled(self, spool: Spool, document: SpooledDocument) -> tuple[model.Receipt, int | None]:
        """Upload a spooled document if it needs that; return its receipt, and its round if it could be read."""
        failure = _decode_failure(document)
        receipt = document.settled
        if receipt is None:
            rank, monotonic_ns = (failure.rank, failure.monotonic_ns) if failure is not None else (None, None)
            target = Target(f"{ERRORS}/{document.name}", monotonic_ns, rank)
            receipt = await self._in_time(target, self._uploads.put(target, document.path, spool))
        return receipt, failure.place.round if failure is not None else None

    async def _in_time(self, target: Target, upload: Coroutine[None, None, model.Receipt]) -> model.Receipt:
        seconds = self._settings.deadline_seconds
        try:
            receipt = await asyncio.wait_for(upload, seconds)
        except asyncio.TimeoutError:
            receipt = target.failed(f"the storage did not answer within {seconds:.1f} s")
        if not receipt.durable:
            log_line(f"{target.name} was not uploaded: {receipt.error}")
        return receipt


async def _agent_gone(pid: int) -> None:
    """Return when the parent process `pid` has ended; at once if it already has.

    Uses pidfd_open(2), and polls ten times a second where that is missing or forbidden.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        while os.getppid() == pid:  # noqa: ASYNC110 - no event exists to wait for
            await asyncio.sleep(AGENT_POLL_SECONDS)
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        # checked after opening: if `pid` is still our parent, the number wasn't reused for another process
        if os.getppid() == pid:
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _read_on(stderr: list[int]) -> None:
    """Let a separate process read the stderr of orphans, which would get SIGPIPE without a reader."""
    try:
        relay_late_stderr(dict.fromkeys(stderr, True))
    except (OSError, subprocess.SubprocessError) as error:
        log_line(f"the stderr of processes that outlive the agent is lost: {error}")


def _decode_failure(document: SpooledDocument) -> model.WorkerError | None:
    """Return the decoded document; None if it can't be read."""
    from firstfault.wire.documents import decode  # noqa: PLC0415 - as above

    try:
        failure = decode(document.path.read_bytes(), model.DocumentRef(document.name))
    except (OSError, BadDocumentError):
        return None
    return failure if isinstance(failure, model.WorkerError) else None


def _with_its_end(failure: model.WorkerError, folder: NodeFolder) -> model.WorkerError:
    """Add the signal that ended a rank without an agent, if the rank left no exception.

    The rank's parent is a launcher, so its exit code is unknown here. A fatal signal (SIGSEGV, SIGABRT) and SIGTERM
    each leave stacks in a separate file. Without such a file the failure stays a SIGKILL, which leaves no trace.
    """
    from firstfault.exceptions.fingerprint import compute_fingerprint  # noqa: PLC0415 - heavy, seldom needed

    files = folder.worker(failure.place.round, failure.place.local_rank or 0)
    fatal, asked = get_stack_tail(files.fatal_stacks), get_stack_tail(files.stacks)
    signal = fatal_error(fatal)[1] if fatal else "SIGTERM" if asked else ""
    if signal:
        sent = (model.SentSignal(signal, model.TERMINATED_ALONE),) if signal == "SIGTERM" else ()
        failure = replace(
            failure,
            code="USER:Stopped" if sent else f"USER:{signal}",
            message=f"rank {failure.rank} was {'terminated' if sent else 'killed'} by {signal}",
            signal=signal,
            sent_signals=sent,
            stack_dumps=(model.StackDump(failure.place.pid, failure.rank, fatal or asked),),
        )
    return replace(failure, fingerprint=compute_fingerprint(failure))


# --- uploads --------------------------------------------------------------------------------------------------------


class Uploads:
    """Runs uploads below an output prefix concurrently, through one store that stays open.

    Belongs to one event loop. Each call waits until `warm` has ended.
    """

    def __init__(self, output_prefix: str) -> None:
        self._output_prefix = output_prefix
        self._store: Store | None = None
        self._open_error = ""
        self._warm = asyncio.Event()
        self._slots = asyncio.Semaphore(_PARALLEL)
        self._in_progress: dict[str, asyncio.Task[model.Receipt]] = {}
        self._began: dict[str, float] = {}
        """When the last upload of each path in progress began, by the monotonic clock."""

    async def warm(self) -> None:
        """Open the store and keep it open. If that fails, every upload fails with the same error."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_PARALLEL + _SPARE_THREADS))
        self._store, self._open_error = await attempted(self._opened())
        self._warm.set()

    async def _opened(self) -> Store:
        # importing the storage's client is slow; the loop must accept connections in the meantime
        await asyncio.to_thread(_load_client, self._output_prefix)
        return await open_store(self._output_prefix).__aenter__()

    async def put(self, target: Target, source: bytes | Path, spool: Spool | None = None) -> model.Receipt:
        """Write an object, from bytes or a file, and return its receipt, also into `spool`; never raises."""
        return await self._upload_once(target.path, partial(self._put, target, source, spool))

    async def names(self, folder: str) -> tuple[list[str], str]:
        """Return the names of a folder's objects, and the error if they could not be listed; never raises."""
        found, error = await self._with_store(lambda store: store.list(folder))
        return [item.name for item in found or ()], error

    async def drain(self, seconds: float) -> None:
        """Wait at most `seconds` for the uploads in progress; name those that didn't finish on stderr."""
        if self._in_progress:
            await asyncio.wait(set(self._in_progress.values()), timeout=seconds)
        for path in self._in_progress:
            log_line(f"{path} was not uploaded: the storage did not answer before the job ended")

    async def _upload_once(
        self, path: str, upload: Callable[[], Coroutine[None, None, model.Receipt]]
    ) -> model.Receipt:
        """Start an upload, or join the one in progress for this path; start a second one if that one is slow."""
        # A document may be requested twice: by its worker, and again after the worker or the agent has died. The first
        # request may hang in the storage, so it is awaited only while it is young.
        while (running := self._in_progress.get(path)) is not None:
            young_for = self._began[path] + SLOW_UPLOAD_SECONDS - time.monotonic()
            if young_for <= 0:
                break
            await asyncio.wait({running}, timeout=young_for)
            if running.done():
                return running.result()
        task = asyncio.create_task(upload() if running is None else _first_durable(running, upload()))
        self._in_progress[path], self._began[path] = task, time.monotonic()
        task.add_done_callback(lambda ended: self._forget(path, ended))
        # Cancelling a caller (`_in_time`) must not cancel the upload, which other callers may have joined.
        return await asyncio.shield(task)

    def _forget(self, path: str, ended: asyncio.Task[model.Receipt]) -> None:
        # A second upload may have replaced this one.
        if self._in_progress.get(path) is ended:
            del self._in_progress[path], self._began[path]

    async def _with_store(self, call: Callable[[Store], Awaitable[T]]) -> tuple[T | None, str]:
        await self._warm.wait()
        if self._store is None:
            return None, self._open_error
        async with self._slots:
            return await attempted(call(self._store))

    async def _put(self, target: Target, source: bytes | Path, spool: Spool | None) -> model.Receipt:
        data = _read(source) if isinstance(source, Path) else source
        if data is None:
            return target.failed(f"{source!s} could not be read")
        _, error = await self._with_store(lambda store: store.put(target.path, data))
        receipt = target.failed(error) if error else target.done()
        if spool is not None:
            with contextlib.suppress(OSError):  # no folder, or a full disk; the client gets the answer anyway
                spool.add_receipt(receipt)
        return receipt


async def _first_durable(
    running: asyncio.Task[model.Receipt], upload: Coroutine[None, None, model.Receipt]
) -> model.Receipt:
    """Run a second upload in addition to a slow one; return the first durable receipt, else the last one."""
    pending = {running, asyncio.create_task(upload)}
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        receipts = sorted((task.result() for task in done), key=lambda receipt: not receipt.durable)
        if receipts[0].durable or not pending:
            return receipts[0]


def log_line(text: str) -> None:
    """Write a line to stderr, which is the pod's log."""
    with contextlib.suppress(OSError):  # stderr is closed
        sys.stderr.write(f"firstfault: recorder: {text}\n")
        sys.stderr.flush()


def _load_client(output_prefix: str) -> None:
    """Open the store once, which imports its client."""

    async def look() -> None:
        async with open_store(output_prefix):
            pass

    run_sync(look())


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


# --- the container's memory -------------------------------------------------------------------------------------------

_NO_LIMIT_BYTES = 2**60
"""A larger limit means no limit: version 1 writes the largest number of whole pages for that."""


# file names of each version of control groups; each file has one number, "oom" has lines of a name and a number
_V1 = {
    "used": "memory.usage_in_bytes",
    "peak": "memory.max_usage_in_bytes",
    "limit": "memory.limit_in_bytes",
    "oom": "memory.oom_control",
}
_V2 = {"used": "memory.current", "peak": "memory.peak", "limit": "memory.max", "oom": "memory.events"}


@dataclass(frozen=True, slots=True)
class _ContainerGroup:
    """The control group of this process."""

    folder: Path
    mount: Path
    files: dict[str, str]

    def limited(self) -> Path:
        """Return the folder of the nearest group upwards that has a limit; of this group if none has."""
        folder = self.folder
        while _read_number(folder / self.files["limit"]) is None:
            if folder == self.mount:
                return self.folder
            folder = folder.parent
        return folder


class MemoryWatch:
    """Watches the memory of the control group that this process is in, version 1 or 2. Never raises.

    Usage, peak and limit are those of the nearest group that has a limit; kills are those of this process's group.
    Usage includes page cache, which the kernel frees before it kills, so usage near the limit proves nothing. Tests set
    `root`, the folder of ``/proc`` and the mounts.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._group = _own_group(root)
        self._limited = self._group.limited() if self._group is not None else None
        self._kills_before = self._kills()
        self._used: int | None = None
        self._watermark: int | None = None
        self._watermark_ns: int | None = None
        self.sample()

    def sample(self) -> None:
        """Read the memory in use, and keep the highest value with its time."""
        used = self._number("used")
        self._used = used
        if used is not None and (self._watermark is None or used > self._watermark):
            self._watermark, self._watermark_ns = used, time.time_ns()

    def report(self) -> model.Resources:
        """Return the current figures; None for one that could not be read.

        ``oom_kill``: processes of this group that the kernel's OOM killer has killed since this watch began.
        ``memory_used_bytes``, ``memory_limit_bytes``: now; a limit of None means no limit.
        ``memory_peak_bytes``: the kernel's peak, else the highest sample.
        ``watermark_ns``: time of the highest sample, nanoseconds since the Unix epoch.
        """
        self.sample()
        kills = self._kills()
        peak = self._number("peak")
        return model.Resources(
            oom_kill=max(kills - (self._kills_before or 0), 0) if kills is not None else None,
            memory_used_bytes=self._used,
            memory_peak_bytes=peak if peak is not None else self._watermark,
            memory_limit_bytes=self._number("limit"),
            watermark_ns=self._watermark_ns,
        )

    def _number(self, which: str) -> int | None:
        if self._group is None or self._limited is None:
            return None
        return _read_number(self._limited / self._group.files[which])

    def _kills(self) -> int | None:
        if self._group is None:
            return None
        for line in _read_text(self._group.folder / self._group.files["oom"]).splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.isdigit():
                return int(number)
        return None


def _own_group(root: Path) -> _ContainerGroup | None:
    """Return this process's group: of version 1 if that has a memory controller, else of version 2."""
    groups = [line.split(":", 2)[1:] for line in _read_text(root / "proc/self/cgroup").splitlines()]
    paths = {name: group[1] for group in groups if len(group) > 1 for name in group[0].split(",")}
    path = paths.get("memory", paths.get(""))
    version_1 = "memory" in paths
    for mount_root, mount in _list_mounts(root, version_1=version_1):
        if path is not None:
            return _ContainerGroup(_find_group_folder(mount_root, mount, path), mount, _V1 if version_1 else _V2)
    return None


def _list_mounts(root: Path, *, version_1: bool) -> list[tuple[str, Path]]:
    """Return the root and the mount point of each mount of the hierarchy; see mountinfo in proc(5)."""
    found = []
    for line in _read_text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount, kind = left.split(), right.split()
        if kind[:1] == ["cgroup" if version_1 else "cgroup2"] and (not version_1 or "memory" in kind[-1].split(",")):
            found.append((mount[3], root / mount[4].lstrip("/")))
    return found


def _find_group_folder(mount_root: str, mount: Path, path: str) -> Path:
    """Return the group's folder. In a container it is the mount point itself, also if `path` is a path of the host."""
    prefix = mount_root.rstrip("/")
    inside = path[len(prefix) :].strip("/") if f"{path}/".startswith(f"{prefix}/") else ""
    folder = mount / inside
    return folder if ".." not in folder.parts and folder.is_dir() else mount


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, or if it means no limit."""
    text = _read_text(path).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT_BYTES else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
