"""A training in which one stall follows another: ``program.py KINDS SECONDS [TIMEOUT]``.

Each ends by itself after so long. Before each, all ranks make progress for a while and print its
number; the ranks to be told are `culprits`. Those of `ENDLESS` end by the collective's timeout, and
so the training does.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing as mp
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from firstfault_torch import watchdog

MARK = "stall number"
STEPS = 60
STEP_S = 0.05
SECONDS = 8.0
FORK = mp.get_context("fork")


def asleep() -> None:
    """Read from a storage that does not answer, as far as Python sees it."""
    time.sleep(SECONDS)


def late() -> None:
    """Come late to a collective: at another line than `asleep`."""
    time.sleep(SECONDS)


def after(command: str) -> subprocess.Popen[bytes]:
    """Run a command of the shell once the stall has lasted long enough."""
    return subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; {command}"])


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Be stopped, as by a person or a paused container."""
    after(f"kill -CONT {os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def alarm() -> None:
    """Let an exception end what this process does late."""
    signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)


def unopened() -> str:
    """Return the path of a FIFO that another process opens late."""
    folder = tempfile.mkdtemp()
    os.mkfifo(f"{folder}/fifo")
    after(f": > {folder}/fifo; rm -r {folder}")
    return f"{folder}/fifo"


def forked(target: Callable[[], object]) -> mp.process.BaseProcess:
    """Start a process; it is killed late, if it lives."""
    process = FORK.Process(target=target)
    process.start()
    after(f"kill -9 {process.pid}")
    return process


def locked() -> None:
    """Wait for a lock that another thread holds."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=SECONDS)


def reads(library: Any) -> None:
    """Make one call of C, which continues after a signal."""
    reader, writer = os.pipe()
    subprocess.Popen(
        ["sh", "-c", f"sleep {SECONDS}; echo > /proc/self/fd/{writer}"], pass_fds=[writer]
    )
    library.read(reader, ctypes.create_string_buffer(1), 1)


def computes() -> None:
    """Evaluate on this rank alone."""
    alarm()
    while True:
        sum(range(1000))


def saves() -> None:
    """Write a checkpoint to a slow disk."""
    alarm()
    while True:
        torch.save(torch.zeros(1000), os.devnull)
        time.sleep(0.2)


def web() -> None:
    """Ask a server that accepts and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=SECONDS)


def loader(function: Callable[[object], object]) -> None:
    """Wait for a process of the data loader."""
    list(
        torch.utils.data.DataLoader(
            [0, 1],
            num_workers=1,
            multiprocessing_context="fork",
            collate_fn=function,
        )
    )


def hook() -> None:
    """Stall in a hook of the backward pass, in a call of C++."""
    value = torch.ones(2, requires_grad=True)
    future = torch.futures.Future[None]()
    threading.Timer(SECONDS, future.set_result, (None,)).start()
    value.register_hook(lambda _gradient: future.wait())
    value.sum().backward()


def paused() -> None:
    """Evaluate in a block that tells so."""
    with watchdog.pause():
        asleep()


def waits_for_holder() -> None:
    """Wait for a lock of a thread that waits for something else."""
    lock = threading.Lock()
    ThreadPoolExecutor(1).submit(lambda: lock.acquire() and web())
    time.sleep(0.3)
    lock.acquire(timeout=SECONDS)


def imports() -> None:
    """Import a module that another thread is still importing."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "slow_module.py").write_text(f"import time; time.sleep({SECONDS})")
        sys.path.insert(0, folder)
        threading.Thread(target=__import__, args=("slow_module",)).start()
        time.sleep(0.3)
        __import__("slow_module")


def debugger() -> None:
    """Be held by a debugger (ptrace)."""
    code = "import ctypes, sys, time; p = ctypes.CDLL(None).ptrace; pid = int(sys.argv[1]); "
    code += (  # PTRACE_SEIZE, INTERRUPT
        "p(0x4206, pid, 0, 0); p(0x4207, pid, 0, 0); time.sleep(float(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, str(os.getpid()), str(SECONDS)], check=True)


ALONE: dict[str, Callable[[], object]] = {
    function.__name__: function
    for function in (
        asleep, locked, computes, saves, web, hook, paused, waits_for_holder, imports, debugger,
    )
} | {
    "stopped": stop,
    "holds_gil": lambda: reads(ctypes.PyDLL(None)),
    "gil_thread": lambda: ThreadPoolExecutor(1).submit(ALONE["holds_gil"]).result(),
    # holds Python's lock and computes, for exponential time
    "regular_expression": lambda: (alarm(), re.match(r"(a+)+$", "a" * 60 + "b")),
    "c_call": lambda: reads(ctypes.CDLL(None)),
    "named_pipe": lambda: Path(unopened()).read_bytes(),
    # state D: a new process opens a FIFO (0: POSIX_SPAWN_OPEN) before it runs
    "in_kernel": lambda: os.posix_spawn("true", ["true"], {}, file_actions=[(0, 0, unopened(), 0, 0)]),
    "thread_pool": lambda: ThreadPoolExecutor(1).submit(asleep).result(),
    "finishes": lambda: ThreadPoolExecutor(1).submit(web).result(),
    "pool_map": lambda: FORK.Pool(1).map_async(die, [1]).get(SECONDS),
    "lost_thread": lambda: queue.Queue().get(timeout=SECONDS),
    "producer": lambda: (forked(die), FORK.Queue().get(timeout=SECONDS)),
    "forked_lock": lambda: forked(threading.Event().wait).join(),
    "child": lambda: subprocess.run(["sleep", str(SECONDS)], check=True),
    "full_pipe": lambda: subprocess.Popen(["head", "-c", "1000000", "/dev/zero"], stdout=-1).wait(SECONDS),
    "handler": lambda: (signal.signal(signal.SIGUSR1, lambda *_: asleep()), os.kill(os.getpid(), signal.SIGUSR1)),
    "event_loop": lambda: asyncio.run(asyncio.sleep(SECONDS)),
    "store_key": lambda: dist.distributed_c10d._get_default_store().wait(["missing"], timedelta(seconds=SECONDS)),
    "loader": lambda: loader(lambda items: asleep() if items[0] else None),
    "frozen_loader": lambda: loader(lambda items: stop() if items[0] else None),
}  # fmt: skip
AT = {
    "paused": "paused|asleep",
    "thread_pool": "thread_pool|asleep",
    "stopped": "stopped by a signal",
    "c_call": "in reads|in <lambda>",
    **dict.fromkeys(
        ("holds_gil", "gil_thread", "regular_expression"), "one call holds Python's lock"
    ),
    "finishes": "in web",
    **dict.fromkeys(("loader", "frozen_loader"), "in loader"),
    "in_kernel": r"blocked in the kernel \(kernel_clone\)",
    "debugger": "held by a debugger",
    "handler": "asleep",
    "two_places": "in web|in locked",
    "ring": "no single rank is behind",
    "frozen_node": "no response from node 1",
    **dict.fromkeys(("mismatch", "broadcasts", "branch"), "in stall|in <lambda>"),
}
"""Words of which one is told, where that is not the kind's own name."""


class Stall(NamedTuple):
    """A stall of some ranks, as one rank sees it."""

    ranks: list[int]
    me: int
    world: int
    pair: dist.ProcessGroup | None
    """The group of this rank and its neighbour: ranks 0 and 1, 2 and 3."""
    every_other: dist.ProcessGroup | None
    """The group of this rank and every other one: ranks 0, 2, 4."""

    @property
    def is_one(self) -> bool:
        """Whether this rank stalls."""
        return self.me in self.ranks


def _subgroup(at: Stall) -> None:
    if at.me // 2 == at.ranks[0] // 2:
        asleep() if at.is_one else None
        dist.all_reduce(torch.ones(8), group=at.pair)


def _stages(at: Stall) -> None:
    """Each stage of a pipeline waits for the one before."""
    late() if at.is_one else dist.recv(torch.ones(8), (at.me - 1) % at.world)
    if (at.me + 1) % at.world not in at.ranks:
        dist.send(torch.ones(8), (at.me + 1) % at.world)


def _two_places(at: Stall) -> None:
    with contextlib.suppress(Exception):
        if at.is_one:
            web() if at.me == at.ranks[0] else locked()


def _ring(at: Stall) -> None:
    """Each rank receives before it sends: all wait, and none stands out."""
    threading.Timer(SECONDS, dist.send, (torch.ones(8), (at.me + 1) % at.world)).start()
    dist.recv(torch.ones(8), (at.me - 1) % at.world)


def _frozen_node(at: Stall) -> None:
    """The agent of a node and its workers are stopped."""
    if at.me == 2:
        agent = os.getppid()
        children = [path.read_text() for path in Path(f"/proc/{agent}/task").glob("*/children")]
        everyone = f"{agent} {' '.join(children)}"
        command = f"kill -STOP {everyone}; sleep {2 * SECONDS}; kill -CONT {everyone}"
        subprocess.Popen(["sh", "-c", command])


def _ddp(at: Stall) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model.register_forward_pre_hook(lambda *_: late() if at.is_one else None)
    model(torch.ones(8)).sum().backward()


def _dcp(at: Stall) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = dcp.FileSystemWriter(folder)
        write = writer.write_data
        writer.write_data = lambda *given: (late() if at.is_one else None, write(*given))[1]
        dcp.save({"value": torch.ones(8)}, storage_writer=writer)


def _slow_steps(at: Stall) -> None:
    for _ in range(10):
        time.sleep(SECONDS / 7 if at.me == 1 else 0)
        dist.all_reduce(torch.ones(8))


TOGETHER = {
    function.__name__[1:]: function
    for function in (
        _subgroup, _stages, _two_places, _ring, _frozen_node, _ddp, _dcp, _slow_steps,
    )
}  # fmt: skip
"""What all ranks do."""
LATE: dict[str, Callable[[Stall], object]] = {
    "node": lambda _: None,
    "gather": lambda at: dist.all_gather([torch.zeros(8) for _ in range(at.world)], torch.ones(8)),
    "objects": lambda at: dist.all_gather_object([None] * at.world, {}),
    "rooted": lambda at: dist.broadcast(torch.ones(8), at.ranks[0]),
    "monitored": lambda _: dist.monitored_barrier(timeout=timedelta(seconds=3 * SECONDS)),
    "nested": lambda at: [
        dist.all_reduce(torch.ones(8), group=group) for group in (at.pair, at.every_other)
    ],
    "slow_first": lambda at: late() if at.me == 1 else None,
    "late_first": lambda at: late() if at.is_one else None,
}
"""What all ranks call after some came late."""
ENDLESS: dict[str, Callable[[Stall], object]] = {
    "mismatch": lambda _: dist.barrier(),
    "broadcasts": lambda _: dist.broadcast(torch.ones(8), 0),
    "branch": lambda at: dist.barrier(group=at.pair),
}
"""Collectives that one rank calls and the others do not: they end only by a timeout."""
HEALTHY = ("slow_first", "slow_steps")
"""Stalls too short to be told, if the first steps may take three times as long."""
APART = {*HEALTHY, "late_first", *ENDLESS}
TRAININGS = (
    [kind for kind in (*ALONE, *TOGETHER, *LATE) if kind not in APART],
    HEALTHY,
    ["late_first"],
    *([kind] for kind in ENDLESS),
)


def culprits(kind: str, number: int, world: int) -> list[int]:
    """Return the ranks of a stall that are to be told."""
    rank = (number * 3 + 1) % world
    if kind == "two_places":
        return sorted({rank, (rank + 2) % world})
    if kind == "node":
        return [2, 3]
    if kind in {*HEALTHY, "ring", "frozen_node"}:
        return []
    return [0] if kind in {"saves", "computes"} else [rank]


def stall(kind: str, at: Stall) -> None:
    if kind in TOGETHER:
        TOGETHER[kind](at)
    elif at.is_one:
        with contextlib.suppress(Exception):
            ENDLESS[kind](at) if kind in ENDLESS else ALONE.get(kind, late)()
    if kind in LATE:
        LATE[kind](at)
    dist.all_reduce(torch.ones(8))


def main(kinds: list[str], timeout: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    me = dist.get_rank()
    world = dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    halves = [dist.new_group(range(first, world, 2)) for first in range(2)]
    for number, kind in enumerate(kinds):
        for _ in range(0 if kind.endswith("first") else STEPS):
            dist.all_reduce(torch.ones(8))
            time.sleep(STEP_S)
        ranks = culprits(kind, number, world)
        if os.environ["LOCAL_RANK"] == "0":
            print(f"{MARK} {number} {kind} {time.time():.1f} {ranks}", file=sys.stderr, flush=True)
        stall(kind, Stall(ranks, me, world, pairs[me // 2], halves[me % 2]))


if __name__ == "__main__":
    SECONDS = float(sys.argv[2])
    main(sys.argv[1].split(","), float(sys.argv[3]) if len(sys.argv) > 3 else 3 * SECONDS)
