"""What a worker knows of exceptions that its program handled,
on this and on newer versions of Python.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from firstfault_torch import PlainEngine, time_limits
from firstfault_torch.worker.worker_monitor import WorkerMonitor
from tests.nodes import Job
from tests.torch_agent import trainings

_SCENES = Path(__file__).with_name("handled_scenes.py")
_PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
_NEWER = (
    sorted(_PYENV.glob("versions/3.1[2-9].*/bin/python3"))[:1] if sys.version_info < (3, 12) else []
)
_TELLS_ALL = pytest.mark.skipif(
    sys.version_info < (3, 12) and not _NEWER, reason="Python 3.12 isn't installed"
)


def _run(python: str, folder: Path) -> dict[str, Any]:
    # Only what the scenes need, wherever it is installed: the other packages there are for this
    # version of Python.
    for name in ("firstfault", "firstfault_torch", "firstfault_start"):
        file = Path(str(importlib.import_module(name).__file__))
        found = file.parent if file.stem == "__init__" else file
        (folder / found.name).symlink_to(found)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    if python == sys.executable:
        del environment["PYTHONPATH"]
    command = [python, str(_SCENES)]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the scenes on this version of Python."""
    return _run(sys.executable, tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the scenes on a version of Python that tells of all handled exceptions."""
    return _run(str(_NEWER[0]) if _NEWER else sys.executable, tmp_path_factory.mktemp("packages"))


def _failed(number: int, function: str) -> list[Any]:
    return [["ValueError", f"batch {number} has no labels", [function, "step"], 1]]


def test_an_exception_is_known_if_its_traceback_was_formatted(here: dict[str, Any]) -> None:
    """Every version of Python knows a handled exception that was logged with its traceback."""
    assert here["logged"] == _failed(2, "logged")


def test_an_exception_that_the_program_keeps_is_known(here: dict[str, Any]) -> None:
    """Every version of Python knows a handled exception that a running function still refers to."""
    assert here["kept"] == _failed(3, "kept")


@_TELLS_ALL
def test_a_dropped_exception_is_known_from_python_3_12(newer: dict[str, Any]) -> None:
    """From Python 3.12 on, a handled exception that left no trace is known;
    other tools may have all ids.
    """
    assert newer["dropped"] == _failed(1, "dropped")
    assert newer["taken"] == _failed(2, "logged")


@_TELLS_ALL
def test_the_same_exception_counts_once(here: dict[str, Any], newer: dict[str, Any]) -> None:
    """An exception that passed a clean-up was handled once;
    one that is raised again wasn't handled.
    """
    assert here["cleaned_up"] == newer["cleaned_up"] == _failed(4, "cleaned_up")
    assert here["raised_again"] == newer["raised_again"] == []


@_TELLS_ALL
def test_routinely_handled_exceptions_are_not_listed(
    here: dict[str, Any], newer: dict[str, Any]
) -> None:
    """An exception that is handled all the time isn't listed, nor one of another thread,
    or of a forked process.
    """
    for found in (here, newer):
        assert found["business"] == [1, 0]
        assert (found["of_a_thread"], found["forked"]) == ([], 0)


@_TELLS_ALL
def test_nothing_of_the_program_is_kept(here: dict[str, Any], newer: dict[str, Any]) -> None:
    """A handled exception's objects are freed as before, its own ``__str__`` isn't called,
    and hooks are taken back.
    """
    for found in (here, newer):
        assert found["lets_go"] == ["out of memory", 0, True]
        assert found["undone"] is True


@_TELLS_ALL
def test_a_program_that_handles_too_many_is_watched_less(newer: dict[str, Any]) -> None:
    """Above a number of exceptions Python is no longer asked for them,
    until the agent asks a minute later.
    """
    assert newer["far_too_many"] == [True, False, False, True]


@_TELLS_ALL
def test_a_program_that_handles_few_is_watched_for_hours(
    here: dict[str, Any], newer: dict[str, Any]
) -> None:
    """A program that handles few exceptions a minute is watched for as long as it runs,
    without an agent, too.
    """
    assert here["for_hours"] == newer["for_hours"] == _failed(6, "for_hours")


def test_formatting_exceptions_works_as_without_firstfault(here: dict[str, Any]) -> None:
    """All ways to format an exception do what they do without firstfault,
    and near the limit of recursion, too.
    """
    assert here["as_before"] == []


@pytest.mark.parametrize("is_slow", [False, True])
def test_handled_exceptions_are_listed_only_while_the_agent_waits(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker lists handled exceptions only while the agent still waits for its answer."""
    monkeypatch.setattr(time_limits, "WORKER_QUERY_TIMEOUT_SECONDS", 0.0 if is_slow else 60.0)
    monkeypatch.setattr(time_limits, "HANDLED_EXCEPTIONS_TIMEOUT_SECONDS", 60.0)
    monitor = WorkerMonitor(PlainEngine(""))
    listed = threading.Event()
    monkeypatch.setattr(monitor._handled, "list", lambda *_, **__: listed.set() or ())
    assert monitor.answer()["handled"] == []
    assert listed.is_set() is not is_slow


@pytest.mark.jobs
def test_a_retried_steps_exception_is_the_verdict(tmp_path: Path) -> None:
    """The verdict on a job whose rank handled its exception, and is out of step since,
    is that exception.
    """
    config = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2}
    with Job(tmp_path, trainings.tries_again, (), None, config) as job:
        ended = job.start(1).end()

    assert (ended.verdict.rule, ended.verdict.ranks) == ("out-of-step", (1,)), ended.logs
    assert ended.verdict.headline.endswith("the first fault")
    assert ended.verdict.confidence != "high"
    assert "which its program handled before it continued" in ended.verdict.why[0]
