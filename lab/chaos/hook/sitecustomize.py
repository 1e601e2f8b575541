"""Loaded by each Python process of a job under test: strikes one process at one step
(`lab.chaos.steps`), once.

It wraps the function that begins the step when its module has been imported, or listens to Python's
audit events for the moment at which a half written file would get its name.
"""

import contextlib
import functools
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_GONE_S = 10.0
_CASE: dict[str, Any] = json.loads(os.environ.get("CHAOS", "{}"))


def _process() -> str:
    """Return which process of the job this is;
    a forked worker differs from its agent in its variables.
    """
    if "firstfault.recorder" in sys.orig_argv:
        return "recorder"
    return "worker" if "RANK" in os.environ else "agent"


def _is_here() -> bool:
    return _process() == _CASE["process"] and (
        "RANK" not in os.environ or os.environ["RANK"] == _CASE["rank"]
    )


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _child(parent: int, belongs: Any) -> int:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if _parent(int(folder.name)) == parent and belongs(int(folder.name)):
                return int(folder.name)
    return 0


def _target() -> int:
    """Return the process to strike: this node's, or the engine that started it;
    0 if it does not run.
    """
    agent = os.getpid() if _process() == "agent" else os.getppid()
    if _CASE["struck"] == _process():
        return os.getpid()
    if _CASE["struck"] == "agent":
        return agent
    if _CASE["struck"] == "engine":
        return _parent(agent)
    workers = {
        json.loads(mark.read_text())["pid"]
        for mark in Path(os.environ["MARKS"]).glob("rank-*.json")
    }
    if _CASE["struck"] == "worker":
        return _child(agent, workers.__contains__)
    return _child(
        agent, lambda pid: "firstfault.recorder" in Path(f"/proc/{pid}/cmdline").read_text()
    )


def _strike(half_written: str = "") -> None:
    try:
        os.close(os.open(f"{os.environ['MARKS']}/struck", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    target = _target()
    number = signal.Signals(_CASE["signal"])
    Path(os.environ["MARKS"], "struck.json").write_text(
        json.dumps({"pid": target, "by": os.getpid()})
    )
    if half_written and target == os.getpid() and number == signal.SIGKILL:
        os.truncate(half_written, Path(half_written).stat().st_size // 2)
    if target:
        os.kill(target, number)
    deadline = time.monotonic() + _GONE_S
    while number == signal.SIGKILL and _runs(target) and time.monotonic() < deadline:
        time.sleep(0.005)


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _wrapped(function: Any) -> Any:
    """Return the function, preceded by the strike."""

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        if _is_here():
            _strike()
        return function(*args, **more)

    return call


class _Finder:
    """Wraps the function as soon as its module has been imported,
    before others import it from there.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def find_spec(self, fullname: str, *_: Any) -> Any:
        """Return the module's usual specification, with the wrapping after its execution."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            *outer, last = self._name.split(".")
            owner = functools.reduce(getattr, outer, module)
            setattr(owner, last, _wrapped(getattr(owner, last)))

        spec.loader.exec_module = execute_and_wrap
        return spec


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.rename" and _is_here():
        source = str(arguments[0])
        name = str(arguments[1])
        if source.startswith(name) and _CASE["path"] in name and name.endswith(".pb"):
            _strike(source)


if _CASE.get("begins"):
    sys.meta_path.insert(0, _Finder(*_CASE["begins"].split(":")))
elif _CASE:
    sys.addaudithook(_listen)
