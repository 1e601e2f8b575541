"""The recorder's uploads: one open store for all of them, many at a time, each path once."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from firstfault.errors import FirstFaultError
from firstfault.model import Receipt

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from firstfault.recorder.spool import Spool
    from firstfault.store import Store

__all__ = ["Uploads", "say"]

_PARALLEL = 16
"""Uploads at a time; more wait for one to end."""
_SPARE_THREADS = 2
"""For imports, beside the uploads of a storage that is not asynchronous."""


class Uploads:
    """Uploads below an output prefix. Belongs to one event loop; whoever comes before `warm` has ended waits for it."""

    def __init__(self, output_prefix: str) -> None:
        self._output_prefix = output_prefix
        self._store: Store | None = None
        self._trouble = ""
        self._warm = asyncio.Event()
        self._free = asyncio.Semaphore(_PARALLEL)
        self._in_hand: dict[str, asyncio.Task[Receipt]] = {}

    @property
    def in_hand(self) -> list[str]:
        """The paths that are on their way."""
        return list(self._in_hand)

    async def warm(self) -> None:
        """Open the store, and keep it open. If that fails, every upload is lost for the same reason."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_PARALLEL + _SPARE_THREADS))
        try:
            # in a thread, because it imports the storage's client, and meanwhile somebody may connect
            await asyncio.to_thread(_load, self._output_prefix)
            from firstfault.store import open_store  # noqa: PLC0415 - loaded by now

            self._store = await open_store(self._output_prefix).__aenter__()
        except Exception as error:  # noqa: BLE001 - a storage library may raise anything; it is why nothing is uploaded
            self._trouble = _reason(error)
        self._warm.set()

    async def put(
        self, path: str, data: bytes, *, fault_monotonic_ns: int | None = None, rank: int | None = None
    ) -> Receipt:
        """Write an object and return its receipt; never raises. See `firstfault.recorder.Recorder.put`."""
        return await self._once(path, self._put(path, data, fault_monotonic_ns, rank))

    async def put_file(
        self, path: str, file: Path, spool: Spool | None, *, fault_monotonic_ns: int | None, rank: int | None
    ) -> Receipt:
        """Upload a file, note the outcome in its `spool` if it has one, and return its receipt; never raises."""
        return await self._once(path, self._put_file(path, file, spool, fault_monotonic_ns, rank))

    async def names(self, folder: str) -> tuple[list[str], str]:
        """Return the names of the objects in a folder, and why they could not be listed, if so; never raises."""
        await self._warm.wait()
        if self._store is None:
            return [], self._trouble
        try:
            async with self._free:
                return [item.name for item in await self._store.list(folder)], ""
        except Exception as error:  # noqa: BLE001 - as in _put
            return [], _reason(error)

    async def drain(self, seconds: float) -> None:
        """Wait for what is in hand, at most `seconds`; what is given up then is said on stderr."""
        if self._in_hand:
            await asyncio.wait(set(self._in_hand.values()), timeout=seconds)
        for path in self._in_hand:
            say(f"{path} was not uploaded: the storage had not answered when the job ended")

    async def _once(self, path: str, upload: Coroutine[None, None, Receipt]) -> Receipt:
        """Run an upload to its end, whoever stops waiting for it; one that is in hand is joined."""
        if path in self._in_hand:
            upload.close()
        else:
            self._in_hand[path] = asyncio.create_task(upload)
            self._in_hand[path].add_done_callback(lambda _: self._in_hand.pop(path))
        return await asyncio.shield(self._in_hand[path])

    async def _put(self, path: str, data: bytes, fault_monotonic_ns: int | None, rank: int | None) -> Receipt:
        name = path.rsplit("/", 1)[-1]
        await self._warm.wait()
        if self._store is None:
            return Receipt(name, durable=False, error=self._trouble, rank=rank)
        try:
            async with self._free:
                await self._store.put(path, data)
        except Exception as error:  # noqa: BLE001 - a storage library may raise anything; it is why the document is lost
            return Receipt(name, durable=False, error=_reason(error), rank=rank)
        took = time.monotonic_ns() - fault_monotonic_ns if fault_monotonic_ns else None
        return Receipt(name, durable=True, fault_to_durable_ns=took, rank=rank)

    async def _put_file(
        self, path: str, file: Path, spool: Spool | None, fault_monotonic_ns: int | None, rank: int | None
    ) -> Receipt:
        data = _read(file)
        if data is None:
            return Receipt(path.rsplit("/", 1)[-1], durable=False, error=f"{file} could not be read", rank=rank)
        receipt = await self._put(path, data, fault_monotonic_ns, rank)
        if spool is not None:
            _note(spool, receipt)
        return receipt


def say(text: str) -> None:
    """Tell whoever reads the pod's log; only what a person must know."""
    try:
        sys.stderr.write(f"firstfault recorder: {text}\n")
        sys.stderr.flush()
    except OSError:  # nobody reads it any more
        return


def _load(output_prefix: str) -> None:
    """Import what the storage needs, by opening it once."""
    from firstfault.store import open_store  # noqa: PLC0415
    from firstfault.sync import run_sync  # noqa: PLC0415 - heavy: only after the recorder listens

    async def look() -> None:
        async with open_store(output_prefix):
            pass

    run_sync(look())


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _note(spool: Spool, receipt: Receipt) -> None:
    try:
        spool.add_receipt(receipt)
    except OSError:  # the folder has gone, or its disk is full: whoever waits gets the answer all the same
        return


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, FirstFaultError) else f"{type(error).__name__}: {error}"
