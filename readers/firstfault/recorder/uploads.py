"""The recorder's uploads: one open store, several uploads at a time, one for each path."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from firstfault.recorder.budgets import SLOW_UPLOAD_S
from firstfault.sync import attempted, run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    from firstfault.model import Receipt
    from firstfault.recorder.client import Target
    from firstfault.recorder.spool import Spool
    from firstfault.store import Store

T = TypeVar("T")
_PARALLEL = 16
"""Uploads at a time."""
_SPARE_THREADS = 2
"""Threads for imports, beside those of uploads to a storage that is not asynchronous."""


class Uploads:
    """Uploads below an output prefix. Belongs to one event loop; each call waits until `warm` has ended."""

    def __init__(self, output_prefix: str) -> None:
        self._output_prefix = output_prefix
        self._store: Store | None = None
        self._open_error = ""
        self._warm = asyncio.Event()
        self._slots = asyncio.Semaphore(_PARALLEL)
        self._in_progress: dict[str, asyncio.Task[Receipt]] = {}
        self._began: dict[str, float] = {}
        """When the last upload of each path in progress began, by the monotonic clock."""

    @property
    def in_progress(self) -> list[str]:
        """The paths of uploads in progress."""
        return list(self._in_progress)

    async def warm(self) -> None:
        """Open the store and keep it open. If that fails, every upload fails with the same error."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_PARALLEL + _SPARE_THREADS))
        self._store, self._open_error = await attempted(self._opened())
        self._warm.set()

    async def _opened(self) -> Store:
        # importing the storage's client is slow; the loop must accept connections meanwhile
        await asyncio.to_thread(_load, self._output_prefix)
        from firstfault.store import open_store  # noqa: PLC0415 - loaded by now

        return await open_store(self._output_prefix).__aenter__()

    async def put(self, target: Target, data: bytes) -> Receipt:
        """Write an object and return its receipt; never raises. See `firstfault.recorder.Recorder.put`."""
        return await self._once(target.path, partial(self._put, target, data))

    async def put_file(self, target: Target, file: Path, spool: Spool | None) -> Receipt:
        """Upload a file, write its receipt to its `spool`, if any, and return the receipt; never raises."""
        return await self._once(target.path, partial(self._put_file, target, file, spool))

    async def names(self, folder: str) -> tuple[list[str], str]:
        """Return the names of a folder's objects, and the error if they could not be listed; never raises."""
        found, error = await self._with_store(lambda store: store.list(folder))
        return [item.name for item in found or ()], error

    async def drain(self, seconds: float) -> None:
        """Wait at most `seconds` for the uploads in progress; name those that did not finish on stderr."""
        if self._in_progress:
            await asyncio.wait(set(self._in_progress.values()), timeout=seconds)
        for path in self._in_progress:
            log_line(f"{path} was not uploaded: the storage did not answer before the job ended")

    async def _once(self, path: str, upload: Callable[[], Coroutine[None, None, Receipt]]) -> Receipt:
        """Run an upload, or join the path's latest one while that is young; it continues if the caller leaves."""
        while (running := self._in_progress.get(path)) is not None:
            young_for = self._began[path] + SLOW_UPLOAD_S - time.monotonic()
            if young_for <= 0:
                break
            await asyncio.wait({running}, timeout=young_for)
            if running.done():
                return running.result()
        task = asyncio.create_task(upload() if running is None else _first_durable(running, upload()))
        self._in_progress[path], self._began[path] = task, time.monotonic()
        task.add_done_callback(lambda ended: self._forget(path, ended))
        return await asyncio.shield(task)

    def _forget(self, path: str, ended: asyncio.Task[Receipt]) -> None:
        if self._in_progress.get(path) is ended:
            del self._in_progress[path], self._began[path]

    async def _with_store(self, call: Callable[[Store], Awaitable[T]]) -> tuple[T | None, str]:
        await self._warm.wait()
        if self._store is None:
            return None, self._open_error
        async with self._slots:
            return await attempted(call(self._store))

    async def _put(self, target: Target, data: bytes) -> Receipt:
        _, error = await self._with_store(lambda store: store.put(target.path, data))
        return target.failed(error) if error else target.done()

    async def _put_file(self, target: Target, file: Path, spool: Spool | None) -> Receipt:
        data = _read(file)
        if data is None:
            return target.failed(f"{file} could not be read")
        receipt = await self._put(target, data)
        if spool is not None:
            with contextlib.suppress(OSError):  # no folder, or a full disk; the client gets the answer anyway
                spool.add_receipt(receipt)
        return receipt


async def _first_durable(running: asyncio.Task[Receipt], upload: Coroutine[None, None, Receipt]) -> Receipt:
    """Run an upload beside one that is slow; return the first durable receipt, else the last one."""
    pending = {running, asyncio.create_task(upload)}
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        receipts = sorted((task.result() for task in done), key=lambda receipt: not receipt.durable)
        if receipts[0].durable or not pending:
            return receipts[0]


def log_line(text: str) -> None:
    """Write a line to stderr, which is the pod's log."""
    try:
        sys.stderr.write(f"firstfault recorder: {text}\n")
        sys.stderr.flush()
    except OSError:  # stderr is closed
        return


def _load(output_prefix: str) -> None:
    """Open the store once, which imports its client."""
    from firstfault.store import open_store  # noqa: PLC0415

    async def look() -> None:
        async with open_store(output_prefix):
            pass

    run_sync(look())


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
