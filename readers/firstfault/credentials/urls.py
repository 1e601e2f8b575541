"""Credentials in URLs: passwords before the host, and hooks whose path is the secret."""

from __future__ import annotations

import re

from firstfault.credentials.tokens import HIDDEN
from firstfault.credentials.values import is_placeholder

__all__ = ["without_url_passwords"]

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

_GO_ADDRESS = re.compile(r"@(?:tcp[46]?|udp|unix|cloudsql)\(")
_LONGEST_GO_USER = 300

_ORACLE = re.compile(r"(?P<keep>\boracle:(?:thin|oci8?):[^\s/:@\"']{1,64}/)[^\s@\"']{1,256}(?=@)")
_HOOKS = re.compile(
    r"""(?P<keep>
        hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/
      | discord(?:app)?\.com/api/(?:v\d{1,2}/)?webhooks/
      | \.webhook\.office\.com/webhookb2/
      | outlook\.office(?:365)?\.com/webhook/
      | api\.telegram\.org/(?:file/)?bot
      | hooks\.zapier\.com/hooks/catch/
      | maker\.ifttt\.com/trigger/[\w-]{1,80}/(?:json/)?with/key/
      | events\.pagerduty\.com/integration/
      | hook\.[a-z0-9.]{0,20}make\.com/
      | open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook/
      | alert\.victorops\.com/integrations/generic/
    )(?P<secret>[^\s"'`<>?#\\,;)\]}]+)""",
    re.VERBOSE | re.IGNORECASE,
)
_MARKS = ("hook", "telegram.org", "ifttt.com", "pagerduty.com", "victorops.com")
_OTHER_HOOK = re.compile(
    r"(?P<keep>/(?:in)?(?:web)?hooks?(?:/[\w-]{1,24}){0,2}/)(?P<secret>[A-Za-z0-9_-]{16,})", re.IGNORECASE
)


def without_url_passwords(text: str) -> str:
    """Replace what identifies a user before a URL's host, and the paths of hooks; user and host stay."""
    if "oracle:" in text:
        text = _ORACLE.sub(rf"\g<keep>{HIDDEN}", text)
    if any(mark in text for mark in _MARKS):
        text = _OTHER_HOOK.sub(_without_hook, _HOOKS.sub(rf"\g<keep>{HIDDEN}", text))
    if "@" not in text:
        return text
    if "://" in text:
        text = _URL.sub(_without_password, text)
    return _without_go_passwords(text)


def _without_go_passwords(text: str) -> str:
    """Replace the passwords before addresses as Go's drivers write them: ``user:password@tcp(host:3306)/db``."""
    kept, done = [], 0
    for address in _GO_ADDRESS.finditer(text):
        at = address.start()
        before = text[max(at - _LONGEST_GO_USER, done) : at]
        start = max(before.rfind(mark) for mark in " \t\r\n\"'`")
        user, _, password = before[start + 1 :].rpartition("://")[2].partition(":")
        if user and not is_placeholder(password):
            kept += [text[done : at - len(password)], HIDDEN]
            done = at
    return "".join((*kept, text[done:])) if kept else text


def _without_hook(found: re.Match[str]) -> str:
    secret = found["secret"]
    return found["keep"] + HIDDEN if any(map(str.isdigit, secret)) else found[0]


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
