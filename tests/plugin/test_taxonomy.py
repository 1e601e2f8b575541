"""What a failure means to Flyte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserException
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from firstfault.model import CATEGORIES, Kind, Origin
from firstfault_torch.capture import capture
from firstfault_torch.error_classes import (
    CONSEQUENCES,
    RECOVERABLE_TYPE,
    Sort,
    code_of,
    is_recoverable,
    sort_of_agent_error,
)

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


def test_every_sort_has_a_consequence() -> None:
    """Each sort of error has one, of a category that exists; a retry is the user's to pay only when the user asked."""
    assert set(CONSEQUENCES) == set(Sort)
    for sort, consequence in CONSEQUENCES.items():
        assert consequence.category == "" or consequence.category in CATEGORIES
        assert consequence.code.startswith(f"{consequence.origin.value}:")
        if sort is Sort.RECOVERABLE:
            assert (consequence.kind, consequence.origin) == (Kind.RECOVERABLE, Origin.USER)
        else:
            assert (consequence.kind is Kind.RECOVERABLE) is (consequence.origin is Origin.SYSTEM)


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
    assert is_recoverable(capture(error)) is recoverable


def test_a_recoverable_cause_is_not_enough() -> None:
    """An exception that was raised from a recoverable one is what it is itself."""
    error = ValueError("gave up")
    error.__cause__ = FlyteRecoverableException("x")
    assert not is_recoverable(capture(error))


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
    """The code is the exception's own, as flytekit takes it, else that of any exception."""
    assert code_of(error) == code


@pytest.mark.parametrize(
    ("error", "sort"),
    [
        (RendezvousTimeoutError("x"), Sort.RENDEZVOUS_ERROR),
        (RendezvousConnectionError("x"), Sort.RENDEZVOUS_ERROR),
        (torch.distributed.DistNetworkError("x"), Sort.RENDEZVOUS_ERROR),
        (torch.distributed.DistStoreError("x"), Sort.RENDEZVOUS_ERROR),
        (OSError(28, "No space left on device"), Sort.INFRA_ERROR),
        (MemoryError(), Sort.INFRA_ERROR),
        (ConnectionRefusedError(), Sort.INFRA_ERROR),
        (ValueError("bad port"), Sort.INPUT_ERROR),
        (TypeError("x"), Sort.INPUT_ERROR),
        (RuntimeError("x"), Sort.PLATFORM_ERROR),
        (torch.distributed.DistError("x"), Sort.PLATFORM_ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
def test_agent_errors(error: Exception, sort: Sort) -> None:
    """An error of the agent is the rendezvous', the machine's, the caller's, or the platform's."""
    assert sort_of_agent_error(error) is sort
