"""A state is read from the environment, goes from iteration to iteration, and is read-only."""

from __future__ import annotations

import dataclasses

import pytest

from firstfault_torch.inprocess import exception
from firstfault_torch.inprocess.state import Mode, State


class TwoArgumentsError(Exception):
    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"{rank}: {reason}")


def train() -> None:
    """Raise an exception that has a cause."""
    raise TwoArgumentsError(1, "bad batch") from KeyError("layer")


def test_from_env() -> None:
    """A state has the rank and the world size of the environment, also as the initial ones."""
    state = State.from_env({"RANK": "3", "WORLD_SIZE": "8"})
    assert state == State(rank=3, world_size=8, initial_rank=3, initial_world_size=8)
    assert (state.mode, state.iteration, state.active_rank, state.active_world_size) == (
        Mode.INITIALIZED,
        0,
        None,
        None,
    )


def test_from_env_without_variables() -> None:
    """Without variables, a process is the only rank."""
    assert State.from_env({}) == State(0, 1)


def test_from_env_reads_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument, the variables are those of this process."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert State.from_env() == State(1, 2)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x', which is not a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '', which is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2; RANK must be from 0 to WORLD_SIZE - 1"),
        ({"RANK": "-1"}, "RANK is -1 and WORLD_SIZE is 1"),
    ],
)
def test_from_env_refuses(environment: dict[str, str], message: str) -> None:
    """An error names the variable that is wrong."""
    with pytest.raises(ValueError, match=message):
        State.from_env(environment)


def test_initial_numbers_stay() -> None:
    """A later rank does not change the initial one."""
    state = dataclasses.replace(State(5, 8), rank=2, world_size=3)
    assert (state.initial_rank, state.initial_world_size) == (5, 8)


def test_advance() -> None:
    """The next iteration has a higher number and no exception."""
    state = State(0, 1, fn_exception=ValueError())
    assert (state.next().iteration, state.next().fn_exception) == (1, None)


def test_a_hook_gets_the_exception() -> None:
    """A state holds the exception itself, with its traceback and cause; its fields cannot be set."""
    with pytest.raises(TwoArgumentsError) as caught:
        train()
    state = dataclasses.replace(State(0, 1), fn_exception=caught.value)
    assert state.fn_exception is caught.value
    assert state.fn_exception.__traceback__ is not None
    assert isinstance(state.fn_exception.__cause__, KeyError)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.rank = 2  # type: ignore[misc]


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
