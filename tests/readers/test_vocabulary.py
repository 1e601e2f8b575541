"""The tables of what programs, launchers and schedulers print."""

from pathlib import Path

import pytest

import firstfault_logs
from firstfault.utils.toml import parse_toml
from firstfault_logs.vocabulary import ALTERNATIVES, PATTERNS, WORDS

_FOLDER = Path(firstfault_logs.__file__).parent
_TABLES = parse_toml((_FOLDER / "vocabulary.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", _TABLES["pattern"])
def test_patterns(name: str) -> None:
    """Each pattern compiles, and none is so loose that it matches an empty text."""
    assert PATTERNS[name].search("") is None


def test_each_entry_is_used() -> None:
    """The code names each pattern, each group of alternatives and each list of words."""
    sources = [file.read_text("utf-8") for file in _FOLDER.rglob("*.py")]
    names = {*_TABLES["pattern"], *ALTERNATIVES, *WORDS}
    assert {
        name
        for name in names
        if not any(f'"{name}"' in text or f"'{name}'" in text for text in sources)
    } == set()
