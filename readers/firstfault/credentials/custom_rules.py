"""The platform's own rules: regular expressions in ``FIRSTFAULT_REDACT``, one per line."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from firstfault.credentials.literals import HIDDEN
from firstfault.utils.loggers import get_logger

REDACT_VARIABLE = "FIRSTFAULT_REDACT"
TEXT_ENCODING = ("utf-8", "surrogatepass")
"""Lone surrogates occur in paths and in truncated output;
they must survive the round trip through RE2's bytes.
"""

logger = get_logger(__name__)


def redact_custom_matches(text: str) -> str:
    """Replace matches of the platform's rules: a rule's first group if it has one,
    else the whole match.
    """
    rules = os.environ.get(REDACT_VARIABLE)
    if not rules:
        return text
    data = text.encode(*TEXT_ENCODING)
    for pattern in _compile_and_warn(rules):
        parts: list[bytes] = []
        end = 0
        for match in pattern.finditer(data):
            first, last = match.span(min(pattern.groups, 1))
            if first < last:  # not an empty match, nor a group outside the match
                parts += data[end:first], HIDDEN.encode()
                end = last
        data = b"".join((*parts, data[end:]))
    return data.decode(*TEXT_ENCODING)


def warn_of_invalid_rules() -> None:
    """Log the warnings of the first text, so that a job has them when it starts."""
    redact_custom_matches("")


@lru_cache(maxsize=1)
def _compile_and_warn(rules: str) -> tuple[Any, ...]:
    patterns, problems = compile_rules(rules)
    for problem in problems:
        logger.warning("%s", problem)
    return patterns


def compile_rules(rules: str) -> tuple[tuple[Any, ...], list[str]]:
    """Return the compiled rules, and what is wrong with the invalid ones,
    without their text, which may hold a credential.
    """
    # RE2 matches in linear time, so no rule can hang the report of a failed job
    import re2  # noqa: PLC0415 - slow, and only those who set the variable need it

    options = re2.Options()
    # RE2 would print an invalid rule itself
    options.log_errors = False
    patterns: list[Any] = []
    problems: list[str] = []
    for number, rule in enumerate(rules.splitlines(), 1):
        if not rule.strip():
            continue
        try:
            patterns.append(re2.compile(f"(?m){rule.strip()}".encode(), options))
        except re2.error as error:
            # after the colon RE2 quotes the rule, which may hold a credential
            why = error.args[0].decode(errors="replace").partition(":")[0]
            problems.append(
                f"line {number} of {REDACT_VARIABLE} is not a regular expression of RE2 ({why}); it"
                " hides nothing"
            )
    return tuple(patterns), problems
