"""The releases of other packages that firstfault was run with, and the check of what is installed.

Only ``firstfault doctor`` calls it. The code that uses a package looks for the name that it needs,
and does without it if it's missing.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from functools import partial

from firstfault_torch.guard import try_call

_Release = tuple[int, int]
TESTED_RELEASES: Mapping[str, tuple[_Release, _Release]] = {
    "Python": ((3, 10), (3, 13)),
    "torch": ((2, 3), (2, 15)),
    "flytekit": ((1, 15), (1, 16)),
    "flyte": ((2, 12), (2, 12)),
    "flyteplugins-pytorch": ((2, 12), (2, 12)),
    "ray": ((2, 60), (2, 60)),
    "nvidia-resiliency-ext": ((0, 4), (0, 7)),
}
"""The first and the last release by distribution. The first is the minimum in pyproject.toml, which
has no extra for Ray. docs/reference/versions.md lists what was run; a test compares all three.
"""


def find_untested_releases() -> list[str]:
    """Return each installed package that firstfault wasn't tested with, as in "torch 2.16.0
    (tested: 2.3 to 2.15)". Nothing is refused because of it.
    """
    untested = []
    for name, (first, last) in TESTED_RELEASES.items():
        read = partial(importlib.metadata.version, name)
        installed = sys.version.split()[0] if name == "Python" else try_call(read)[0]
        if installed and not first <= tuple(map(int, re.findall(r"\d+", installed)[:2])) <= last:
            tested = " to ".join(
                dict.fromkeys(".".join(map(str, release)) for release in (first, last))
            )
            untested.append(f"{name} {installed} (tested: {tested})")
    return untested
