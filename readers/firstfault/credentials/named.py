"""Values that follow the name of a credential: ``password=x``, ``"api_key": "x"``, ``--token x``, ``X-Api-Key: x``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from firstfault.credentials.commands import without_arguments, without_options
from firstfault.credentials.names import LOOK_BACK, SHORT_LOOK, place_of, words
from firstfault.credentials.quotes import QUOTE, end_of_quoted
from firstfault.credentials.tokens import HIDDEN
from firstfault.credentials.values import Form, Strength, is_placeholder, is_random, is_secret_literal, is_secret_word

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firstfault.credentials.names import Place, Word

__all__ = ["without_named_values"]

_OPENING = re.compile(
    r"(?P<wrapper>(?:[A-Za-z_][\w.]{0,40}\.)?(?:SecretStr|SecretBytes|Secret|str|bytes|b64decode|quote|quote_plus|unquote)"
    r"\([ \t]{0,4})?[rRbBuUfF]{0,2}(?P<quote>" + QUOTE + r")(?P<triple>(?P=quote){2})?"
)
_ENDS_QUOTE = re.compile(r"[ \t]{0,8}(?:[,)+%\]}:]|\.(?:format|join)|$|\n|in\b|not\b)")
_LIST = re.compile(r"[\[(]\s{0,80}(?=[rbuf]{0,2}\\{0,7}[\"'])")
_NEXT_ITEM = re.compile(r"\s{0,80},\s{0,80}(?=[rbuf]{0,2}\\{0,7}[\"'])")
_MOST_ITEMS = 64
_BLOCK = re.compile(r"[|>][-+]?[ \t]{0,8}\r?\n")
_BRACES = re.compile(r"\{(?P<value>[^{}\n]{1,200})\}(?=;|\s|$|[\"'])")
_JAR = re.compile(r"\{[^{}\n]{0,4000}\}")
_ELEMENT = re.compile(r"[^<\n]+(?=</)")
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
_FLAG_PROSE = {
    *(
        "is",
        "was",
        "must",
        "should",
        "not",
        "and",
        "or",
        "to",
        "for",
        "flag",
        "option",
        "argument",
        "requires",
        "required",
    ),
    *(
        "has",
        "with",
        "in",
        "from",
        "as",
        "the",
        "if",
        "when",
        "parameter",
        "value",
        "cannot",
        "can",
        "are",
        "instead",
        "but",
    ),
    *("be", "needs", "takes", "will", "does", "on", "it", "a", "an", "at", "by", "expected", "unless", "expects"),
}
_AUTH = {"auth", "credentials", "credential", "creds", "cred", "bearer", "jwt"}
_METHODS = {
    *(
        "basic",
        "bearer",
        "digest",
        "oauth",
        "oauth2",
        "include",
        "omit",
        "same-origin",
        "enabled",
        "disabled",
        "default",
    ),
    *("token", "iam", "anon", "anonymous", "ntlm", "kerberos", "failed", "ok", "success", "expired", "service_account"),
}
_SCHEMES = {
    *(
        "bearer",
        "basic",
        "token",
        "apikey",
        "api-key",
        "key",
        "jwt",
        "negotiate",
        "ntlm",
        "geniekey",
        "sharedkey",
        "splunk",
    ),
    *("digest", "hawk", "oauth", "aws4-hmac-sha256", "snowflake"),
}
_SCHEME = re.compile(r"[ \t]{0,4}(?P<scheme>[A-Za-z][\w-]{1,24})(?:[ ]|%20|\+){1,4}(?P<value>[^\s\"'`\\]+)")
_PARAMETER = re.compile(r"[ \t]{0,4},?[ \t]{0,4}(?:[\w-]{1,40}=)?(?:\\?\"[^\"\n]{0,2000}\"|(?<==)[^\s,\"'`]+)")
_COOKIE_NAMES = {"cookie", "cookies"}
_HEADERS = {"authorization", *_COOKIE_NAMES}
_COOKIES = re.compile(r"[\w.$!#%&*+^|~-]{1,128}=[^\n\"'`]*")
_MIXED = re.compile(r"(?=[A-Za-z]{0,80}[0-9])(?=[0-9]{0,80}[A-Za-z])[A-Za-z0-9]{10,}")
_NAME_OF_SECRET = re.compile(r"(?:[a-z]{1,40}-){1,6}(?:secrets?|creds?|credentials?|tokens?|keys?|tls)")
"""The name of a secret of Kubernetes, such as ``registry-cred``."""
_TARGETS = re.compile(r"(?:^|[\s:;])[\w.]{1,80},[ ]?$")
_STRING_VALUE = re.compile(r":[ \t]{0,8}[rbuf]{0,2}[\"'](?![\"'])")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.\[\]\"'()]*(?:![rsa])?")
_ESCAPED_END = re.compile(r"\\+(?:[nr]|[\"'`]|$)")
_LONG_METAVAR = 16
_LONGEST_TARGET = 100
_LONGEST_LOOK = 300


def without_named_values(text: str) -> str:
    """Replace values that follow the name of a credential and are literals; names, code and placeholders stay."""
    text = without_options(text)
    kept, done = [], 0
    for word in words(text):
        for start, end in _values(text, word) if word.start >= done else ():
            if done <= start < end:
                kept += [text[done:start], HIDDEN]
                done = end
    return without_arguments("".join((*kept, text[done:])) if kept else text)


def _values(text: str, found: Word) -> Iterator[tuple[int, int]]:
    place = place_of(text, found)
    if place is None:
        return iter(())
    if place.sign == ">":
        return _of_element(place)
    opening = _OPENING.match(text, place.start)
    if opening is not None:
        return _of_quoted(place, opening)
    if place.sign == "," and place.flag and not place.closed:
        return _of_bare(place)
    if place.sign in {",", "==", "!="}:
        return iter(())
    if place.word in _HEADERS:
        header = _of_header(place)
        if header is not None:
            return iter((header,))
        if place.word in _COOKIE_NAMES and not _JAR.match(text, place.start):
            return iter(())
    return _of_group(place) or _of_bare(place)


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
    end = end_of_quoted(text, start, quote, triple=triple)
    content = text[start:end]
    if place.word == "authorization":
        header = _hidden_header(text, start, end)
        if header is not None:
            yield header
        return
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
        return not content.startswith("-") and not is_secret_word(content) and not _is_metavar(content)
    if _CALLED.search(place.before[-SHORT_LOOK:]):
        return not is_secret_word(content)
    return is_random(content) or (
        bool(_IN_TUPLE.search(place.before[-SHORT_LOOK:])) and "-" in place.name and not content.islower()
    )


def _is_metavar(text: str) -> bool:
    return text.isupper() and text.replace("_", "").isalpha() and len(text) < _LONG_METAVAR


def _of_header(place: Place) -> tuple[int, int] | None:
    """Return the credential in a header without quotes; None if it is none."""
    if place.word == "authorization":
        return _hidden_header(place.text, place.start, None)
    if place.sign != ":":
        return None
    found = _COOKIES.match(place.text, place.start)
    return found.span() if found else None


def _hidden_header(text: str, start: int, end: int | None) -> tuple[int, int] | None:
    """Return what follows the scheme in the value of ``Authorization``, or the value itself; None if it is none."""
    found = _SCHEME.match(text, start, end) if end is not None else _SCHEME.match(text, start)
    if found is None:
        if end is None or is_placeholder(text[start:end]) or text[start:end].strip().lower() in _SCHEMES:
            return None
        return start, end
    value, known = found["value"].rstrip(",;)}]"), found["scheme"].lower() in _SCHEMES
    if is_placeholder(found["value"]) or is_placeholder(value) or found["scheme"].lower() == "str":
        return None
    word = value.isalpha() and value.islower() and not is_random(value)
    if end is None and (
        (word and (not known or text.startswith(" ", found.end()))) or not (known or not value.isalpha())
    ):
        return None
    if end is not None:
        return (found.start("value"), end) if known or not word else (start, end)
    stop = found.start("value") + len(value)
    while more := _PARAMETER.match(text, stop):
        stop = more.end()
    return found.start("value"), stop


def _of_element(place: Place) -> Iterator[tuple[int, int]]:
    found = _ELEMENT.match(place.text, place.start)
    if found and is_secret_literal(found[0], place.named(found.end()), quoted=True):
        yield found.span()


def _of_group(place: Place) -> Iterator[tuple[int, int]] | None:
    """Return the credentials in a list, a block of YAML, or braces; None if there is no such value."""
    text, start = place.text, place.start
    if place.word == "cookies" and (jar := _JAR.match(text, start)) and _STRING_VALUE.search(jar[0]):
        return iter(((start + 1, jar.end() - 1),))
    if (
        place.word in {"pwd", "password"}
        and (braces := _BRACES.match(text, start))
        and not _IDENTIFIER.fullmatch(braces["value"])
    ):
        return iter((braces.span("value"),)) if braces["value"] != HIDDEN else None
    if place.sign == ":" and _BLOCK.match(text, start):
        return iter(((_block(text, start)),))
    if place.strength is Strength.SURE or (place.word == "auth" and place.sign == "="):
        return _of_list(place) if _LIST.match(text, start) else None
    return None


def _block(text: str, start: int) -> tuple[int, int]:
    """Return the lines of a YAML block: the first one, and those that are indented more than the line of its name."""
    line = text[text.rfind("\n", max(start - LOOK_BACK, 0), start) + 1 : start]
    indent = len(line) - len(line.lstrip(" "))
    end = first = text.index("\n", start) + 1
    while end < len(text):
        stop = text.find("\n", end)
        stop = len(text) if stop < 0 else stop
        line = text[end:stop]
        if line.strip() and len(line) - len(line.lstrip(" ")) <= indent and text[first:end].strip():
            break
        end = stop + 1
    end = min(end, len(text))
    body = text[first:end]
    inside = body.strip()
    if not inside or inside == HIDDEN:
        return first, first
    return first + len(body) - len(body.lstrip()), first + len(body.rstrip())


def _of_list(place: Place) -> Iterator[tuple[int, int]]:
    opened = _LIST.match(place.text, place.start)
    return _items(place, opened.end() if opened else place.start)


def _items(place: Place, position: int) -> Iterator[tuple[int, int]]:
    for _ in range(_MOST_ITEMS):
        opening = _OPENING.match(place.text, position)
        if opening is None or opening["triple"]:
            return
        end = end_of_quoted(place.text, opening.end(), opening["quote"])
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
    if (
        not value
        or (place.sign == " " and not place.apart and _is_argument_prose(place, value))
        or (place.sign == "," and not is_random(value))
    ):
        return
    if place.word in _AUTH and value.lower() in _METHODS:
        return
    if place.word in {"secret", "secrets"} and _NAME_OF_SECRET.fullmatch(value):
        return
    if is_secret_literal(value, named, quoted=False):
        yield start, _end_of_bare(place, _SIMPLE_END if simple else _END_OF_VALUE, len(text))


def _end_of_bare(place: Place, pattern: re.Pattern[str], most: int = _LONGEST_LOOK) -> int:
    """Return where a value without quotes ends: at the latest at an escaped newline or quote, or after `most`.

    What is not replaced is looked at again for other names, so the look at a value must be bounded.
    """
    found = pattern.match(place.text, place.start, place.start + most)
    value = found[0] if found else ""
    escaped = _ESCAPED_END.search(value)
    return place.start + (escaped.start() if escaped else len(value))


def _is_argument_prose(place: Place, value: str) -> bool:
    if not place.flag:
        return _MIXED.search(value) is None
    return value.startswith("-") or value.lower().rstrip(".:") in _FLAG_PROSE or _is_metavar(value)
