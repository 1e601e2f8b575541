"""How a rank of the framework lab fails, and the data that it trains on."""

import datetime as dt
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

STEPS = 6
FAULT_AT = 3
LONG_S = 120
FEATURES = 8
BATCH = 2


def timeout_of(kind: str) -> dt.timedelta:
    """Return the timeout of collectives: a hang is noticed after it,
    an exit in the middle long before.
    """
    return dt.timedelta(seconds=80 if kind == "leave" else 8)


def is_faulty(rank: int) -> bool:
    return int(os.environ["RANK"]) == rank


def fail(kind: str, rank: int, step: int) -> None:  # noqa: C901 - a table of faults
    if not is_faulty(rank) or step != FAULT_AT:
        return
    if kind in {"raise", "slow-hook"}:
        raise KeyError(f"label of sample {rank * 100 + step}")
    if kind == "hang":
        time.sleep(LONG_S)
    if kind == "exit":
        sys.exit(3)
    if kind == "leave":
        sys.exit(0)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    if kind == "handled":
        try:
            Path("/no/such/file").stat()
        except OSError:
            traceback.print_exc()


class Data(torch.utils.data.Dataset[Any]):
    """Samples; one of a rank's cannot be read, or the process that reads it dies."""

    def __init__(self, kind: str, rank: int, named: bool = False) -> None:
        self.kind = kind
        self.rank = rank
        self.named = named
        self.read = 0

    def __len__(self) -> int:
        return BATCH * (STEPS + 2) * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.read > BATCH * FAULT_AT and is_faulty(self.rank):
            if self.kind == "loader":
                raise KeyError(f"label of sample {index}")
            if self.kind == "loader-killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "loader-hang":
                time.sleep(LONG_S)
        sample = torch.randn(FEATURES)
        return {"x": sample} if self.named else sample


def loader(kind: str, rank: int) -> Any:
    """Return a loader of batches, which another process reads if that is what fails."""
    workers = 1 if kind.startswith("loader") else 0
    return torch.utils.data.DataLoader(Data(kind, rank), batch_size=BATCH, num_workers=workers)
