"""What is read from the recorded consoles of jobs that had no firstfault,
against the injector's truth.
"""

from collections import Counter
from typing import Any

import pytest

from lab.consoles import score

_EVERY = 3
RIGHT = 0.85
"""Least share of right answers."""


def test_no_recorded_console_is_wrong_with_high_confidence() -> None:
    """No answer is wrong with high confidence, none fails, most are right;
    `make consoles` scores all.
    """
    rows = score.all_scored(every=_EVERY)
    found = Counter(row.outcome for row in rows)
    tool_failed = "1: "  # its exit code
    bad = [
        row.answer for row in rows if row.outcome == "sure" or row.answer.startswith(tool_failed)
    ]
    assert not bad
    assert found["right"] >= RIGHT * len(rows), found


def test_each_log_has_its_truth() -> None:
    """Each recording has one row in the index, and at least 200 are there."""
    files = {file.name.removesuffix(".log.gz") for file in score.RECORDED.glob("*.gz")}
    assert files == set(score.index())
    assert len(files) >= 200


@pytest.mark.parametrize(
    ("outcome", "ranks", "code", "said"),
    [
        ("right", [1, 2], 10, {"ranks": [1, 2], "headline": "no labels"}),
        ("story", [1, 2], 11, {"ranks": [1, 2], "headline": "timed out"}),
        ("partial", [1, 2], 10, {"ranks": [2], "headline": "no labels"}),
        ("wrong", [1, 2], 10, {"ranks": [3], "confidence": "medium"}),
        ("sure", None, 10, {"ranks": [], "confidence": "high"}),
        ("undetermined", [1, 2], 10, {"ranks": []}),
        ("wrong", [1, 2], 0, {}),
        ("unread", None, 1, {}),
        ("right", None, 0, {}),
        ("right", [], 10, {"ranks": [2, 3], "node": "gpu-b", "headline": "no labels"}),
        ("wrong", [], 10, {"ranks": [0], "node": "gpu-a"}),
    ],
)
def test_an_answer_is_right_if_it_names_ranks_and_cause(
    outcome: str, ranks: list[int] | None, code: int, said: dict[str, Any]
) -> None:
    """An answer is right if it names the guilty ranks and tells what failed."""
    truth = {"ranks": ranks, "node": "gpu-b", "word": "no labels", "any": False}
    assert score.judge(truth, code, {"verdict": said} if said else {}) == outcome
    if outcome == "partial":
        assert score.judge(truth | {"any": True}, code, {"verdict": said}) == "right"
