"""Trainings that fail in one of several ways; each worker tells the test when it runs."""

import contextlib
import ctypes
import datetime as dt
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from firstfault.model import Verdict
from firstfault.retry import RetryContext, Vote, explicit, on_category, same_fault_again
from firstfault_torch import RecoverableError, watchdog
from tests.nodes import await_file, mark

FAULT_STEP = 3
LONG_S = 1000.0
ALONE_S = 60.0
CLEAN_UP_S = 2.5
SLOW_S = 6.0
SAVING_S = 1.0
DEADLINE_S = 6.0


def _meet() -> int:
    """Make the process group; return this rank."""
    # on a busy machine ranks may come half a minute apart
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=100))
    return dist.get_rank()


def _summed() -> float:
    """Run a collective of all ranks; return the sum."""
    part = torch.ones(1)
    dist.all_reduce(part)
    return float(part)


def _fail(folder: str, kind: str) -> None:
    mark(folder, "fault")
    if kind == "raise":
        raise ValueError("the first fault")
    if kind == "finally-destroy":
        try:
            raise ValueError("the first fault")
        finally:
            dist.destroy_process_group()
            time.sleep(CLEAN_UP_S)
    if kind == "terminate":
        ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"]()
    if kind == "exit 0":
        os._exit(0)
    if kind == "leave":
        sys.exit(0)  # it keeps its process group
    if kind == "freeze the recorder":
        os.kill(_recorder(), signal.SIGSTOP)
        raise ValueError("the first fault")
    if kind == "hang":
        time.sleep(LONG_S)


def _recorder() -> int:
    """Return the process of this node's recorder, a child of the agent."""
    (children,) = Path(f"/proc/{os.getppid()}/task").glob(f"{os.getppid()}/children")
    return next(
        int(pid)
        for pid in children.read_text().split()
        if "firstfault.recorder" in Path(f"/proc/{pid}/cmdline").read_text()
    )


def one_fails(folder: str, kind: str, peers: str = "sleep", rank: int = 1) -> float:
    """Let one rank fail while the others sleep or continue with collectives."""
    if peers == "gloo":
        _meet()
    own = int(os.environ["RANK"])
    mark(folder, f"rank-{own}")
    await_file(folder, "rank-*.json", int(os.environ["WORLD_SIZE"]))
    if peers == "sleep, once told":
        await_file(folder, "go")
    total = 0.0
    for step in range(2 * FAULT_STEP):
        if step == FAULT_STEP and own == rank:
            _fail(folder, kind)
        if step == FAULT_STEP and peers.startswith("sleep"):
            time.sleep(LONG_S)
        if peers == "gloo":
            total += _summed()
    return total


def one_is_late(folder: str, kind: str, seconds: float) -> float:
    """Let rank 0 fail, or finish, after rank 1 has finished and waits."""
    own = int(os.environ["RANK"])
    mark(folder, f"rank-{own}")
    if own == 0:
        await_file(folder, "0/firstfault/roster/*succeeded*")
        time.sleep(seconds)
        _fail(folder, kind)
    return 1.0


def one_hangs_in_a_step(folder: str, rank: int) -> float:
    """Let one rank hang in a step while the others wait for it in a collective,
    each with a deadline.
    """
    del folder
    own = _meet()
    for step in range(2 * FAULT_STEP):
        watchdog.ping()
        with watchdog.expires(after=DEADLINE_S, scope="train step"):
            if step == FAULT_STEP and own == rank:
                os.write(2, b"the loader reads shard 7\n")
                time.sleep(LONG_S)
            _summed()
    return 0.0


def disturbed(folder: str, how: str, verdict: Verdict, context: RetryContext) -> bool:
    """Be the user's retry policy, and disturb the first node that concludes."""
    del verdict, context
    place = Path(folder, f"concludes-{os.getpid()}")
    is_first = not list(place.parent.glob("concludes-*"))
    place.touch()
    if is_first and how in {"SIGKILL", "SIGSTOP"}:
        os.kill(os.getpid(), signal.Signals[how])
    if is_first and how == "slow":
        time.sleep(SLOW_S)
    return False


def disturbing(folder: Path, how: str) -> Any:
    """Return a retry policy that disturbs the node that asks it first."""
    return partial(disturbed, str(folder), how)


def prints_and_leaves(folder: str) -> None:
    """Print to both streams, then exit once all have:
    the agent stops those that are slower than the first to exit.
    """
    rank = os.environ["RANK"]
    os.write(1, f"stdout of rank {rank}\n".encode())  # in one piece: the ranks share the file
    os.write(2, f"stderr of rank {rank}\nits reason\n".encode())
    mark(folder, f"rank-{rank}")
    await_file(folder, "rank-*.json", int(os.environ["WORLD_SIZE"]))
    os._exit(3)


def prints_and_raises(folder: str) -> None:
    """Rank 1 prints 400 lines and fails while rank 0 waits,
    after it printed its exception's traceback too.
    """
    del folder
    if os.environ["RANK"] == "0":
        threading.Event().wait()
    for step in range(400):
        print(f"step {step} of shard-{step:03}", file=sys.stderr)
    print("password=hunter22", file=sys.stderr)
    try:
        raise ValueError("bad sample")  # noqa: TRY301 - printed before it leaves
    except ValueError:
        traceback.print_exc()
        raise


def retries_user_code(verdict: Verdict, context: RetryContext) -> bool | None:
    """Be a retry policy that a node can be sent."""
    return on_category("user_code")(verdict, context)


def retries_other_faults(verdict: Verdict, context: RetryContext) -> Vote | bool | None:
    """Be a retry policy that does not retry the same fault twice."""
    return (explicit() & ~same_fault_again())(verdict, context)


def _runs(folder: str) -> int:
    """Return the number of the round, counted by this rank's marks, and write a mark for it."""
    rank = os.environ["RANK"]
    number = len(list(Path(folder).glob(f"rank-{rank}-*.json")))
    mark(folder, f"rank-{rank}-{number}", world=int(os.environ["WORLD_SIZE"]))
    return number


def the_same_again(folder: str) -> float:
    """Rank 1 raises the same error in each round, after all have met."""
    _runs(folder)
    rank = _meet()
    mark(folder, f"sum-{_summed():g}-{rank}")
    if rank == 1:
        raise ValueError("the same each time")
    return _summed()


def not_there_yet(folder: str) -> None:
    """Rank 1 raises a recoverable error in each round and attempt, without a process group."""
    number = _runs(folder)
    if os.environ["RANK"] == "1":
        raise RecoverableError(f"shard {number} is not there yet")  # a fingerprint ignores numbers
    time.sleep(LONG_S)


def in_turn(folder: str) -> float:
    """A worker of a different node raises a recoverable error in each of the first two rounds."""
    number = _runs(folder)
    rank = _meet()
    _summed()
    if number < 2 and rank == number:
        raise RecoverableError(f"round {number} fails on rank {number}")
    return _summed()


def code_bug(folder: str) -> float:
    """Rank 1 has a bug; rank 0 fails first, because it lost its peer,
    and calls that recoverable.
    """
    _runs(folder)
    rank = _meet()
    _summed()
    if rank == 0:
        try:
            return _summed()
        except RuntimeError as error:
            raise RecoverableError("lost the connection to another rank") from error
    try:
        raise TypeError("the bug")
    finally:
        dist.destroy_process_group()
        time.sleep(1)


def once_told(folder: str) -> float:
    """One rank fails when the test writes its number into the file "go"; the others sleep on."""
    _runs(folder)
    await_file(folder, "go")
    if os.environ["RANK"] == Path(folder, "go").read_text():
        raise ValueError("the fault that was asked for")
    time.sleep(ALONE_S)
    return 0.0


def _save_when_stopped(folder: str, save: Callable[[], None]) -> None:
    """Save a checkpoint in the handler of SIGTERM, and exit."""
    rank, asked = os.environ["RANK"], []

    def handle(*_: object) -> None:
        asked.append(None)
        mark(folder, f"asked-{rank}", times=len(asked))
        save()
        mark(folder, f"saved-{rank}", times=len(asked))
        os._exit(0)

    signal.signal(signal.SIGTERM, handle)


def saving(folder: str, _how: object = None) -> None:
    """Wait to be stopped; then save until there is a file "go"."""
    _save_when_stopped(folder, lambda: await_file(folder, "go"))
    mark(folder, f"rank-{os.environ['RANK']}")
    time.sleep(LONG_S)


def growing(folder: str) -> float:
    """Wait alone until a second node comes, and save when stopped for it; then reduce with it."""
    if os.environ["WORLD_SIZE"] == "1":
        _save_when_stopped(folder, lambda: time.sleep(SAVING_S))
    _runs(folder)
    if os.environ["WORLD_SIZE"] == "1":
        time.sleep(ALONE_S)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _meet()
    return _summed()


def out_of_memory(folder: str) -> float:
    """Rank 1 allocates memory until the kernel kills it."""
    _runs(folder)
    taken = []
    while os.environ["RANK"] == "1":
        taken.append(b"x" * (1 << 26))
    time.sleep(ALONE_S)
    return 0.0


class Shards(torch.utils.data.Dataset[int]):
    """A data set that is not complete."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise LookupError("shard 2 is gone")
        return index


def _prefetch() -> None:
    raise LookupError("the prefetch thread found nothing")


def loading(folder: str) -> float:
    """Rank 1 waits after its thread has died;
    then a worker process of rank 0's data loader fails.
    """
    _runs(folder)
    if os.environ["RANK"] == "1":
        thread = threading.Thread(target=_prefetch, name="prefetch")
        thread.start()
        thread.join()
        mark(folder, "dead")
        time.sleep(ALONE_S)
        return 0.0
    await_file(folder, "dead.json")
    return float(sum(int(batch) for batch in torch.utils.data.DataLoader(Shards(), num_workers=1)))


def stalling(folder: str, way: str, seconds: float = 0.0) -> None:
    """Make progress for a while, then rank 1 makes none until there is a file "go",
    or for so many seconds.

    `way`: "paused" in a block of the watchdog, "computes", or in the first steps "early" (asleep)
    and "compiles".
    """

    def read_shard() -> None:
        ends = time.monotonic() + seconds
        while not Path(folder, "go").exists() and (not seconds or time.monotonic() < ends):
            time.sleep(0.5 if way in {"paused", "early"} else 0)

    rank = _meet()
    for step in range(60):
        if rank == 1 and step == (5 if way in {"early", "compiles"} else 40):
            with watchdog.pause() if way == "paused" else contextlib.nullcontext():
                read_shard()
        _summed()
        time.sleep(0.05)


TRIED_AGAIN_S = 3.0


def tries_again(_: str) -> None:
    """Rank 1 fails after a step's collective, logs its exception and calls the step again,
    out of step with rank 0.
    """
    rank = _meet()
    dist.barrier()
    # Rank 0 is the first to give up. If rank 1 were, it would have failed by itself, with a timeout
    # of its own.
    patience = TRIED_AGAIN_S if rank == 0 else 20 * TRIED_AGAIN_S
    group = dist.new_group(timeout=dt.timedelta(seconds=patience))
    has_failed = False

    def step(number: int) -> None:
        nonlocal has_failed
        dist.all_reduce(torch.ones(1), group=group)
        if (rank, number, has_failed) == (1, 1, False):
            has_failed = True
            raise ValueError("the first fault")

    for number in range(3):
        for attempt in range(3):
            try:
                step(number)
                break
            except Exception:
                if attempt == 2:
                    raise
                logging.getLogger("training").exception("step %d failed, trying again", number)
        dist.barrier(group=group)
