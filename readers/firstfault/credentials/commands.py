"""Credentials among the arguments of well-known commands and calls, and in ``.netrc`` files."""

from __future__ import annotations

import re

from firstfault.credentials.tokens import HIDDEN
from firstfault.credentials.values import is_key, is_placeholder

__all__ = ["without_arguments", "without_options"]

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
    r"\b(?:wandb|comet|neptune)[\"', ]{1,8}login[\"', ]{1,8}"
    r"(?:--[a-z-]{1,20}(?:=[^\s\"',]{1,200})?[\"', ]{1,8}){0,3}(?:local-)?(?P<value>[0-9A-Za-z]{16,})"
)

_ARGUMENT = re.compile(r"\(\s{0,80}[rbu]?(?P<quote>[\"'])(?P<value>[^\s\"'\\]{16,500})(?P=quote)")
_TAKES_KEY = re.compile(
    r"""(?:\blogin|(?<![A-Za-z0-9])(?:set|save|add|use|with|from|register)_(?:\w{1,30}_)?(?:key|token|secret|password|credentials?)
        |(?<![A-Za-z0-9])[A-Z]\w{0,40}(?:(?<!Public)(?<!Primary)(?<!Foreign)(?<!Cache)Key|Token|Secret|Password|Credentials?|Auth)
        |\bcomet_ml\.(?:init|start|Experiment|API)|\bcohere\.(?:Async)?Client(?:V2)?|\bFernet|\bPinecone|\bpinecone\.init|\bGithub)$
    """,
    re.VERBOSE,
)
"""What takes a credential as its first argument: ``wandb.login``, ``set_api_key``, ``AzureKeyCredential``."""
_LOOK_AT_NAME = 60
_LOGIN_CALL = re.compile(
    r"(?P<keep>\blogin\(\s{0,80}(?P<quote>[\"'])[^\"'\n]{1,100}(?P=quote),\s{0,80})(?P<mark>[\"'])(?P<value>[^\"'\n]{1,500})(?=(?P=mark))"
)
"""``login("me", "password")``"""
_BASIC_AUTH = re.compile(
    r"(?P<keep>\bBasicAuth\(|\bHTTP(?:Basic|Digest|Proxy)Auth\()(?P<user>[ ]{0,4}[^,()\n]{1,200},[ ]{0,4})"
    r"(?P<quote>[\"'])(?P<value>[^\"'\n]{1,500})"
)


def without_options(text: str) -> str:
    """Replace passwords after ``docker login -p``, ``curl -u`` and the like."""
    return _FLAG.sub(_without_argument, text) if "-" in text else text


def without_arguments(text: str) -> str:
    """Replace passwords and keys in the arguments of commands and calls, and in lines of ``.netrc``."""
    if "login" in text or "machine" in text:
        text = _LOGIN.sub(_without_value, _NETRC.sub(_without_value, text))
    if "login(" in text:
        text = _LOGIN_CALL.sub(_without_password, text)
    if "(" in text:
        text = _ARGUMENT.sub(_without_key, text)
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


def _without_password(found: re.Match[str]) -> str:
    return found[0] if is_placeholder(found["value"]) else found["keep"] + found["mark"] + HIDDEN


def _without_key(found: re.Match[str]) -> str:
    before = found.string[max(found.start() - _LOOK_AT_NAME, 0) : found.start()]
    if not is_key(found["value"]) or not _TAKES_KEY.search(before):
        return found[0]
    return found[0][: found.start("value") - found.start()] + HIDDEN + found["quote"]


def _without_value(found: re.Match[str]) -> str:
    group = found.lastgroup or "value"
    return found[0] if is_placeholder(found[group]) else found[0][: found.start(group) - found.start()] + HIDDEN
