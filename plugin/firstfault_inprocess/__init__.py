"""Restarts a function inside the processes that run it, after a fault on any rank.

What does the same as in NVIDIA's ``nvidia_resiliency_ext.inprocess`` has the same name.
"""

from __future__ import annotations

import sys

from firstfault_inprocess import (
    exception as exception,
    hooks,
    rank_assignment as rank_assignment,
    store as store,
)
from firstfault_inprocess.hooks import Compose as Compose
from firstfault_inprocess.job import InProcessRestart as InProcessRestart
from firstfault_inprocess.monitor import thread
from firstfault_inprocess.rank_assignment import (
    FrozenState as FrozenState,
    Mode as Mode,
    State as State,
)
from firstfault_inprocess.wrap import (
    CallWrapper as CallWrapper,
    Wrapper as Wrapper,
    current_call as current_call,
)

abort = completion = compose = finalize = health_check = initialize = terminate = hooks
monitor_thread = thread
state = rank_assignment
# NVRx's modules: also ``from firstfault_inprocess.abort import Abort`` works
_NAMES = dict.fromkeys(
    ("abort", "completion", "compose", "finalize", "health_check", "initialize", "terminate"), hooks
)
for _name, _module in {**_NAMES, "monitor_thread": thread, "state": rank_assignment}.items():
    sys.modules[f"{__name__}.{_name}"] = _module
