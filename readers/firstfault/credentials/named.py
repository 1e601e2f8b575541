"""Values that follow the name of a credential: ``password=x``, ``"api_key": "x"``, ``--token x``, ``X-Api-Key: x``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from firstfault.credentials.literals import (
    HIDDEN,
    Form,
    Strength,
    is_placeholder,
    is_random,
    is_secret_literal,
    is_secret_word,
    pattern,
    table,
)
from firstfault.credentials.names import QUOTE, SHORT_LOOK, place_of, words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firstfault.credentials.names import Place, Word

_FLAG_PROSE, _METHODS, _SCHEMES = (frozenset(table()["names"][key].split()) for key in ("prose", "methods", "schemes"))
_OPENING = re.compile(
    r"(?P<wrapper>(?:[A-Za-z_][\w.]{0,40}\.)?(?:SecretStr|SecretBytes|Secret|str|bytes|b64decode|quote|quote_plus|unquote)"
    r"\([ \t]{0,4})?[rRbBuUfF]{0,2}(?P<quote>" + QUOTE + r")(?P<triple>(?P=quote){2})?"
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
_NAME_OF_SECRET, _METAVAR = pattern("name_of_secret"), pattern("metavar")
_TARGETS = re.compile(r"(?:^|[\s:;])[\w.]{1,80},[ ]?$")
_ESCAPED_END = re.compile(r"\\+(?:[nr]|[\"'`]|$)")
_LONGEST_TARGET = 100
_LONGEST_LOOK = 300
_STOPS = {mark: re.compile(f"[{mark}\n]") for mark in "\"'`"}
_LONGEST_BLOCK = 16_384


def without_named_values(text: str) -> str:
    """Replace values that follow the name of a credential and are literals; names, code and placeholders stay."""
    kept, done = [], 0
    for word in words(text):
        for start, end in _values(text, word) if word.start >= done else ():
            if done <= start < end:
                kept += [text[done:start], HIDDEN]
                done = end
    return "".join((*kept, text[done:])) if kept else text


def _values(text: str, found: Word) -> Iterator[tuple[int, int]]:
    place = place_of(text, found)
    if place is None:
        return iter(())
    opening = _OPENING.match(text, place.start)
    if opening is not None:
        return _of_quoted(place, opening)
    if place.sign == "," and place.flag and not place.closed:
        return _of_bare(place)
    if place.sign in {",", "==", "!="}:
        return iter(())
    if place.word == "authorization" and (scheme := _SCHEME.match(text, place.start)):
        place.start = scheme.end()
    if place.word in {"cookie", "cookies"}:
        return iter(())
    if place.strength is Strength.SURE or (place.word == "auth" and place.sign == "="):
        opened = _LIST.match(text, place.start)
        if opened is not None:
            return _items(place, opened.end())
    return _of_bare(place)


def _of_quoted(place: Place, opening: re.Match[str]) -> Iterator[tuple[int, int]]:
    text, quote, triple = place.text, opening["quote"], opening["triple"] is not None
    start, follows = opening.end(), not opening["wrapper"]
    if (
        follows
        and not triple
        and place.before.count(quote[-1]) % 2
        and not place.closed
        and _ENDS_QUOTE.match(text, start)
    ):
        return  # the end of a string that holds the name
    end = _end_of_quoted(text, start, quote, triple=triple)
    content = text[start:end]
    if place.word == "authorization" and (scheme := _SCHEME.match(text, start, end)):
        start, content = scheme.end(), text[scheme.end() : end]
    if not _is_secret_quoted(place, content, end):
        return
    yield start, end
    following = _NEXT_ITEM.match(text, end + len(quote))
    if following and place.sign == "=" and _TARGETS.search(place.before[-_LONGEST_TARGET:]):
        yield from _items(place, following.end())


def _is_secret_quoted(place: Place, content: str, end: int) -> bool:
    if place.in_code or not is_secret_literal(content, place.named(end), quoted=True):
        return False
    if place.word in _AUTH and content.lower() in _METHODS:
        return False
    if place.sign != ",":
        return True
    if place.flag:
        return not content.startswith("-") and not is_secret_word(content) and not _METAVAR.fullmatch(content)
    if _CALLED.search(place.before[-SHORT_LOOK:]):
        return not is_secret_word(content)
    return is_random(content) or (
        bool(_IN_TUPLE.search(place.before[-SHORT_LOOK:])) and "-" in place.name and not content.islower()
    )


def _items(place: Place, position: int) -> Iterator[tuple[int, int]]:
    for _ in range(_MOST_ITEMS):
        opening = _OPENING.match(place.text, position)
        if opening is None or opening["triple"]:
            return
        end = _end_of_quoted(place.text, opening.end(), opening["quote"])
        content = place.text[opening.end() : end]
        if not is_placeholder(content) and not is_secret_word(content) and (place.word == "auth" or _is_item(content)):
            yield opening.end(), end
        following = _NEXT_ITEM.match(place.text, end + len(opening["quote"]))
        if following is None:
            return
        position = following.end()


def _is_item(text: str) -> bool:
    """Whether an item of a list is a credential, and no name: names have no digits and no other characters."""
    return not re.fullmatch(r"[A-Za-z_. -]*|[A-Z0-9_]*", text)


def _of_bare(place: Place) -> Iterator[tuple[int, int]]:
    text, start = place.text, place.start
    if text[start : start + 1] in "([{<":
        return
    end = _end_of_bare(place, _END_OF_VALUE)
    named = place.named(end)
    simple = named.form in {Form.CALL, Form.CODE}
    if simple:
        end = _end_of_bare(place, _SIMPLE_END)
    value = text[start:end]
    if named.form in {Form.PROSE, Form.COLON}:
        value = value.rstrip(".:!?")
    if not value or (place.sign == " " and _is_argument_prose(value)) or (place.sign == "," and not is_random(value)):
        return
    if place.word in _AUTH and value.lower() in _METHODS:
        return
    if place.word in {"secret", "secrets"} and _NAME_OF_SECRET.fullmatch(value):
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


def _is_argument_prose(value: str) -> bool:
    return value.startswith("-") or value.lower().rstrip(".:") in _FLAG_PROSE or bool(_METAVAR.fullmatch(value))


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
