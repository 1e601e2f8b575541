"""Rule 2: values that follow a credential's name: ``password=x``, ``"api_key": "x"``, ``--token x``, ``X-Api-Key: x``.

A name ends with one of the table's words; what stands around it decides how surely its value is a credential.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from firstfault.credentials.literals import (
    HIDDEN,
    PATTERNS,
    TABLE,
    Form,
    Named,
    Strength,
    is_placeholder,
    is_random,
    is_secret_literal,
    is_secret_word,
)

_QUOTE = r"\\{0,7}[\"'`]"
"""Also an escaped one."""
_TABLE: dict[str, Any] = TABLE["names"]
_WORD = re.compile(
    f"(?P<sure>{_TABLE['sure']})|(?P<likely>{_TABLE['likely']})|(?P<key>{_TABLE['key']})|(?P<weak>{_TABLE['weak']})"
)
_KEY_OF = re.compile(rf"(?:{_TABLE['key_of']})[_\ .-]?$", re.VERBOSE)
_LONGEST_KEY_OF = 16
_SUFFIX = re.compile(r"(?:_[A-Za-z0-9]{1,24}){1,4}(?![A-Za-z0-9_])")
_SUFFIXES = frozenset(_TABLE["suffixes"].split())
_OTHER_SUFFIX = re.compile(rf"_(?:{_TABLE['other_suffixes']})(?:_|$)", re.IGNORECASE | re.VERBOSE)
_END_OF_NAME = re.compile(r"(?:[_-]?\d{1,2})?(?![A-Za-z0-9_])(?P<close>" + _QUOTE + r")?\]?(?:[ ]provided)?")
_SEPARATOR = re.compile(
    r"""(?P<named>[,\s]{1,40}(?:\\{0,7}["'])?value(?:\\{0,7}["'])?[ \t]{0,8}[:=](?!=))
      |[ \t]{0,4}(?P<typed>:[ \t]{0,4}[A-Za-z_][\w.\[\],| \t]{0,80}=(?=[ \t]{0,4}[rbuf]{0,2}["']))
      |[ \t]{0,8}(?P<sign>=>|==|!=|:=|=|:(?!:)|%3[Dd]|%3[Aa]|,)
      |(?P<blank>[ \t]{1,8})""",
    re.VERBOSE,
)
_GAP = re.compile(r"[ \t]{0,40}(?:\r?\n[ \t]{0,80}(?=[rbuf]{0,2}\\{0,7}[\"']))?")
_LOOK_BACK = 300
_LONGEST_NAME = 80
_NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-$"
_SHORT_WORDS = {"pass", "pw", "pwd"}
_NEEDS_BOUNDARY = {*_SHORT_WORDS, "auth", "sig", "creds", "cred", "jwt", "code", "key", "bearer", "signature", "cookie"}
_OWNER = re.compile(rf"(?:^|[^a-z])(?:{_TABLE['owners']})_?$", re.IGNORECASE | re.VERBOSE)
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
_FLAG_PROSE, _METHODS, _SCHEMES = (frozenset(_TABLE[key].split()) for key in ("prose", "methods", "schemes"))
_OPENING = re.compile(
    r"(?P<wrapper>(?:[A-Za-z_][\w.]{0,40}\.)?(?:SecretStr|SecretBytes|Secret|str|bytes|b64decode|quote|quote_plus|unquote)"
    r"\([ \t]{0,4})?[rRbBuUfF]{0,2}(?P<quote>" + _QUOTE + r")(?P<triple>(?P=quote){2})?"
)
_ENDS_QUOTE = re.compile(r"[ \t]{0,8}(?:[,)+%\]}:]|\.(?:format|join)|$|\n|in\b|not\b)")
_LIST = re.compile(r"[\[(]\s{0,80}(?=[rbuf]{0,2}\\{0,7}[\"'])")
_NEXT_ITEM = re.compile(r"\s{0,80},\s{0,80}(?=[rbuf]{0,2}\\{0,7}[\"'])")
_MOST_ITEMS = 64
_SIMPLE_END = re.compile(r"[^\s\"'`,;&)\]}]*")
_END_OF_VALUE = re.compile(
    r"""(?:[^\s"'`,;&)\]}]
        |["'`](?=[A-Za-z0-9])
        |[,;&](?![ ]?[\w.%-]{1,60}\\?["']?[=:]|\s|$|[,;&"'])
        |[)\]}](?!\s|$|[)\]}"',;:.]))*""",
    re.VERBOSE,
)
_CALLED = re.compile(
    r"(?:getenv|get|setdefault|setenv|pop|putenv|set|set_secret|add_header|putheader|getattr\(\w{1,40},[ ]?)"
    r"\(?[bB]?[\"']$"
)
_IN_TUPLE = re.compile(r"\([ \t]{0,4}[bB]?[\"']$")
_AUTH = {"authorization", "auth", "credentials", "credential", "creds", "cred", "bearer", "jwt"}
_SCHEME = re.compile(rf"(?:{'|'.join(_SCHEMES)})(?:[ ]|%20|\+){{1,4}}", re.IGNORECASE)
_ITEM_NAME = re.compile(r"[A-Za-z_. -]*|[A-Z0-9_]*")
"""An item of a list that is a name, and no credential: names have no digits and no other characters."""
_TARGETS = re.compile(r"(?:^|[\s:;])[\w.]{1,80},[ ]?$")
_ESCAPED_END = re.compile(r"\\+(?:[nr]|[\"'`]|$)")
_LONGEST_LOOK = 300
_STOPS = {mark: re.compile(f"[{mark}\n]") for mark in "\"'`"}
_LONGEST_BLOCK = 16_384


def without_named_values(text: str) -> str:
    """Replace values that follow the name of a credential and are literals; names, code and placeholders stay."""
    kept, done = [], 0
    for place in _names(text):
        for start, end in _values(place) if place.begin >= done else ():
            if done <= start < end:
                kept += [text[done:start], HIDDEN]
                done = end
    return "".join((*kept, text[done:])) if kept else text


# --- names ------------------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """The name of a credential in a text, and what stands before and after it."""

    text: str
    begin: int
    """Where the name's word begins."""
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

    @cached_property
    def in_call(self) -> bool:
        """Whether a call is open before it on its line."""
        opened = self.before.rfind("(")
        caller = self.before[max(opened - 1, 0) : max(opened, 0)]
        return (caller.isalnum() or caller in {"_", ")", "]"}) and self.before.count("(") > self.before.count(")")

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
            around = self.text[max(self.start - _LOOK_AROUND, 0) : self.start + _LOOK_AROUND]
            sure = _OWNER.search(prefix) or _USER.search(around) or (self.name.isupper() and prefix)
            return Strength.LIKELY if sure else Strength.SHORT
        if self.word == "tokens" or _OF_TEXTS.search(prefix) or self.suffix.islower():
            return Strength.WORD
        if self.sign in {"==", "!="} or (self.sign == ":" and _ADJECTIVE.search(self.before)):
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
        if self.in_call or _KEYWORD.search(self.before):
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


def _names(text: str) -> Iterator[Place]:
    """Yield the names of credentials in a text that a value may follow, in their order."""
    lowered = text.lower()
    if len(lowered) != len(text):
        lowered = re.sub("[A-Z]+", lambda found: found[0].lower(), text)
    starts = {found.start() for core in _TABLE["cores"] for found in re.finditer(core, lowered)}
    after = 0
    for at in sorted(starts):
        found = _WORD.match(lowered, at) if at >= after else None
        # the rest is a longer word
        if found is None or (found.end() < len(text) and text[found.end()].isalpha()):
            continue
        start, kind = found.start(), found.lastgroup or ""
        if kind == "key":
            owner = _KEY_OF.search(lowered, max(start - _LONGEST_KEY_OF, 0), start)
            start -= len(owner[0]) if owner else 0
            kind = "sure" if owner else "weak"
        after = found.end()
        word = lowered[start:after].strip("_")
        if kind == "weak" and word.startswith("key") and word != "key" and not lowered.startswith("client", start - 7):
            continue
        place = _place_of(text, start, after, kind if "data" not in word else "sure", word)
        if place is not None:
            yield place


def _place_of(text: str, start: int, after: int, kind: str, word: str) -> Place | None:
    """Return the name that ends with the word at this place; None if it is no name, or no value follows."""
    found = _SUFFIX.match(text, after)
    # an added number is read with any name's end
    suffix = "" if found is None or found[0][1:].isdigit() else found[0]
    end = _END_OF_NAME.match(text, after + len(suffix))
    separator = _SEPARATOR.match(text, end.end()) if end is not None else None
    if end is None or separator is None:
        return None
    before = text[max(start - _LOOK_BACK, 0) : start]
    if separator["sign"] == "," and end["close"] is None and "--" not in before[-_LONGEST_NAME:]:
        return None
    stem = before.rstrip(_NAME_CHARACTERS)
    prefix = before[len(stem) :][-_LONGEST_NAME:]
    if stem.endswith("\\") and prefix[:1] in {"n", "r", "t"}:
        prefix = prefix[1:]  # an escaped newline or tab
    written = text[start:after]
    sign = "value" if separator["named"] else "=" if separator["typed"] else separator["sign"] or " "
    line = stem[stem.rfind("\n") + 1 :]
    name = prefix + written
    spaced, closed = separator[0][:1].isspace(), end["close"] is not None
    place = Place(text, start, kind, word, name, line, sign, closed, spaced, suffix, separator.end())
    if suffix and not _may_follow(suffix, place):
        return None
    if not _is_name(place, prefix, written.lstrip("_")) or _REFERENCE.search(place.name):
        return None
    if sign == ":" and stem.endswith("://") and text.startswith(f"{HIDDEN}@", place.start):
        return None  # the user of a URL
    if (gap := _GAP.match(text, place.start)) is not None:
        place.start = gap.end()
    return place


def _is_name(place: Place, prefix: str, word: str) -> bool:
    """Whether the word is a name of its own, or the end of one, and the sign fits."""
    last = prefix[-1:]
    if place.word in _NEEDS_BOUNDARY and last.isalpha() and not (last.islower() and word[0].isupper()):
        return place.word in _SHORT_WORDS and place.sign != " " and _OWNER.search(prefix) is not None
    if place.sign == " ":
        return place.flag
    if place.sign == ",":
        return place.closed or place.flag
    if place.kind == "weak":
        if place.word in {"key", "code"}:
            return place.query or (place.word == "key" and _is_variable(place))
        return (place.word != "pat" or _is_variable(place)) and place.sign in {"=", "%3D", "%3d"} and not place.spaced
    return True


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


def _is_variable(place: Place) -> bool:
    """Whether the name is that of an environment variable, such as ``KAGGLE_KEY``, and not one of many other keys."""
    return place.name.isupper() and "_" in place.name and not place.name.endswith(_OTHER_KEY)


# --- values -----------------------------------------------------------------------------------------------------------


def _values(place: Place) -> Iterator[tuple[int, int]]:
    """Return where the credentials after a name begin and end."""
    text = place.text
    opening = _OPENING.match(text, place.start)
    if opening is not None:
        return _of_quoted(place, opening)
    if place.sign == "," and place.flag and not place.closed:
        return _of_bare(place)
    if place.sign in {",", "==", "!="} or place.word in {"cookie", "cookies"}:
        return iter(())
    if place.word == "authorization" and (scheme := _SCHEME.match(text, place.start)):
        place.start = scheme.end()
    if place.strength is Strength.SURE or (place.word == "auth" and place.sign == "="):
        opened = _LIST.match(text, place.start)
        if opened is not None:
            return _items(place, opened.end())
    return _of_bare(place)


def _of_quoted(place: Place, opening: re.Match[str]) -> Iterator[tuple[int, int]]:
    text, quote, triple = place.text, opening["quote"], opening["triple"] is not None
    start = opening.end()
    may_end = not (opening["wrapper"] or triple or place.closed) and place.before.count(quote[-1]) % 2
    if may_end and _ENDS_QUOTE.match(text, start):
        return  # the end of a string that holds the name
    end = _end_of_quoted(text, start, quote, triple=triple)
    content = text[start:end]
    if place.word == "authorization" and (scheme := _SCHEME.match(text, start, end)):
        start, content = scheme.end(), text[scheme.end() : end]
    if not _is_secret_quoted(place, content, end):
        return
    yield start, end
    following = _NEXT_ITEM.match(text, end + len(quote))
    if following and place.sign == "=" and _TARGETS.search(place.before):
        yield from _items(place, following.end())


def _is_secret_quoted(place: Place, content: str, end: int) -> bool:
    # part of a statement: lambda token: "x"
    in_code = not place.closed and place.sign == ":" and _KEYWORD.search(place.before)
    if in_code or not is_secret_literal(content, Named(place.name, place.strength, place.form(end)), quoted=True):
        return False
    if place.word in _AUTH and content.lower() in _METHODS:
        return False
    if place.sign != ",":
        return True
    if place.flag:
        return (
            not content.startswith("-") and not is_secret_word(content) and not PATTERNS["metavar"].fullmatch(content)
        )
    if _CALLED.search(place.before):
        return not is_secret_word(content)
    return is_random(content) or (bool(_IN_TUPLE.search(place.before)) and "-" in place.name and not content.islower())


def _items(place: Place, position: int) -> Iterator[tuple[int, int]]:
    for _ in range(_MOST_ITEMS):
        opening = _OPENING.match(place.text, position)
        if opening is None or opening["triple"]:
            return
        end = _end_of_quoted(place.text, opening.end(), opening["quote"])
        content = place.text[opening.end() : end]
        is_name = is_secret_word(content) or (place.word != "auth" and _ITEM_NAME.fullmatch(content))
        if not is_placeholder(content) and not is_name:
            yield opening.end(), end
        following = _NEXT_ITEM.match(place.text, end + len(opening["quote"]))
        if following is None:
            return
        position = following.end()


def _of_bare(place: Place) -> Iterator[tuple[int, int]]:
    text, start = place.text, place.start
    if text[start : start + 1] in "([{<":
        return
    end = _end_of_bare(place, _END_OF_VALUE)
    named = Named(place.name, place.strength, place.form(end))
    simple = named.form in {Form.CALL, Form.CODE}
    if simple:
        end = _end_of_bare(place, _SIMPLE_END)
    value = text[start:end]
    if named.form in {Form.PROSE, Form.COLON}:
        value = value.rstrip(".:!?")
    if not value or (place.sign == "," and not is_random(value)):
        return
    if place.sign == " " and (
        value.startswith("-") or value.lower().rstrip(".:") in _FLAG_PROSE or PATTERNS["metavar"].fullmatch(value)
    ):
        return  # an option, not its value
    if place.word in _AUTH and value.lower() in _METHODS:
        return
    if place.word in {"secret", "secrets"} and PATTERNS["name_of_secret"].fullmatch(value):
        return
    if is_secret_literal(value, named, quoted=False):
        yield start, _end_of_bare(place, _SIMPLE_END if simple else _END_OF_VALUE, len(text))


def _end_of_bare(place: Place, value: re.Pattern[str], most: int = _LONGEST_LOOK) -> int:
    """Return where a value without quotes ends: at the latest at an escaped newline or quote, or after `most`.

    What is not replaced is looked at again for other names, so the look at a value must be bounded.
    """
    found = value.match(place.text, place.start, place.start + most)
    text = found[0] if found else ""
    escaped = _ESCAPED_END.search(text)
    return place.start + (escaped.start() if escaped else len(text))


def _end_of_quoted(text: str, start: int, quote: str, *, triple: bool = False) -> int:
    """Return where a string ends that began with `quote` before `start`; the line's end if it is not closed."""
    if triple:
        end = text.find(quote * 3, start, start + _LONGEST_BLOCK)
        return end if end >= 0 else min(start + _LONGEST_BLOCK, len(text))
    depth, position = len(quote) - 1, start
    while found := _STOPS[quote[-1]].search(text, position):
        at = found.start()
        if text[at] == "\n":
            return at
        first = at
        while first > start and text[first - 1] == "\\":
            first -= 1
        slashes = at - first
        if slashes % 2 == 0 if depth == 0 else slashes <= depth:
            return at - slashes if depth else at
        position = at + 1
    return len(text)
