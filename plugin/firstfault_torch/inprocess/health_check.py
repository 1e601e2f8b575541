"""Hooks that decide whether this rank may continue after a fault."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import torch

from firstfault_torch.inprocess.compose import Hook
from firstfault_torch.inprocess.exception import RestartError
from firstfault_torch.inprocess.finalize import call_in_thread, check_timeout, current_cuda_device

if TYPE_CHECKING:
    from firstfault_torch.inprocess.state import State


class HealthCheck(Hook):
    """Checks that this rank can call the function again. It must not communicate: other ranks may be gone.

    It runs after the `Finalize` hooks. If it raises, this rank leaves the job, and the others continue without it.
    """


class CudaHealthCheck(HealthCheck):
    """Checks that the CUDA devices of this process still answer: waits for all their pending work.

    A process that has not used CUDA passes.

    Args:
        timeout: the longest wait for all devices together. Kernels that were launched before the fault must end within
            this time.

    Raises:
        ValueError: the timeout is not positive.
    """

    def __init__(self, timeout: dt.timedelta = dt.timedelta(seconds=30)) -> None:
        check_timeout(timeout)
        self.timeout = timeout

    def __call__(self, state: State) -> State:
        """Synchronize each device.

        Raises:
            TimeoutError: the one of in-process restart: a device did not answer in time.
            RuntimeError: torch's error: a kernel failed, and the CUDA context is unusable.
        """
        current = current_cuda_device()
        if current is None:
            return state
        waiting_for = current

        def synchronize() -> None:
            nonlocal waiting_for
            for device in _devices(current):
                waiting_for = device
                torch.cuda.synchronize(device)

        call_in_thread(
            synchronize, self.timeout, "firstfault-cuda-check", lambda: f"synchronizing CUDA device {waiting_for}"
        )
        return state


class FaultCounterExceeded(RestartError):  # noqa: N818 - the name is part of the shared vocabulary
    """This rank raised more often than `FaultCounter` allows."""


class FaultCounter(HealthCheck):
    """Counts how often the function raised on this rank, and fails if that is too often.

    Iterations that ended because of another rank do not count.

    Args:
        max_rank_faults: most faults of this rank; None for no limit.

    Raises:
        ValueError: `max_rank_faults` is negative.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        if max_rank_faults is not None and max_rank_faults < 0:
            raise ValueError(f"max_rank_faults is {max_rank_faults}; it must be at least 0, or None for no limit")
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: State) -> State:
        """Count the fault of this iteration, if this rank had one.

        Raises:
            FaultCounterExceeded: there were too many; the message has both numbers.
        """
        if state.fn_exception is None:
            return state
        self.faults_count += 1
        if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
            times = "once" if self.faults_count == 1 else f"{self.faults_count} times"
            faults = "fault is" if self.max_rank_faults == 1 else "faults are"
            raise FaultCounterExceeded(
                f"rank {state.rank} raised {times}, at most {self.max_rank_faults} {faults} allowed (max_rank_faults)"
            )
        return state


def _devices(current: int) -> list[int]:
    """Return the devices on which this process holds memory, or `current` if there are none.

    Synchronizing another device would create a context on it, which takes memory from the process that uses it. The
    caller bounds this call too: the allocator's lock may be held by a thread that a device blocks.
    """
    used = [device for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device) > 0]
    return used or [current]
