"""Whether the value of a named credential is a literal, or code, a placeholder or an ordinary word."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["Form", "Named", "Strength", "is_key", "is_placeholder", "is_random", "is_secret_literal", "is_secret_word"]


class Strength(Enum):
    """How surely the value of a name is a credential."""

    SURE = auto()
    """Passwords, secrets and keys."""
    LIKELY = auto()
    """Tokens and the like: the words also have other meanings."""
    WORD = auto()
    """Tokens of a text, and names of which only a random value is a credential."""
    SHORT = auto()
    """``pass`` and ``pw`` alone, which also name other things: only a value with letters and digits is a password."""
    KEY = auto()
    """Names that often have other values: only a value of many random characters is a credential."""


class Form(Enum):
    """How a value without quotes follows its name."""

    PLAIN = auto()
    """``PASSWORD=x``, ``--password x``, ``&token=x``: any text is a literal."""
    TIGHT = auto()
    """``password=x``"""
    SPACED = auto()
    """``password = x``, as in code and INI files."""
    CALL = auto()
    """``connect(password=x)``"""
    COLON = auto()
    """``password: x``, alone on its line, as in YAML"""
    PROSE = auto()
    """``password: x and more``, ``unexpected token: x``"""
    CODE = auto()
    """``if password: x``, ``rows[token: x]``, ``def f(password: x)``"""


@dataclass(frozen=True, slots=True)
class Named:
    """The name of a value, as it stands in a text."""

    name: str
    strength: Strength
    form: Form


_CONSTANT = re.compile(
    r"(?:none|null|nil|nan|undefined|unset|true|false|yes|no|on|off|n/a|empty|missing|required|optional|redacted|hidden"
    r"|masked|removed|filtered|secret-?str|str|string|int|integer|float|number|bool|boolean|bytes|bytearray|dict|list"
    r"|tuple|set|object|any|type|callable|int64|int32|float32|long|lineno)[.!?]?|\W{1,3}|[*xX.#_\u2022\u2026-]+",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"""\\?\$\{?[A-Za-z_][\w.:-]*\}?      # $NAME, ${NAME}
      | \$\(.{0,300}                             # $(command)
      | \$?\{\{?[^{}]{0,200}\}?\}          # {name}, {{ name }}, ${{ secrets.NAME }}
      | %[-+ #0-9.]{0,6}[sdrxfgi]          # %s
      | %\(\w{1,60}\)[sdrxfgi]
      | %[A-Za-z_]\w{0,60}%
      | :[a-z_]{1,40}                      # of SQL
      | (?:<[^<>]{0,200}>|\[[^\[\]]{0,100}\])
    """,
    re.VERBOSE,
)
_NUMBER = re.compile(
    r"[-+]?(?:\d{1,9}|\d{0,9}\.\d{0,9}|\d[\d_]{0,8})(?:e[-+]?\d{1,3})?(?:[a-z%]{1,3}(?:/[a-z]{1,5})?)?|0x[0-9a-f]{1,12}"
)
_DIGITS_OF_PASSWORD = 6
_PATH = re.compile(
    r"(?:~|\.{1,2}|[A-Z]:)?[/\\](?:home|root|etc|var|run|tmp|usr|mnt|opt|data|workspace|srv|app|secrets|proc|dev|lib|Users|\.)"
    r"(?:[/\\][\w./\\-]*)?|(?:~|\.{1,2})/[\w./-]{1,300}"
)
_SPECIAL_WORD = re.compile(r"</?[^<>]{0,40}>|\[[^\[\]]{0,40}\]|\{[^{}]{0,40}\}")
"""Special tokens of tokenizers: ``<pad>``, ``[CLS]``."""

_SECRET_WORD = re.compile(
    r"(?:(?:^|[_.])(?i:pass(?:word|wd|phrase|code)?|pwd?|secret|token|tok|key|credential|cred|auth|jwt|sig|signature|cookie|str)"
    r"|[a-z0-9](?:Pass(?:word|wd|phrase|code)?|Pwd|Secret|Token|Key|Credential|Auth|Jwt|Signature|Cookie|Str))[sS]?\d{0,2}$"
)
_CALL = re.compile(r"[A-Za-z_][\w.]{0,120}[(\[]")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_OPERATION = re.compile(
    r"(?:[A-Za-z_][A-Za-z_.]{0,60}|\d{1,6})(?:[-+*/%|&@](?:[A-Za-z_][A-Za-z_.]{0,60}|\d{1,6})){1,8}"
)
_WORDS = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*[.!?]?")
_CAMEL_CASE = re.compile(r"_?(?:[A-Z]{1,8}[a-z]{2,}\d?){1,8}")
_SNAKE_CASE = re.compile(r"_?(?:[a-z]{2,}\d{0,2})(?:_[a-z]+\d{0,2})+|[A-Z]{2,}\d{0,2}(?:_[A-Z]+\d{0,2})+")
_HEX = re.compile(
    r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}|(?:local-)?(?:[0-9a-f]{32,128}|[0-9A-F]{32,128})"
)
"""UUIDs, and hexadecimal digits as of a hash."""
_KEY = re.compile(r"[0-9A-Za-z_.+/=-]{16,500}")
_RUN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_RUNS = 5
_RUNS_OF_PATH = 4
_RUNS_OF_LETTERS = 3
"""The runs of letters or digits in random texts are shorter than this on average, in words and paths longer."""
_LONG_WITH_SIGNS = 32
_FEW = 3
_LONG = 16
_MIXED = 8
_SHORT_MIXED = 6
_OF_NAMES = (
    "self.",
    "cls.",
    "args.",
    "cfg.",
    "config.",
    "conf.",
    "opts.",
    "options.",
    "settings.",
    "os.",
    "env.",
    "this.",
)


def is_placeholder(text: str) -> bool:
    """Whether a text stands for a value that is not there: ``***``, ``None``, ``${NAME}``, ``%s``."""
    if not text or _CONSTANT.fullmatch(text) or _PLACEHOLDER.fullmatch(text):
        return True
    # placeholders alone, such as those of an f-string
    if "%s" in text and not re.sub(r"%s|\W|_", "", text):
        return True
    return "{" in text and len(re.sub(r"\$?\{[A-Za-z_][^{}]{0,200}\}|\W|_", "", text)) < _FEW


def is_secret_word(name: str) -> bool:
    """Whether the last word of a name is one such as "password" or "token"."""
    return bool(_SECRET_WORD.search(name))


def is_random(text: str) -> bool:
    """Whether a text is neither a word nor words: it is long, or has letters and digits."""
    if not text.isascii() or " " in text:
        return False
    if _SNAKE_CASE.fullmatch(text) or _CAMEL_CASE.fullmatch(text):
        return False
    parts = re.split(r"[_.\-/]", text)
    if max(map(len, parts)) >= _LONG:
        return True
    return len(text) >= _MIXED and any(_mixed(part) for part in parts)


def is_key(text: str) -> bool:
    """Whether a text is a UUID or a hash, or has 16 random letters and digits in a row, as keys have."""
    if _HEX.fullmatch(text):
        return _mixed(text)
    if not _KEY.fullmatch(text):
        return False
    if len(text) >= _LONG_WITH_SIGNS and not (text.islower() or text.isupper()) and _is_varied(text, _RUNS_OF_PATH):
        return True
    longest = _RUNS_OF_PATH if "/" in text else _RUNS
    return any(len(part) >= _LONG and _is_varied(part, longest) for part in re.split(r"[_.-]", text))


def _is_varied(text: str, longest: int) -> bool:
    return len(_RUN.findall(text)) * (longest if _mixed(text) else _RUNS_OF_LETTERS) > len(text)


def is_secret_literal(text: str, named: Named, *, quoted: bool) -> bool:
    """Whether the value of `named` is a credential."""
    if is_placeholder(text) or _PATH.fullmatch(text):
        return False
    if _NUMBER.fullmatch(text):
        return named.strength is Strength.SURE and text.isdigit() and len(text) >= _DIGITS_OF_PASSWORD
    if named.strength is Strength.KEY:
        return is_key(text)
    if named.strength is Strength.SHORT:
        tight = named.form in {Form.TIGHT, Form.PLAIN} or (named.form is Form.COLON and named.name.lower() == "pw")
        return _is_short_password(text) and (quoted or is_random(text) or tight)
    if named.strength is Strength.WORD:
        return not _SPECIAL_WORD.search(text) and is_random(text) and not (not quoted and _is_code(text, named))
    if quoted:
        return not (named.strength is Strength.LIKELY and _SPECIAL_WORD.fullmatch(text))
    return not _is_code(text, named)


def _is_short_password(text: str) -> bool:
    if _SNAKE_CASE.fullmatch(text) or _CALL.match(text) or text[0] in "([{<" or " " in text or "/" in text:
        return False
    return len(text) >= _SHORT_MIXED and _mixed(text)


def _is_code(text: str, named: Named) -> bool:
    """Whether a value without quotes is code or a word of a sentence."""
    if text[0] in "([{<" or _CALL.match(text) or text.startswith("***"):
        return not text.startswith("***")
    if named.form is Form.PLAIN:
        return text.startswith(_OF_NAMES)
    if _NAME.fullmatch(text):
        return _is_code_name(text, named)
    if named.form in {Form.CALL, Form.CODE, Form.SPACED} and _OPERATION.fullmatch(text):
        return len(text) < _LONG or not is_random(text)
    if named.form in {Form.PROSE, Form.CODE} or (named.form is Form.COLON and named.strength is Strength.LIKELY):
        return bool(_WORDS.fullmatch(text)) and (len(text) < _LONG or "-" in text)
    return False


def _is_code_name(text: str, named: Named) -> bool:
    if is_secret_word(text) or text.lower() == named.name.lower() or text.startswith(_OF_NAMES):
        return not any(is_random(part) and _mixed(part) for part in text.split("."))
    if named.form in {Form.CALL, Form.CODE, Form.PROSE}:
        return not is_random(text)
    if named.form is Form.SPACED:
        short = named.strength is Strength.SURE and len(text) >= _SHORT_MIXED and _mixed(text) and "." not in text
        return not is_random(text) and not (short and not _SNAKE_CASE.fullmatch(text))
    if "." in text:
        return not any(_mixed(part) or len(part) >= _LONG for part in text.split(".")) and (
            named.form is Form.TIGHT or text.rpartition(".")[2][:1].isupper()
        )
    if named.form is Form.COLON:
        return bool(_CAMEL_CASE.fullmatch(text)) and (named.strength is Strength.LIKELY or is_secret_word(text))
    return False


def _mixed(text: str) -> bool:
    return any(map(str.isdigit, text)) and any(map(str.isalpha, text))
