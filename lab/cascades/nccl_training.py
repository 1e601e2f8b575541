"""The training loop of the lab's cascades under NCCL: steps that only enqueue,
and one wait for the GPU in each.

``tasks.py`` calls it in a task of Flyte's. torchrun starts it as a program: ``nccl_training.py
INPUTS``, in JSON. The inputs name the fault and the version of torch whose words are printed.
"""

import ctypes
import datetime as dt
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))  # in a pod, only this folder is on the path

from lab.cascades.fake_nccl import DUMP_S, Gpu, install
from lab.cascades.injecting import end_node, hang_in_c, marks, rank, truth

STEPS = 6
FAULT_STEP = 3
TIMEOUT_S = 4.0
LONG_S = 600.0
ASSERTED = (
    "../aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [54,0,0], thread:"
    " [31,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
)
GPU_ERRORS = {
    "assert": ("device-side assert triggered", ASSERTED),
    "late-assert": ("device-side assert triggered", ASSERTED),
    "illegal": ("an illegal memory access was encountered", ""),
    "ecc": ("uncorrectable ECC error encountered", ""),
    "xid": ("unspecified launch failure", ""),
}
"""By fault: CUDA's error, and what the kernel prints."""


class Training:
    """One rank's training.

    `fault` is empty for nothing; with `groups`, tensors are split between the ranks of a node, too.
    """

    def __init__(self, fault: str, gpu: Gpu, groups: bool) -> None:
        self.fault = fault
        self.gpu = gpu
        self.batches: queue.Queue[int] = queue.Queue()
        self.tensor_group = _tensor_group() if groups else None
        for step in range(STEPS):
            if not (step == FAULT_STEP and fault == "hang-loader"):
                self.batches.put(step)

    def run(self) -> None:
        for step in range(STEPS):
            now = step == FAULT_STEP and bool(self.fault)
            if now:
                truth(kind=self.fault)
            self.step(step, self.fault if now else "")
            self.gpu.lock()
            self.gpu.unlock()
            self.gpu.check()
            if self.gpu.aborted and self.gpu.unblocks:
                out_of_memory("184.13 GiB", "61.02 GiB")  # the sizes never arrived
            if step % 3 == 0:
                self.save_checkpoint(hangs=now and self.fault == "hang-checkpoint")
        self.gpu.lock()
        self.gpu.unlock()

    def step(self, step: int, fault: str) -> None:
        """Compute and reduce one batch."""
        batch = self.batches.get()
        gradient = torch.ones(16)
        if self.tensor_group is not None:
            if fault == "tensor-hang":
                time.sleep(LONG_S)
            dist.all_reduce(torch.ones(4), group=self.tensor_group)
        if fault in GPU_ERRORS:
            self.gpu.submit(GPU_ERRORS[fault])
        elif fault in FAULTS:
            FAULTS[fault]()
        REDUCE.get(fault, dist.all_reduce)(gradient)
        dist.all_reduce(torch.full((4,), float(batch + step)))
        if fault == "late-assert":
            time.sleep(LONG_S)  # the main thread computes, and asks the GPU nothing
        if fault == "watchdog-stuck":
            self.gpu.stuck = True
            self.gpu.lock()
            self.gpu.lock()  # for ever, in a C call that no signal ends

    def save_checkpoint(self, hangs: bool) -> None:
        """Write a checkpoint; the file system of one rank may not answer."""
        if hangs:
            time.sleep(LONG_S)
        dist.all_reduce(torch.ones(1))


def _tensor_group() -> dist.ProcessGroup:
    """Return this rank's tensor parallel group: the ranks of its node."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    own = None
    for first in range(0, dist.get_world_size(), per_node):
        group = dist.new_group(list(range(first, first + per_node)))
        if first <= dist.get_rank() < first + per_node:
            own = group
    assert own is not None
    return own


def _await_all() -> None:
    """Wait until all ranks are here: on two cores,
    sixteen of them take longer to connect than a collective waits.
    """
    (marks() / f"ready-{rank()}").touch()
    while len(list(marks().glob("ready-*"))) < dist.get_world_size():
        time.sleep(0.05)


def out_of_memory(wanted: str = "2.00 GiB", free: str = "814.12 MiB") -> None:
    """Raise what torch raises when a GPU's memory is used up."""
    raise torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 79.10 GiB"
        f" of which {free} is free. Process 1171 has 78.29 GiB memory in use."
    )


def straggle() -> None:
    """Come when the others have given up."""
    time.sleep(TIMEOUT_S + DUMP_S + 0.1)


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": lambda: (_ for _ in ()).throw(ValueError("the batch has no labels")),
    "exits": lambda: (_ for _ in ()).throw(ValueError("the batch has no labels")),
    "oom": out_of_memory,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "hang-python": lambda: time.sleep(LONG_S),
    "hang-c": hang_in_c,
    "rubbish": lambda: time.sleep(LONG_S),
    "straggler": straggle,
    "node-killed": end_node,
}

REDUCE: dict[str, Callable[[torch.Tensor], Any]] = {
    "skip": lambda _: None,
    "mismatch-operation": lambda gradient: dist.broadcast(gradient, 0),
    "mismatch-size": lambda _: dist.all_reduce(torch.ones(17)),
}
"""What a faulty rank calls instead of the gradients' all-reduce."""


def train(kind: str = "", culprit: int = 3, version: str = "2.7") -> int:
    """Train; one rank meets a fault."""
    gpu = install(version, marks())
    gpu.unblocks = kind == "rubbish"
    dist.init_process_group("lab_nccl", timeout=dt.timedelta(seconds=TIMEOUT_S))
    _await_all()
    faulty = rank() == culprit
    training = Training(kind if faulty else "", gpu, kind.startswith("tensor"))
    if kind == "network" and faulty:
        truth(kind=kind)
    dist.all_reduce(torch.ones(1))
    time.sleep(1.0)  # the agents connect to each other in the background
    if kind == "network":
        gpu.cut_after = 4
    try:
        training.run()
        if kind == "destroy" and faulty:
            truth(kind=kind)
            {}["val_loss"]
        dist.all_reduce(torch.ones(1))
    except Exception:
        if kind == "exits":
            sys.exit(1)
        raise
    finally:
        if kind == "destroy" and faulty:
            dist.all_reduce(torch.ones(2))
        dist.destroy_process_group()
    return rank()


if __name__ == "__main__":
    train(**json.loads(sys.argv[1]))
