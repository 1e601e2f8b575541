"""Rules of those who operate the platform: regular expressions in the variable ``FIRSTFAULT_REDACT``, one a line."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Any

_VARIABLE = "FIRSTFAULT_REDACT"
_ENCODING = ("utf-8", "surrogatepass")

logger = logging.getLogger(__name__)


def without_own_rules(text: str) -> str:
    """Replace what the rules match by ``***``: a rule's first group if it has one, otherwise the whole match."""
    rules = os.environ.get(_VARIABLE)
    if not rules:
        return text
    data = text.encode(*_ENCODING)
    for pattern in _compiled(rules):
        data = _without(pattern, data)
    return data.decode(*_ENCODING)


def _without(pattern: Any, data: bytes) -> bytes:
    group = min(pattern.groups, 1)
    parts: list[bytes] = []
    end = 0
    for found in pattern.finditer(data):
        first, last = found.span(group)
        if first < last:  # neither an empty match nor a group that took no part in it
            parts += data[end:first], b"***"
            end = last
    return b"".join((*parts, data[end:])) if parts else data


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
