"""Lines in which a program names its own rank."""

from __future__ import annotations

from firstfault.utils.lazy_pattern import LazyPattern

# A program prints its own rank.
DECLARED_RANK = LazyPattern(r"""
^\W{0,3}(?:INFO\W+)?(?:[\w.]+\.)?
(?i:(?:global[_ ]?)?rank|process_index(?:\(\))?)\W{1,2}(?P<rank>\d{1,6})\b
""")

# A program's own logger puts the rank before a line of a process with a known number.
LOGGED_RANK = LazyPattern(r"^[\w\s:.,-]{0,30}\[(?i:worker|rank)[ :=](?P<rank>\d{1,6})\]")
