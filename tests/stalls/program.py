"""A training in which one stall follows another: ``program.py KINDS SECONDS``. Each ends by itself after so long.

Before each stall all ranks make progress for a while and print its number. The ranks that stall are those of `TRUTH`.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import http.server
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from firstfault_torch import watchdog

MARK = "stall number"
STEPS = 140
STEP_S = 0.05
SECONDS = 8.0


def asleep() -> None:
    """Read from a storage that does not answer, as far as Python sees it."""
    time.sleep(SECONDS)


def late() -> None:
    """Come late to a collective: at another line, because a stall that comes again and again is told less."""
    time.sleep(SECONDS)


def deep() -> None:
    """Stall below a recursion and a generator."""

    def rows(depth: int) -> Iterator[int]:
        if depth:
            yield from rows(depth - 1)
        asleep()
        yield depth

    list(rows(5))


def locked() -> None:
    """Wait for a lock that another thread holds."""
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(SECONDS, lock.release).start()
    lock.acquire()


def lost_thread() -> None:
    """Wait for the item of a thread that has ended."""
    items: queue.Queue[int] = queue.Queue()
    with contextlib.suppress(queue.Empty):
        items.get(timeout=SECONDS)


def holds_gil() -> None:
    """Make one C call that holds Python's lock, and continues after a signal."""
    reader, writer = os.pipe()
    subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; echo > /proc/self/fd/{writer}"], pass_fds=[writer])
    ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


def c_call() -> None:
    """Make one C call that releases Python's lock."""
    reader, writer = os.pipe()
    threading.Timer(SECONDS, os.write, (writer, b"x")).start()
    ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)


def stopped() -> None:
    """Be stopped, as by a person, a debugger or a paused container."""
    subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def computes() -> None:
    """Evaluate on this rank alone."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        sum(range(1000))


def saves() -> None:
    """Write a checkpoint to a slow disk."""
    with tempfile.TemporaryFile() as file:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            file.seek(0)
            torch.save(torch.zeros(1000), file)
            os.fsync(file.fileno())
            time.sleep(0.2)


def file_lock() -> None:
    """Wait for another process's lock on a file."""
    with tempfile.NamedTemporaryFile() as file:
        holder = subprocess.Popen(["flock", file.name, "sleep", str(SECONDS)])
        time.sleep(0.3)
        with Path(file.name).open("rb") as mine:
            fcntl.flock(mine, fcntl.LOCK_EX)
        holder.wait()


def web() -> None:
    """Ask a server that accepts and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.suppress(OSError, http.client.HTTPException):
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=SECONDS)


def named_pipe() -> None:
    """Open a FIFO that no process writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fifo")
        os.mkfifo(path)
        threading.Timer(SECONDS, lambda: path.open("wb").close()).start()
        path.open("rb").close()


def child() -> None:
    """Wait for a program that prepares data."""
    subprocess.run(["sleep", str(SECONDS)], check=True)


def event_loop() -> None:
    """Wait in asyncio's loop."""
    asyncio.run(asyncio.sleep(SECONDS))


def store_key() -> None:
    """Wait for a key that no rank sets."""
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(dist.DistError):
        store.wait(["missing"], timedelta(seconds=SECONDS))


class Slow(torch.utils.data.Dataset[int]):
    """A data set whose last item takes long."""

    def __len__(self) -> int:
        """Return 2."""
        return 2

    def __getitem__(self, index: int) -> int:
        """Return an item."""
        time.sleep(SECONDS * index)
        return index


def loader() -> None:
    """Wait for a process of the data loader."""
    for _ in torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"):
        pass


def hook() -> None:
    """Stall in a hook of the backward pass."""
    value = torch.ones(2, requires_grad=True)
    value.register_hook(lambda _gradient: asleep())
    value.sum().backward()


def paused() -> None:
    """Evaluate in a block that tells so."""
    with watchdog.pause():
        asleep()


def thread_pool() -> None:
    """Wait for a future."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - one use

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asleep).result()


ALONE = {
    function.__name__: function
    for function in (
        asleep, deep, locked, lost_thread, holds_gil, c_call, stopped, computes, saves, file_lock, web, named_pipe,
        child, event_loop, store_key, loader, hook, paused, thread_pool,
    )
}  # fmt: skip
"""What one rank does while the others go on."""
AT = {
    "deep": "rows|asleep",
    "paused": "paused|asleep",
    "thread_pool": "thread_pool|asleep",
    "stopped": "stopped|SIGSTOP",
    "hook": "hook|asleep|lambda",
    "holds_gil": "holds_gil",
}
"""Functions of which one is named, where that is not the kind's own."""
TOGETHER = ("subgroup", "pipeline", "two", "node", "ahead", "gather")


def culprits(kind: str, number: int, world: int) -> list[int]:
    """Return the ranks of a stall."""
    rank = (number * 3 + 1) % world
    if kind == "two":
        return sorted({rank, (rank + 2) % world})
    if kind == "node":
        return [2, 3]
    return [0] if kind in {"saves", "computes"} else [rank]


def stall(kind: str, ranks: list[int], groups: dict[int, dist.ProcessGroup]) -> None:
    """Take part in a stall of some ranks."""
    me, world, value = dist.get_rank(), dist.get_world_size(), torch.ones(8)
    other = (ranks[0] + 1) % world
    if kind == "subgroup" and me in {ranks[0], ranks[0] ^ 1}:
        asleep() if me in ranks else None
        dist.all_reduce(value, group=groups[min(ranks[0], ranks[0] ^ 1)])
    elif kind == "pipeline" and me in {ranks[0], other}:
        asleep() if me in ranks else None
        dist.send(value, other) if me in ranks else dist.recv(value, ranks[0])
    elif kind in {"two", "node", "gather"} and me in ranks:
        late()
    elif kind == "ahead" and me in {ranks[0], ranks[0] ^ 1}:
        # the other rank of the pair called one more collective, and waits in it
        if me in ranks:
            late()
        dist.barrier(group=groups[min(ranks[0], ranks[0] ^ 1)])
    elif kind in ALONE and me in ranks:
        ALONE[kind]()
    if kind == "gather":
        dist.all_gather([torch.zeros(8) for _ in range(world)], value)
    dist.all_reduce(value)


def main(kinds: list[str]) -> None:
    """Train."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    groups = {first: dist.new_group([first, first + 1]) for first in range(0, world, 2)}
    for number, kind in enumerate(kinds):
        for _ in range(STEPS):
            dist.all_reduce(torch.ones(8))
            time.sleep(STEP_S)
        ranks = culprits(kind, number, world)
        if os.environ["LOCAL_RANK"] == "0":
            print(f"{MARK} {number} {kind} {ranks}", file=sys.stderr, flush=True)
        stall(kind, ranks, groups)


if __name__ == "__main__":
    SECONDS = float(sys.argv[2])
    main(sys.argv[1].split(","))
