"""Each layer of tests can be collected without the packages above it;
`make test` runs it where they are absent.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
_COLLECT = """
import sys
sys.modules.update(torch=None, flytekit=None)  # importing one of these raises ModuleNotFoundError
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_files_and_folders_of_each_layer_exist() -> None:
    """Every file and folder in conftest's tables exists."""
    places = {*conftest._FOLDERS["torch"], *conftest._FOLDERS["flyte"]}
    assert [place for place in sorted(places) if not (ROOT / "tests" / place).exists()] == []


def test_tests_that_need_absent_packages_are_left_out_and_named() -> None:
    """Without torch and flytekit the tests that need them are not imported,
    and one line names them.
    """
    paths = [str(ROOT / "tests" / path) for path in ("readers/test_wire.py", "plugin")]
    outer = ("PYTEST_", "FIRSTFAULT_", "TESTS_LAYER")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    ran = subprocess.run(
        [sys.executable, "-c", _COLLECT, *paths],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "tests/readers/test_wire.py::" in ran.stdout, ran.stdout + ran.stderr
    assert "tests/plugin/test_" not in ran.stdout
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("left out")]
    assert line.startswith("left out, because torch is not installed: ")
    assert {"tests/torch_agent", "tests/plugin"} <= set(line.rpartition(": ")[2].split(", "))
