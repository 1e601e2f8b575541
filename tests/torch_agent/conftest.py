"""Fixtures of the agent's tests."""

import pytest

from firstfault_torch import context as node_setup
from firstfault_torch import verdict as verdicts
from firstfault_torch.node import document_writer
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
        (verdicts, "CONCLUDING_S"),
        (verdicts, "PREVIOUS_S"),
        (verdicts, "READING_S"),
        (verdicts, "PREVIOUS_S"),
        (verdicts, "LEAVING_FILES_S"),
        (verdicts, "TURN_LOOK_S"),
        (process_state, "FLIGHT_RECORDER_S"),
        (process_state, "GPU_S"),
        (node_setup, "READING_SETUP_S"),
        (process_state, "FILE_SYSTEMS_S"),
    ]:
        monkeypatch.setattr(module, limit, PATIENT_S)
