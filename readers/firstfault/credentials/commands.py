"""Credentials among the arguments of well-known commands, and in ``.netrc`` files."""

from __future__ import annotations

import re

from firstfault.credentials.tokens import HIDDEN
from firstfault.credentials.values import is_placeholder

__all__ = ["without_arguments"]

_FLAG = re.compile(
    r"""(?<![\w-])-(?P<flag>[apu]|-user|-proxy-user)
        (?:(?P<listed>(?P<mark>["']),[ ]?(?P=mark))|=|[ ]{1,3})?
        (?P<quote>["'])?(?P<value>(?(quote)[^"'\n]{1,500}|[^\s"'`,;|)\]]+))""",
    re.VERBOSE,
)
_LOOK_BACK = 300
_COMMANDS = {
    "p": re.compile(r"\b(?:sshpass|login|mysql\w{0,8}|mariadb\w{0,8}|mongo\w{0,8}|ldap\w{0,8})\b"),
    "a": re.compile(r"\bredis-cli\b"),
    "-user": re.compile(r"\bcurl\b"),
    "-proxy-user": re.compile(r"\bcurl\b"),
    "u": re.compile(r"\b(?:curl|http|https|xh)\b"),
}
_ATTACHED_ONLY = re.compile(r"\b(?:mysql|mariadb)")

_NETRC = re.compile(
    r"\bmachine\s{1,20}\S{1,256}\s{1,20}(?:(?:login|account)\s{1,20}\S{1,256}\s{1,20}){0,2}password\s{1,20}(?P<value>\S+)"
    r"|(?:^|\n)[ \t]{0,20}(?:default\s{1,20})?login[ \t]{1,20}\S{1,256}\s{1,20}password[ \t]{1,20}(?P<other>\S+)"
    r"(?=[ \t]{0,20}(?:\n|$))"
)
_LOGIN = re.compile(
    r"\b(?:wandb|comet|neptune)[\"', ]{1,8}login[\"', ]{1,8}(?:--relogin[\"', ]{1,8})?(?P<value>[0-9A-Za-z]{16,})"
)

_BASIC_AUTH = re.compile(
    r"(?P<keep>\bBasicAuth\(|\bHTTP(?:Basic|Digest|Proxy)Auth\()(?P<user>[ ]{0,4}[^,()\n]{1,200},[ ]{0,4})"
    r"(?P<quote>[\"'])(?P<value>[^\"'\n]{1,500})"
)


def without_arguments(text: str) -> str:
    """Replace passwords after ``docker login -p``, ``curl -u`` and the like, and in lines of ``.netrc``."""
    if "-" in text:
        text = _FLAG.sub(_without_argument, text)
    if "login" in text or "machine" in text:
        text = _LOGIN.sub(_without_value, _NETRC.sub(_without_value, text))
    if "Auth(" in text:
        text = _BASIC_AUTH.sub(_without_value, text)
    return text


def _without_argument(found: re.Match[str]) -> str:
    flag, value = found["flag"], found["value"]
    before = found.string[max(found.start() - _LOOK_BACK, 0) : found.start()]
    before = before[before.rfind("\n") + 1 :]
    command = _COMMANDS[flag].search(before)
    if command is None or value.startswith("-") or is_placeholder(value):
        return found[0]
    if flag == "p" and _ATTACHED_ONLY.match(command[0]) and found.start("value") != found.start() + len("-p"):
        return found[0]
    user, colon, password = value.partition(":")
    if flag in {"p", "a"}:
        user, password = "", value
    elif not colon or is_placeholder(password):
        return found[0]
    head = found[0][: found.start("value") - found.start()]
    return f"{head}{user}{colon if flag not in {'p', 'a'} else ''}{HIDDEN}"


def _without_value(found: re.Match[str]) -> str:
    group = found.lastgroup or "value"
    return found[0] if is_placeholder(found[group]) else found[0][: found.start(group) - found.start()] + HIDDEN
