"""Torch's log of a failure in a process that has not loaded torch's compiler, and its flight recorder."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.torch_version import TorchVersion

from firstfault_torch.compat.torch_agent import flight_recorder_variables

SCRIPT = """\
import logging, sys
from firstfault_torch.compat.torch_agent import format_exceptions_early
import torch.distributed.elastic.multiprocessing.api as api

before = "torch._dynamo" in sys.modules
format_exceptions_early()
format_exceptions_early()  # as a second agent of this process does
try:
    raise ValueError("boom of a worker")
except ValueError:
    logging.getLogger(api.__name__).exception("failed (exitcode: %s)", 1)
print(before, "torch._dynamo" in sys.modules)
"""


def test_torchs_log_of_an_exception() -> None:
    """Logging an exception does not import torch's compiler; the log contains message and traceback once."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False False"
    for text in ("failed (exitcode: 1)", "Traceback (most recent call last):", "ValueError: boom of a worker"):
        assert ended.stderr.count(text) == 1


@pytest.mark.parametrize(
    ("version", "environment", "set_for_workers"),
    [
        ("2.3.1", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ("2.8.0", {}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ("2.8.0", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, {}),
        ("2.9.0", {}, {}),
        ("2.13.0+cpu", {}, {}),
    ],
)
def test_the_flight_recorder_is_on(
    version: str, environment: dict[str, str], set_for_workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is turned on where torch does not do that; a torch that does would warn of the old variable."""
    monkeypatch.setattr("torch.__version__", TorchVersion(version))
    assert flight_recorder_variables(environment) == set_for_workers
