"""What programs, launchers, schedulers and log collectors print: ``vocabulary.toml``."""

from __future__ import annotations

from pathlib import Path

from firstfault.utils.toml import Patterns, parse_toml

_TABLES = parse_toml(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PATTERNS = Patterns(_TABLES["pattern"])
ALTERNATIVES: dict[str, list[str]] = _TABLES["alternatives"]
WORDS: dict[str, list[str]] = _TABLES["words"]
HARDWARE_XIDS = {int(number): text for number, text in _TABLES["xid"].items()}
"""Errors of GPUs."""
