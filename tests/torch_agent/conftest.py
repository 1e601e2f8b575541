"""Fixtures of the agent's tests."""

import pytest
from torch.distributed import TCPStore

from firstfault_torch import node_setup, time_limits
from firstfault_torch.node import document_writer
from firstfault_torch.rounds.round_store import RoundStore
from tests.prefix import prefix

__all__ = ["prefix"]

PATIENT_S = 60.0
"""For a fraction of a second a busy machine may run no thread at all."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give machine and storage more time than a worker or an agent gives;
    a test of a limit sets its own.
    """
    for module, limit in [
        (document_writer, "RECEIPT_TIMEOUT_SECONDS"),
        (time_limits, "CONCLUDE_TIMEOUT_SECONDS"),
        (time_limits, "PREVIOUS_VERDICT_TIMEOUT_SECONDS"),
        (time_limits, "READ_TIMEOUT_SECONDS"),
        (time_limits, "HANDOVER_TIMEOUT_SECONDS"),
        (time_limits, "VERDICT_READ_TIMEOUT_SECONDS"),
        (time_limits, "FLIGHT_RECORDER_TIMEOUT_SECONDS"),
        (time_limits, "GPU_UUID_TIMEOUT_SECONDS"),
        (node_setup, "NODE_SETUP_TIMEOUT_SECONDS"),
        (time_limits, "FILE_SYSTEMS_TIMEOUT_SECONDS"),
    ]:
        monkeypatch.setattr(module, limit, PATIENT_S)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> RoundStore:
    """Return the store of a round; without libuv if the parameter is False."""
    libuv = getattr(request, "param", True)
    return RoundStore(
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv), 0
    )
