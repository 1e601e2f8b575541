"""The regular expressions of ``texts.toml``: for messages of exceptions, the lines around them, and stacks."""

from __future__ import annotations

import re
from pathlib import Path

from firstfault.utils.toml import parse_toml

_TABLE = parse_toml(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
# compiled when this module is imported, and not when a process fails
PATTERNS = {name: re.compile(text, re.VERBOSE) for name, text in _TABLE["pattern"].items()}
