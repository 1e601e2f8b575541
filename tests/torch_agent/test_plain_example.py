"""The example without an engine runs where flytekit is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain.py"


@pytest.mark.jobs
def test_the_dead_worker_is_named(tmp_path: Path) -> None:
    """A job of two nodes without an engine names the worker that was killed."""
    # seven processes import torch and use 24 seconds of a core; a busy machine gives them a tenth of one
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.splitlines()[-1].startswith("SIGKILL, rank 3 on worker-1"), done
