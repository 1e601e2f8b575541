"""Runs an example.

`tests/plugin/test_live.py` runs user_error.py; tools/demo.sh plain.py and recoverable.py;
tools/check_demo.py ddp.py.
"""

import difflib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.model import Phase

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.jobs


def test_one_import_line_migrates_a_kfpytorch_script(tmp_path: Path) -> None:
    """The script differs from kfpytorch's only in its import,
    and succeeds without an error document.
    """
    before = (EXAMPLES / "migration" / "before.py").read_text().splitlines()
    after = (EXAMPLES / "migration" / "after.py").read_text().splitlines()
    changed = [line for line in difflib.ndiff(before, after) if line.startswith(("-", "+"))]

    command = [
        sys.executable,
        "-m",
        "firstfault",
        "run",
        str(EXAMPLES / "migration" / "after.py"),
        "sum_of_ranks",
    ]
    command += ["--store", str(tmp_path), "--json", "--nodes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])

    assert [line.split(" import ")[0] for line in changed] == [
        "- from flytekitplugins.kfpytorch",
        "+ from flytekitplugins.firstfault",
    ]
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
