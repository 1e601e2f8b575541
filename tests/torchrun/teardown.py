"""Trains on gloo to its end, then the last rank aborts in its teardown: ``teardown.py HOW``.

atexit, group, destructor: after the program, where a function for the exit, the end of the process group, or an object's
destructor runs. last: in the call that ends the process group, the last one of the program. early: while another rank
still trains. exit: by an exit code.
"""

import atexit
import os
import sys
import time

import torch
import torch.distributed as dist

HOW = sys.argv[1]
LONG_S = 300


class Handle:
    """Aborts when the interpreter destroys it, as C++ does for a resource that it can't release."""

    def __del__(self, abort=os.abort) -> None:  # noqa: ANN001 - a default outlives the module
        abort()


def end_group() -> None:
    """End the process group, whose backend fails to shut down."""
    backend = type(dist.distributed_c10d._get_default_group())  # noqa: SLF001 - what torch calls
    backend.shutdown = lambda _group: os.abort()
    dist.destroy_process_group()


def main() -> None:
    """Train, and prepare the teardown."""
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == last + 1
    if rank != last:
        if HOW == "early" and rank == 0:
            time.sleep(LONG_S)
        atexit.register(time.sleep, 0.2)
    elif HOW == "exit":
        atexit.register(os._exit, 7)
    elif HOW in {"atexit", "early"}:
        atexit.register(os.abort)
    elif HOW == "group":
        atexit.register(end_group)
    elif HOW == "destructor":
        globals()["handle"] = Handle()
    elif HOW == "last":
        end_group()


if __name__ == "__main__":
    main()
