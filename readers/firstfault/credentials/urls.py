"""Passwords in URLs, before the host."""

from __future__ import annotations

import re

from firstfault.credentials.literals import HIDDEN, is_placeholder

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
