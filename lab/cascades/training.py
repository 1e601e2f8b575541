"""The training loop of the cascade lab: every rank computes and reduces;
one rank fails and writes down the truth.

``tasks.py`` calls it in a task of Flyte's. torchrun starts it as a program: ``training.py INPUTS``,
in JSON.
"""

import ctypes
import datetime as dt
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # in a pod, only this folder is on the path

from lab.cascades.injecting import (
    clock_variables,
    descendants,
    end_node,
    hang_in_c,
    marks,
    rank,
    truth,
)

if TYPE_CHECKING or "flytekit" not in sys.modules:  # a program
    from firstfault_torch import RecoverableError
else:
    from flytekit.exceptions.user import FlyteRecoverableException as RecoverableError


def _set_clock() -> None:
    """Restart this pod with a wrong wall clock, if the case asks for that. The node of a
    program has it already.
    """
    pod, _, rest = os.environ.get("LAB_CLOCK", "").partition(" ")
    if (
        not pod
        or not os.environ.get("HOSTNAME", "").endswith(pod)
        or "FAKETIME_TIMESTAMP_FILE" in os.environ
    ):
        return
    seconds, _, library = rest.partition(" ")
    clock = clock_variables(float(seconds), library, marks() / "clock")
    # the same command again
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **clock})  # noqa: S606


_set_clock()

STEPS = 6
FAULT_STEP = 3
TIMEOUT_S = 6
LONG_S = 600.0
CLEAN_UP_S = 2.5
STRAGGLER_S = 1.0


def listens(pid: int) -> bool:
    """Whether a process hosts a store: it listens on a TCP port."""
    listening = set()
    for table in ("tcp", "tcp6"):
        rows = [
            line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        ]
        listening |= {
            f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and not row[1].endswith(":0000")
        }
    own = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            own += str(descriptor.readlink()) in listening
        except OSError:
            continue
    # each agent listens for the other agents; the store's host has a second listener
    return own > 1


class Loader(torch.utils.data.Dataset[int]):
    """A data set whose second item fails."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index:
            raise IndexError(f"shard {index} has no record 17")
        return index


class Backward(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(_context: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("the gradient of the head is not finite")


def loader() -> None:
    """A process of the data loader raises."""
    for _ in torch.utils.data.DataLoader(Loader(), num_workers=1):
        pass


def in_backward() -> None:
    """An autograd function raises."""
    value = torch.ones(3, requires_grad=True)
    Backward.apply(value).sum().backward()


def in_thread() -> None:
    """The thread that fills a queue fails, so the main thread waits for ever."""
    filled: queue.Queue[int] = queue.Queue()

    def fill() -> None:
        raise LookupError("the prefetcher has lost its shard")

    thread = threading.Thread(target=fill, name="prefetch")
    thread.start()
    thread.join()
    filled.get()


def in_future() -> None:
    """A future raises its thread's exception again in the main thread."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - one use

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int, "not a number").result()


def slow_finally(destroy: bool) -> None:
    """Raise, and clean up slowly."""
    try:
        raise ValueError("the batch has no labels")
    finally:
        if destroy:
            dist.destroy_process_group()
        time.sleep(CLEAN_UP_S)


def exhaust() -> None:
    """Allocate more memory than a limit allows."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1 << 29)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    taken = []
    while True:
        taken.append(bytearray(1 << 26))


def fill_disk() -> None:
    """Write to a device that is always full."""
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"weights")


def mismatch() -> None:
    """Reduce a tensor of another shape than the others."""
    dist.all_reduce(torch.ones(7))


def skip() -> None:
    """Leave out one collective and continue with the next steps."""


def chained() -> None:
    """Raise the fault as the cause of other exceptions."""
    try:
        try:
            {}["learning_rate"]
        except KeyError as error:
            raise RuntimeError("cannot build the optimizer") from error
    except RuntimeError:
        raise SystemError("training failed")  # noqa: B904 - a context, as people write it


class ShardNotReadyError(RecoverableError):
    """A user's subclass of a recoverable exception."""


def fetch() -> None:
    """Raise an exception that a retry may avoid."""
    raise ShardNotReadyError("shard 7 is not there yet")


def recoverable_from() -> None:
    """Raise a recoverable exception from a plain one."""
    try:
        Path("/proc/1/shards/7").read_bytes()
    except OSError as error:
        raise RecoverableError("shard 7 is not there yet") from error


def recoverable_in_finally() -> None:
    """Raise a recoverable exception, and clean up slowly."""
    try:
        raise RecoverableError("shard 7 is not there yet")
    finally:
        dist.destroy_process_group()
        time.sleep(CLEAN_UP_S)


def recoverable_in_future() -> None:
    """A future raises its thread's recoverable exception again in the main thread."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - one use

    with ThreadPoolExecutor(1) as pool:
        pool.submit(fetch).result()


def plain_from_recoverable() -> None:
    """Raise a plain exception from a recoverable one; the plain one counts."""
    try:
        fetch()
    except RecoverableError as error:
        raise ValueError("given up after 3 tries") from error


def freeze() -> None:
    """Stop the whole process, as in a driver's uninterruptible sleep."""
    os.kill(os.getpid(), signal.SIGSTOP)


def deadlock() -> None:
    """Wait for the next rank, as every rank does, so that no single rank is at fault."""
    dist.recv(torch.zeros(1), src=(rank() + 1) % dist.get_world_size())


def set_clock_and_raise() -> None:
    """Set this pod's clock an hour ahead, so that the storage refuses it from now on, and raise."""
    time.sleep(3.0)  # by now the node's roster entry has been written
    (marks() / "clock").write_text("+3600\n")
    raise ValueError("the batch has no labels")


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": lambda: (_ for _ in ()).throw(ValueError("the batch has no labels")),
    "recoverable": lambda: (_ for _ in ()).throw(RecoverableError("shard 7 is not there yet")),
    "chained": chained,
    "loader": loader,
    "backward": in_backward,
    "future": in_future,
    "thread": in_thread,
    "finally": lambda: slow_finally(destroy=False),
    "finally-destroy": lambda: slow_finally(destroy=True),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGABRT": os.abort,
    "SIGTERM": lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(LONG_S)),
    # loaded late
    "terminate": lambda: ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"](),  # noqa: PLW0108
    "exit-1": lambda: os._exit(1),
    "exit-0": lambda: os._exit(0),
    "sys.exit-0": lambda: sys.exit(0),
    "sys.exit-3": lambda: sys.exit(3),
    "hang": lambda: time.sleep(LONG_S),
    "hang-c": hang_in_c,
    "skip": skip,
    "mismatch": mismatch,
    "memory": exhaust,
    "disk": fill_disk,
    "cuda": (
        lambda: (_ for _ in ()).throw(
            RuntimeError("CUDA error: an illegal memory access was encountered")
        )
    ),
    "agent-killed": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(LONG_S)),
    "agent-told": lambda: (os.kill(os.getppid(), signal.SIGTERM), time.sleep(LONG_S)),
    "recoverable-subclass": fetch,
    "recoverable-from": recoverable_from,
    "recoverable-finally": recoverable_in_finally,
    "recoverable-future": recoverable_in_future,
    "plain-from-recoverable": plain_from_recoverable,
    "frozen": freeze,
    "deadlock": deadlock,
    "node-killed": end_node,
    "clock-jump": set_clock_and_raise,
}
"""What a faulty rank does instead of the step's collective."""
SEVERAL = {
    "all-ranks": "raise",
    "two-ranks": "raise",
    "all-told": "agent-told",
    "all-killed": "SIGKILL",
}
"""Faults of several ranks: what each of them does."""


def is_faulty(kind: str, culprit: int) -> bool:
    if kind in {"all-ranks", "all-killed", "deadlock"} or kind.endswith("-all"):
        return True
    if kind == "all-told":
        return os.environ["LOCAL_RANK"] == "0"
    if kind == "two-ranks":
        return rank() in {culprit, (culprit + 1) % int(os.environ["WORLD_SIZE"])}
    if kind == "store-killed":
        return os.environ["LOCAL_RANK"] == "0" and listens(os.getppid())
    return rank() == culprit


def hold_recorder(seconds: float) -> None:
    """Stop this node's recorder for a while, so that uploads are late."""
    for pid in descendants(os.getppid()):
        if "firstfault.recorder" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGSTOP)
            subprocess.Popen(
                ["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], start_new_session=True
            )
            return
    raise LookupError("this node has no recorder")


def meet(kind: str, held: float = 0.0) -> None:
    """Write down the truth, then fail."""
    if held:
        hold_recorder(held)
    truth(kind=kind)
    if kind == "two-ranks":
        raise (
            ValueError(f"the batch of rank {rank()} has no labels")
            if rank() % 2
            else KeyError(f"rank {rank()}")
        )
    name = "agent-killed" if kind == "store-killed" else SEVERAL.get(kind, kind)
    FAULTS[name]()


def train(
    kind: str = "",
    culprit: int = 3,
    *,
    slow: int = -1,
    early: bool = False,
    held: float = 0.0,
    rounds: int = 0,
) -> float:
    """Train; `culprit` fails, as `kind` says. If `rounds` is given, only in so many rounds."""
    if rounds and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) >= rounds:
        kind = ""
    if early and is_faulty(kind, culprit):
        time.sleep(1.0)  # by then the other ranks wait for this one
        meet(kind, held)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=TIMEOUT_S))
    total = torch.zeros(1)
    dist.barrier()
    if "FAKETIME_TIMESTAMP_FILE" in os.environ:
        Path(os.environ["FAKETIME_TIMESTAMP_FILE"]).write_text(
            os.environ["LAB_CLOCK"].split()[1] + "\n"
        )
    time.sleep(1.0)  # the agents connect to each other in the background
    dist.barrier()
    for step in range(STEPS):
        faulty = step == FAULT_STEP and bool(kind) and is_faulty(kind, culprit)
        if faulty:
            meet(kind, held)
        if not (faulty and kind == "skip"):
            part = torch.ones(3)
            try:
                dist.all_reduce(part)
            except RuntimeError:
                if rank() == slow:
                    time.sleep(STRAGGLER_S)
                raise
            total += part[:1]
    dist.barrier()
    dist.destroy_process_group()
    return float(total)


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
