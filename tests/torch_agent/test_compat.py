"""Torch's log of a failure, in a process that has not loaded torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
