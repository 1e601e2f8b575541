"""Rule 2, the name: finds names of credentials that a value may follow,
such as ``password=`` and ``--token``.

A name ends with one of the table's words; the text around it decides how surely its value is a
credential.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from firstfault.credentials.literals import HIDDEN, TABLE, Strength, ValueSyntax
from firstfault.utils.lazy_pattern import LazyPattern

NAMES_TABLE: dict[str, Any] = TABLE["names"]
CREDENTIAL_WORD = re.compile(
    "|".join(f"(?P<{kind}>{NAMES_TABLE[kind]})" for kind in ("sure", "likely", "key", "weak"))
)
KEY_OWNER = re.compile(rf"(?:{NAMES_TABLE['key_of']})[_\ .-]?$", re.VERBOSE)
MAX_KEY_OWNER_LENGTH = 16
KNOWN_SUFFIXES = frozenset(NAMES_TABLE["suffixes"].split())
HARMLESS_SUFFIX = re.compile(
    rf"_(?:{NAMES_TABLE['other_suffixes']})(?:_|$)", re.IGNORECASE | re.VERBOSE
)
CHARACTERS_READ_BEFORE = 300
"""Limits the work for each name: the time must stay linear in the text."""
MAX_NAME_LENGTH = 80
NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-$"
SHORT_WORDS = {"pass", "pw", "pwd"}
# these also end ordinary words, such as "bypass", "monkey" and "decode"
WORDS_NEEDING_BOUNDARY = {
    *SHORT_WORDS,
    *("auth", "sig", "creds", "cred", "jwt", "code", "key", "bearer", "signature", "cookie"),
}
OWNER_PREFIX = re.compile(
    rf"(?:^|[^a-z])(?:{NAMES_TABLE['owners']})_?$", re.IGNORECASE | re.VERBOSE
)
TEXT_PROCESSING_PREFIX = re.compile(
    rf"(?:^|[_.-])(?:{NAMES_TABLE['of_texts']})[_.-]?$", re.IGNORECASE | re.VERBOSE
)
ADJECTIVE_BEFORE_NAME = re.compile(
    rf"\b(?:{NAMES_TABLE['adjectives']})[ \t]{{1,4}}$", re.IGNORECASE | re.VERBOSE
)
ENDINGS_OF_OTHER_KEYS = tuple(f"{word}_KEY" for word in NAMES_TABLE["other_keys"].split())
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z_.]*")
CHARACTERS_OF_LINE_REST = 100
CHARACTERS_SEARCHED_FOR_USERNAME = 120
_USERNAME = LazyPattern(
    r"""(?i)(?<![A-Za-z])(?:user|usr|uid|login|e?mail)(?:_?(?:name|id))?["']?[ \t]{0,4}[:=]"""
)

# A keyword of Python before a name.
PYTHON_KEYWORD = LazyPattern(r"""
  (?:^|[^\w.])
  (?:if|elif|while|lambda|not|and|or|in|is|for|case|return|else|except|async|await|del)[ \t]{1,4}$|\[$
""")


@dataclass
class NameInText:
    """The name of a credential in a text, with the text before and after it."""

    text: str
    word_start: int
    """Index of the credential word in `text`."""
    word_kind: str
    """Group of the table that has the word: "sure", "likely" or "weak"."""
    word: str
    name: str
    before: str
    """The line up to the name, at most `CHARACTERS_READ_BEFORE` of it."""
    sign: str
    is_quoted: bool
    has_blank_before_sign: bool
    suffix: str
    """The rest of the name after the word, such as ``_PROD``."""
    value_start: int
    """Index of the value in `text`."""

    @property
    def is_flag(self) -> bool:
        """Whether the name is a command-line option: ``--password``."""
        return self.name.startswith("-")

    @property
    def is_query_parameter(self) -> bool:
        """Whether the name is a URL parameter: ``?token=x``."""
        return self.before.endswith(("?", "&", "&amp;")) or self.sign.startswith("%")

    @cached_property
    def is_in_call(self) -> bool:
        """Whether a call is open before the name on its line: ``connect(host, password=x``."""
        opened = self.before.rfind("(")
        caller = self.before[max(opened - 1, 0) : max(opened, 0)]
        return (caller.isalnum() or caller in {"_", ")", "]"}) and self.before.count(
            "("
        ) > self.before.count(")")

    @cached_property
    def strength(self) -> Strength:
        """How surely the value is a credential."""
        if self.word_kind == "sure" and _is_known_suffix(self.suffix):
            return Strength.SURE
        if self.word_kind == "sure" and self.suffix.lower() != "_id":
            return Strength.IF_RANDOM
        if not _is_known_suffix(self.suffix):
            return Strength.IF_KEY
        if self.word_kind == "weak":
            return (
                Strength.LIKELY
                if self.is_query_parameter and self.word not in {"key", "code"}
                else Strength.IF_RANDOM
            )
        prefix = self.name[: -len(self.word)]
        if self.word == "pw" or (self.word == "pass" and not prefix.strip("-")):
            begin = max(self.value_start - CHARACTERS_SEARCHED_FOR_USERNAME, 0)
            surroundings = self.text[begin : self.value_start + CHARACTERS_SEARCHED_FOR_USERNAME]
            is_sure = (
                OWNER_PREFIX.search(prefix)
                or _USERNAME.search(surroundings)
                or (self.name.isupper() and prefix)
            )
            return Strength.LIKELY if is_sure else Strength.IF_MIXED
        if self.word == "tokens" or TEXT_PROCESSING_PREFIX.search(prefix) or self.suffix.islower():
            return Strength.IF_RANDOM
        if self.sign in {"==", "!="} or (
            self.sign == ":" and ADJECTIVE_BEFORE_NAME.search(self.before)
        ):
            return Strength.IF_RANDOM
        return Strength.LIKELY

    def get_syntax(self, end: int) -> ValueSyntax:
        """Return the syntax of an unquoted value that ends at `end`."""
        text_after = self.text[end : end + 3]
        is_alone_on_line = not self.before.strip()
        if self.is_flag or self.is_query_parameter or self.sign == "value":
            return ValueSyntax.PLAIN
        if self.sign == ":":
            return self._get_syntax_after_colon(end)
        if self.is_in_call or (
            is_alone_on_line
            and (
                text_after[:1] == ")" or (text_after[:1] == "," and not text_after[1:].strip(" \n"))
            )
        ):
            return ValueSyntax.CALL
        if self.has_blank_before_sign:
            return ValueSyntax.SPACED
        return ValueSyntax.PLAIN if self.name.isupper() else ValueSyntax.TIGHT

    def _get_syntax_after_colon(self, end: int) -> ValueSyntax:
        if self.is_in_call or PYTHON_KEYWORD.search(self.before):
            return ValueSyntax.CODE
        rest_of_line = self.text[end : end + CHARACTERS_OF_LINE_REST].partition("\n")[0].strip()
        before = self.before.rstrip()
        is_only_likely = self.strength is not Strength.SURE
        is_in_braces = (
            before.endswith(("{", ",")) if not self.is_quoted else rest_of_line[:1] in {",", "}"}
        )
        if (
            is_in_braces
            and (is_only_likely or self.is_quoted)
            and IDENTIFIER.fullmatch(self.text, self.value_start, end)
        ):
            return ValueSyntax.CODE
        is_apart = (
            not self.text[self.value_start - 1 : self.value_start].isspace()
            and "-" not in self.name
        )
        if (rest_of_line and rest_of_line[0] not in "#,;}])\"'`|\\") or (
            is_only_likely and (is_apart or before[-1:] not in "{,-\"'`|:>")
        ):
            return ValueSyntax.PROSE
        return ValueSyntax.COLON


def find_credential_names(text: str) -> Iterator[NameInText]:
    """Yield the names of credentials in a text that a value may follow, in order."""
    lowered = text.lower()
    # "İ".lower() has two characters, which would shift every index
    if len(lowered) != len(text):
        lowered = re.sub("[A-Z]+", lambda letters: letters[0].lower(), text)
    starts = {
        needle_match.start()
        for needle in NAMES_TABLE["cores"]
        for needle_match in re.finditer(needle, lowered)
    }
    last_name_end = 0  # words may overlap: "secretkey" is one name
    for needle_start in sorted(starts):
        word_match = (
            CREDENTIAL_WORD.match(lowered, needle_start) if needle_start >= last_name_end else None
        )
        # the rest is a longer word
        if word_match is None or (
            word_match.end() < len(text) and text[word_match.end()].isalpha()
        ):
            continue
        start = word_match.start()
        word_kind = word_match.lastgroup or ""
        if word_kind == "key":
            # "api_key" has a credential; a "key" alone is mostly the key of a mapping
            owner = KEY_OWNER.search(lowered, max(start - MAX_KEY_OWNER_LENGTH, 0), start)
            start -= len(owner[0]) if owner else 0
            word_kind = "sure" if owner else "weak"
        last_name_end = word_match.end()
        word = lowered[start:last_name_end].strip("_")
        follows_client = lowered.startswith("client", start - 7)
        if word_kind == "weak" and word.startswith("key") and word != "key" and not follows_client:
            continue
        credential = _parse_name(
            text,
            start,
            last_name_end,
            word_kind if "data" not in word else "sure",
            word,
        )
        if credential is not None:
            yield credential


_NAME_SUFFIX = LazyPattern(r"(?:_[A-Za-z0-9]{1,24}){1,4}(?![A-Za-z0-9_])")
_NAME_END = LazyPattern(
    r"""(?:[_-]?\d{1,2})?(?![A-Za-z0-9_])(?P<close>\\{0,7}["'`])?\]?(?:[ ]provided)?"""
)
_SEPARATOR = LazyPattern(r"""
  (?P<named>[,\s]{1,40}(?:\\{0,7}["'])?value(?:\\{0,7}["'])?[ \t]{0,8}[:=](?!=))
  |[ \t]{0,4}(?P<typed>:[ \t]{0,4}[A-Za-z_][\w.\[\],| \t]{0,80}=(?=[ \t]{0,4}[rbuf]{0,2}["']))
  |[ \t]{0,8}(?P<sign>=>|==|!=|:=|=|:(?!:)|%3[Dd]|%3[Aa]|,)
  |(?P<blank>[ \t]{1,8})
""")
_GAP_BEFORE_VALUE = LazyPattern(r"""[ \t]{0,40}(?:\r?\n[ \t]{0,80}(?=[rbuf]{0,2}\\{0,7}["']))?""")

# Names of options that refer to a secret by its name.
_SECRET_REFERENCE = LazyPattern(r"(?i)(?:existing|pull_?)secrets?$")


def _parse_name(
    text: str, start: int, word_end: int, word_kind: str, word: str
) -> NameInText | None:
    """Return the name that ends with the word at `start`; None if it isn't a name,
    or no value follows.
    """
    suffix_match = _NAME_SUFFIX.match(text, word_end)
    # an added number is read with any name's end
    suffix = "" if suffix_match is None or suffix_match[0][1:].isdigit() else suffix_match[0]
    end_match = _NAME_END.match(text, word_end + len(suffix))
    separator = _SEPARATOR.match(text, end_match.end()) if end_match is not None else None
    if end_match is None or separator is None:
        return None
    text_before = text[max(start - CHARACTERS_READ_BEFORE, 0) : start]
    # in prose a comma can follow any word; only a quoted name or an option is followed by its
    # value, as in ("token", "x")
    if (
        separator["sign"] == ","
        and end_match["close"] is None
        and "--" not in text_before[-MAX_NAME_LENGTH:]
    ):
        return None
    stem = text_before.rstrip(NAME_CHARACTERS)
    prefix = text_before[len(stem) :][-MAX_NAME_LENGTH:]
    if stem.endswith("\\") and prefix[:1] in {"n", "r", "t"}:
        prefix = prefix[1:]  # an escaped newline or tab
    word_in_text = text[start:word_end]
    sign = (
        "value" if separator["named"] else "=" if separator["typed"] else separator["sign"] or " "
    )
    line = stem[stem.rfind("\n") + 1 :]
    name = prefix + word_in_text
    has_blank_before_sign = separator[0][:1].isspace()
    is_quoted = end_match["close"] is not None
    credential = NameInText(
        text,
        start,
        word_kind,
        word,
        name,
        line,
        sign,
        is_quoted,
        has_blank_before_sign,
        suffix,
        separator.end(),
    )
    if suffix and not _can_have_suffix(suffix, credential):
        return None
    if not _is_name_of_value(
        credential, prefix, word_in_text.lstrip("_")
    ) or _SECRET_REFERENCE.search(credential.name):
        return None
    if (
        sign == ":"
        and stem.endswith("://")
        and text.startswith(f"{HIDDEN}@", credential.value_start)
    ):
        return None  # the user of a URL
    if (gap := _GAP_BEFORE_VALUE.match(text, credential.value_start)) is not None:
        credential.value_start = gap.end()
    return credential


def _is_name_of_value(credential: NameInText, prefix: str, word: str) -> bool:
    """Whether the word is a whole name or the end of one, and the sign fits."""
    last_prefix_character = prefix[-1:]
    if (
        credential.word in WORDS_NEEDING_BOUNDARY
        and last_prefix_character.isalpha()
        and not (last_prefix_character.islower() and word[0].isupper())
    ):
        return (
            credential.word in SHORT_WORDS
            and credential.sign != " "
            and OWNER_PREFIX.search(prefix) is not None
        )
    if credential.sign == " ":
        return credential.is_flag
    if credential.sign == ",":
        return credential.is_quoted or credential.is_flag
    if credential.word_kind == "weak":
        if credential.word in {"key", "code"}:
            return credential.is_query_parameter or (
                credential.word == "key" and _is_environment_variable(credential)
            )
        is_assigned = (
            credential.sign in {"=", "%3D", "%3d"} and not credential.has_blank_before_sign
        )
        return is_assigned and (credential.word != "pat" or _is_environment_variable(credential))
    return True


def _is_known_suffix(suffix: str) -> bool:
    return suffix[:1] != "_" or all(
        part.isdigit() or part.lower() in KNOWN_SUFFIXES for part in suffix[1:].split("_")
    )


def _can_have_suffix(suffix: str, credential: NameInText) -> bool:
    """Whether a credential's name can have this suffix."""
    if credential.word in {"authorization", "cookie", "cookies"}:
        return False
    if suffix.lower() == "_id":
        return credential.word == "secret"
    is_upper = (credential.name + suffix).isupper()
    if _is_known_suffix(suffix):
        return credential.word_kind == "sure" or is_upper or credential.word == "token"
    return is_upper and credential.word_kind != "weak" and not HARMLESS_SUFFIX.search(suffix)


def _is_environment_variable(credential: NameInText) -> bool:
    """Whether the name is an environment variable such as ``KAGGLE_KEY``,
    not one of the many other keys.
    """
    return (
        credential.name.isupper()
        and "_" in credential.name
        and not credential.name.endswith(ENDINGS_OF_OTHER_KEYS)
    )
