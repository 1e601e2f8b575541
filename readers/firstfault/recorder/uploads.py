"""The recorder's uploads: one client for all of the node's documents, each path once at a time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from firstfault import model
from firstfault.recorder.folder import Spool, Target
from firstfault.recorder.time_limits import SLOW_UPLOAD_SECONDS
from firstfault.store import Store, open_store
from firstfault.utils.run_sync import attempted, run_sync

T = TypeVar("T")
_PARALLEL = 16
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
        data = read_if_exists(source) if isinstance(source, Path) else source
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


def read_if_exists(file: Path) -> bytes | None:
    """Return a file's content; None if it can't be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None
