"""Reads TOML, which the standard library does since Python 3.11,
and tables of regular expressions in it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str) -> dict[str, Any]:
    """Return what a TOML text holds.

    Raises:
        ValueError: it isn't TOML.
    """
    return tomllib.loads(text)


class Patterns(dict[str, re.Pattern[str]]):
    """Verbose regular expressions by name, each compiled on first use:
    most commands need few of them.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, name: str) -> re.Pattern[str]:
        self[name] = re.compile(self._texts[name], re.VERBOSE)
        return self[name]

    def compile_all(self) -> None:
        """Compile all of them now, for a process that may lack the memory,
        the stack or the time later.
        """
        for name in self._texts:
            self[name]
