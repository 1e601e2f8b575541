"""Runs examples by the command in their first lines.

`tests/plugin/test_live.py` runs user_error.py, tests/torch_agent/test_plain_example.py runs plain.py, and
tools/check_demo.py checks recoverable.py.
"""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.model import Phase
from tests.waiting import beside

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.jobs


def _run(tmp_path: Path, file: str, task: str, *options: str) -> tuple[int, dict[str, Any]]:
    arguments = [sys.executable, "-m", "firstfault", "run", str(EXAMPLES / file), task, "--store", str(tmp_path)]
    done = subprocess.run([*arguments, "--json", *options], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", autouse=True)
def waits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """Begin the longer training."""
    options = ("--nodes", "1", "--inputs", '{"epochs": 20}')
    learning = partial(_run, tmp_path_factory.mktemp("ddp"), "ddp.py", "train", *options)
    with beside(request, {"test_the_ddp_example_learns": learning}) as begun:
        yield begun


def test_one_import_line_migrates_a_kfpytorch_script(tmp_path: Path) -> None:
    """The script differs from kfpytorch's only in its import, and succeeds without an error document."""
    before = (EXAMPLES / "migration" / "before.py").read_text().splitlines()
    after = (EXAMPLES / "migration" / "after.py").read_text().splitlines()
    changed = [line for line in difflib.ndiff(before, after) if line.startswith(("-", "+"))]

    code, result = _run(tmp_path, "migration/after.py", "sum_of_ranks", "--nodes", "1")

    assert [line.split(" import ")[0] for line in changed] == [
        "- from flytekitplugins.kfpytorch",
        "+ from flytekitplugins.firstfault",
    ]
    assert code == 0
    assert result["outputs"]["o0"] == 0 + 1
    (attempt,) = result["attempts"]
    prefix = Path(attempt["errors"]).parents[1]
    assert attempt["engine"] == {"job": "Succeeded", "error_seen": None}
    assert result["report"] is None
    assert not list(tmp_path.rglob("report.html"))
    assert not list(prefix.glob("error*"))
    assert not list(prefix.glob("firstfault/errors/*"))
    entries = MultiErrorFileOutputReader(str(prefix)).job().roster
    assert {entry.phase for entry in entries} == {Phase.JOINED, Phase.SUCCEEDED}
    assert {rank for entry in entries for rank in entry.ranks} == {0, 1}


def test_the_ddp_example_learns(waits: dict[str, Future[Any]]) -> None:
    """Two workers on one node learn to classify the spirals, far above chance."""
    code, result = waits["test_the_ddp_example_learns"].result()

    assert code == 0
    assert result["outputs"]["o0"] > 0.9
