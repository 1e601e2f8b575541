"""The classes of errors, and what a document about each says to Flyte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from firstfault.model import CATEGORIES, Kind, Origin
from firstfault_torch.capture import capture
from firstfault_torch.error_classes import FLYTE_CLASSES, ErrorClass, error_class_of
from flytekitplugins.firstfault.flyte_engine import RECOVERABLE_TYPE, FlyteEngine

if TYPE_CHECKING:
    from typing import Any


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


def test_every_class_has_its_flyte_class() -> None:
    """Each class has a known category; only a recoverable exception is retried on the user's budget."""
    assert set(FLYTE_CLASSES) == set(ErrorClass)
    for error_class, flyte in FLYTE_CLASSES.items():
        assert flyte.category == "" or flyte.category in CATEGORIES
        assert flyte.code.startswith(f"{flyte.origin.value}:")
        if error_class is ErrorClass.RECOVERABLE:
            assert (flyte.kind, flyte.origin) == (Kind.RECOVERABLE, Origin.USER)
        else:
            assert (flyte.kind is Kind.RECOVERABLE) is (flyte.origin is Origin.SYSTEM)


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


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (RendezvousTimeoutError("x"), ErrorClass.RENDEZVOUS_ERROR),
        (RendezvousConnectionError("x"), ErrorClass.RENDEZVOUS_ERROR),
        (torch.distributed.DistNetworkError("x"), ErrorClass.RENDEZVOUS_ERROR),
        (torch.distributed.DistStoreError("x"), ErrorClass.RENDEZVOUS_ERROR),
        (OSError(28, "No space left on device"), ErrorClass.INFRA_ERROR),
        (MemoryError(), ErrorClass.INFRA_ERROR),
        (ConnectionRefusedError(), ErrorClass.INFRA_ERROR),
        (ValueError("bad port"), ErrorClass.INPUT_ERROR),
        (TypeError("x"), ErrorClass.INPUT_ERROR),
        (RuntimeError("x"), ErrorClass.PLATFORM_ERROR),
        (torch.distributed.DistError("x"), ErrorClass.PLATFORM_ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
def test_agent_errors(error: Exception, error_class: ErrorClass) -> None:
    """An error of the agent is a rendezvous, infra, input or platform error."""
    assert error_class_of(error) is error_class
