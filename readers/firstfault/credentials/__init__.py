"""Finds credentials in texts and replaces them by ``***``.

There are two kinds of rule, both in the table ``credentials.toml``: shapes find what has a form of its own, such as a
token with a known prefix; `named` finds the value that follows a name such as ``password``. `literals` decides
whether a value is a literal, or code and ordinary text. Those who operate the platform have rules of their own: regular
expressions in the variable ``FIRSTFAULT_REDACT``, one a line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from firstfault.credentials.literals import HIDDEN, TABLE, is_key, is_mixed, is_placeholder, is_text, is_varied
from firstfault.credentials.named import without_named_values
from firstfault.logs import logger_of

_ROUNDS = 4
_VARIABLE = "FIRSTFAULT_REDACT"
_ENCODING = ("utf-8", "surrogatepass")

logger = logger_of(__name__)


def redact(text: str) -> str:
    """Replace credentials by ``***``, in time linear in the text's length.

    Names, hosts, source code and numbers stay. The steps are repeated until nothing changes: they may reveal another
    credential.
    """
    for _ in range(_ROUNDS if text else 0):
        before = text
        text = _without_own_rules(without_named_values(without_url_passwords(without_shapes(text))))
        if text == before:
            break
    return text


def _without_own_rules(text: str) -> str:
    """Replace what the platform's rules match: a rule's first group if it has one, otherwise the whole match."""
    rules = os.environ.get(_VARIABLE)
    if not rules:
        return text
    data = text.encode(*_ENCODING)
    for pattern in _compiled(rules):
        parts: list[bytes] = []
        end = 0
        for found in pattern.finditer(data):
            first, last = found.span(min(pattern.groups, 1))
            if first < last:  # neither an empty match nor a group that took no part in it
                parts += data[end:first], HIDDEN.encode()
                end = last
        data = b"".join((*parts, data[end:]))
    return data.decode(*_ENCODING)


@lru_cache(maxsize=1)
def _compiled(rules: str) -> tuple[Any, ...]:
    """Return the patterns; a wrong one is left out with a warning that does not print it."""
    import re2  # noqa: PLC0415 - slow, and only those who set the variable need it

    options = re2.Options()
    options.log_errors = False
    found = []
    for number, rule in enumerate(rules.splitlines(), 1):
        if not rule.strip():
            continue
        try:
            found.append(re2.compile(f"(?m){rule.strip()}".encode(), options))
        except re2.error as error:
            why = error.args[0].decode(errors="replace").partition(":")[0]
            logger.warning(
                "line %d of %s is not a regular expression of RE2 (%s); it hides nothing", number, _VARIABLE, why
            )
    return tuple(found)


# --- rule 1: what has a form of its own -------------------------------------------------------------------------------

_BEGINS_WORD = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
"""Also after an escaped character."""
_LONG = 20
_LONG_PART = 16
_MIXED_PART = 10


def _is_opaque(text: str) -> bool:
    text = text.rstrip(".")
    camel = text.isalpha() and not text[1:].islower() and not text.isupper()
    return is_mixed(text) or "=" in text or len(text) >= _LONG or camel or text.isdigit()


def _is_id(text: str) -> bool:
    text = text.rstrip(".")
    return len(text) >= _LONG_PART and text.isalnum() and is_mixed(text) and is_varied(text, mixed=False)


def _has_random_part(text: str) -> bool:
    """Whether a text is random, and not words with ``_`` or ``-`` between them."""
    parts = re.split("[_-]", text)
    return any(len(part) >= _LONG_PART or (len(part) >= _MIXED_PART and is_mixed(part)) for part in parts)


_JUDGES: dict[str, Callable[[str], object]] = {
    "any": bool,
    "base64": re.compile("[A-Za-z0-9+/=]{16}").search,
    "digit": re.compile(r"\d").search,
    "dotted": re.compile(r"\.").search,
    "id": _is_id,
    "key": is_key,
    "literal": lambda text: not is_placeholder(text),
    "opaque": _is_opaque,
    "parts": _has_random_part,
    "run": lambda text: any(len(run) >= _MIXED_PART and is_mixed(run) for run in re.split("[^0-9A-Za-z]", text)),
    "text": is_text,
    "varied": is_varied,
}
"""What the value of a shape may have to be."""


def _pattern(row: dict[str, list[str]]) -> re.Pattern[str]:
    if "pattern" in row:
        return re.compile(str(row["pattern"]), re.VERBOSE)
    # without marks of its own, a prefix is a plain text
    starts = row["starts"] if "marks" in row else map(re.escape, row["starts"])
    return re.compile(f"{_BEGINS_WORD}(?:{'|'.join(starts)})(?P<value>{row['then']})", re.VERBOSE)


# compiled when this module is imported, and not when a process fails
_SHAPES = [
    (row.get("marks") or row["starts"], _pattern(row), _JUDGES[row.get("only", "any")]) for row in TABLE["shape"]
]


def without_shapes(text: str) -> str:
    """Replace what has the form of a credential."""
    for marks, pattern, is_secret in _SHAPES:
        if any(mark in text for mark in marks):
            parts, done = [], 0
            for found in pattern.finditer(text):
                if is_secret(found["value"]):
                    parts += [text[done : found.start("value")], HIDDEN]
                    done = found.end("value")
            text = "".join((*parts, text[done:]))
    return text


# --- passwords in URLs ----------------------------------------------------------------------------------------------

_URL = re.compile(r"://(?P<rest>(?:[^\s\"'`<>:]|:(?!//))*)")
_WEB = ("http", "https", "git+https", "git+http", "ssh", "git+ssh", "ftp", "ftps", "sftp", "ws", "wss", "git")
_WITHOUT_USERS = ("grpc", "grpcs", "tcp", "udp", "ipc", "zmq", "nccl", "gloo", "ucx", "dns", "docker")
_SCHEME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-"
_LONGEST_SCHEME = 30
_END_OF_AUTHORITY = re.compile(r"[/?#\\]")
_FULL_HOST = re.compile(
    r"(?:localhost|\[[0-9A-Fa-f:.]+\]|[\w-]+(?:\.[\w-]+)+\.?|[\w.-]+(?=:\d))(?::\d{1,5})?", re.ASCII
)
_HOST = re.compile(r"[\w.-]+(?::\d{1,5})?(?=$|[/?,\\;)\]}])|\[[0-9A-Fa-f:]{2,}\]|/|$|\*", re.ASCII)
_PORT = re.compile(r":\d{0,5}(?:$|,)")
_PORT_OF_ALL = re.compile(r":\d{1,5}(?=@|$)")
_SECRET_USER = 16


def without_url_passwords(text: str) -> str:
    """Replace what identifies a user before a URL's host; user and host stay."""
    return _URL.sub(_without_password, text) if "@" in text and "://" in text else text


def _without_password(found: re.Match[str]) -> str:
    rest = found["rest"]
    if "@" not in rest:
        return found[0]
    before = found.string[max(found.start() - _LONGEST_SCHEME, 0) : found.start()]
    scheme = before[len(before.rstrip(_SCHEME_CHARACTERS)) :].lower()
    at = _end_of_user(rest, scheme) if scheme else -1
    if at < 0:
        return found[0]
    user, colon, password = rest[:at].partition(":")
    # a token in place of a user
    if len(user) >= _SECRET_USER and any(map(str.isdigit, user)) and user.isalnum():
        user = HIDDEN
    if colon and not is_placeholder(password):
        password = HIDDEN
    return f"://{user}{colon}{password}{rest[at:]}"


def _end_of_user(rest: str, scheme: str) -> int:
    """Return where the ``@`` before the host is, -1 if there is none; passwords may contain ``@``, ``/`` and ``?``."""
    end = _END_OF_AUTHORITY.search(rest)
    authority = rest[: end.start()] if end else rest
    if scheme in _WITHOUT_USERS and _PORT_OF_ALL.match(authority, max(authority.find(":"), 0)):
        return -1
    at, last = authority.rfind("@"), rest.rfind("@")
    web = scheme in _WEB
    if at >= 0:
        # https://user:password@host.org/package@version has a full host
        plain = ":" not in authority[:at] or (web and _FULL_HOST.fullmatch(authority, at + 1))
        return at if plain or not _HOST.match(rest, last + 1) else last
    if authority.startswith("["):  # an address of IPv6
        return -1
    colon = authority.find(":")
    if colon < 0 or (web and _PORT.match(authority, colon)) or authority.endswith("]"):
        return -1
    return last if _HOST.match(rest, last + 1) else -1
