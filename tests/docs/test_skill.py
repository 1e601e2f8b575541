"""The skill for agents names commands, options, fields and exit codes that exist,
in the common format.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstfault.cli import EXIT
from firstfault.model import CATEGORIES
from tests.readers.commands import Ran, run
from tests.readers.test_log_verdicts import LOST, RAISED, STEPS, add_prefix

__all__ = ["run"]

SKILL = Path(__file__).resolve().parents[2] / "skills" / "firstfault" / "SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8") if SKILL.exists() else ""
pytestmark = pytest.mark.skipif(not TEXT, reason="the sources aren't here")
_MAX_DESCRIPTION_CHARS = 1024


def _rows(title: str) -> list[str]:
    """Return the first cells of the table below a heading."""
    section = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")][
        1:
    ]


def test_the_front_matter_has_the_folders_name_and_a_description() -> None:
    """The file begins with a name, which is its folder's, and a description of when to use it."""
    head = TEXT.split("---\n")[1]
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert fields["name"] == SKILL.parent.name
    assert 0 < len(fields["description"]) <= _MAX_DESCRIPTION_CHARS
    assert "Use when" in fields["description"]


def test_commands_and_options_in_the_skill_exist(run: Callable[..., Ran]) -> None:
    """Each command that the skill shows, and each of its options, is one of the program's."""
    shown = re.findall(r"firstfault (show|[a-z]+(?= \'))([^`\n|]*)", TEXT)
    assert {name for name, _ in shown} == {"show", "classify"}
    for name in ("show", "classify"):
        ran = run(name, "--help")
        assert ran.code == EXIT.OK
        options = {
            option
            for of, text in shown
            if of == name
            for option in re.findall(r"(?<= )--?[a-z]+", text)
        }
        assert {option for option in options if option not in ran.out} == set()
        assert options or name == "classify"


def test_exit_codes_in_the_skill_exist() -> None:
    """Each exit code of the table is one of the command line's."""
    assert {int(code) for code in _rows("Exit codes of show")} <= set(map(int, EXIT))


def test_fields_and_categories_in_the_skill_exist(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Each field of the table is in the JSON of a failed job,
    and each category that the skill names exists.
    """
    log = tmp_path / "job.log"
    log.write_text(
        "\n".join(
            [
                *add_prefix("[rank0]: ", STEPS),
                *add_prefix("[rank1]: ", RAISED),
                *add_prefix("[rank0]: ", LOST),
            ]
        )
    )
    document = json.loads(run("show", "--json", str(log)).out)
    fields = [
        field for row in _rows("Fields of the JSON") for field in re.findall(r"`([a-z_.]+)`", row)
    ]
    assert len(fields) > len(_rows("Fields of the JSON"))
    for field in fields:
        part: Any = document
        for name in field.split("."):
            assert name in part, field
            part = part[name]
    (categories,) = re.findall(r"kind of cause, such as (.*?) \|", TEXT)
    assert set(re.findall(r"`(\w+)`", categories)) <= CATEGORIES.keys()
