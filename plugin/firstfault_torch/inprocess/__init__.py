"""Restarts a function inside the processes that run it, after a fault on any rank.

The names are those of NVIDIA's ``nvidia_resiliency_ext.inprocess`` where the thing is the same.
"""

from __future__ import annotations

from firstfault_torch.inprocess import (
    abort,
    exception,
    finalize,
    health_check,
    initialize,
    rank_assignment,
    state,
    store,
)
from firstfault_torch.inprocess.call import CallWrapper, Interruption, Observer, current_call
from firstfault_torch.inprocess.compose import Compose
from firstfault_torch.inprocess.job.restart import InProcessRestart
from firstfault_torch.inprocess.state import FrozenState, Mode, State
from firstfault_torch.inprocess.wrapper import Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "InProcessRestart",
    "Interruption",
    "Mode",
    "Observer",
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
