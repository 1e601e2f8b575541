"""Finds credentials in texts and replaces them by ``***``.

There are two kinds of rule, both in the table ``credentials.toml``: `shapes` finds what has a form of its own, such as
a token with a known prefix; `named` finds the value that follows a name such as ``password``. `literals` decides
whether a value is a literal, or code and ordinary text. `own_rules` are those of the platform.
"""

from __future__ import annotations

from firstfault.credentials.named import without_named_values
from firstfault.credentials.own_rules import without_own_rules
from firstfault.credentials.shapes import without_private_keys, without_shapes
from firstfault.credentials.urls import without_url_passwords

_ROUNDS = 4
_STEPS = (without_private_keys, without_shapes, without_url_passwords, without_named_values, without_own_rules)


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
