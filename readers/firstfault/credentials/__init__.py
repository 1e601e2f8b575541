"""Finds credentials in texts and replaces them by ``***``.

There are two kinds of rule, both in the table ``credentials.toml``: `shapes` finds what has a form of its own, such as
a token with a known prefix; `named` finds the value that follows a name such as ``password``. `literals` decides
whether a value is a literal, or code and ordinary text. Those who operate the platform have rules of their own: regular
expressions in the variable ``FIRSTFAULT_REDACT``, one a line.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any

from firstfault.credentials.literals import HIDDEN
from firstfault.credentials.named import without_named_values
from firstfault.credentials.shapes import without_shapes, without_url_passwords

_ROUNDS = 4
_VARIABLE = "FIRSTFAULT_REDACT"
_ENCODING = ("utf-8", "surrogatepass")

logger = logging.getLogger(__name__)


def redact(text: str) -> str:
    """Replace credentials by ``***``, in time linear in the text's length.

    Names, hosts, source code and numbers stay. The steps are repeated until nothing changes: they may reveal another
    credential.
    """
    for _ in range(_ROUNDS):
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
