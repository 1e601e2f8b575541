"""Lines of stderr without what loggers and launchers print before the text."""

from __future__ import annotations

import re

from firstfault.utils.text import printable

RANK_PREFIX = re.compile(r"^(?:\[?(?:rank|default|local_rank)[ _]?\d+\]?:\s?|\d{1,5}: (?=\s|\w))+")
"""What torch, its launcher and srun put before each line."""
_CARRIERS = re.compile(
    r"^\s*(?:what\(\):\s*|\[[EWFI]\d{0,4}(?:\s[\d:.]{0,30})?\s[^\]\s]{0,60}\]\s*|[EWFI]\d{3,4}\s[\d:.]+\s+\S+\s\S+:\d+\]\s*"
    r"|\[(?:PG\s[^\]\n]{0,100}\s)?Rank\s\d+\]\s*|Process group watchdog thread terminated with exception:\s*"
    r"|\S{1,200}\.(?:cuh?|cpp|cc|h(?:pp)?):\d+:[^\n]{0,200}?(?=Assertion )"
    r"|terminate called after throwing an instance of '[^']*'\s*"
    r"|(?:/\S{0,200}/)?python[\d.]*: (?=can't |Error while finding |No module named ))+"
)


def strip_line_prefixes(line: str) -> str:
    """Return a line without what loggers, NCCL, C++ and Python's interpreter put before its text."""
    return _CARRIERS.sub("", strip_rank_prefix(line)).strip()


def strip_rank_prefix(line: str) -> str:
    """Return a line without control characters, and without what torch, its launcher or srun put before it."""
    return RANK_PREFIX.sub("", printable(line))
