"""Bare environments, made with ``python3 -m venv`` as by a reader; only torch may be in them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
_TORCH = ("torch", "torch-*", "torchgen", "functorch", "nvidia*", "triton*", "cuda*")
"""torch and its CUDA packages among site-packages: too large to download for each environment."""
_BEING_WRITTEN = shutil.ignore_patterns("*.pyc.*")
"""A module that another process is compiling: Python renames the file as soon as it is complete."""
_EXTRA = re.compile(r"\[([\w,]+)\]")


def find_extra(command: str) -> str:
    """Return the extras in an install command, ``elastic,s3``; an empty text if there are none."""
    match = _EXTRA.search(command)
    return match[1] if match is not None else ""


class Environments:
    """Makes environments in a folder.

    The first one for extras in `shared` is bare. Each later one for them begins with the packages
    that were installed there, without firstfault: its own command then installs firstfault and
    checks the rest. For other extras all are bare.
    """

    def __init__(self, folder: Path, python: str, *, shared: set[str]) -> None:
        self._folder = folder
        self._python = python
        self._shared = shared
        self._lock = threading.Lock()
        self._installed: dict[str, Future[Path]] = {}
        self._count = 0

    @contextlib.contextmanager
    def prepare(self, extra: str) -> Iterator[Path]:
        """Yield a new environment for an install; later ones begin with what was installed."""
        with self._lock:
            self._count += 1
            venv = self._folder / f"venv-{self._count}"
            first = self._installed.get(extra) if extra in self._shared else None
            if first is None:
                self._installed[extra] = installed = Future[Path]()
        if first is not None:
            _run(ROOT / "tools" / "copy_venv.sh", first.result(), venv, "firstfault")
            yield venv
            return
        try:
            _run(self._python, "-m", "venv", venv)
            if extra:
                _link_torch(venv)
            yield venv
            copy = venv.with_name(f"{venv.name}-installed")
            if extra in self._shared:  # the page's next commands may change the environment
                _run(ROOT / "tools" / "copy_venv.sh", venv, copy)
        except BaseException as error:
            installed.set_exception(error)  # or a page that waits for it would wait for ever
            raise
        installed.set_result(copy)


def find_python() -> str:
    """Return the interpreter of .venv, for which torch was built, or $PYTHON of that version."""
    given = os.environ.get("PYTHON")
    python = ROOT / ".venv" / "bin" / "python"
    return given or _run(python, "-c", "import sys; print(sys._base_executable)").strip()


def _link_torch(venv: Path) -> None:
    """Link torch's files from .venv."""
    (source,) = (ROOT / ".venv" / "lib").glob("python*/site-packages")
    target = venv / source.relative_to(ROOT / ".venv")
    if not target.is_dir():
        raise ValueError(f"{venv} has another Python than .venv, and can't use its torch")
    for pattern in _TORCH:
        for path in source.glob(pattern):
            if path.is_dir():
                shutil.copytree(
                    path, target / path.name, copy_function=os.link, ignore=_BEING_WRITTEN
                )
            else:
                os.link(path, target / path.name)


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}")
    return done.stdout
