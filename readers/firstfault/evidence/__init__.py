"""What failures show about themselves and about others, and when they happened.

`classify` judges one text. `diagnosis.diagnose` judges all failures of an attempt once, for
strategies and reports. Nothing here reads storage. Imports `exceptions`, `layout`, `model` and
`text`.
"""

from __future__ import annotations

from firstfault.evidence.signatures import (
    Role as Role,
    Signatures as Signatures,
    built_in_signatures as built_in_signatures,
    load_signatures as load_signatures,
)
from firstfault.evidence.texts import (
    Classification as Classification,
    Pointer as Pointer,
    classify as classify,
)
