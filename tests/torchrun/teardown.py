"""Trains on gloo to its end, then the last rank fails in its teardown: ``teardown.py HOW``.

atexit, group, destructor: after the program, where a function for the exit, the end of the process
group, or the destructor of an object aborts. last: in the call that ends the process group, the
last one of the program. code: it exits with 7. thread, child: a thread or a process of the program
still works when it has returned. early: another rank still trains. then: the program ends the
process group, but has more to do.
"""

import atexit
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

HOW = sys.argv[1]
LONG_S = 300
RETURNED = Path(os.environ["MARKS"], "returned")


class Handle:
    """Aborts when the interpreter destroys it, as C++ does for a resource that it can't release."""

    def __del__(self, abort=os.abort) -> None:  # noqa: ANN001 - a default outlives the module
        abort()


def await_others() -> None:
    """Wait until the other rank's program has returned."""
    while not RETURNED.exists():
        time.sleep(0.02)


def fails_to_shut_down(_group: object) -> None:
    """Abort, as a backend does whose peers are gone."""
    await_others()
    os.abort()


def aborts_later() -> None:
    """Abort while the interpreter waits for this thread."""
    await_others()
    os.abort()


def prepare() -> None:
    """Let the last rank fail where it is asked to."""
    backend = type(dist.distributed_c10d._get_default_group())
    if HOW in {"group", "last", "then"}:
        backend.shutdown = fails_to_shut_down
    if HOW == "destructor":
        sys.stuck = Handle()  # type: ignore[attr-defined]
    elif HOW == "thread":
        threading.Thread(target=aborts_later).start()
    elif HOW == "code":
        atexit.register(os._exit, 7)
    elif HOW == "group":
        atexit.register(dist.destroy_process_group)
    elif HOW == "child":
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(LONG_S,)).start()
        atexit.register(os.abort)
    elif HOW in {"atexit", "early"}:
        atexit.register(os.abort)
    atexit.register(await_others)


def main() -> None:
    """Train, and end the process group if that is to fail."""
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    if dist.get_rank() == dist.get_world_size() - 1:
        prepare()
    else:
        atexit.register(RETURNED.touch)
        if HOW == "early":
            RETURNED.touch()
            time.sleep(LONG_S)
    if HOW == "then":
        dist.destroy_process_group()
        print("saves the model")
    if HOW == "last":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
