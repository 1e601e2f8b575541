"""Flyte's engine: its variables, its codes for exceptions, and which of them are recoverable."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING

import pytest
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserException

from firstfault_torch.capture import capture
from firstfault_torch.context import Recording
from firstfault_torch.worker.recording import WorkerMonitor
from flytekitplugins.firstfault import entrypoints
from flytekitplugins.firstfault.config import STRATEGY_VARIABLE
from flytekitplugins.firstfault.flyte_engine import RECOVERABLE_TYPE, FlyteEngine, attempt_number, node_name
from flytekitplugins.firstfault.outputs import multi_error_files

if TYPE_CHECKING:
    from typing import Any


# --- variables ------------------------------------------------------------------------------------------------------


def test_the_variable_is_the_one_of_the_task() -> None:
    """The user's variable switches recording off, also in workers."""
    assert STRATEGY_VARIABLE == "FLYTE_INTERNAL_ERROR_PROPAGATION"
    identity = FlyteEngine("s3://bucket/out", strategy="earliest").identity()
    assert Recording("earliest", identity).environment()[STRATEGY_VARIABLE] == "earliest"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"_F_DES": ""}, False),
        ({"_F_DES": "Earliest"}, True),
        ({"FLYTE_INTERNAL_DIST_ERROR_STRATEGY": "Earliest"}, True),
        ({"FLYTE_INTERNAL_DIST_ERROR_STRATEGY": "", "_F_DES": "Earliest"}, False),
    ],
)
def test_multi_error_files(environment: dict[str, str], expected: bool) -> None:
    """Every pod writes a file of its own if the backend says so by either name; the long name counts first."""
    assert multi_error_files(environment) is expected


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"FLYTE_INTERNAL_WORKER_NAME": "long", "_F_WN": "short", "HOSTNAME": "host"}, "long"),
        ({"_F_WN": "short", "HOSTNAME": "host"}, "short"),
        ({"_F_WN": "", "HOSTNAME": "host"}, "host"),
        ({"HOSTNAME": "host"}, "host"),
        ({}, socket.gethostname()),
    ],
)
def test_node_name(environment: dict[str, str], name: str) -> None:
    """A node is named as the backend names its pod, else as its host."""
    assert node_name(environment) == name


@pytest.mark.parametrize(("text", "number"), [("2", 2), ("0", 0), ("", 0), ("two", 0), (None, 0)])
def test_attempt_number(text: str | None, number: int) -> None:
    """The attempt's number is the backend's; without one, or with nonsense, it is the first."""
    assert attempt_number({} if text is None else {"FLYTE_ATTEMPT_NUMBER": text}) == number


# --- exceptions -----------------------------------------------------------------------------------------------------


class _LostShardError(FlyteRecoverableException):
    pass


class _FarError(_LostShardError, KeyError):
    pass


class _FlyteRecoverableException(Exception):  # noqa: N818 - the same name, another class
    pass


class _CodeError(Exception):
    error_code = "USER:Quota"


class _NumberError(Exception):
    error_code = 507


class _OddCodeError(Exception):
    error_code = None


class _HostileCodeError(Exception):
    @property
    def error_code(self) -> Any:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("error", "recoverable"),
    [
        (FlyteRecoverableException("x"), True),
        (_LostShardError("x"), True),
        (_FarError("x"), True),
        (FlyteUserException("x"), False),
        (_FlyteRecoverableException("x"), False),
        (ValueError(RECOVERABLE_TYPE), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_recoverable(error: Exception, recoverable: bool) -> None:
    """Recoverable is flytekit's exception and its subclasses: by type, not by name or text."""
    assert FlyteEngine().name_error(error, capture(error)).recoverable is recoverable


def test_a_recoverable_cause_is_not_enough() -> None:
    """An exception raised from a recoverable one is not recoverable because of it."""
    error = ValueError("gave up")
    error.__cause__ = FlyteRecoverableException("x")
    assert not FlyteEngine().name_error(error, capture(error)).recoverable


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), "USER:RuntimeError"),
        (FlyteRecoverableException("x"), "USER:Recoverable"),
        (_LostShardError("x"), "USER:Recoverable"),
        (_CodeError(), "USER:Quota"),
        (_NumberError(), "507"),
        (_OddCodeError(), "USER:RuntimeError"),
        (_HostileCodeError(), "USER:RuntimeError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_code(error: Exception, code: str) -> None:
    """The code is the exception's own, as in flytekit, else the default."""
    assert FlyteEngine().name_error(error, capture(error)).code == code


def _deep(levels: int) -> None:
    if levels == 0:
        raise ValueError("bottom")
    _deep(levels - 1)


def test_own_frames_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's traceback begins with the task function, not with the frames of ours that called it."""
    found = []
    monkeypatch.setattr(WorkerMonitor, "fails", lambda _self, error: found.append(capture(error)))
    with pytest.raises(ValueError, match="bottom"):
        entrypoints.run_forked(partial(_deep, 1))
    assert [frame.function for frame in found[0].frames] == ["_deep", "_deep"]
