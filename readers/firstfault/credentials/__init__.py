"""Finds credentials in texts and replaces them by ``***``.

There are two kinds of rules, both rows of the table ``credentials.toml``. A shape matches a
credential by its own form, such as a token with a known prefix (`shapes`, which also has URLs with
passwords). The second kind matches the value that follows a name such as ``password`` (`names`,
`named_values`); `literals` decides whether that value is a literal, or code and ordinary text.
Platform operators add their own rules in ``FIRSTFAULT_REDACT`` (`custom_rules`).
"""

from __future__ import annotations

import sys

from firstfault.credentials import shapes
from firstfault.credentials.custom_rules import redact_custom_matches
from firstfault.credentials.named_values import redact_named_values
from firstfault.credentials.shapes import redact_shapes, redact_url_passwords
from firstfault.utils.lazy_pattern import find_patterns

MAX_PASSES = 4


def redact(text: str) -> str:
    """Replace credentials by ``***``, in time linear in the text's length.

    Names, hosts, source code and numbers stay.
    """
    # a replacement may uncover the next credential: TOKEN=https://user:***@host?key=...
    for _ in range(MAX_PASSES if text else 0):
        before = text
        text = redact_custom_matches(redact_named_values(redact_url_passwords(redact_shapes(text))))
        if text == before:
            break
    return text


def compile_patterns() -> None:
    """Compile all patterns, so that a process that fails needs not;
    other processes compile what they use.
    """
    patterns = find_patterns(sys.modules[__name__])
    for pattern in (*patterns.values(), *shapes.PATTERNS.values()):
        pattern.compile()
