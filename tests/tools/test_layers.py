"""Tests are layered like the packages: what they import stops where their package's imports stop."""

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
    ("absent", "folders", "left_out"),
    [
        ("flytekit", ("torch_agent", "inprocess"), {"tests/plugin", "tests/chaos"}),
        ("torch", ("readers", "proto", "reports", "storage"), {"tests/plugin", "tests/torch_agent", "tests/inprocess"}),
    ],
)
def test_without_a_package(absent: str, folders: tuple[str, ...], left_out: set[str]) -> None:
    """The tests below a package are all found without it, and one line names those that are left out."""
    blocked = {"flytekit", "flytekitplugins", absent}
    paths = [str(ROOT / "tests" / folder) for folder in (*folders, "plugin")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, "-c", _COLLECT, ",".join(blocked), *paths],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for folder in folders:
        assert f"tests/{folder}/test_" in ran.stdout
    assert "tests/plugin/test_" not in ran.stdout
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("left out")]
    assert line.startswith(f"left out, because {absent} is not installed: ")
    assert left_out <= set(line.rpartition(": ")[2].split(", "))
