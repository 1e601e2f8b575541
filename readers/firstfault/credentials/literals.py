"""Whether the value of a named credential is a literal, or code,
a placeholder or an ordinary word.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.toml import parse_toml

HIDDEN = "***"
TABLE: dict[str, Any] = parse_toml(
    Path(__file__).with_name("credentials.toml").read_text(encoding="utf-8")
)
_NUMBER = LazyPattern(r"""
  [-+]?(?:\d{1,9}|\d{0,9}\.\d{0,9}|\d[\d_]{0,8})(?:e[-+]?\d{1,3})?(?:[a-z%]{1,3}(?:/[a-z]{1,5})?)?|0x[0-9a-f]{1,12}
  |\d{1,9}(?:\.\d{1,9}){2,20}
""")
_FILE_PATH = LazyPattern(r"""
  (?:~|\.{1,2}|[A-Z]:)?[/\\]
    (?:home|root|etc|var|run|tmp|usr|mnt|opt|data|workspace|srv|app|secrets|proc|dev|lib|Users|\.)(?:[/\\][\w./\\-]*)?
  |(?:~|\.{1,2})/[\w./-]{1,300}
""")
_OBJECT_ATTRIBUTE = LazyPattern(
    r"(?:self|cls|args|cfg|config|conf|opts|options|settings|os|env|this)\."
)
_CALL = LazyPattern(r"[A-Za-z_][\w.]{0,120}[(\[]")
_CAMEL_CASE = LazyPattern(r"_?(?:[A-Z]{1,8}[a-z]{2,}\d?){1,8}")
_SNAKE_CASE = LazyPattern(
    r"_?(?:[a-z]{2,}\d{0,2})(?:_[a-z]+\d{0,2})+|[A-Z]{2,}\d{0,2}(?:_[A-Z]+\d{0,2})+"
)


class Strength(Enum):
    """How surely the value of a name is a credential: always, mostly, or if it has a property."""

    SURE = auto()  # passwords, secrets and keys
    LIKELY = auto()  # tokens and the like: the words also have other meanings
    IF_RANDOM = auto()  # tokens of a text, and names with random credentials only
    IF_MIXED = auto()  # `pass` and `pw` alone: only a value with letters and digits is a password
    IF_KEY = auto()  # names that often have other values: only a long random text is a credential


class ValueSyntax(Enum):
    """How a value without quotes follows its name."""

    PLAIN = auto()  # PASSWORD=x, --password x, &token=x: any text is a literal
    TIGHT = auto()  # password=x
    SPACED = auto()  # password = x, as in code and INI files
    CALL = auto()  # connect(password=x)
    COLON = auto()  # password: x, alone on its line, as in YAML
    PROSE = auto()  # password: x and more; unexpected token: x
    CODE = auto()  # if password: x; rows[token: x]; def f(password: x)


class NamedValue(NamedTuple):
    """What `is_secret_literal` needs about a value's name."""

    name: str
    strength: Strength
    syntax: ValueSyntax


MAX_MEAN_RUN_LENGTHS = (5, 4, 3)
"""Longest mean length of runs of letters or digits in a random text;
smaller for paths and for letters alone.
"""
MIN_PASSWORD_DIGITS = 6
"""Digits. A shorter number is more often a setting than a password."""
MIN_KEY_LENGTH_WITH_SIGNS = 32
MIN_LITERAL_CHARACTERS = 3
MIN_RANDOM_LENGTH = 16
MIN_MIXED_LENGTH = 8
MIN_SHORT_PASSWORD_LENGTH = 6
_CONSTANT_WORD = LazyPattern(r"""
  (?i:none|null|nil|nan|undefined|unset|true|false|yes|no|on|off|n/a|empty|missing|required|optional|redacted
    |hidden|masked|removed|filtered|secret-?str|str|string|int|integer|float|number|bool|boolean|bytes|bytearray|dict|list
    |tuple|set|object|any|type|callable|int64|int32|float32|long|lineno)[.!?]?
  |\W{1,3}|[*xX.\#_•…-]+
""")
_PLACEHOLDER = LazyPattern(r"""
  \\?\$\{?[A-Za-z_][\w.:-]*\}?             # $NAME, ${NAME}
  |\$\(.{0,300}                            # $(command)
  |\$?\{\{?[^{}]{0,200}\}?\}               # {name}, {{ name }}, ${{ secrets.NAME }}
  |%[-+ \#0-9.]{0,6}[sdrxfgi]|%\(\w{1,60}\)[sdrxfgi]|%[A-Za-z_]\w{0,60}%
  |:[a-z_]{1,40}                           # of SQL
  |<[^<>]{0,200}>|\[[^\[\]]{0,100}\]
""")


def is_placeholder(text: str) -> bool:
    """Whether a text is a placeholder: ``***``, ``None``, ``${NAME}``, ``%s``."""
    if not text or _CONSTANT_WORD.fullmatch(text) or _PLACEHOLDER.fullmatch(text):
        return True
    # only placeholders, as in f"{user}:{password}"
    if "%s" in text and not re.sub(r"%s|\W|_", "", text):
        return True
    # a template with hardly any fixed text: "${USER}:${PASSWORD}"
    return (
        "{" in text
        and len(re.sub(r"\$?\{[A-Za-z_][^{}]{0,200}\}|\W|_", "", text)) < MIN_LITERAL_CHARACTERS
    )


# The end of a variable's name if its value is a credential
_SECRET_WORD = LazyPattern(r"""
  (?:(?:^|[_.])(?i:pass(?:word|wd|phrase|code)?|pwd?|secret|token|tok|key|credential|cred|auth|jwt|sig|signature|cookie|str)
  |[a-z0-9](?:Pass(?:word|wd|phrase|code)?|Pwd|Secret|Token|Key|Credential|Auth|Jwt|Signature|Cookie|Str))[sS]?\d{0,2}$
""")


def is_secret_word(name: str) -> bool:
    """Whether a name ends with a word such as "password" or "token"."""
    return bool(_SECRET_WORD.search(name))


def is_mixed(text: str) -> bool:
    """Whether a text has both letters and digits."""
    return any(map(str.isdigit, text)) and any(map(str.isalpha, text))


def is_varied(text: str, *, mixed: bool = True) -> bool:
    """Whether a text is more than words and numbers, such as ``embeddings2024large``. With `mixed`,
    letters mixed with digits suffice.
    """
    return (mixed and is_mixed(text)) or _has_short_runs(text, MAX_MEAN_RUN_LENGTHS[0])


# If most runs of these are short, a text is random.
_LETTER_OR_DIGIT_RUN = LazyPattern(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")


def _has_short_runs(text: str, longest: int) -> bool:
    return len(_LETTER_OR_DIGIT_RUN.findall(text)) * longest > len(text)


def is_random(text: str) -> bool:
    """Whether a text is neither a word nor words: it is long, or has letters and digits."""
    is_name = _SNAKE_CASE.fullmatch(text) or _CAMEL_CASE.fullmatch(text)
    if is_name or not text.isascii() or " " in text:
        return False
    parts = re.split(r"[_.\-/]", text)
    return max(map(len, parts)) >= MIN_RANDOM_LENGTH or (
        len(text) >= MIN_MIXED_LENGTH and any(map(is_mixed, parts))
    )


# UUIDs, and hexadecimal digits such as a hash, are credentials if the name is.
_HASH = LazyPattern(
    r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}|(?:local-)?(?:[0-9a-f]{32,128}|[0-9A-F]{32,128})"
)
_KEY = LazyPattern(r"[0-9A-Za-z_.+/=-]{16,500}")


def is_key(text: str) -> bool:
    """Whether a text is a UUID or a hash, or has 16 random letters and digits in a row,
    as keys have.
    """
    if _HASH.fullmatch(text):
        # 32 decimal digits alone are a number
        return is_mixed(text)
    if not _KEY.fullmatch(text):
        return False

    def is_varied(part: str, longest: int) -> bool:
        return _has_short_runs(part, longest if is_mixed(part) else MAX_MEAN_RUN_LENGTHS[2])

    in_text, in_path, _ = MAX_MEAN_RUN_LENGTHS
    if (
        len(text) >= MIN_KEY_LENGTH_WITH_SIGNS
        and not (text.islower() or text.isupper())
        and is_varied(text, in_path)
    ):
        return True
    longest = in_path if "/" in text else in_text
    return any(
        len(part) >= MIN_RANDOM_LENGTH and is_varied(part, longest)
        for part in re.split(r"[_.-]", text)
    )


def is_text(text: str) -> bool:
    """Whether a text isn't a placeholder, a number or a path."""
    return not (is_placeholder(text) or _NUMBER.fullmatch(text) or _FILE_PATH.fullmatch(text))


# A special word of a tokenizer: <pad>, [CLS]
_SPECIAL_WORD = LazyPattern(r"</?[^<>]{0,40}>|\[[^\[\]]{0,40}\]|\{[^{}]{0,40}\}")


def is_secret_literal(text: str, named_value: NamedValue, *, quoted: bool) -> bool:
    """Whether the value of `named_value` is a credential."""
    if is_placeholder(text) or _FILE_PATH.fullmatch(text):
        return False
    strength = named_value.strength
    if _NUMBER.fullmatch(text):
        # numbers are mostly counts: "password=48151623" is a credential, "token: 48151623" isn't
        return strength is Strength.SURE and text.isdigit() and len(text) >= MIN_PASSWORD_DIGITS
    if strength is Strength.IF_KEY:
        return is_key(text)
    if strength is Strength.IF_MIXED:
        is_pw = named_value.syntax is ValueSyntax.COLON and named_value.name.lower() == "pw"
        is_tight = named_value.syntax in {ValueSyntax.TIGHT, ValueSyntax.PLAIN}
        return _is_short_password(text) and (quoted or is_random(text) or is_tight or is_pw)
    if strength is Strength.IF_RANDOM and (_SPECIAL_WORD.search(text) or not is_random(text)):
        return False
    # a quoted text is never the name of a variable; <pad> and [CLS] are a tokenizer's tokens
    if quoted:
        return not (strength is Strength.LIKELY and _SPECIAL_WORD.fullmatch(text))
    return not _is_code_or_word(text, named_value)


def _is_short_password(text: str) -> bool:
    is_code = _SNAKE_CASE.fullmatch(text) or _CALL.match(text) or text[0] in "([{<"
    if is_code or " " in text or "/" in text:
        return False
    return len(text) >= MIN_SHORT_PASSWORD_LENGTH and is_mixed(text)


_DOTTED_NAME = LazyPattern(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_OPERATION = LazyPattern(
    r"(?:[A-Za-z_][A-Za-z_.]{0,60}|\d{1,6})(?:[-+*/%|&@](?:[A-Za-z_][A-Za-z_.]{0,60}|\d{1,6})){1,8}"
)
_HYPHENATED_WORDS = LazyPattern(r"[A-Za-z]+(?:-[A-Za-z]+)*[.!?]?")


def _is_code_or_word(text: str, named_value: NamedValue) -> bool:
    """Whether a value without quotes is code or a word of a sentence."""
    if text[0] in "([{<" or _CALL.match(text):
        return True
    # on a command line or in a URL every text is a literal, except printed code: --token self.token
    if named_value.syntax is ValueSyntax.PLAIN or text.startswith(HIDDEN):
        return bool(_OBJECT_ATTRIBUTE.match(text))
    if _DOTTED_NAME.fullmatch(text):
        return _is_code_name(text, named_value)
    syntax = named_value.syntax
    is_in_code = syntax in {ValueSyntax.CALL, ValueSyntax.CODE, ValueSyntax.SPACED}
    if is_in_code and _OPERATION.fullmatch(text):
        # "a + b" is an expression, but base64 has + and /, too
        return len(text) < MIN_RANDOM_LENGTH or not is_random(text)
    is_after_colon = syntax is ValueSyntax.COLON and named_value.strength is Strength.LIKELY
    if is_after_colon or syntax in {ValueSyntax.PROSE, ValueSyntax.CODE}:
        return bool(_HYPHENATED_WORDS.fullmatch(text)) and (
            len(text) < MIN_RANDOM_LENGTH or "-" in text
        )
    return False


def _is_code_name(text: str, named_value: NamedValue) -> bool:
    parts = text.split(".")
    if (
        is_secret_word(text)
        or text.lower() == named_value.name.lower()
        or bool(_OBJECT_ATTRIBUTE.match(text))
    ):
        return not any(is_random(part) and is_mixed(part) for part in parts)
    if named_value.syntax in {ValueSyntax.CALL, ValueSyntax.CODE, ValueSyntax.PROSE}:
        return not is_random(text)
    if named_value.syntax is ValueSyntax.SPACED:
        is_short = len(text) >= MIN_SHORT_PASSWORD_LENGTH and is_mixed(text) and "." not in text
        is_password = is_short and not _SNAKE_CASE.fullmatch(text)
        return not is_random(text) and not (is_password and named_value.strength is Strength.SURE)
    if "." in text:
        is_attribute = named_value.syntax is ValueSyntax.TIGHT or parts[-1][:1].isupper()
        return is_attribute and not any(
            is_mixed(part) or len(part) >= MIN_RANDOM_LENGTH for part in parts
        )
    camel = named_value.syntax is ValueSyntax.COLON and bool(_CAMEL_CASE.fullmatch(text))
    return camel and (named_value.strength is Strength.LIKELY or is_secret_word(text))
