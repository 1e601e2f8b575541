"""``firstfault show`` on logs in which several lines could be the cause,
or several names could be a process's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstfault.utils.toml import parse_toml
from tests.readers.commands import Ran

_CASES = parse_toml(Path(__file__).with_name("log_causes.toml").read_text(encoding="utf-8"))


@pytest.fixture
def show(run: Callable[..., Ran], tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Return a function that shows a text as the log of a job,
    as JSON with the exit code as "code".
    """

    def shown(text: str) -> dict[str, Any]:
        path = tmp_path / "job.txt"
        path.write_text(text, encoding="utf-8")
        ran = run("show", "--json", str(path))
        return {"code": ran.code, **(json.loads(ran.out) if ran.out else {"stderr": ran.err})}

    return shown


@pytest.mark.parametrize("name", _CASES)
def test_the_verdict_has_the_cause_that_the_log_proves(
    show: Callable[[str], dict[str, Any]], name: str
) -> None:
    """The headline has the cause, and the verdict the ranks and the
    category that the log proves.
    """
    case = _CASES[name]
    verdict = show(case["log"])["verdict"]
    assert case["headline"] in verdict["headline"]
    assert (verdict["ranks"], verdict["category"]) == (case.get("ranks", []), case["category"])
    assert verdict["node"] == case["node"] if "node" in case else True
    assert not case.get("absent") or case["absent"] not in json.dumps(verdict)


@pytest.mark.parametrize(
    "before",
    [
        [f"{hour:02}:{minute:02}:55.477 [I] " for hour in (2, 5, 7, 12) for minute in (11, 22, 33)],
        [f"{hour:02}:{minute:02} " for hour in (2, 5, 7, 12) for minute in (11, 22, 33)],
        [f"[{number}] " for number in range(14, 26)],
        [f"{number}: " for number in range(14, 26)],
    ],
    ids=["times", "hours and minutes", "counters in brackets", "counters"],
)
def test_times_and_counters_are_no_labels(
    show: Callable[[str], dict[str, Any]], before: list[str]
) -> None:
    """Hours and numbers of lines before the lines of one process name no ranks."""
    lines = [f"{prefix}step {number} loss 2" for number, prefix in enumerate(before)]
    frame = '  File "/job/train.py", line 12, in main'
    raised = ["Traceback (most recent call last):", frame, "    go()", "KeyError: 1"]
    found = show("\n".join([*lines, *raised]))
    assert found["verdict"]["headline"].startswith("KeyError")
    assert found["verdict"]["ranks"] == []
    assert found["verdict"]["victims"]["count"] == 0
