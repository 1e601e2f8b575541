"""What failures tell: about themselves, about others, and when.

`classify` reads one text; the strategy ``evidence`` weighs all failures of an attempt. Nothing
here reads storage. Imports `exceptions`, `layout` and `model`.
"""

from __future__ import annotations

from firstfault.evidence.signatures import Role, Signatures, built_in_signatures, load_signatures
from firstfault.evidence.texts import Classification, Pointer, classify

__all__ = [
    "Classification",
    "Pointer",
    "Role",
    "Signatures",
    "built_in_signatures",
    "classify",
    "load_signatures",
]
