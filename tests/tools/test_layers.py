"""Each layer of tests can be collected without the packages above it; `make test` runs it where they are absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_COLLECT = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # importing one of these raises ModuleNotFoundError
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.parametrize(
    ("absent", "file", "left_out"),
    [("flytekit", "torch_agent/test_guard.py", "tests/plugin"), ("torch", "readers/test_wire.py", "tests/torch_agent")],
)
def test_what_is_left_out(absent: str, file: str, left_out: str) -> None:
    """Without a package the tests that need it are not imported, and one line names them."""
    paths = [str(ROOT / "tests" / path) for path in (file, "plugin")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "FIRSTFAULT_"))}
    ran = subprocess.run(
        [sys.executable, "-c", _COLLECT, f"flytekit,{absent}", *paths],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert f"tests/{file}::" in ran.stdout, ran.stdout + ran.stderr
    assert "tests/plugin/test_" not in ran.stdout
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("left out")]
    assert line.startswith(f"left out, because {absent} is not installed: ")
    assert left_out in line.rpartition(": ")[2].split(", ")
