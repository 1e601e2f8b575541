"""What a signal does, and how much time each step has after it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import firstfault_torch
from firstfault_torch import time_limits
from firstfault_torch.protocol.shutdown import ExitStep, Hurry, SignalPhase, get_limit

_PACKAGES = (
    "firstfault_torch",
    "firstfault_inprocess",
    "flytekitplugins/firstfault",
    "flyteplugins/firstfault",
)
"""Not all of the folder: an installed package has others beside it."""
_LIMIT_OF_SIGNAL = re.compile(r"\b(TERMINATED_\w+_SECONDS|EXIT_(STEP|RECORDER)_TIMEOUT_SECONDS)\b")


@pytest.mark.parametrize("step", ExitStep)
def test_hurry_makes_no_step_longer(step: ExitStep) -> None:
    usual, terminated, leaving_now = (get_limit(step, hurry) for hurry in Hurry)
    assert leaving_now <= terminated <= usual


@pytest.mark.parametrize("hurry", Hurry)
def test_an_option_replaces_the_usual_limit(hurry: Hurry) -> None:
    assert get_limit(ExitStep.SETTLE, hurry, 0.25) == 0.25
    assert get_limit(ExitStep.SETTLE, hurry, 1000.0) == (
        1000.0 if hurry is Hurry.NONE else get_limit(ExitStep.SETTLE, hurry)
    )


def test_the_signal_thread_has_seconds_for_each_step() -> None:
    limits = [
        get_limit(step, Hurry.LEAVING_NOW) for step in ExitStep if step is not ExitStep.LEADERS
    ]
    assert max(limits) <= time_limits.TERMINATED_CONCLUDE_TIMEOUT_SECONDS


@pytest.mark.parametrize(
    ("phase", "interrupts", "reports", "needs"),
    [
        (SignalPhase.WORKING, True, True, True),
        (SignalPhase.SETTLING, False, False, True),
        (SignalPhase.LEAVING, False, False, False),
    ],
)
def test_what_a_signal_does(
    phase: SignalPhase, interrupts: bool, reports: bool, needs: bool
) -> None:
    assert (phase.interrupts_main, phase.reports_signal, phase.needs_main) == (
        interrupts,
        reports,
        needs,
    )


def test_no_other_module_reads_the_limits_of_a_signal() -> None:
    folder = Path(str(firstfault_torch.__file__)).parents[1]
    tables = {"time_limits.py", "shutdown.py"}
    files = [file for package in _PACKAGES for file in (folder / package).rglob("*.py")]
    others = [file for file in files if file.name not in tables]
    assert len(others) > len(tables)
    assert [file.name for file in others if _LIMIT_OF_SIGNAL.search(file.read_text())] == []
