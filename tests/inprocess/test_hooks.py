"""The hooks give up with the limit that was met, clean up in a bounded thread, and check CUDA and faults."""

from __future__ import annotations

import datetime as dt
import itertools
import threading
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
import torch

from firstfault_torch.inprocess.exception import RestartAbort, RestartError
from firstfault_torch.inprocess.exception import TimeoutError as RestartTimeoutError
from firstfault_torch.inprocess.hooks import (
    CudaHealthCheck,
    FaultCounter,
    FaultCounterExceeded,
    Finalize,
    HealthCheck,
    Initialize,
    RetryController,
    ThreadedFinalize,
)
from firstfault_torch.inprocess.state import FrozenState, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

STATE = FrozenState(rank=3, world_size=4, active_rank=1, active_world_size=2, mode=Mode.ACTIVE)
SHORT = dt.timedelta(seconds=0.05)
LONG = dt.timedelta(seconds=60)


def iteration(number: int, world_size: int = 4, active_world_size: int | None = 2) -> FrozenState:
    """Return the state of an iteration."""
    return FrozenState(0, world_size, 0, active_world_size, iteration=number)


# --- initialize -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [Initialize, Finalize, HealthCheck])
def test_bases_are_abstract(base: type) -> None:
    """The base classes of hooks cannot be used themselves."""
    with pytest.raises(TypeError, match="abstract"):
        base()


@pytest.mark.parametrize("state", [iteration(2), iteration(0, 3, 2), iteration(0, 3, None), iteration(0, 9, 9)])
def test_retries_are_allowed(state: FrozenState) -> None:
    """Within the limits, the controller returns the state."""
    assert RetryController(max_iterations=3, min_world_size=3, min_active_world_size=2)(state) is state


def test_no_limit_of_iterations() -> None:
    """Without a limit, every iteration is allowed."""
    assert RetryController()(iteration(10**6)).iteration == 10**6


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (iteration(3), "no further restart: 3 of at most 3 iterations were used (max_iterations)"),
        (iteration(0, 2), "no further restart: only 2 ranks are left, at least 3 are needed (min_world_size)"),
        (
            iteration(0, 3, 1),
            "no further restart: only 1 rank is active, at least 2 are needed (min_active_world_size)",
        ),
        (
            iteration(5, 1, 0),
            (
                "no further restart: 5 of at most 3 iterations were used (max_iterations); "
                "only 1 rank is left, at least 3 are needed (min_world_size); "
                "only 0 ranks are active, at least 2 are needed (min_active_world_size)"
            ),
        ),
    ],
)
def test_the_controller_gives_up(state: FrozenState, message: str) -> None:
    """The message names each limit that was met, with its numbers."""
    with pytest.raises(RestartAbort) as caught:
        RetryController(max_iterations=3, min_world_size=3, min_active_world_size=2)(state)
    assert str(caught.value) == message


def test_one_iteration() -> None:
    """A single iteration is written in the singular."""
    with pytest.raises(RestartAbort, match="1 of at most 1 iteration was used"):
        RetryController(max_iterations=1)(iteration(1))


@pytest.mark.parametrize("limits", [{"max_iterations": 0}, {"min_world_size": -1}, {"min_active_world_size": -1}])
def test_limits_of_the_controller(limits: dict[str, int]) -> None:
    """An error names the limit that is out of range."""
    with pytest.raises(ValueError, match=f"{next(iter(limits))} is {next(iter(limits.values()))}; it must be"):
        RetryController(**limits)


# --- finalize -------------------------------------------------------------------------------------------------------


def test_finalize_calls_in_a_thread() -> None:
    """The function gets its arguments, in a thread of its own."""
    calls = []

    def clean(*args: object, **kwargs: object) -> None:
        calls.append((args, kwargs, threading.current_thread().name))

    assert ThreadedFinalize(LONG, clean, (1, 2), {"key": 3})(STATE) is STATE
    assert calls == [((1, 2), {"key": 3}, "firstfault-finalize-3")]


def test_finalize_without_arguments() -> None:
    """A function without arguments is called again in each iteration."""
    clean = Mock()
    finalize = ThreadedFinalize(LONG, clean)
    finalize(finalize(STATE))
    assert clean.call_count == 2
    clean.assert_called_with()


def test_finalize_passes_errors() -> None:
    """An exception of the function comes out of the hook as the same object."""
    error = KeyError("cache")
    with pytest.raises(KeyError) as caught:
        ThreadedFinalize(LONG, Mock(side_effect=error))(STATE)
    assert caught.value is error


def test_finalize_times_out() -> None:
    """A function that does not end in time is named, and left running."""
    release = threading.Event()

    def clean_caches() -> None:
        release.wait()

    try:
        with pytest.raises(RestartTimeoutError, match=r"finalize function .*clean_caches did not end within 0.05 s"):
            ThreadedFinalize(SHORT, clean_caches)(STATE)
    finally:
        release.set()


@pytest.mark.parametrize("seconds", [0, -1])
def test_timeouts_are_positive(seconds: float) -> None:
    """A hook refuses a time limit that is not positive."""
    with pytest.raises(ValueError, match=f"timeout is {seconds} s; it must be more than 0 s"):
        ThreadedFinalize(dt.timedelta(seconds=seconds), Mock())
    with pytest.raises(ValueError, match="timeout"):
        CudaHealthCheck(dt.timedelta(seconds=seconds))


# --- CUDA -----------------------------------------------------------------------------------------------------------


class Cuda:
    """Stands for torch.cuda: four devices, and memory on some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: set[int], *, initialized: bool = True) -> None:
        self.synchronized: list[int] = []
        self.set_devices: list[int] = []
        self.wait: Callable[[int], object] = self.synchronized.append
        for name, function in {
            "is_available": lambda: True,
            "is_initialized": lambda: initialized,
            "device_count": lambda: 4,
            "current_device": lambda: 2,
            "memory_reserved": lambda device: 1024 if device in used else 0,
            "set_device": self.set_devices.append,
            "synchronize": self.synchronize,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def synchronize(self, device: int) -> None:
        """Wait for a device."""
        self.wait(device)


def test_without_cuda() -> None:
    """A process that has not used CUDA is healthy."""
    assert CudaHealthCheck()(STATE) is STATE


def test_before_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not initialize CUDA."""
    cuda = Cuda(monkeypatch, {0}, initialized=False)
    CudaHealthCheck()(STATE)
    assert cuda.synchronized == []


@pytest.mark.parametrize(("used", "synchronized"), [({1, 3}, [1, 3]), (set(), [2])])
def test_devices(monkeypatch: pytest.MonkeyPatch, used: set[int], synchronized: list[int]) -> None:
    """The devices on which the process holds memory are synchronized, or else the current one."""
    cuda = Cuda(monkeypatch, used)
    assert CudaHealthCheck()(STATE) is STATE
    assert cuda.synchronized == synchronized


def test_a_broken_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a device comes out of the check as the same object."""
    error = RuntimeError("CUDA error: device-side assert triggered")
    Cuda(monkeypatch, {0}).wait = Mock(side_effect=error)
    with pytest.raises(RuntimeError) as caught:
        CudaHealthCheck()(STATE)
    assert caught.value is error


def test_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the device that did not answer in time."""
    release = threading.Event()
    Cuda(monkeypatch, {0, 3}).wait = lambda device: device == 3 and release.wait()
    try:
        with pytest.raises(RestartTimeoutError, match=r"synchronizing CUDA device 3 did not end within 0.05 s"):
            CudaHealthCheck(SHORT)(STATE)
    finally:
        release.set()


def test_finalize_keeps_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function's thread has the caller's current device."""
    cuda = Cuda(monkeypatch, set())
    ThreadedFinalize(LONG, Mock())(STATE)
    assert cuda.set_devices == [2]


# --- faults ---------------------------------------------------------------------------------------------------------


def fault(*, raised: bool = True) -> FrozenState:
    """Return the state after an iteration in which this rank raised, or another did."""
    return FrozenState(rank=3, world_size=4, fn_exception=ValueError() if raised else None)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (0, "rank 3 raised once, at most 0 faults are allowed (max_rank_faults)"),
        (1, "rank 3 raised 2 times, at most 1 fault is allowed (max_rank_faults)"),
        (2, "rank 3 raised 3 times, at most 2 faults are allowed (max_rank_faults)"),
    ],
)
def test_too_many_faults(limit: int, message: str) -> None:
    """Only this rank's own faults count, and the message has both numbers."""
    check = FaultCounter(limit)
    for _ in range(limit):
        check(fault())
        check(fault(raised=False))
    with pytest.raises(FaultCounterExceeded) as caught:
        check(fault())
    assert str(caught.value) == message
    assert isinstance(caught.value, RestartError)


def test_faults_without_limit() -> None:
    """Without a limit, faults are counted and allowed."""
    check = FaultCounter()
    for _ in itertools.repeat(None, 5):
        check(fault())
    assert check.faults_count == 5


def test_limit_of_faults() -> None:
    """A negative limit is refused."""
    with pytest.raises(ValueError, match="max_rank_faults is -1; it must be at least 0"):
        FaultCounter(-1)
