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
if sys.argv[1] == "early":
    format_exceptions_early()
    format_exceptions_early()  # as a second agent of this process does
try:
    raise ValueError("boom of a worker")
except ValueError:
    logging.getLogger(api.__name__).exception("failed (exitcode: %s)", 1)
print(before, "torch._dynamo" in sys.modules)
"""


def _run(how: str) -> tuple[str, str]:
    """Log an exception; return whether torch's compiler was loaded before and after it, and the log."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return ended.stdout.strip(), ended.stderr


@pytest.fixture(scope="module")
def early() -> tuple[str, str]:
    """Log an exception by torch's logger, once it formats early."""
    return _run("early")


def test_no_compiler_is_imported(early: tuple[str, str]) -> None:
    """Logging an exception does not import torch's compiler."""
    assert early[0] == "False False"


def test_the_text_stays(early: tuple[str, str]) -> None:
    """The log contains message and traceback once."""
    assert early[1].count("failed (exitcode: 1)") == 1
    assert early[1].count("Traceback (most recent call last):") == 1
    assert early[1].count("ValueError: boom of a worker") == 1


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
