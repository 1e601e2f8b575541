"""The hooks give up, abort, clean up and check; a chain calls its last part first;
each gets the state.
"""

import dataclasses
import datetime as dt
import sys
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import firstfault_inprocess as inprocess
from firstfault.errors import UsageError
from firstfault_inprocess import exception, hooks
from firstfault_inprocess.exception import RestartAbort, RestartError
from firstfault_inprocess.exception import TimeoutError as RestartTimeoutError
from firstfault_inprocess.rank_assignment import (
    ActiveWorldSizeDivisibleBy,
    FrozenState,
    MaxActiveWorldSize,
    Mode,
    State,
)

STATE = FrozenState(rank=3, world_size=4, active_rank=1, active_world_size=2, mode=Mode.ACTIVE)
SHORT = dt.timedelta(seconds=0.05)
LONG = dt.timedelta(seconds=60)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: hooks.RetryController(max_iterations=0),
            "max_iterations is 0; it must be at least 1",
        ),
        (lambda: hooks.RetryController(min_world_size=-1), "min_world_size is -1; it must be"),
        (
            lambda: hooks.RetryController(min_active_world_size=-1),
            "min_active_world_size is -1; it must be",
        ),
        (
            lambda: hooks.ThreadedFinalize(dt.timedelta(seconds=0), Mock()),
            "timeout is 0 s; it must be more than 0 s",
        ),
        (
            lambda: hooks.CudaHealthCheck(dt.timedelta(seconds=-1)),
            "timeout is -1 s; it must be more than 0 s",
        ),
        (lambda: hooks.FaultCounter(-1), "max_rank_faults is -1; it must be at least 0"),
        (lambda: MaxActiveWorldSize(0), "max_active_world_size is 0; it must be at least 1"),
        (lambda: ActiveWorldSizeDivisibleBy(0), "divisor is 0; it must be at least 1"),
        (hooks.Compose, "at least one part"),
        (lambda: State.from_env({"RANK": "x"}), "RANK is 'x', which is not a number"),
        (lambda: State.from_env({"WORLD_SIZE": ""}), "WORLD_SIZE is '', which is not a number"),
        (
            lambda: State.from_env({"RANK": "2", "WORLD_SIZE": "2"}),
            "RANK must be from 0 to WORLD_SIZE - 1",
        ),
        (lambda: State.from_env({"RANK": "-1"}), "RANK is -1 and WORLD_SIZE is 1"),
    ],
)
def test_an_error_names_the_value_out_of_range(make: Callable[[], object], message: str) -> None:
    """An error names what is out of range."""
    with pytest.raises(ValueError, match=message):
        make()


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"soft_timeout": 9, "hard_timeout": 5},
            r"soft_timeout \(9 s\) must be shorter than hard_timeout \(5 s\)",
        ),
        (
            {"hard_timeout": 500},
            r"hard_timeout \(500 s\) must be shorter than barrier_timeout \(120 s\)",
        ),
        ({"heartbeat_interval": 40}, "heartbeat_interval .* shorter than heartbeat_timeout"),
        (
            {"last_call_wait": -1},
            "last_call_wait must be a timedelta or a number of seconds, 0 or more, not -1",
        ),
        (
            {"barrier_timeout": 0},
            "barrier_timeout must be a timedelta or a number of seconds, above 0, not 0",
        ),
        ({"soft_timeout": "fast"}, "soft_timeout must be a timedelta"),
        ({"soft_timeout": True}, "soft_timeout must be a timedelta"),
        ({"abort": 3}, "abort must be callable, not 3"),
        ({"initialize": hooks.RetryController}, "initialize must be callable, not <class"),
        ({"store_factory": 3}, "store_factory must be callable"),
        ({"monitor_process_logfile": "here.log"}, "must be an absolute path"),
        ({"enabled": 1}, "enabled must be an instance of bool"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    """One line names the option, its value and what is wrong."""
    with pytest.raises(UsageError, match=said):
        inprocess.Wrapper(**options)


def test_without_restarts_the_function_itself_is_called() -> None:
    """Without restarts the function itself is called."""

    def function() -> int:
        return 3

    assert inprocess.Wrapper(enabled=False)(function) is function
    with pytest.raises(TypeError):
        inprocess.Wrapper(function)  # type: ignore[misc]


# --- the state ------------------------------------------------------------------------------------


def test_a_state_begins_with_the_environments_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with the environment's numbers and keeps them;
    the next iteration has no exception.
    """
    assert State.from_env({}) == State(0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    state = State.from_env()
    assert state == State(
        rank=3,
        world_size=8,
        initial_rank=3,
        initial_world_size=8,
        mode=Mode.INITIALIZED,
    )
    later = dataclasses.replace(state, rank=2, world_size=3, fn_exception=ValueError())
    assert (later.initial_rank, later.initial_world_size) == (3, 8)
    assert (later.next().iteration, later.next().fn_exception) == (1, None)


def test_the_function_sees_its_active_rank_and_world_size() -> None:
    """An active rank's function sees its active rank and the active world size;
    a reserve keeps its variables.
    """
    state = State(7, 8, active_rank=2, active_world_size=4, mode=Mode.ACTIVE)
    assert state.distributed_variables() == {"RANK": "2", "WORLD_SIZE": "4"}
    assert State(7, 8, active_world_size=4, mode=Mode.INACTIVE).distributed_variables() == {}


def test_except_exception_catches_errors_but_no_interruption() -> None:
    """``except Exception`` catches the errors, and neither the abort nor the interruption."""
    for error in (exception.HealthCheckError, exception.InternalError, exception.TimeoutError):
        assert error.__bases__ == (exception.RestartError,)
    assert exception.RestartError.__bases__ == (Exception,)
    assert (
        exception.RestartAbort.__bases__
        == exception.RankShouldRestart.__bases__
        == (BaseException,)
    )


# --- chains ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "result"),
    [
        ([lambda text: text + "a", lambda text: text + "b"], ">ba"),
        ([lambda text: text + "a", print], ">a"),
        ([hooks.Compose(str.upper, lambda text: text + "b"), lambda text: text + "c"], ">CB"),
        ([lambda one, two: one + two, lambda text: (text, "d")], ">d"),
    ],
    ids=["order", "returns nothing", "a chain in a chain", "several values"],
)
def test_a_chain_calls_its_last_part_first(parts: list[Callable[[str], Any]], result: str) -> None:
    """The last part is called first, and each gets the result of the part before,
    or what that got.
    """
    assert hooks.Compose(*parts)(">") == result


def test_a_chain_refuses_a_part_that_is_not_callable() -> None:
    """It is refused when the chain is made."""
    with pytest.raises(TypeError, match="cannot call 3"):
        hooks.Compose(len, 3)  # type: ignore[arg-type]


# --- initialize -----------------------------------------------------------------------------------


def iteration(number: int, world_size: int = 4, active_world_size: int | None = 2) -> FrozenState:
    return FrozenState(0, world_size, 0, active_world_size, iteration=number)


@pytest.mark.parametrize(
    "state", [iteration(2), iteration(0, 3, 2), iteration(0, 3, None), iteration(0, 9, 9)]
)
def test_the_controller_allows_retries_within_its_limits(state: FrozenState) -> None:
    """Within the limits, or without one, the controller returns the state."""
    assert (
        hooks.RetryController(max_iterations=3, min_world_size=3, min_active_world_size=2)(state)
        is state
    )
    assert hooks.RetryController()(dataclasses.replace(state, iteration=10**6)).iteration == 10**6


@pytest.mark.parametrize(
    ("most", "state", "message"),
    [
        (3, iteration(3), "3 iterations used, at most 3 allowed (max_iterations)"),
        (1, iteration(1), "1 iteration used, at most 1 allowed (max_iterations)"),
        (3, iteration(0, 2), "2 ranks left, at least 3 needed (min_world_size)"),
        (3, iteration(0, 3, 1), "1 rank active, at least 2 needed (min_active_world_size)"),
        (
            3,
            iteration(5, 1, 0),
            (
                "5 iterations used, at most 3 allowed (max_iterations); "
                "1 rank left, at least 3 needed (min_world_size); "
                "0 ranks active, at least 2 needed (min_active_world_size)"
            ),
        ),
    ],
)
def test_the_controllers_error_names_each_limit_reached(
    most: int, state: FrozenState, message: str
) -> None:
    """The message names each limit that was met, with its numbers."""
    with pytest.raises(RestartAbort) as caught:
        hooks.RetryController(max_iterations=most, min_world_size=3, min_active_world_size=2)(state)
    assert str(caught.value) == f"no further restart: {message}"


# --- abort: with fake process groups, because there is no GPU here --------------------------------


class FakeNccl:
    """A backend whose communicator is aborted as a test says."""

    def __init__(self, how: Callable[[], object] = lambda: None) -> None:
        self.how = how
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()
        self.how()


class FakeGroup:
    """A process group with one backend for the GPU, or none."""

    _device_types = (torch.device("cuda"),)

    def __init__(self, backend: object = None) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> object:
        assert device.type == "cuda"
        if self.backend is None:
            raise RuntimeError("no backend for the device")
        return self.backend


def test_every_communicator_is_aborted(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One that raises, or that hangs, keeps no other from being aborted;
    without groups there is nothing to abort.
    """
    state = State.from_env()
    assert hooks.AbortTorchDistributed()(state) is state
    released = threading.Event()
    request.addfinalizer(released.set)
    hanging = FakeNccl(released.wait)
    failing = FakeNccl(Mock(side_effect=RuntimeError))
    healthy = FakeNccl()
    found = [
        FakeGroup(hanging),
        FakeGroup(),
        FakeGroup(failing),
        FakeGroup(object()),
        FakeGroup(healthy),
    ]
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(type(c10d._world), "pg_map", property(lambda _: dict.fromkeys(found)))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(hooks, "NCCL_ABORT_TIMEOUT_SECONDS", 0.3)
    assert hooks.AbortTorchDistributed()(state) is state
    assert all(
        backend.aborted.wait(LONG.total_seconds()) for backend in (hanging, failing, healthy)
    )


def test_transformer_engines_buffers_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are destroyed if the program uses it, and an error there ends no chain of hooks."""
    assert hooks.AbortTransformerEngine()(STATE) is STATE
    destroyed = Mock(side_effect=RuntimeError("no buffers"))
    monkeypatch.setitem(
        sys.modules, "transformer_engine.pytorch", Mock(**{"module.base.destroy_ub": destroyed})
    )
    assert hooks.AbortTransformerEngine()(STATE) is STATE
    destroyed.assert_called_once_with()


# --- finalize -------------------------------------------------------------------------------------


def test_finalize_runs_in_a_thread_in_each_iteration() -> None:
    """The function gets its arguments, in a thread of its own, in each iteration;
    its exception is raised unchanged.
    """
    calls = []

    def clean(*args: object, **kwargs: object) -> None:
        calls.append((args, kwargs, threading.current_thread().name))

    finalize = hooks.ThreadedFinalize(LONG, clean, (1, 2), {"key": 3})
    assert finalize(finalize(STATE)) is STATE
    assert calls == [((1, 2), {"key": 3}, "firstfault-restarting")] * 2
    hooks.ThreadedFinalize(LONG, clean)(STATE)
    assert calls[-1][:2] == ((), {})
    error = KeyError("cache")
    with pytest.raises(KeyError) as caught:
        hooks.ThreadedFinalize(LONG, Mock(side_effect=error))(STATE)
    assert caught.value is error


def test_a_finalize_that_times_out_is_named_and_left_running() -> None:
    """A function that does not end in time is named, and left running."""
    release = threading.Event()

    def clean_caches() -> None:
        release.wait()

    try:
        with pytest.raises(
            RestartTimeoutError, match=r"finalize function .*clean_caches did not end within 0.05 s"
        ):
            hooks.ThreadedFinalize(SHORT, clean_caches)(STATE)
    finally:
        release.set()


# --- CUDA -----------------------------------------------------------------------------------------


class Cuda:
    """Stands for torch.cuda: four devices, and memory on some of them."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        used: set[int],
        *,
        initialized: bool = True,
    ) -> None:
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
    ("used", "initialized", "synchronized"),
    [({1, 3}, True, [1, 3]), (set(), True, [2]), ({0}, False, [])],
)
def test_devices_in_use_are_synchronized(
    used: set[int],
    initialized: bool,
    synchronized: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The devices with memory of this process are synchronized, or else the current one;
    CUDA is not initialized.
    """
    assert hooks.CudaHealthCheck()(STATE) is STATE
    cuda = Cuda(monkeypatch, used, initialized=initialized)
    assert hooks.CudaHealthCheck()(STATE) is STATE
    assert cuda.synchronized == synchronized
    hooks.ThreadedFinalize(LONG, Mock())(STATE)
    assert cuda.set_devices == [2] * initialized, (
        "a function's thread has the caller's current device"
    )


def test_a_broken_devices_error_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a device is raised unchanged; the message about one that hangs names it."""
    error = RuntimeError("CUDA error: device-side assert triggered")
    cuda = Cuda(monkeypatch, {0, 3})
    cuda.wait = Mock(side_effect=error)
    with pytest.raises(RuntimeError) as caught:
        hooks.CudaHealthCheck()(STATE)
    assert caught.value is error
    release = threading.Event()
    cuda.wait = lambda device: device == 3 and release.wait()
    try:
        with pytest.raises(
            RestartTimeoutError, match=r"synchronizing CUDA device 3 did not end within 0.05 s"
        ):
            hooks.CudaHealthCheck(SHORT)(STATE)
    finally:
        release.set()


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (0, "rank 3 raised 1 time, at most 0 allowed (max_rank_faults)"),
        (1, "rank 3 raised 2 times, at most 1 allowed (max_rank_faults)"),
        (2, "rank 3 raised 3 times, at most 2 allowed (max_rank_faults)"),
    ],
)
def test_only_own_faults_count_toward_the_limit(limit: int, message: str) -> None:
    """Only this rank's own faults count, and the message has both numbers;
    without a limit all are allowed.
    """
    check = hooks.FaultCounter(limit)
    unlimited = hooks.FaultCounter()
    own = FrozenState(rank=3, world_size=4, fn_exception=ValueError())
    for _ in range(limit):
        check(unlimited(own))
        check(unlimited(dataclasses.replace(own, fn_exception=None)))
    with pytest.raises(hooks.FaultCounterExceeded) as caught:
        check(own)
    assert str(caught.value) == message
    assert isinstance(caught.value, RestartError)
    assert unlimited.faults_count == limit
