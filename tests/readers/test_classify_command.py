"""``firstfault classify``: JSON lines in, JSON lines out, and one line for an error."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def run(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process."""
    command = [sys.executable, "-m", "firstfault", "classify", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_lines() -> None:
    """One answer per line, in order, with the id of the input; empty lines are skipped."""
    rows = [
        {"id": "a", "exception_type": "ValueError", "message": "bad batch"},
        {"id": 2, "message": "[gloo/pair.cc:1] Connection closed by peer [10.0.0.7]:4711"},
        {"message": "CUDA error: misaligned address", "exception_type": None, "more": 1},
    ]
    done = run("\n\n".join(json.dumps(row) for row in rows))
    first, second, third = (json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0
    assert first == {"id": "a", "role": "primary", "category": "user_code", "pointer": None, "signature": "program"}
    assert (second["id"], second["role"], second["pointer"]) == (2, "secondary", {"ip": "10.0.0.7", "port": 4711})
    assert (third["id"], third["signature"]) == (None, "gpu-kernel")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"id": 1}\n{"id": ', "line 2 of stdin is not JSON"),
        ("[" * 5_000, "line 1 of stdin is not JSON"),
        ("[1]", "line 1 of stdin must be an object"),
        ('{"message": 7}', "'message' in line 1 of stdin must be a string"),
    ],
)
def test_bad_input(text: str, reason: str) -> None:
    """An invalid line has exit code 2 and an error with its number."""
    done = run(text)
    assert done.returncode == 2
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_stdin() -> None:
    """It is said in one line."""
    command = f"{shlex.quote(sys.executable)} -m firstfault classify <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "firstfault: stdin is closed; give it lines of JSON\n")


def test_signatures_of_ones_own(tmp_path: Path) -> None:
    """A file's signatures come first; an invalid file is named in the error."""
    file = tmp_path / "ours.toml"
    file.write_text(
        'schema = 1\n[[signature]]\nid = "ours"\npattern = "bad batch"\nrole = "secondary"\ncategory = "data"\n'
        'example = "bad batch"\nwhy = "ours"\n'
    )
    row = json.dumps({"id": 1, "exception_type": "ValueError", "message": "bad batch"})
    assert json.loads(run(row, "--signatures", str(file)).stdout)["signature"] == "ours"
    file.write_text("schema = 2")
    done = run(row, "--signatures", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{file}:1: must say schema = 1" in done.stderr
