"""Restarts a function inside the processes that run it, after a fault on any rank.

What does the same as in NVIDIA's ``nvidia_resiliency_ext.inprocess`` has the same name.
"""

from __future__ import annotations

from firstfault_torch.inprocess import exception, hooks, rank_assignment, state, store
from firstfault_torch.inprocess.hooks import Compose
from firstfault_torch.inprocess.job import InProcessRestart
from firstfault_torch.inprocess.state import FrozenState, Mode, State
from firstfault_torch.inprocess.wrap import CallWrapper, Wrapper, current_call

abort = finalize = health_check = initialize = hooks
"""NVRx's modules of hooks, such as ``inprocess.initialize.RetryController``."""

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "InProcessRestart",
    "Mode",
    "State",
    "Wrapper",
    "abort",
    "current_call",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "rank_assignment",
    "state",
    "store",
]
