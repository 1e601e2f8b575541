"""Whether the value of a named credential is a literal, or code, a placeholder or an ordinary word."""

from __future__ import annotations

import re
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from firstfault.toml import parse_toml

HIDDEN = "***"
TABLE: dict[str, Any] = parse_toml(Path(__file__).with_name("credentials.toml").read_text(encoding="utf-8"))
PATTERNS = {name: re.compile(text, re.VERBOSE) for name, text in TABLE["values"].items()}
"""Of values that are not credentials."""


class Strength(Enum):
    """How surely the value of a name is a credential."""

    SURE = auto()  # passwords, secrets and keys
    LIKELY = auto()  # tokens and the like: the words also have other meanings
    WORD = auto()  # tokens of a text, and names of which only a random value is a credential
    SHORT = auto()  # `pass` and `pw` alone: only a value with letters and digits is a password
    KEY = auto()  # names that often have other values: only many random characters are a credential


class Form(Enum):
    """How a value without quotes follows its name."""

    PLAIN = auto()  # PASSWORD=x, --password x, &token=x: any text is a literal
    TIGHT = auto()  # password=x
    SPACED = auto()  # password = x, as in code and INI files
    CALL = auto()  # connect(password=x)
    COLON = auto()  # password: x, alone on its line, as in YAML
    PROSE = auto()  # password: x and more; unexpected token: x
    CODE = auto()  # if password: x; rows[token: x]; def f(password: x)


class Named(NamedTuple):
    """The name of a value, as it stands in a text."""

    name: str
    strength: Strength
    form: Form


_RUN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_LONGEST_RUNS = (5, 4, 3)
"""Runs of letters or digits in random texts are shorter on average: in texts, in paths, in letters alone."""
_DIGITS_OF_PASSWORD = 6
_LONG_WITH_SIGNS = 32
_FEW = 3
_LONG = 16
_MIXED = 8
_SHORT_MIXED = 6


def is_placeholder(text: str) -> bool:
    """Whether a text stands for a value that is not there: ``***``, ``None``, ``${NAME}``, ``%s``."""
    if not text or PATTERNS["constant"].fullmatch(text) or PATTERNS["placeholder"].fullmatch(text):
        return True
    # placeholders alone, such as those of an f-string
    if "%s" in text and not re.sub(r"%s|\W|_", "", text):
        return True
    return "{" in text and len(re.sub(r"\$?\{[A-Za-z_][^{}]{0,200}\}|\W|_", "", text)) < _FEW


def is_secret_word(name: str) -> bool:
    """Whether the last word of a name is one such as "password" or "token"."""
    return bool(PATTERNS["secret_word"].search(name))


def is_mixed(text: str) -> bool:
    """Whether a text has both letters and digits."""
    return any(map(str.isdigit, text)) and any(map(str.isalpha, text))


def is_varied(text: str, *, mixed: bool = True) -> bool:
    """Whether a text is not words and numbers, as ``embeddings2024large`` is; if `mixed`, digits in it suffice."""
    return (mixed and is_mixed(text)) or _has_short_runs(text, _LONGEST_RUNS[0])


def _has_short_runs(text: str, longest: int) -> bool:
    return len(_RUN.findall(text)) * longest > len(text)


def is_random(text: str) -> bool:
    """Whether a text is neither a word nor words: it is long, or has letters and digits."""
    if (
        not text.isascii()
        or " " in text
        or PATTERNS["snake_case"].fullmatch(text)
        or PATTERNS["camel_case"].fullmatch(text)
    ):
        return False
    parts = re.split(r"[_.\-/]", text)
    return max(map(len, parts)) >= _LONG or (len(text) >= _MIXED and any(map(is_mixed, parts)))


def is_key(text: str) -> bool:
    """Whether a text is a UUID or a hash, or has 16 random letters and digits in a row, as keys have."""
    if PATTERNS["hash"].fullmatch(text):
        return is_mixed(text)
    if not PATTERNS["key"].fullmatch(text):
        return False

    def is_varied(part: str, longest: int) -> bool:
        return _has_short_runs(part, longest if is_mixed(part) else _LONGEST_RUNS[2])

    in_text, in_path, _ = _LONGEST_RUNS
    if len(text) >= _LONG_WITH_SIGNS and not (text.islower() or text.isupper()) and is_varied(text, in_path):
        return True
    longest = in_path if "/" in text else in_text
    return any(len(part) >= _LONG and is_varied(part, longest) for part in re.split(r"[_.-]", text))


def is_text(text: str) -> bool:
    """Whether a text is not a placeholder, a number or a path."""
    return not (is_placeholder(text) or PATTERNS["number"].fullmatch(text) or PATTERNS["path"].fullmatch(text))


def is_secret_literal(text: str, named: Named, *, quoted: bool) -> bool:
    """Whether the value of `named` is a credential."""
    if is_placeholder(text) or PATTERNS["path"].fullmatch(text):
        return False
    strength = named.strength
    if PATTERNS["number"].fullmatch(text):
        return strength is Strength.SURE and text.isdigit() and len(text) >= _DIGITS_OF_PASSWORD
    if strength is Strength.KEY:
        return is_key(text)
    if strength is Strength.SHORT:
        tight = named.form in {Form.TIGHT, Form.PLAIN} or (named.form is Form.COLON and named.name.lower() == "pw")
        return _is_short_password(text) and (quoted or is_random(text) or tight)
    if strength is Strength.WORD and (PATTERNS["special_word"].search(text) or not is_random(text)):
        return False
    if quoted:
        return not (strength is Strength.LIKELY and PATTERNS["special_word"].fullmatch(text))
    return not _is_code(text, named)


def _is_short_password(text: str) -> bool:
    if (
        PATTERNS["snake_case"].fullmatch(text)
        or PATTERNS["call"].match(text)
        or text[0] in "([{<"
        or " " in text
        or "/" in text
    ):
        return False
    return len(text) >= _SHORT_MIXED and is_mixed(text)


def _is_code(text: str, named: Named) -> bool:
    """Whether a value without quotes is code or a word of a sentence."""
    if text[0] in "([{<" or PATTERNS["call"].match(text):
        return True
    if named.form is Form.PLAIN or text.startswith(HIDDEN):
        return bool(PATTERNS["of_object"].match(text))
    if PATTERNS["name"].fullmatch(text):
        return _is_code_name(text, named)
    if named.form in {Form.CALL, Form.CODE, Form.SPACED} and PATTERNS["operation"].fullmatch(text):
        return len(text) < _LONG or not is_random(text)
    if named.form in {Form.PROSE, Form.CODE} or (named.form is Form.COLON and named.strength is Strength.LIKELY):
        return bool(PATTERNS["words"].fullmatch(text)) and (len(text) < _LONG or "-" in text)
    return False


def _is_code_name(text: str, named: Named) -> bool:
    parts = text.split(".")
    if is_secret_word(text) or text.lower() == named.name.lower() or bool(PATTERNS["of_object"].match(text)):
        return not any(is_random(part) and is_mixed(part) for part in parts)
    if named.form in {Form.CALL, Form.CODE, Form.PROSE}:
        return not is_random(text)
    if named.form is Form.SPACED:
        short = named.strength is Strength.SURE and len(text) >= _SHORT_MIXED and is_mixed(text) and "." not in text
        return not is_random(text) and not (short and not PATTERNS["snake_case"].fullmatch(text))
    if "." in text:
        is_attribute = named.form is Form.TIGHT or parts[-1][:1].isupper()
        return is_attribute and not any(is_mixed(part) or len(part) >= _LONG for part in parts)
    camel = named.form is Form.COLON and bool(PATTERNS["camel_case"].fullmatch(text))
    return camel and (named.strength is Strength.LIKELY or is_secret_word(text))
