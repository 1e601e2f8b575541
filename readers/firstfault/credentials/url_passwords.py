"""Users and passwords in URLs: ``https://user:password@host``."""

from __future__ import annotations

import re

from firstfault.credentials.literals import HIDDEN, is_placeholder
from firstfault.utils.lazy_pattern import LazyPattern

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
