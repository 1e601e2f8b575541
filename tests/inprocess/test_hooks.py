"""The hooks give up, abort, clean up and check; a chain calls its last part first; each gets the state."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
import threading
import warnings
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from firstfault_torch.inprocess import exception, hooks
from firstfault_torch.inprocess.exception import RestartAbort, RestartError
from firstfault_torch.inprocess.exception import TimeoutError as RestartTimeoutError
from firstfault_torch.inprocess.hooks import (
    AbortTorchDistributed,
    Compose,
    CudaHealthCheck,
    FaultCounter,
    FaultCounterExceeded,
    Finalize,
    HealthCheck,
    Initialize,
    RetryController,
    ThreadedFinalize,
)
from firstfault_torch.inprocess.rank_assignment import ActivateAllRanks, RankAssignment, RankFilter, ShiftRanks
from firstfault_torch.inprocess.state import FrozenState, Mode, State

if TYPE_CHECKING:
    from collections.abc import Callable

STATE = FrozenState(rank=3, world_size=4, active_rank=1, active_world_size=2, mode=Mode.ACTIVE)
SHORT = dt.timedelta(seconds=0.05)
LONG = dt.timedelta(seconds=60)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetryController(max_iterations=0), "max_iterations is 0; it must be"),
        (lambda: RetryController(min_world_size=-1), "min_world_size is -1; it must be"),
        (lambda: RetryController(min_active_world_size=-1), "min_active_world_size is -1; it must be"),
        (lambda: ThreadedFinalize(dt.timedelta(seconds=0), Mock()), "timeout is 0 s; it must be more than 0 s"),
        (lambda: CudaHealthCheck(dt.timedelta(seconds=-1)), "timeout is -1 s; it must be more than 0 s"),
        (lambda: FaultCounter(-1), "max_rank_faults is -1; it must be at least 0"),
        (Compose, "at least one part"),
        (lambda: State.from_env({"RANK": "x"}), "RANK is 'x', which is not a number"),
        (lambda: State.from_env({"WORLD_SIZE": ""}), "WORLD_SIZE is '', which is not a number"),
        (lambda: State.from_env({"RANK": "2", "WORLD_SIZE": "2"}), "RANK must be from 0 to WORLD_SIZE - 1"),
        (lambda: State.from_env({"RANK": "-1"}), "RANK is -1 and WORLD_SIZE is 1"),
    ],
)
def test_values_that_are_not_valid(make: Callable[[], object], message: str) -> None:
    """An error names what is out of range."""
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("base", [Initialize, Finalize, HealthCheck])
def test_bases_are_abstract(base: type) -> None:
    """The base classes of hooks cannot be used themselves."""
    with pytest.raises(TypeError, match="abstract"):
        base()


# --- the state ------------------------------------------------------------------------------------------------------


def test_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the environment's numbers and keeps them; the next iteration has no exception."""
    assert State.from_env({}) == State(0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    state = State.from_env()
    assert state == State(rank=3, world_size=8, initial_rank=3, initial_world_size=8, mode=Mode.INITIALIZED)
    later = dataclasses.replace(state, rank=2, world_size=3, fn_exception=ValueError())
    assert (later.initial_rank, later.initial_world_size) == (3, 8)
    assert (later.next().iteration, later.next().fn_exception) == (1, None)


def test_distributed_variables() -> None:
    """An active rank's function sees its active rank and the active world size; a reserve keeps its variables."""
    state = State(7, 8, active_rank=2, active_world_size=4, mode=Mode.ACTIVE)
    assert state.distributed_variables() == {"RANK": "2", "WORLD_SIZE": "4"}
    assert State(7, 8, active_world_size=4, mode=Mode.INACTIVE).distributed_variables() == {}


def test_bases_of_exceptions() -> None:
    """``except Exception`` catches the errors, and neither the abort nor the interruption."""
    for error in (exception.HealthCheckError, exception.InternalError, exception.TimeoutError):
        assert error.__bases__ == (exception.RestartError,)
    assert exception.RestartError.__bases__ == (Exception,)
    assert exception.RestartAbort.__bases__ == exception.RankShouldRestart.__bases__ == (BaseException,)


# --- chains ---------------------------------------------------------------------------------------------------------


class Add:
    """A part that needs an argument to be made."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, text: str) -> str:
        """Return the text with this part's."""
        return text + self.text


class Forgets:
    """A part that returns nothing."""

    def __call__(self, value: object) -> None:
        """Forget the value."""

    def __repr__(self) -> str:
        return "Forgets()"


@pytest.mark.parametrize(
    ("parts", "arguments", "result"),
    [
        ((Add("a"), Add("b"), Add("c")), (">",), ">cba"),
        ((lambda low, high: high - low, lambda low, high: (low * 10, high * 10)), (1, 3), 20),
        ((lambda: None, lambda: None), (), None),
        ((lambda number: number + 1, lambda: 1), (), 2),
        ((Forgets(), Forgets()), (None,), None),
        ((dict, zip), ("ab", "cd"), {"a": "c", "b": "d"}),
    ],
    ids=["order", "a tuple is arguments", "no arguments", "a result after none", "None may be passed", "no signature"],
)
def test_a_chain(parts: tuple[Any, ...], arguments: tuple[object, ...], result: object) -> None:
    """The last part is called first, and each gets the result of the part before, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Compose(*parts)(*arguments) == result


def test_a_forgotten_result_warns() -> None:
    """A warning names the part that got an argument and returned None; what cannot be called is refused."""
    with pytest.warns(UserWarning, match=re.escape("Forgets() got an argument and returned None")):
        assert Compose(Forgets())(1) is None
    with pytest.raises(TypeError, match="cannot call 3"):
        Compose(len, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "is_instance_of", "is_none_of"),
    [
        ((CudaHealthCheck(), FaultCounter()), (HealthCheck,), (FaultCounter, CudaHealthCheck)),
        ((FaultCounter(), FaultCounter()), (FaultCounter, HealthCheck), ()),
        ((ActivateAllRanks(), ShiftRanks()), (RankAssignment,), (RankFilter, ShiftRanks)),
        ((FaultCounter(), RetryController()), (), (HealthCheck, Finalize)),
        ((Add("a"), Add("b")), (Add,), ()),
        ((len, str), (), (type,)),
    ],
)
def test_class(parts: tuple[object, ...], is_instance_of: tuple[type, ...], is_none_of: tuple[type, ...]) -> None:
    """A chain is an instance of the nearest class that all parts share; that class's constructor is not called."""
    chain = Compose(*parts)
    assert all(isinstance(chain, cls) for cls in (Compose, *is_instance_of))
    assert not any(isinstance(chain, cls) for cls in is_none_of)
    assert not hasattr(chain, "text")


def test_chains_of_chains() -> None:
    """A chain within a chain counts as its parts, and keeps their class."""
    counters = [FaultCounter() for _ in range(3)]
    chain = Compose(Compose(counters[0], CudaHealthCheck()), Compose(counters[1], counters[2]))
    assert isinstance(chain, HealthCheck)
    assert len(chain.instances) == 4
    state = State(0, 1, fn_exception=ValueError())
    assert chain(state) is state
    assert [counter.faults_count for counter in counters] == [1, 1, 1]


# --- initialize -----------------------------------------------------------------------------------------------------


def iteration(number: int, world_size: int = 4, active_world_size: int | None = 2) -> FrozenState:
    """Return the state of an iteration."""
    return FrozenState(0, world_size, 0, active_world_size, iteration=number)


@pytest.mark.parametrize("state", [iteration(2), iteration(0, 3, 2), iteration(0, 3, None), iteration(0, 9, 9)])
def test_retries_are_allowed(state: FrozenState) -> None:
    """Within the limits, or without one, the controller returns the state."""
    assert RetryController(max_iterations=3, min_world_size=3, min_active_world_size=2)(state) is state
    assert RetryController()(dataclasses.replace(state, iteration=10**6)).iteration == 10**6


@pytest.mark.parametrize(
    ("most", "state", "message"),
    [
        (3, iteration(3), "3 of at most 3 iterations were used (max_iterations)"),
        (1, iteration(1), "1 of at most 1 iteration was used (max_iterations)"),
        (3, iteration(0, 2), "only 2 ranks are left, at least 3 are needed (min_world_size)"),
        (3, iteration(0, 3, 1), "only 1 rank is active, at least 2 are needed (min_active_world_size)"),
        (
            3,
            iteration(5, 1, 0),
            (
                "5 of at most 3 iterations were used (max_iterations); "
                "only 1 rank is left, at least 3 are needed (min_world_size); "
                "only 0 ranks are active, at least 2 are needed (min_active_world_size)"
            ),
        ),
    ],
)
def test_the_controller_gives_up(most: int, state: FrozenState, message: str) -> None:
    """The message names each limit that was met, with its numbers."""
    with pytest.raises(RestartAbort) as caught:
        RetryController(max_iterations=most, min_world_size=3, min_active_world_size=2)(state)
    assert str(caught.value) == f"no further restart: {message}"


# --- abort: with fake process groups, because there is no GPU here ----------------------------------------------------


class FakeNccl:
    """A backend whose communicator is aborted as a test says."""

    def __init__(self, how: Callable[[], object] = lambda: None) -> None:
        self.how = how
        self.aborted = threading.Event()

    def abort(self) -> None:
        """Abort the communicator."""
        self.aborted.set()
        self.how()


class FakeGroup:
    """A process group with one backend for the GPU, or none."""

    def __init__(self, backend: object = None) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> object:
        assert device.type == "cuda"
        if self.backend is None:
            raise RuntimeError("no backend for the device")
        return self.backend


def test_every_communicator_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises, or that hangs, keeps no other from being aborted; without groups there is nothing to abort."""
    state = State.from_env()
    assert AbortTorchDistributed()(state) is state
    hanging, failing, healthy = FakeNccl(threading.Event().wait), FakeNccl(Mock(side_effect=RuntimeError)), FakeNccl()
    found = [FakeGroup(hanging), FakeGroup(), FakeGroup(failing), FakeGroup(object()), FakeGroup(healthy)]
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(type(c10d._world), "pg_map", property(lambda _: dict.fromkeys(found)))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(hooks, "NCCL_ABORT_S", 0.3)
    assert AbortTorchDistributed()(state) is state
    assert all(backend.aborted.wait(LONG.total_seconds()) for backend in (hanging, failing, healthy))


# --- finalize -------------------------------------------------------------------------------------------------------


def test_finalize_calls_in_a_thread() -> None:
    """The function gets its arguments, in a thread of its own, in each iteration; its exception is raised unchanged."""
    calls = []

    def clean(*args: object, **kwargs: object) -> None:
        calls.append((args, kwargs, threading.current_thread().name))

    finalize = ThreadedFinalize(LONG, clean, (1, 2), {"key": 3})
    assert finalize(finalize(STATE)) is STATE
    assert calls == [((1, 2), {"key": 3}, "firstfault-finalize-3")] * 2
    ThreadedFinalize(LONG, clean)(STATE)
    assert calls[-1][:2] == ((), {})
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


# --- CUDA -----------------------------------------------------------------------------------------------------------


class Cuda:
    """Stands for torch.cuda: four devices, and memory on some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: set[int], *, initialized: bool = True) -> None:
        self.synchronized: list[int] = []
        self.set_devices: list[int] = []
        self.wait: Callable[[int], object] = self.synchronized.append

        def synchronize(device: int) -> None:
            self.wait(device)

        for name, function in {
            "is_available": lambda: True,
            "is_initialized": lambda: initialized,
            "device_count": lambda: 4,
            "current_device": lambda: 2,
            "memory_reserved": lambda device: 1024 if device in used else 0,
            "set_device": self.set_devices.append,
            "synchronize": synchronize,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)


@pytest.mark.parametrize(
    ("used", "initialized", "synchronized"), [({1, 3}, True, [1, 3]), (set(), True, [2]), ({0}, False, [])]
)
def test_devices(used: set[int], initialized: bool, synchronized: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices with memory of this process are synchronized, or else the current one; CUDA is not initialized."""
    assert CudaHealthCheck()(STATE) is STATE
    cuda = Cuda(monkeypatch, used, initialized=initialized)
    assert CudaHealthCheck()(STATE) is STATE
    assert cuda.synchronized == synchronized
    ThreadedFinalize(LONG, Mock())(STATE)
    assert cuda.set_devices == [2] * initialized, "a function's thread has the caller's current device"


def test_a_broken_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a device is raised unchanged; the message about one that hangs names it."""
    error = RuntimeError("CUDA error: device-side assert triggered")
    cuda = Cuda(monkeypatch, {0, 3})
    cuda.wait = Mock(side_effect=error)
    with pytest.raises(RuntimeError) as caught:
        CudaHealthCheck()(STATE)
    assert caught.value is error
    release = threading.Event()
    cuda.wait = lambda device: device == 3 and release.wait()
    try:
        with pytest.raises(RestartTimeoutError, match=r"synchronizing CUDA device 3 did not end within 0.05 s"):
            CudaHealthCheck(SHORT)(STATE)
    finally:
        release.set()


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (0, "rank 3 raised once, at most 0 faults are allowed (max_rank_faults)"),
        (1, "rank 3 raised 2 times, at most 1 fault is allowed (max_rank_faults)"),
        (2, "rank 3 raised 3 times, at most 2 faults are allowed (max_rank_faults)"),
    ],
)
def test_too_many_faults(limit: int, message: str) -> None:
    """Only this rank's own faults count, and the message has both numbers; without a limit all are allowed."""
    check, unlimited = FaultCounter(limit), FaultCounter()
    own = FrozenState(rank=3, world_size=4, fn_exception=ValueError())
    for _ in range(limit):
        check(unlimited(own))
        check(unlimited(dataclasses.replace(own, fn_exception=None)))
    with pytest.raises(FaultCounterExceeded) as caught:
        check(own)
    assert str(caught.value) == message
    assert isinstance(caught.value, RestartError)
    assert unlimited.faults_count == limit
