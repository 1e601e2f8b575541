"""Names of credentials in texts, and what stands around them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault.credentials.literals import HIDDEN, Form, Named, Strength, table

if TYPE_CHECKING:
    from collections.abc import Iterator

QUOTE = r"\\{0,7}[\"'`]"
"""Also an escaped one."""
_TABLE: dict[str, Any] = table()["names"]
_WORD = re.compile(
    f"(?P<sure>{_TABLE['sure']})|(?P<likely>{_TABLE['likely']})|(?P<key>{_TABLE['key']})|(?P<weak>{_TABLE['weak']})"
)
_KEY_OF = re.compile(rf"(?:{_TABLE['key_of']})[_\ .-]?$", re.VERBOSE)
_LONGEST_KEY_OF = 16
_SUFFIX = re.compile(r"(?:_[A-Za-z0-9]{1,24}){1,4}(?![A-Za-z0-9_])")
_SUFFIXES = frozenset(_TABLE["suffixes"].split())
_OTHER_SUFFIX = re.compile(rf"_(?:{_TABLE['other_suffixes']})(?:_|$)", re.IGNORECASE | re.VERBOSE)
_END_OF_NAME = re.compile(r"(?:[_-]?\d{1,2})?(?![A-Za-z0-9_])(?P<close>" + QUOTE + r")?\]?(?:[ ]provided)?")
_SEPARATOR = re.compile(
    r"""(?P<named>[,\s]{1,40}(?:\\{0,7}["'])?value(?:\\{0,7}["'])?[ \t]{0,8}[:=](?!=))
      |[ \t]{0,4}(?P<typed>:[ \t]{0,4}[A-Za-z_][\w.\[\],| \t]{0,80}=(?=[ \t]{0,4}[rbuf]{0,2}["']))
      |[ \t]{0,8}(?P<sign>=>|==|!=|:=|=|:(?!:)|%3[Dd]|%3[Aa]|,)
      |(?P<blank>[ \t]{1,8})""",
    re.VERBOSE,
)
_GAP = re.compile(r"[ \t]{0,40}(?:\r?\n[ \t]{0,80}(?=[rbuf]{0,2}\\{0,7}[\"']))?")
LOOK_BACK = 300
_LONGEST_NAME = 80
_NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-$"
_SHORT_WORDS = {"pass", "pw", "pwd"}
_NEEDS_BOUNDARY = {*_SHORT_WORDS, "auth", "sig", "creds", "cred", "jwt", "code", "key", "bearer", "signature", "cookie"}
_OWNER = re.compile(rf"(?:^|[^a-z])(?:{_TABLE['owners']})_?$", re.IGNORECASE | re.VERBOSE)
_LONGEST_OWNER = 10
_USER = re.compile(r"(?<![A-Za-z])(?:user|usr|uid|login|e?mail)(?:_?(?:name|id))?[\"']?[ \t]{0,4}[:=]", re.IGNORECASE)
_OF_TEXTS = re.compile(rf"(?:^|[_.-])(?:{_TABLE['of_texts']})[_.-]?$", re.IGNORECASE | re.VERBOSE)
_ADJECTIVE = re.compile(rf"\b(?:{_TABLE['adjectives']})[ \t]{{1,4}}$", re.IGNORECASE | re.VERBOSE)
_KEYWORD = re.compile(
    r"(?:^|[^\w.])(?:if|elif|while|lambda|not|and|or|in|is|for|case|return|else|except|async|await|del)[ \t]{1,4}$|\[$"
)
_OTHER_KEY = tuple(f"{word}_KEY" for word in _TABLE["other_keys"].split())
_REFERENCE = re.compile(r"(?:existing|pull_?)secrets?$", re.IGNORECASE)
"""Names whose value is the name of a secret."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z_.]*")
_LOOK_AHEAD = 100
_LOOK_AROUND = 120
SHORT_LOOK = 60


class Word(NamedTuple):
    """A word in a text that is the end of a credential's name."""

    start: int
    end: int
    kind: str
    word: str


@dataclass
class Place:
    """The name of a credential in a text, and what stands before and after it."""

    text: str
    kind: str
    word: str
    name: str
    before: str
    """The line before the name, at most so much of it as is looked at."""
    sign: str
    closed: bool
    """Whether the name is in quotes."""
    spaced: bool
    """Whether there is a blank before the sign."""
    suffix: str
    """What follows the word in the name, such as ``_PROD``."""
    start: int
    """Where the value starts."""

    @property
    def flag(self) -> bool:
        """Whether it is an option of a command: ``--password``."""
        return self.name.startswith("-")

    @property
    def query(self) -> bool:
        """Whether it is a parameter of a URL."""
        return self.before.endswith(("?", "&", "&amp;")) or self.sign.startswith("%")

    def beside(self, other: re.Pattern[str]) -> bool:
        """Whether another name stands near this one."""
        around = self.text[max(self.start - _LOOK_AROUND, 0) : self.start + _LOOK_AROUND]
        return bool(other.search(around))

    @cached_property
    def in_call(self) -> bool:
        """Whether a call is open before it on its line."""
        opened = self.before.rfind("(")
        caller = self.before[max(opened - 1, 0) : max(opened, 0)]
        return (caller.isalnum() or caller in {"_", ")", "]"}) and self.before.count("(") > self.before.count(")")

    @property
    def in_code(self) -> bool:
        """Whether it is part of a statement: ``lambda token: x``."""
        return not self.closed and self.sign == ":" and bool(_KEYWORD.search(self.before[-SHORT_LOOK:]))

    @cached_property
    def strength(self) -> Strength:
        """How surely its value is a credential."""
        if self.kind == "sure" and _is_known(self.suffix):
            return Strength.SURE
        if self.kind == "sure" and self.suffix.lower() != "_id":
            return Strength.WORD
        if not _is_known(self.suffix):
            return Strength.KEY
        if self.kind == "weak":
            return Strength.LIKELY if self.query and self.word not in {"key", "code"} else Strength.WORD
        prefix = self.name[: -len(self.word)]
        if self.word == "pw" or (self.word == "pass" and not prefix.strip("-")):
            sure = _owner(prefix) or self.beside(_USER) or (self.name.isupper() and prefix)
            return Strength.LIKELY if sure else Strength.SHORT
        if self.word == "tokens" or _OF_TEXTS.search(prefix) or self.suffix.islower():
            return Strength.WORD
        if self.sign in {"==", "!="} or (self.sign == ":" and _ADJECTIVE.search(self.before[-SHORT_LOOK:])):
            return Strength.WORD
        return Strength.LIKELY

    def form(self, end: int) -> Form:
        """Return how a value without quotes stands there that ends at `end`."""
        after = self.text[end : end + 3]
        alone = not self.before.strip()
        if self.flag or self.query or self.sign == "value":
            return Form.PLAIN
        if self.sign == ":":
            return self._form_after_colon(end)
        if self.in_call or (alone and (after[:1] == ")" or (after[:1] == "," and not after[1:].strip(" \n")))):
            return Form.CALL
        if self.spaced:
            return Form.SPACED
        return Form.PLAIN if self.name.isupper() else Form.TIGHT

    def _form_after_colon(self, end: int) -> Form:
        if self.in_call or _KEYWORD.search(self.before[-SHORT_LOOK:]):
            return Form.CODE
        rest = self.text[end : end + _LOOK_AHEAD].partition("\n")[0].strip()
        before = self.before.rstrip()
        likely = self.strength is not Strength.SURE
        in_braces = before.endswith(("{", ",")) if not self.closed else rest[:1] in {",", "}"}
        if in_braces and (likely or self.closed) and _IDENTIFIER.fullmatch(self.text, self.start, end):
            return Form.CODE
        apart = not self.text[self.start - 1 : self.start].isspace() and "-" not in self.name
        if (rest and rest[0] not in "#,;}])\"'`|\\") or (likely and (apart or before[-1:] not in "{,-\"'`|:>")):
            return Form.PROSE
        return Form.COLON

    def named(self, end: int) -> Named:
        """Return the name of a value that ends at `end`."""
        return Named(self.name, self.strength, self.form(end))


def words(text: str) -> Iterator[Word]:
    """Yield the words in a text that end names of credentials, in their order."""
    lowered = text.lower()
    if len(lowered) != len(text):
        lowered = re.sub("[A-Z]+", lambda found: found[0].lower(), text)
    after = 0
    for at in sorted(_cores(lowered)):
        found = _WORD.match(lowered, at) if at >= after else None
        # the rest is a longer word
        if found is None or (found.end() < len(text) and text[found.end()].isalpha()):
            continue
        start, kind = found.start(), found.lastgroup or ""
        if kind == "key":
            owner = _KEY_OF.search(lowered[max(start - _LONGEST_KEY_OF, 0) : start])
            start -= len(owner[0]) if owner else 0
            kind = "sure" if owner else "weak"
        after = found.end()
        word = lowered[start:after].strip("_")
        if kind == "weak" and word.startswith("key") and word != "key" and not lowered.startswith("client", start - 7):
            continue
        yield Word(start, after, kind if "data" not in word else "sure", word)


def _cores(text: str) -> Iterator[int]:
    for core in _TABLE["cores"]:
        at = text.find(core)
        while at >= 0:
            yield at
            at = text.find(core, at + 1)


def place_of(text: str, found: Word) -> Place | None:
    """Return where a value follows a name; None if none does."""
    suffix = _suffix(text, found)
    end = _END_OF_NAME.match(text, found.end + len(suffix))
    separator = _SEPARATOR.match(text, end.end()) if end is not None else None
    if end is None or separator is None:
        return None
    before = text[max(found.start - LOOK_BACK, 0) : found.start]
    if separator["sign"] == "," and end["close"] is None and "--" not in before[-_LONGEST_NAME:]:
        return None
    stem = before.rstrip(_NAME_CHARACTERS)
    prefix = before[len(stem) :][-_LONGEST_NAME:]
    if stem.endswith("\\") and prefix[:1] in {"n", "r", "t"}:
        prefix = prefix[1:]  # an escaped newline or tab
    written = text[found.start : found.end]
    sign = "value" if separator["named"] else "=" if separator["typed"] else separator["sign"] or " "
    line = stem[stem.rfind("\n") + 1 :]
    place = Place(
        text,
        found.kind,
        found.word,
        prefix + written,
        line,
        sign,
        end["close"] is not None,
        separator[0][:1].isspace(),
        suffix,
        separator.end(),
    )
    if suffix and not _may_follow(suffix, place):
        return None
    if not _is_name(place, prefix, written.lstrip("_")) or _REFERENCE.search(place.name):
        return None
    if sign == ":" and stem.endswith("://") and text.startswith(f"{HIDDEN}@", place.start):
        return None  # the user of a URL
    gap = _GAP.match(text, place.start)
    if gap is not None:
        place.start = gap.end()
    return place


def _is_name(place: Place, prefix: str, word: str) -> bool:
    """Whether the word is a name of its own, or the end of one, and the sign fits."""
    last = prefix[-1:]
    if place.word in _NEEDS_BOUNDARY and last.isalpha() and not (last.islower() and word[0].isupper()):
        return place.word in _SHORT_WORDS and place.sign != " " and _owner(prefix)
    if place.sign == " ":
        return place.flag
    if place.sign == ",":
        return place.closed or place.flag
    if place.kind == "weak":
        if place.word in {"key", "code"}:
            return place.query or (place.word == "key" and _is_variable(place))
        return (place.word != "pat" or _is_variable(place)) and place.sign in {"=", "%3D", "%3d"} and not place.spaced
    return True


def _suffix(text: str, found: Word) -> str:
    """Return what follows a word in its name, such as ``_PROD``; an empty text if nothing does."""
    suffix = _SUFFIX.match(text, found.end)
    # an added number is read with any name's end
    return "" if suffix is None or suffix[0][1:].isdigit() else suffix[0]


def _is_known(suffix: str) -> bool:
    return suffix[:1] != "_" or all(part.isdigit() or part.lower() in _SUFFIXES for part in suffix[1:].split("_"))


def _may_follow(suffix: str, place: Place) -> bool:
    """Whether a name with this suffix can be that of a credential."""
    if place.word in {"authorization", "cookie", "cookies"}:
        return False
    if suffix.lower() == "_id":
        return place.word == "secret"
    if _is_known(suffix):
        return place.kind == "sure" or (place.name + suffix).isupper() or place.word == "token"
    return (place.name + suffix).isupper() and place.kind != "weak" and not _OTHER_SUFFIX.search(suffix)


def _owner(prefix: str) -> bool:
    """Whether ``pass`` after this prefix is a password."""
    return bool(_OWNER.search(prefix[-_LONGEST_OWNER:]))


def _is_variable(place: Place) -> bool:
    """Whether the name is that of an environment variable, such as ``KAGGLE_KEY``, and not one of many other keys."""
    return place.name.isupper() and "_" in place.name and not place.name.endswith(_OTHER_KEY)
