"""Full texts of reports: messages for each scope and category, and each form,
in files that ``make golden`` writes.
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from firstfault.model import CATEGORIES, Scope
from firstfault.render.flyte_message import flyte_message
from firstfault.render.json_report import json_report
from firstfault.render.markdown import markdown
from firstfault.render.terminal import terminal_text
from firstfault.report import Report
from tests.all_forms import print_to_terminal
from tests.reports.scenes import CATEGORY_SCENES, HARD_SCENES, SCOPE_SCENES

_FOLDER = Path(__file__).parent / "golden"
_PAGE = Path(__file__).parents[2] / "docs" / "guides" / "report.md"
_BEGIN, _END = "<!-- first lines: written by make golden -->", "<!-- end -->"
_LISTS = 100
"""Characters that a list in Flyte's console shows."""
_PREFIXES = (
    "[3/3] currentAttempt done. Last Error: USER::",
    "[10/10] currentAttempt done. Last Error: SYSTEM::",
)
"""What propeller puts before a message when the retries have run out."""
_FIRST_LINE = 79
_FORMS: dict[str, Callable[[Report], str]] = {
    "terminal": lambda report: _plain(print_to_terminal(report)),
    "terminal-v": lambda report: _plain(print_to_terminal(report, 160, verbose=True)),
    "narrow": lambda report: _plain(print_to_terminal(report, 40)),
    "lines": terminal_text,
    "lines-v": lambda report: terminal_text(report, verbose=True),
    "json": lambda report: json.dumps(json.loads(json_report(report)), indent=1),
}
_FORM_SCENES = {
    "rank": SCOPE_SCENES["rank"],
    "hang": CATEGORY_SCENES["hang"],
    "host_oom": CATEGORY_SCENES["host_oom"],
    "three-attempts": HARD_SCENES["three-attempts"],
}
_MESSAGE_BYTES = 16 * 1024


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _files() -> dict[str, Callable[[], str]]:
    files: dict[str, Callable[[], str]] = {}
    for kind, scenes in (("scope", SCOPE_SCENES), ("category", CATEGORY_SCENES)):
        for name, scene in scenes.items():
            files[f"{kind}-{name}.txt"] = lambda scene=scene: f"{flyte_message(scene())}\n"
    for name, scene in SCOPE_SCENES.items():
        files[f"scope-{name}.md"] = lambda scene=scene: markdown(scene())
    for form, name in itertools.product(_FORMS, _FORM_SCENES):
        files[f"{form}-{name}.form"] = lambda form=form, name=name: _formed(form, name)
    return files


def _formed(form: str, name: str) -> str:
    """Return a form's text on a scene; names of documents end in random characters."""
    text = _FORMS[form](_FORM_SCENES[name]())
    lines = re.sub(
        r'(?<=-)[0-9a-f]+(\n +)?[0-9a-f]*(?=\.pb)|(?<="digest": ")[0-9a-f]+', "0", text
    ).split("\n")
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


@pytest.mark.parametrize("name", _files())
def test_a_report_is_the_golden_file(name: str) -> None:
    """The text is the one in the file; to change it, run ``make golden`` and read the new file."""
    text = _files()[name]()
    file = _FOLDER / name
    if os.environ.get("FIRSTFAULT_GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def _table() -> str:
    """Return the first lines as Flyte's lists show them, as a table."""
    rows = ["| Category or scope | The first 55 characters |", "|---|---|"]
    for file in sorted(_FOLDER.glob("*.txt")):
        kind, _, name = file.stem.partition("-")
        line = file.read_text(encoding="utf-8").partition("\n")[0]
        rows.append(
            f"| {name if kind == 'category' else f'{kind}: {name}'} | `{line[:55].rstrip()}` |"
        )
    return "\n".join(rows)


def test_the_documented_first_lines_are_those_of_the_golden_files() -> None:
    """The table in docs/guides/report.md has the first line of each golden file;
    ``make golden`` writes it.
    """
    page = _PAGE.read_text(encoding="utf-8")
    begin = page.index(_BEGIN) + len(_BEGIN)
    end = page.index(_END)
    if os.environ.get("FIRSTFAULT_GOLDEN") == "write":
        page = f"{page[:begin]}\n{_table()}\n{page[end:]}"
        _PAGE.write_text(page, encoding="utf-8")
    assert f"{_BEGIN}\n{_table()}\n{_END}" in page


def test_each_scope_and_category_has_a_scene() -> None:
    """Each scope and category has a scene, whose verdict has that scope or category."""
    assert {file.name for file in _FOLDER.iterdir()} == set(_files())
    assert {name: scene().verdict.scope.value for name, scene in SCOPE_SCENES.items()} == {
        scope.value: scope.value for scope in Scope
    }
    assert {name: scene().verdict.category for name, scene in CATEGORY_SCENES.items()} == {
        category: category for category in CATEGORIES
    }


@pytest.mark.parametrize("scene", [*SCOPE_SCENES.values(), *CATEGORY_SCENES.values()])
def test_messages_are_short_ascii_and_begin_with_the_answer(scene: Callable[[], Report]) -> None:
    """The message is ASCII and below 16 KB; its first line is short and begins with the answer,
    as the last does.
    """
    report = scene()
    message = flyte_message(report)
    lines = message.splitlines()
    assert message.isascii()
    assert len(message) < _MESSAGE_BYTES
    assert len(lines[0]) < _FIRST_LINE
    assert lines[-1] == lines[0]
    answer = min(
        (f"{prefix}{lines[0]}"[:_LISTS].removeprefix(prefix) for prefix in _PREFIXES), key=len
    )
    assert ("no retry" in answer) is not report.decision.retry
    assert "retry" in answer
    if len(report.verdict.ranks) == 1:
        assert f"rank {report.verdict.ranks[0]} " in answer
    if report.verdict.node:
        assert report.verdict.node[-8:] in answer or "all 4 ranks" in answer
        assert f"kubectl logs {report.verdict.node} -n project-development" in lines
    assert f"firstfault show {report.uri}" in lines
    assert not [line for line in lines if line != line.rstrip()]
