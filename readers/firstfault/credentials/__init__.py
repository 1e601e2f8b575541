"""Finds credentials in texts and replaces them by ``***``.

`tokens` finds private keys and tokens by their form, `urls` passwords and hooks in URLs, `named` values after a name
such as ``password`` or a flag. `values` decides whether such a value is a literal, or code and ordinary text.
`own_rules` are those of the platform.
"""

from __future__ import annotations

from firstfault.credentials.named import without_named_values
from firstfault.credentials.own_rules import without_own_rules
from firstfault.credentials.tokens import without_private_keys, without_tokens
from firstfault.credentials.urls import without_url_passwords

__all__ = ["redact"]

_ROUNDS = 4
_STEPS = (without_private_keys, without_tokens, without_url_passwords, without_named_values, without_own_rules)


def redact(text: str) -> str:
    """Replace credentials by ``***``, in time linear in the text's length.

    Names, hosts, source code and numbers stay. The steps are repeated until nothing changes: they may reveal another
    credential.
    """
    for _ in range(_ROUNDS):
        before = text
        for step in _STEPS:
            text = step(text)
        if text == before:
            break
    return text
