"""Check the wheel beside torch, without flytekit: a job of two nodes without an engine names its dead worker."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "plain.py"
EXPECTED = "SIGKILL, rank 3 on worker-1"


def main() -> None:
    """Run the example and look at the last line that it prints."""
    assert importlib.util.find_spec("flytekit") is None, "flytekit is installed here"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), folder], capture_output=True, text=True, check=True, timeout=300
        )
    assert done.stdout.splitlines()[-1].startswith(EXPECTED), done


if __name__ == "__main__":
    main()
