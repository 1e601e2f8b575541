"""Check the wheel without its extras, as another engine than Flyte installs it; run by its environment's Python."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import firstfault

COMMANDS = (
    (["--help"], 0, "not available: `firstfault run` needs "),
    (["show", tempfile.mkdtemp()], 3, "no error document"),
    (["run", "training.py", "train"], 1, "install the extra elastic: pip install '<wheel>[elastic]'"),
)
"""Arguments, the exit code, and what is printed."""


def main() -> None:
    """Import every public name and run the commands."""
    extras = [name for name in ("flytekit", "torch", "s3fs") if importlib.util.find_spec(name)]
    assert not extras, f"{extras} came with the core dependencies"
    for name in firstfault.__all__:
        getattr(firstfault, name)
    command = str(Path(sys.executable).with_name("firstfault"))
    for arguments, status, text in COMMANDS:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, env={"COLUMNS": "200"}, check=False
        )
        assert done.returncode == status, (arguments, done)
        assert text in " ".join((done.stdout + done.stderr).split()), (arguments, done)


if __name__ == "__main__":
    main()
