"""Fixtures of the agent's tests."""

import pytest
from torch.distributed import TCPStore

from firstfault_torch import budgets
from firstfault_torch import context as node_setup
from firstfault_torch.node import document_writer
from firstfault_torch.rounds.failure_broadcast import RoundStore
from firstfault_torch.worker import process_state
from tests.prefix import prefix

__all__ = ["prefix"]

PATIENT_S = 60.0
"""For a fraction of a second a busy machine may run no thread at all."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give machine and storage more time than a worker or an agent gives; a test of a limit sets its own."""
    for module, limit in [
        (document_writer, "RECEIPT_S"),
        (budgets, "CONCLUDING_S"),
        (budgets, "PREVIOUS_S"),
        (budgets, "READING_S"),
        (budgets, "LEAVING_FILES_S"),
        (budgets, "TURN_LOOK_S"),
        (process_state, "FLIGHT_RECORDER_S"),
        (process_state, "GPU_S"),
        (node_setup, "READING_SETUP_S"),
        (process_state, "FILE_SYSTEMS_S"),
    ]:
        monkeypatch.setattr(module, limit, PATIENT_S)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> RoundStore:
    """Return the store of a round; without libuv if the parameter is False."""
    libuv = getattr(request, "param", True)
    return RoundStore(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv), 0)
