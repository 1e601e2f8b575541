"""The classes of errors, and what a document about each says to Flyte."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from firstfault.model import CATEGORIES, Kind, Origin
from firstfault_torch.error_classes import ErrorClass, error_class_of


def test_every_class_has_its_flyte_class() -> None:
    """Each class has a known category; only a recoverable exception is retried on the user's budget."""
    for error_class in ErrorClass:
        flyte = error_class.value
        assert flyte.category == "" or flyte.category in CATEGORIES
        assert flyte.code.startswith(f"{flyte.origin.value}:")
        if error_class is ErrorClass.RECOVERABLE_EXCEPTION:
            assert (flyte.kind, flyte.origin) == (Kind.RECOVERABLE, Origin.USER)
        else:
            assert (flyte.kind is Kind.RECOVERABLE) is (flyte.origin is Origin.SYSTEM)


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
        (FileNotFoundError(2, "No such file or directory", "./train"), ErrorClass.INPUT_ERROR),
        (OSError(8, "Exec format error", "./train"), ErrorClass.INPUT_ERROR),
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
