"""Each process of a failing job is killed or terminated at each step of the failure;
what is promised still holds.

CI runs the most telling cases, ``make chaos`` all of them.
"""

import importlib
import json
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.cli import EXIT
from firstfault.model import JobErrors
from lab.chaos.steps import (
    CASES,
    EXIT_CODE,
    NO_HALF,
    NOTHING_LEFT,
    SAME_VERDICT,
    STEPS,
    TELLING,
    TEXT_KEPT,
    Case,
)
from lab.chaos.training import FAULTY, TEXT
from tests.plugin.running import DEADLINE_S, Running, running

ROOT = Path(__file__).parents[2]
HERE = ROOT / "lab" / "chaos"
FAULTS = ROOT / "tests" / "plugin" / "jobs" / "faults.py"
GONE_S = 60.0
"""From the end of the command until all its processes have ended:
ten seconds on a machine that does nothing else.
"""
FAILED = (EXIT.ROOT_CAUSE, EXIT.ROOT_CAUSE_RETRYABLE)
_chosen = CASES if os.environ.get("FIRSTFAULT_CHAOS") == "all" else TELLING


@pytest.mark.parametrize("begins", [step.begins for step in STEPS.values() if step.begins])
def test_the_function_of_every_step_exists(begins: str) -> None:
    """The function that begins a step is where the table says."""
    module, _, name = begins.partition(":")
    assert callable(reduce(getattr, name.split("."), importlib.import_module(module)))


@pytest.mark.jobs
@pytest.mark.parametrize("case", _chosen, ids=operator.attrgetter("name"))
def test_promises_hold_whichever_process_ends_at_whichever_step(
    case: Case, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Whichever process ends at whichever step, all promises of `docs/project/chaos.md` hold."""
    with running(
        HERE / "training.py",
        case.task,
        tmp_path,
        {},
        environment=_environment(case),
    ) as run:
        out, err = run.process.communicate(timeout=DEADLINE_S)
        left_over = _left_over(run)
    assert json.loads((run.marks / "struck.json").read_text())["pid"], (
        "the process had ended before"
    )
    (prefix,) = tmp_path.glob("store/*/0")
    (status, shown), again = _show(prefix), _show(prefix)
    told = json.loads(out.splitlines()[-1])["attempts"][-1]["verdict"] if out else shown["verdict"]
    job = MultiErrorFileOutputReader(str(prefix)).job()
    broken = {
        NO_HALF: list(_half_documents(job)),
        NOTHING_LEFT: left_over,
        SAME_VERDICT: [told] * (told != shown["verdict"]) + [again] * (again != (status, shown)),
        EXIT_CODE: list(_wrong_codes(case, run.process.returncode, status)),
        TEXT_KEPT: list(_lost_texts(case, job, shown)),
    }
    for promise, reasons in broken.items():
        record_property(promise, "broken" if reasons else "held")
    logs = "\n".join(log.read_text() for log in sorted(tmp_path.glob("store/*/logs/*/*.log")))
    assert not any(broken.values()), f"{broken}\n{shown}\n{err}\n{logs}"


@pytest.mark.jobs
def test_pods_of_a_killed_engine_end_soon_with_a_verdict(tmp_path: Path) -> None:
    """A training that nothing has failed in ends soon after `firstfault run` was killed,
    with a verdict.
    """
    with running(FAULTS, "one_node", tmp_path, {}) as run:
        for rank in ("0", "1"):
            run.mark(rank)
        run.process.kill()
        run.process.communicate()
        assert _left_over(run) == []
    (prefix,) = tmp_path.glob("store/*/0")
    _, shown = _show(prefix)
    assert shown["verdict"]["scope"] == "external"


def _environment(case: Case) -> dict[str, str]:
    """Return the variables with which all processes of the job load the hook that strikes."""
    plan = {**vars(STEPS[case.step]), "struck": case.process, "signal": case.number, "rank": FAULTY}
    path = filter(None, [str(HERE / "hook"), os.environ.get("PYTHONPATH", "")])
    return {"CHAOS": json.dumps(plan), "PYTHONPATH": os.pathsep.join(path)}


def _left_over(run: Running) -> list[str]:
    """Return what remains of a run a while after its end."""
    deadline = time.monotonic() + GONE_S
    while (found := run.find_leftovers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _show(prefix: Path) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the answer of `firstfault show` in a new process."""
    command = [sys.executable, "-m", "firstfault", "show", str(prefix), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def _half_documents(job: JobErrors) -> Iterator[str]:
    if job.coverage.unreadable:
        yield f"unreadable: {job.coverage.notes}"
    for failure in (*job.failures, *job.history):
        if (
            failure.exception is not None
            and failure.rank == int(FAULTY)
            and failure.exception.message != TEXT
        ):
            yield f"not the user's whole exception: {failure}"


def _wrong_codes(case: Case, status: int, shown: int) -> Iterator[str]:
    """The command and each later reader say that the job has failed."""
    expected = shown
    if case.process == "engine":
        expected = -signal.SIGKILL if case.signal == "SIGKILL" else 130
    if shown not in FAILED or status != expected:
        yield f"run: {status}, show: {shown}"


def _lost_texts(case: Case, job: JobErrors, shown: dict[str, Any]) -> Iterator[str]:
    """A worker that lived long enough is quoted in the report, as the root cause or beside it."""
    if not case.is_recorded:
        if (shown["verdict"]["ranks"], shown["root"]["signal"]) != ([int(FAULTY)], case.signal):
            yield "the verdict does not name the killed worker"
        return
    whole = [
        failure
        for failure in job.failures
        if failure.exception is not None and failure.exception.message == TEXT
    ]
    if not whole:
        yield "no document has the user's text"
    if TEXT[:50] not in json.dumps(shown):
        yield "the report does not quote it"
