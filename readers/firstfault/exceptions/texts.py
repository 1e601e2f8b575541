"""The regular expressions of ``texts.toml``: for messages of exceptions, the lines around them,
and stacks.
"""

from __future__ import annotations

from pathlib import Path

from firstfault.utils.toml import Patterns, parse_toml

PATTERNS = Patterns(
    parse_toml(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))["pattern"]
)
"""By name. A process that may fail compiles all of them before; see `Patterns.compile_all`."""
