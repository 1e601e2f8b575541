"""Rule 1: credentials recognized by their form, such as a token with a known prefix, and users and
passwords in URLs: ``https://user:password@host``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from firstfault.credentials.literals import (
    HIDDEN,
    TABLE,
    is_key,
    is_mixed,
    is_placeholder,
    is_text,
    is_varied,
)
from firstfault.utils.lazy_pattern import LazyPattern

WORD_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
"""A word also starts after an escape: ``\\n``, ``%20``."""
MIN_OPAQUE_LENGTH = 20
MIN_ID_LENGTH = 16
MIN_MIXED_RUN_LENGTH = 10


def _is_opaque(text: str) -> bool:
    # a full stop at the end belongs to the sentence
    text = text.rstrip(".")
    camel = text.isalpha() and not text[1:].islower() and not text.isupper()
    return (
        is_mixed(text) or "=" in text or len(text) >= MIN_OPAQUE_LENGTH or camel or text.isdigit()
    )


def _is_id(text: str) -> bool:
    text = text.rstrip(".")
    return (
        len(text) >= MIN_ID_LENGTH
        and text.isalnum()
        and is_mixed(text)
        and is_varied(text, mixed=False)
    )


def _has_random_part(text: str) -> bool:
    """Whether a text is random, not words joined by ``_`` or ``-``."""
    parts = re.split("[_-]", text)
    return any(
        len(part) >= MIN_ID_LENGTH or (len(part) >= MIN_MIXED_RUN_LENGTH and is_mixed(part))
        for part in parts
    )


VALUE_CHECKS: dict[str, Callable[[str], object]] = {
    "any": bool,
    "base64": re.compile("[A-Za-z0-9+/=]{16}").search,
    "digit": re.compile(r"\d").search,
    "dotted": re.compile(r"\.").search,
    "id": _is_id,
    "key": is_key,
    "literal": lambda text: not is_placeholder(text),
    "opaque": _is_opaque,
    "parts": _has_random_part,
    "run": lambda text: any(
        len(run) >= MIN_MIXED_RUN_LENGTH and is_mixed(run) for run in re.split("[^0-9A-Za-z]", text)
    ),
    "text": is_text,
    "varied": is_varied,
}
"""Checks that a shape's value may have to pass (`only` in the table)."""


def _build_pattern(row: dict[str, list[str]]) -> str:
    if "pattern" in row:
        return str(row["pattern"])
    # without `marks`, the prefixes are plain text and serve as marks themselves
    starts = row["starts"] if "marks" in row else map(re.escape, row["starts"])
    return f"{WORD_START}(?:{'|'.join(starts)})(?P<value>{row['then']})"


PATTERNS = {row["name"]: LazyPattern(_build_pattern(row)) for row in TABLE["shape"]}
SHAPES = [
    (row.get("marks") or row["starts"], row["name"], VALUE_CHECKS[row.get("only", "any")])
    for row in TABLE["shape"]
]
"""The marks of each shape, its name, and the check of its value."""


def redact_shapes(text: str) -> str:
    """Replace texts with the form of a credential."""
    for marks, name, is_secret in SHAPES:
        # almost no text contains a mark, and a substring search is much faster than the pattern
        if any(mark in text for mark in marks):
            parts, copied_until = [], 0
            for match in PATTERNS[name].finditer(text):
                if is_secret(match["value"]):
                    parts += [text[copied_until : match.start("value")], HIDDEN]
                    copied_until = match.end("value")
            text = "".join((*parts, text[copied_until:]))
    return text


WEB_SCHEMES = (
    "http",
    "https",
    "git+https",
    "git+http",
    "ssh",
    "git+ssh",
    "ftp",
    "ftps",
    "sftp",
    "ws",
    "wss",
    "git",
)
SCHEMES_WITHOUT_USERS = (
    "grpc",
    "grpcs",
    "tcp",
    "udp",
    "ipc",
    "zmq",
    "nccl",
    "gloo",
    "ucx",
    "dns",
    "docker",
)
"""Endpoints of these have a port and no user: the digits in tcp://node:29500@1 aren't a password.
"""
SCHEME_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-"
MAX_SCHEME_LENGTH = 30
MIN_TOKEN_USER_LENGTH = 16
_URL_AFTER_SCHEME = LazyPattern(r"""://(?P<rest>(?:[^\s"'`<>:]|:(?!//))*)""")


def redact_url_passwords(text: str) -> str:
    """Replace passwords and tokens before a URL's host; ordinary user names and hosts stay."""
    return _URL_AFTER_SCHEME.sub(_redact_url_user, text) if "@" in text and "://" in text else text


def _redact_url_user(match: re.Match[str]) -> str:
    rest = match["rest"]
    if "@" not in rest:
        return match[0]
    # read the scheme backwards, and only so far: the time must stay linear in the text
    before = match.string[max(match.start() - MAX_SCHEME_LENGTH, 0) : match.start()]
    scheme = before[len(before.rstrip(SCHEME_CHARACTERS)) :].lower()
    at = _find_end_of_userinfo(rest, scheme) if scheme else -1
    if at < 0:
        return match[0]
    user, colon, password = rest[:at].partition(":")
    # https://ghp_...@github.com: a token as user name
    if len(user) >= MIN_TOKEN_USER_LENGTH and any(map(str.isdigit, user)) and user.isalnum():
        user = HIDDEN
    if colon and not is_placeholder(password):
        password = HIDDEN
    return f"://{user}{colon}{password}{rest[at:]}"


_AUTHORITY_END = LazyPattern(r"[/?\#\\]")
_FULL_HOST = LazyPattern(
    r"(?a)(?:localhost|\[[0-9A-Fa-f:.]+\]|[\w-]+(?:\.[\w-]+)+\.?|[\w.-]+(?=:\d))(?::\d{1,5})?"
)
_PLAUSIBLE_HOST = LazyPattern(
    r"(?a)[\w.-]+(?::\d{1,5})?(?=$|[/?,\\;)\]}])|\[[0-9A-Fa-f:]{2,}\]|/|$|\*"
)
_PORT_AND_END = LazyPattern(r":\d{0,5}(?:$|,)")
_PORT_ONLY = LazyPattern(r":\d{1,5}(?=@|$)")


def _find_end_of_userinfo(rest: str, scheme: str) -> int:
    """Return the index of the ``@`` before the host, or -1; passwords may contain ``@``,
    ``/`` and ``?``.
    """
    end = _AUTHORITY_END.search(rest)
    authority = rest[: end.start()] if end else rest
    if scheme in SCHEMES_WITHOUT_USERS and _PORT_ONLY.match(authority, max(authority.find(":"), 0)):
        return -1
    at = authority.rfind("@")
    last = rest.rfind("@")
    web = scheme in WEB_SCHEMES
    if at >= 0:
        # https://user:password@host.org/package@version has a full host
        plain = ":" not in authority[:at] or (web and _FULL_HOST.fullmatch(authority, at + 1))
        return at if plain or not _PLAUSIBLE_HOST.match(rest, last + 1) else last
    if authority.startswith("["):  # an IPv6 address
        return -1
    # no @ before the first / or ?, which may belong to the password: https://user:pa/ss@host
    colon = authority.find(":")
    if colon < 0 or (web and _PORT_AND_END.match(authority, colon)) or authority.endswith("]"):
        return -1
    return last if _PLAUSIBLE_HOST.match(rest, last + 1) else -1
