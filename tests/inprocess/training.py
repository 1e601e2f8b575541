"""A training loop whose ranks restart in their processes after a fault; one module,
because processes import it.
"""

import ctypes
import datetime as dt
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import firstfault_inprocess as inprocess
from firstfault_inprocess import current_call
from tests.nodes import forkserver
from tests.ports import get_free_port

__all__ = ["BLOCKED", "FAST", "Event", "Run", "on_nodes", "run"]

OTHERWISE: dict[int, Callable[[BaseException], BaseException]] = {
    # 3.11
    0: lambda interruption: BaseExceptionGroup("in a TaskGroup", [interruption]),  # noqa: F821
    2: lambda _: SystemExit(1),
}
"""What healthy ranks make of an interruption under "otherwise", by rank."""
STEPS = 30
FAULT_STEP = 10
SLOW_STEPS = 50
"""Each takes 0.1 s; a rank that is late takes so long that it is interrupted."""
SEVERAL = {
    "again and again": {1: "two arguments", 2: "raise"},
    "stuck": {1: "blocked", 2: "hang", 3: "atomic"},
    "otherwise": {1: "raise"},
}
"""Faults of several ranks in the first iteration, or another name of a fault. The first one has a
second iteration with a fault.
"""
FAST = {
    "soft_timeout": 40.0,
    "hard_timeout": 60.0,
    "barrier_timeout": 100.0,
    "heartbeat_timeout": 30.0,
    "monitor_process_interval": 0.1,
    "termination_grace_time": 0.5,
}
"""Options of a restart in which no rank hangs: a machine that stalls for seconds changes nothing.
"""
BLOCKED = {**FAST, "soft_timeout": 5.0, "hard_timeout": 10.0}
"""Options where a rank that hangs is interrupted, or is ended if it cannot be interrupted."""
_LONGEST_S = 120.0
FAULTY = 1
"""The rank that fails in the first iteration."""


def fail(kind: str, call: inprocess.CallWrapper) -> None:  # noqa: C901 - one branch a fault
    if kind == "raise":
        raise ValueError("the fault")
    if kind == "two arguments":
        raise TwoArgumentsError("a", "b")
    if kind in {"kill", "twice"}:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        sys.exit(3)
    if kind == "hang":
        while True:
            time.sleep(0.01)
    if kind == "blocked":
        ctypes.PyDLL(None).sleep(1000)  # holds the GIL
    if kind == "frozen":  # with its monitor process, as on a machine that is gone
        os.kill(call._session.monitor.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind.startswith("store:"):
        os.kill(int(kind.partition(":")[2]), signal.SIGKILL)
        time.sleep(2)  # the others learn of it first
    if kind == "atomic":
        with call.atomic():
            while True:
                time.sleep(0.01)


class Failing(inprocess.finalize.Finalize, inprocess.health_check.HealthCheck):
    """A hook that fails on some ranks after so many `healthy` calls: by "raise",
    "hang" or an error of a "store".
    """

    def __init__(self, how: dict[int, str], healthy: int) -> None:
        self.how = how
        self.healthy = healthy
        self.calls = 0

    def __call__(self, state: Any) -> Any:
        self.calls += 1
        how = self.how.get(state.initial_rank, "") if self.calls > self.healthy else ""
        if how == "store":
            raise dist.DistStoreError("a store of the hook's own")
        if how == "hang":
            time.sleep(1000)
        if how == "raise":
            raise OSError("this machine is broken")
        return state


class TwoArgumentsError(Exception):
    """Cannot be copied: its constructor does not take what it keeps."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


def train(call: Any, kind: str, say: Callable[..., None], store: Any = None) -> tuple[int, int]:
    """Train; return rank and world size of the last iteration.

    `say` tells the parent what happens. `store` is where the process group meets; None: the wrapper
    takes care of that.
    """
    say("enter", call.iteration)
    if kind == "frozen":
        say("monitor", call._session.monitor.pid)
    rank = int(os.environ["RANK"])
    if kind == "again and again" and call.iteration == 1 and rank == 2:
        raise ValueError("a fault during the recovery")
    if store is None:
        dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    else:
        world = int(os.environ["WORLD_SIZE"])
        own = dist.PrefixStore(f"iteration-{call.iteration}", store())
        dist.init_process_group(
            "gloo",
            store=own,
            rank=rank,
            world_size=world,
            timeout=dt.timedelta(seconds=60),
        )
    me = dist.get_rank()
    world = dist.get_world_size()
    for step in range(STEPS):
        call.ping()
        ones = torch.ones(100)
        dist.all_reduce(ones)
        assert ones[0].item() == world
        if (
            call.iteration == 0
            and step == FAULT_STEP
            and (fault := SEVERAL.get(kind, {FAULTY: kind}).get(me))
        ):
            say("fault")
            fail(fault, call)
    if kind == "slow" or (kind == "late" and me == FAULTY):
        for _ in range(SLOW_STEPS if kind == "slow" else 100 * SLOW_STEPS):
            call.ping()
            time.sleep(0.1)
    dist.destroy_process_group()
    return me, world


def on_nodes(folder: str, faults: list[str]) -> str:
    """Train in an agent's worker; in each iteration the rank that began as such fails as
    `faults` says ("3 kill").
    """
    del folder
    call = current_call()
    assert call is not None
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    who, _, kind = (
        faults[call.iteration].partition(" ") if call.iteration < len(faults) else ("", "", "")
    )
    rank = dist.get_rank()
    world = dist.get_world_size()
    for step in range(FAULT_STEP):
        call.ping()
        dist.all_reduce(torch.ones(1))
        if kind and step == FAULT_STEP // 2 and int(who) == call.state.initial_rank:
            if kind == "raise":
                raise ValueError(f"the fault of iteration {call.iteration}")
            fail(kind, call)
    dist.destroy_process_group()
    return f"rank {rank} of {world}, began as {call.state.initial_rank}, iteration {call.iteration}"


class Event(NamedTuple):
    rank: int
    what: str
    value: Any
    seconds: float


def worker_of_ours(
    rank: int,
    world: int,
    port: int,
    work: tuple[str, dict[str, Any]],
    events: Any,
) -> None:
    """Train with our wrapper, and say what happens."""
    kind, options = work
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )

    def say(what: str, value: Any = None) -> None:
        events.put((rank, what, value, time.monotonic()))

    @inprocess.Wrapper(**options)
    def wrapped(call: inprocess.CallWrapper | None = None) -> tuple[int, int]:
        assert call is not None
        try:
            return train(call, kind, say)
        except inprocess.exception.RankShouldRestart as interruption:
            if kind == "otherwise" and rank in OTHERWISE:
                # as code does that knows of no restart
                raise OTHERWISE[rank](interruption)  # noqa: B904
            raise

    try:
        say("done", wrapped())
        if kind == "twice":
            wrapped()
    except BaseException as error:
        cause = error.__cause__
        has_traceback = cause is not None and bool(cause.__traceback__)
        say("raised", (type(error).__name__, str(error), type(cause).__name__, has_traceback))
        raise


class Run(NamedTuple):
    events: list[Event]
    codes: list[int | None]
    port: int
    """Of the store."""

    def of(self, what: str, value: Any = None) -> dict[int, Event]:
        """Return the events of a kind, by rank."""
        return {
            event.rank: event
            for event in self.events
            if event.what == what and value in {None, event.value}
        }

    def values(self, what: str) -> dict[int, Any]:
        return {rank: event.value for rank, event in self.of(what).items()}

    def seconds(self, iteration: int = 1) -> float:
        """Return the seconds from the last fault until the last rank called the function again."""
        fault = max(event.seconds for event in self.of("fault").values())
        return max(event.seconds for event in self.of("enter", iteration).values()) - fault


def run(
    kind: str,
    world: int = 4,
    port: int = 0,
    *,
    worker: Callable[..., None] = worker_of_ours,
    most_s: float = 0,
    **options: Any,
) -> Run:
    """Train on so many processes, of which one fails;
    return what happened. One that freezes itself is killed.

    After `most_s` seconds, processes that are left are killed; 0: in the end there must be none.
    """
    context = forkserver()
    events = context.SimpleQueue()
    port = port or get_free_port()
    processes = [
        context.Process(target=worker, args=(rank, world, port, (kind, options), events))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + (most_s or _LONGEST_S)
    for process in [
        one for rank, one in enumerate(processes) if kind != "frozen" or rank != FAULTY
    ]:
        process.join(max(deadline - time.monotonic(), 0.1))
    if kind == "frozen":
        processes[FAULTY].kill()
        processes[FAULTY].join()
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    found = []
    while not events.empty():
        found.append(Event(*events.get()))
    for event in found:
        if event.what == "monitor" and event.rank == FAULTY:
            os.kill(event.value, signal.SIGKILL)
    assert most_s or not late, f"{len(late)} ranks did not end: {found}"
    return Run(
        sorted(found, key=lambda event: event.seconds),
        [process.exitcode for process in processes],
        port,
    )
