"""What reports look like, word for word: one file for each scope and category. ``make golden`` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from firstfault.model import CATEGORIES, Scope
from firstfault.report import flyte_message, markdown
from firstfault.report.words import CATEGORY_ADVICE, State
from tests.reports.scenes import CATEGORY_SCENES, SCOPE_SCENES

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault.report import Report

_FOLDER = Path(__file__).parent / "golden"
_LIST_WIDTH = 55
_FIRST_LINE = 90
_MESSAGE_BYTES = 16 * 1024


def _files() -> dict[str, Callable[[], str]]:
    """What each file holds, by its name."""
    files: dict[str, Callable[[], str]] = {}
    for kind, scenes in (("scope", SCOPE_SCENES), ("category", CATEGORY_SCENES)):
        for name, scene in scenes.items():
            files[f"{kind}-{name}.txt"] = lambda scene=scene: f"{flyte_message(scene())}\n"
    for name, scene in SCOPE_SCENES.items():
        files[f"scope-{name}.md"] = lambda scene=scene: markdown(scene())
    return files


@pytest.mark.parametrize("name", _files())
def test_it_looks_as_it_did(name: str) -> None:
    """The text is the one in the file, which somebody has read; change it with ``make golden`` and read it again."""
    text = _files()[name]()
    file = _FOLDER / name
    if os.environ.get("FIRSTFAULT_GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_no_file_is_left_over() -> None:
    """Every file belongs to a scene."""
    assert {file.name for file in _FOLDER.iterdir()} == set(_files())


def test_each_scope_and_category_has_a_scene() -> None:
    """The scenes are of the scope, or the category, that they are named after, and none is missing."""
    assert {name: scene().verdict.scope.value for name, scene in SCOPE_SCENES.items()} == {
        scope.value: scope.value for scope in Scope
    }
    assert {name: scene().verdict.category for name, scene in CATEGORY_SCENES.items()} == {
        category: category for category in CATEGORIES
    }


@pytest.mark.parametrize("scene", [*SCOPE_SCENES.values(), *CATEGORY_SCENES.values()])
def test_rules_of_the_message(scene: Callable[[], Report]) -> None:
    """ASCII, below 16 KB; the first line is short, holds the answer in what lists keep of it, and stands at the end."""
    report = scene()
    message = flyte_message(report)
    lines = message.splitlines()
    assert message.isascii()
    assert len(message) < _MESSAGE_BYTES
    assert len(lines[0]) < _FIRST_LINE
    assert lines[-1] == lines[0]
    answer = lines[0][:_LIST_WIDTH]
    assert ("no retry" in answer) is not report.decision.retry
    assert "retry" in answer
    if len(report.verdict.ranks) == 1:
        assert f"rank {report.verdict.ranks[0]} " in answer
    if report.verdict.node:
        assert report.verdict.node[-8:] in answer
        assert f"kubectl logs {report.verdict.node} -n project-development" in lines
    assert f"firstfault show {report.uri}" in lines
    assert not [line for line in lines if line != line.rstrip()]


def test_every_category_has_advice() -> None:
    """What to do first is said for each category of the closed list, and for no other."""
    assert set(CATEGORY_ADVICE) == set(CATEGORIES)


def test_marks_tell_states_apart() -> None:
    """Every state has one ASCII character of its own."""
    marks = [state.mark for state in State]
    assert len(set(marks)) == len(marks)
    assert all(len(mark) == 1 and mark.isascii() for mark in marks)
