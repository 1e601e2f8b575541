"""The options of an in-process restart."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from firstfault.errors import UsageError
from firstfault_inprocess.hooks import AbortTorchDistributed, Compose
from firstfault_inprocess.rank_assignment import (
    ActivateAllRanks,
    RankAssignmentCtx,
    ShiftRanks,
    State,
)

# Each step needs time to act before the next one does. A rank is interrupted before it is killed; a
# killed or lost rank is reported before its peers time out at the barrier; and each interval is
# shorter than the limits that are checked in it.
_ASCENDING_PAIRS = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
    ("last_call_wait", "soft_timeout"),
)
"""Pairs of options; in each pair the first must be the shorter one."""
_OPTION_TYPES: dict[str, type] = {
    "store_kwargs": dict,
    "monitor_process_logfile": str,
    "enabled": bool,
}
_OPTIONS_FROM_ZERO = {"last_call_wait", "termination_grace_time"}
_DEFAULT_RANK_ASSIGNMENT = Compose(ActivateAllRanks(), ShiftRanks())


@dataclass(frozen=True, kw_only=True)
class InProcessOptions:
    """How the ranks of a function are started again in the same processes after a fault.

    Durations are ``timedelta`` or seconds.

    Raises:
        firstfault.errors.UsageError: an option has a value that isn't valid, or two are in the
            wrong order.
    """

    store_factory: Callable[..., Any] | None = None
    """Makes each connection to the store of the ranks. With None or `TCPStore`, torch elastic's
    agent hosts the store, or without such an agent a process that the first rank starts.
    """
    store_kwargs: dict[str, Any] | None = None
    """Arguments of `store_factory`. Without a factory, ``host_name`` and ``port`` (by default,
    MASTER_ADDR and MASTER_PORT).
    """
    initialize: Callable[[State], Any] | None = None
    """Called on each rank before each iteration. `RetryController` limits the iterations."""
    abort: Callable[[State], Any] | None = field(default_factory=AbortTorchDistributed)
    """Called in a thread of each rank to unblock the main thread of an interrupted iteration."""
    finalize: Callable[[State], Any] | None = None
    """Called on each rank that continues, when it has left the function."""
    health_check: Callable[[State], Any] | None = None
    """Called on each rank before each iteration and after each fault. A rank that fails the
    check doesn't continue.
    """
    rank_assignment: Callable[[RankAssignmentCtx], RankAssignmentCtx] = _DEFAULT_RANK_ASSIGNMENT
    """Gives the ranks that continue their new ranks, the world size, and whether they are active.
    """
    rank_filter: Callable[[RankAssignmentCtx], RankAssignmentCtx] | None = None
    """Applied after `rank_assignment`; NVRx's older way to keep ranks in reserve."""
    monitor_thread_interval: dt.timedelta | float = 0.05
    """Time between two attempts to interrupt the main thread in the function."""
    monitor_process_interval: dt.timedelta | float = 1.0
    """Time between two checks of the worker's progress by its monitor process, which notices the
    worker's death at once.
    """
    heartbeat_interval: dt.timedelta | float = 5.0
    """Time between two heartbeats of a monitor process. Each process checks the next rank's."""
    progress_watchdog_interval: dt.timedelta | float = 1.0
    """Time between two timestamps that the main thread writes when it executes Python code."""
    soft_timeout: dt.timedelta | float = 60.0
    """A rank without progress for this long is interrupted, and continues if it is healthy.
    Progress is Python code that is executed and, once a rank has called `CallWrapper.ping`, the
    next call of it.
    """
    hard_timeout: dt.timedelta | float = 90.0
    """A rank is killed after this long without progress or in an interrupted function."""
    heartbeat_timeout: dt.timedelta | float = 30.0
    """A rank without a heartbeat for this long counts as lost."""
    barrier_timeout: dt.timedelta | float = 120.0
    """How long the ranks wait for each other, to begin and between two iterations."""
    completion_timeout: dt.timedelta | float | None = None
    """How long a rank that has returned waits for the remaining ranks. None means no limit, because
    the last rank may still be writing a checkpoint.
    """
    last_call_wait: dt.timedelta | float = 0.2
    """How long further ranks may report their own faults, before the collectives are aborted."""
    termination_grace_time: dt.timedelta | float = 5.0
    """Time between SIGTERM and SIGKILL for a rank that met `hard_timeout`."""
    monitor_process_logfile: str | None = None
    """Absolute path of the monitor process's log; ``{rank}`` is replaced by the initial rank."""
    enabled: bool = True
    """Whether to restart the function after faults; if False, it is called as is."""
    completion: Callable[[State], Any] | None = None
    """Called with the state when all ranks have completed."""
    terminate: Callable[[State], Any] | None = None
    """Called with the state when this rank ends without having completed."""

    def __post_init__(self) -> None:
        """Check the options."""
        for name, kind in _OPTION_TYPES.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"{name} must be an instance of {kind.__name__}, not {value!r}")
        for name in _list_fields("Callable"):
            value = getattr(self, name)
            # RetryController without parentheses can be called, but isn't a hook
            is_class = isinstance(value, type) and name != "store_factory"
            if value is not None and (is_class or not callable(value)):
                raise UsageError(f"{name} must be callable, not {value!r}")
        for name in _list_fields("timedelta"):
            value = getattr(self, name)
            if value is not None or name != "completion_timeout":
                _check_duration(name, value)
        for shorter, longer in _ASCENDING_PAIRS:
            one = self.seconds(shorter)
            other = self.seconds(longer)
            if one >= other:
                raise UsageError(
                    f"{shorter} ({one:g} s) must be shorter than {longer} ({other:g} s)"
                )
        if (
            self.monitor_process_logfile is not None
            and not Path(self.monitor_process_logfile).is_absolute()
        ):
            raise UsageError(
                "monitor_process_logfile must be an absolute path, not"
                f" {self.monitor_process_logfile!r}"
            )

    def seconds(self, name: str) -> float:
        """Return a duration in seconds, or infinity if there is none."""
        value = getattr(self, name)
        return float("inf") if value is None else _to_seconds(value)


def _list_fields(kind: str) -> list[str]:
    """Return the names of the options with a type that mentions a kind."""
    return [item.name for item in fields(InProcessOptions) if kind in str(item.type)]


def _to_seconds(value: dt.timedelta | float) -> float:
    return value.total_seconds() if isinstance(value, dt.timedelta) else float(value)


def _check_duration(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float | dt.timedelta) and not isinstance(value, bool)
    seconds = _to_seconds(value) if is_number else -1
    if not 0 <= seconds < float("inf") or (seconds == 0 and name not in _OPTIONS_FROM_ZERO):
        least = "0 or more" if name in _OPTIONS_FROM_ZERO else "above 0"
        raise UsageError(
            f"{name} must be a timedelta or a number of seconds, {least}, not {value!r}"
        )
