"""The hooks that run on a rank at each step of a restart: the kinds, firstfault's own hooks,
and chains of hooks.

NVRx has one module for each kind: those of `firstfault_inprocess` are other names of this one.
"""

from __future__ import annotations

import abc
import datetime as dt
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from firstfault.utils.text import counted
from firstfault_inprocess.exception import RestartAbort, RestartError, check_limit
from firstfault_inprocess.exception import TimeoutError as RestartTimeoutError
from firstfault_inprocess.rank_assignment import State
from firstfault_torch.compat.torch_worker import (
    backends_that_abort,
    forget_process_groups,
    shut_down_gloo_connections,
)
from firstfault_torch.guard import (
    call_with_timeout,
    start_daemon,
    start_in_thread,
    suppress_internal_errors,
    try_call,
)
from firstfault_torch.time_limits import NCCL_ABORT_TIMEOUT_SECONDS


class Hook(abc.ABC):
    """Called on a rank at one step of a restart. `Compose` chains several of one kind.

    The options accept any callable: these classes document what a hook of each kind does.
    """

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Do the step; return a state for the next hook of a chain, or None for the same.

        Raises:
            Exception: what that means depends on the kind of hook.
        """


class Compose:
    """Calls its parts from the last to the first: ``Compose(a, b, c)(x)`` is ``a(b(c(x)))``.

    The parts are hooks of one kind, or rank assignments. A part that returns None passes its
    argument on; a tuple is passed on as several arguments.

    Args:
        instances: the parts, at least one. The last is called first.

    Raises:
        ValueError: `parts` is empty.
        TypeError: a part can't be called.
    """

    def __init__(self, *instances: Callable[..., Any]) -> None:
        if not instances:
            raise ValueError("Compose needs at least one part")
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"Compose cannot call {instance!r}")
        self.instances = instances

    def __call__(self, *arguments: Any) -> Any:
        """Return what the first part returned; the last one gets the arguments."""
        value = arguments if len(arguments) != 1 else arguments[0]
        # The order of mathematical composition, as in NVRx: the part that is written last runs
        # first.
        for part in reversed(self.instances):
            returned = part(*value) if isinstance(value, tuple) else part(value)
            value = value if returned is None else returned
        return value


# --- before each iteration ------------------------------------------------------------------------


class Initialize(Hook):
    """Runs on each rank at the start of each iteration, the first one included.

    If it raises an `Exception`, all ranks restart. If it raises another `BaseException`, such as
    `RestartAbort`, the wrapped call ends.
    """


class RetryController(Initialize):
    """Gives up when the iterations are used up or too few ranks are left.

    Args:
        max_iterations: how often the function may be called, the first call included; None for no
            limit.
        min_world_size: fewest ranks that must be left, active or not.
        min_active_world_size: fewest ranks that must be active.

    Raises:
        ValueError: `max_iterations` is below 1, or another limit is below 0.
    """

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
    ) -> None:
        check_limit("max_iterations", max_iterations, 1)
        check_limit("min_world_size", min_world_size, 0)
        check_limit("min_active_world_size", min_active_world_size, 0)
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: State) -> State:
        """Return `state` if the function may be called again.

        Raises:
            RestartAbort: it may not; the message names each limit that was met, with its numbers.
        """
        reasons = []
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            used = counted(state.iteration, "iteration")
            reasons.append(f"{used} used, at most {self.max_iterations} allowed (max_iterations)")
        if state.world_size < self.min_world_size:
            left = counted(state.world_size, "rank")
            reasons.append(f"{left} left, at least {self.min_world_size} needed (min_world_size)")
        active = state.active_world_size
        if active is not None and active < self.min_active_world_size:
            needed = f"at least {self.min_active_world_size} needed (min_active_world_size)"
            reasons.append(f"{counted(active, 'rank')} active, {needed}")
        if reasons:
            raise RestartAbort("no further restart: " + "; ".join(reasons))
        return state


# --- when an iteration is interrupted -------------------------------------------------------------


class Abort(Hook):
    """What a thread of every rank does when the iteration is interrupted,
    while the main thread may be blocked.
    """


class AbortTorchDistributed(Abort):
    """Makes the collectives of all process groups fail.

    NCCL's communicators are aborted. gloo has no call for that, so its connections to other ranks
    are shut down, never the socket on which it listens.
    """

    def __call__(self, state: State) -> State:
        """Abort; the main thread destroys the groups when it has left the function."""
        if dist.is_available() and dist.is_initialized():
            # In parallel: if one communicator's abort blocks, all further ones are still aborted.
            # gloo's connections are shut down at the same time, because a rank may wait in a group
            # of either backend. Without a free thread, one after another in this one: otherwise
            # the main thread would stay in its collective until it is killed.
            doing = "aborting NCCL's communicators"
            aborted = [start_in_thread(abort, doing, local=True) for abort in backends_that_abort()]
            with suppress_internal_errors("shutting down gloo's connections"):
                shut_down_gloo_connections()
            deadline = time.monotonic() + NCCL_ABORT_TIMEOUT_SECONDS
            for event in aborted:
                event.wait(max(deadline - time.monotonic(), 0))
        return state


class AbortTransformerEngine(Abort):
    """Destroys the communication buffers of Transformer Engine, if the program uses it."""

    def __call__(self, state: State) -> State:
        """Destroy them."""
        engine: Any = sys.modules.get("transformer_engine.pytorch")
        if engine is not None:
            with suppress_internal_errors("destroying Transformer Engine's buffers"):
                engine.module.base.destroy_ub()
        return state


def destroy_process_groups(seconds: float) -> None:
    """Destroy all process groups.

    Raises:
        firstfault_inprocess.exception.TimeoutError: that took longer than `seconds`.
    """
    if not dist.is_available():
        return
    if dist.is_initialized():
        # None is returned for success and for a timeout alike: so torch is asked again below.
        call_with_timeout(
            dist.destroy_process_group,
            seconds,
            "destroying the process groups",
            local=True,
        )
        if dist.is_initialized():
            raise RestartTimeoutError(
                f"the process groups could not be destroyed within {seconds:g} s (soft_timeout)"
            )
    # Also without groups: an interruption inside init_process_group leaves entries that torch
    # doesn't destroy.
    with suppress_internal_errors("forgetting process groups"):
        forget_process_groups()


# --- when the function has ended ------------------------------------------------------------------


class Finalize(Hook):
    """Cleans up after a fault, so that the function can be called again: global variables,
    pending asynchronous work.

    It runs on each rank after the process groups were aborted. If it raises, this rank leaves the
    job.
    """


class ThreadedFinalize(Finalize):
    """Calls a function in a thread, with a time limit.

    If the process uses CUDA, the thread has the same current device as the thread that starts it.
    What the function returns isn't used.

    Raises:
        ValueError: the timeout isn't positive.
    """

    def __init__(
        self,
        timeout: dt.timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        _check_timeout(timeout)
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: State) -> State:
        """Call the function and wait for its end.

        Raises:
            TimeoutError: the one of in-process restart: it didn't end in time. Its thread is left
                running.
            BaseException: whatever the function raised.
        """
        # CUDA's current device belongs to a thread: read here, set in the new one.
        device = _current_cuda_device()

        def call() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            self.fn(*self.args, **self.kwargs)

        name = getattr(self.fn, "__qualname__", repr(self.fn))
        call_in_thread(call, self.timeout, lambda: f"the finalize function {name}")
        return state


def call_in_thread(
    call: Callable[[], object], timeout: dt.timedelta, doing: Callable[[], str]
) -> None:
    """Raise what `call` raises in a daemon thread; this thread runs signal handlers while it waits.

    Raises:
        TimeoutError: the one of in-process restart: it didn't end in time, and is left running. The
            message has what `doing` returns then, such as "the cleanup".
    """
    errors: list[BaseException | None] = []
    # not join(): after a signal handler raised in it, Python takes the thread for dead
    done = threading.Event()

    def run() -> None:
        errors.append(try_call(call)[1])
        done.set()

    deadline = time.monotonic() + timeout.total_seconds()
    start_daemon(run, "firstfault-restarting", timeout.total_seconds())
    if not done.wait(max(deadline - time.monotonic(), 0)):
        raise RestartTimeoutError(f"{doing()} did not end within {timeout.total_seconds():g} s")
    if errors[0] is not None:
        raise errors[0]


def _check_timeout(timeout: dt.timedelta) -> None:
    """Raise a ValueError if a time limit isn't positive."""
    if timeout.total_seconds() <= 0:
        raise ValueError(f"timeout is {timeout.total_seconds():g} s; it must be more than 0 s")


def _current_cuda_device() -> int | None:
    """Return this thread's current CUDA device, or None if this process hasn't used CUDA."""
    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if is_used else None


# --- whether this rank may continue ---------------------------------------------------------------


class HealthCheck(Hook):
    """Checks that this rank can call the function again. It must not communicate:
    other ranks may be gone.

    It runs after the `Finalize` hooks. If it raises, this rank leaves the job, and the rest
    continue without it.
    """


class CudaHealthCheck(HealthCheck):
    """Checks that the CUDA devices of this process still answer: waits for all their pending work.

    A process that hasn't used CUDA passes. The timeout is for all devices together: kernels that
    were launched before the fault must end within this time.

    Raises:
        ValueError: the timeout isn't positive.
    """

    def __init__(self, timeout: dt.timedelta = dt.timedelta(seconds=30)) -> None:
        _check_timeout(timeout)
        self.timeout = timeout

    def __call__(self, state: State) -> State:
        """Synchronize each device.

        Raises:
            TimeoutError: the one of in-process restart: a device didn't answer in time.
            RuntimeError: torch's error: a kernel failed, and the CUDA context is unusable.
        """
        current = _current_cuda_device()
        if current is None:
            return state
        waiting_for = current

        def synchronize() -> None:
            nonlocal waiting_for
            # this is bounded, too: the allocator's lock may be held by a thread that a device
            # blocks. To synchronize a device without memory would create a context on it, which
            # takes memory from the process that uses it
            used = [
                device
                for device in range(torch.cuda.device_count())
                if torch.cuda.memory_reserved(device) > 0
            ]
            for device in used or [current]:
                waiting_for = device
                torch.cuda.synchronize(device)

        call_in_thread(
            synchronize, self.timeout, lambda: f"synchronizing CUDA device {waiting_for}"
        )
        return state


class FaultCounterExceeded(RestartError):  # noqa: N818 - the name is part of the shared vocabulary
    """This rank raised more often than `FaultCounter` allows."""


class FaultCounter(HealthCheck):
    """Counts how often the function raised on this rank, and fails if that is too often.

    Iterations that ended because of another rank don't count. `max_rank_faults` may be None, for no
    limit.

    Raises:
        ValueError: `max_rank_faults` is negative.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        check_limit("max_rank_faults", max_rank_faults, 0)
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
            raised = f"rank {state.rank} raised {counted(self.faults_count, 'time')}"
            raise FaultCounterExceeded(
                f"{raised}, at most {self.max_rank_faults} allowed (max_rank_faults)"
            )
        return state


# --- when the call ends ---------------------------------------------------------------------------


class Completion(Hook):
    """Runs on each rank when all ranks have completed."""


class Terminate(Hook):
    """Runs on a rank that ends without having completed."""
