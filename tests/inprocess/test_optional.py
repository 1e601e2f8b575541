"""In-process restart is a folder that can be deleted: nothing else imports it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import firstfault_torch

_IMPORT_ALL = """
import importlib, pkgutil, sys
import firstfault_torch
assert firstfault_torch.__file__.startswith(sys.argv[1]), firstfault_torch.__file__
names = [module.name for module in pkgutil.walk_packages(firstfault_torch.__path__, "firstfault_torch.")]
for name in names:
    if not name.startswith("firstfault_torch.notifiers"):  # optional, too
        importlib.import_module(name)
print(len(names))
"""


def test_the_rest_without_it(tmp_path: Path) -> None:
    """All other modules of the package are imported in a copy that lacks the folder."""
    package = Path(firstfault_torch.__file__).parent
    ignored = shutil.ignore_patterns("inprocess", "__pycache__")
    shutil.copytree(package, tmp_path / "firstfault_torch", ignore=ignored)
    ran = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 20
