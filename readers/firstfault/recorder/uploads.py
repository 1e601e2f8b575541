"""The recorder's uploads: one client for all of the node's documents, each path once at a time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from firstfault import model
from firstfault.recorder.client import Target
from firstfault.recorder.spool import Spool
from firstfault.recorder.time_limits import SLOW_UPLOAD_SECONDS
from firstfault.store import Store, open_store
from firstfault.utils.brief_threads import BriefThreads
from firstfault.utils.run_sync import run_sync, try_await

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Upload:
    """The last upload of a path in progress."""

    data: bytes
    task: asyncio.Task[model.Receipt]
    began: float
    """By the monotonic clock."""


_MAX_CONCURRENT_UPLOADS = 16
"""Uploads at a time."""
_SPARE_THREADS = 2
"""Threads for imports, in addition to those of uploads to a storage that isn't asynchronous."""


class Uploads:
    """Runs uploads below an output prefix concurrently, through one store that stays open.

    Belongs to one event loop. Each call waits until `warm` has ended.
    """

    def __init__(self, output_prefix: str) -> None:
        self._output_prefix = output_prefix
        self._store: Store | None = None
        self._open_error = ""
        self._warm = asyncio.Event()
        self._opening = asyncio.Lock()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_UPLOADS)
        self._in_progress: dict[str, _Upload] = {}
        self._repeated: set[asyncio.Task[model.Receipt]] = set()

    async def warm(self) -> None:
        """Open the store and keep it open. If that fails, each upload tries again,
        and fails with the same error.
        """
        asyncio.get_running_loop().set_default_executor(
            BriefThreads(_MAX_CONCURRENT_UPLOADS + _SPARE_THREADS, "uploads")
        )
        await self._open()
        self._warm.set()

    async def _open(self) -> None:
        async with self._opening:
            if self._store is None:
                self._store, self._open_error = await try_await(self._opened())

    async def _opened(self) -> Store:
        # importing the storage's client is slow; the loop must accept connections in the meantime
        await asyncio.to_thread(_load_client, self._output_prefix)
        return await open_store(self._output_prefix).__aenter__()

    async def put(
        self,
        target: Target,
        source: bytes | Path,
        spool: Spool | None = None,
    ) -> model.Receipt:
        """Write an object, from bytes or a file. Return its receipt, and add it to `spool` if there
        is one. This never raises.
        """
        data = read_if_exists(source) if isinstance(source, Path) else source
        if data is None:
            receipt = target.failed(f"{source!s} could not be read")
        else:
            receipt = await self._upload_once(target, data)
        if spool is not None:
            # no folder, or a full disk; the client gets the answer anyway
            with contextlib.suppress(OSError):
                spool.add_receipt(receipt)
        return receipt

    async def names(self, folder: str) -> tuple[list[str], str]:
        """Return the names of a folder's objects, and the error if they can't be listed. This
        method never raises.
        """
        objects, error = await self._with_store(lambda store: store.list(folder))
        return [item.name for item in objects or ()], error

    async def drain(self, seconds: float) -> None:
        """Wait at most `seconds` for the uploads in progress, and print the names of unfinished
        uploads on stderr.
        """
        running = {upload.task for upload in self._in_progress.values()} | self._repeated
        if running:
            await asyncio.wait(running, timeout=seconds)
        for path in self._in_progress:
            log_line(f"{path} was not uploaded: the storage did not answer before the job ended")

    async def _upload_once(self, target: Target, data: bytes) -> model.Receipt:
        """Start an upload, or join the upload in progress of the same content. If that one is slow,
        start a second one.
        """
        # A document may be requested twice: by its worker, and again after the worker or the agent
        # has died. The first request may hang in the storage, so it is awaited only while it is
        # young.
        path = target.path
        while (running := self._in_progress.get(path)) is not None:
            young_for = running.began + SLOW_UPLOAD_SECONDS - time.monotonic()
            if young_for <= 0:
                break
            await asyncio.wait({running.task}, timeout=young_for)
            if running.task.done() and running.data == data:
                return running.task.result()
            # Different content for the same path is newer, and is uploaded next.
            if running.task.done() and self._in_progress.get(path) is running:
                break
        if running is None or running.task.done():
            upload = self._put(target, data)
        elif running.data == data:
            upload = _first_durable(running.task, self._put(target, data))
        else:
            upload = self._replace(running.task, target, data)
        task = asyncio.create_task(upload)
        self._in_progress[path] = _Upload(data, task, time.monotonic())
        task.add_done_callback(lambda ended: self._forget(path, ended))
        # Cancelling a caller (`_in_time`) must not cancel the upload, which other callers may have
        # joined.
        return await asyncio.shield(task)

    async def _replace(
        self,
        older: asyncio.Task[model.Receipt],
        target: Target,
        data: bytes,
    ) -> model.Receipt:
        """Upload newer content during a slow upload of older content."""
        receipt = await self._put(target, data)
        if not older.done():
            # Whenever that one ends, it may overwrite the newer content.
            again = asyncio.create_task(self._put_after(older, target, data))
            self._repeated.add(again)
            again.add_done_callback(self._repeated.discard)
        return receipt

    async def _put_after(
        self,
        older: asyncio.Task[model.Receipt],
        target: Target,
        data: bytes,
    ) -> model.Receipt:
        await asyncio.wait({older})
        return await self._put(target, data)

    def _forget(self, path: str, ended: asyncio.Task[model.Receipt]) -> None:
        # A second upload may have replaced this one.
        if path in self._in_progress and self._in_progress[path].task is ended:
            del self._in_progress[path]

    async def _with_store(self, call: Callable[[Store], Awaitable[T]]) -> tuple[T | None, str]:
        await self._warm.wait()
        # It could not be opened before: perhaps only for want of a thread, or while the network was
        # down.
        if self._store is None:
            await self._open()
        if self._store is None:
            return None, self._open_error
        async with self._slots:
            return await try_await(call(self._store))

    async def _put(self, target: Target, data: bytes) -> model.Receipt:
        is_written, error = await self._with_store(lambda store: target.write(store, data))
        if error:
            return target.failed(error)
        return target.done() if is_written else target.refused()


async def _first_durable(
    running: asyncio.Task[model.Receipt], upload: Coroutine[None, None, model.Receipt]
) -> model.Receipt:
    """Run a second upload in addition to a slow one; return the first durable receipt,
    else the last one.
    """
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

    async def open_once() -> None:
        async with open_store(output_prefix):
            pass

    run_sync(open_once())


def read_if_exists(file: Path) -> bytes | None:
    """Return a file's content; None if it can't be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None
