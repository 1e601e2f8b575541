"""Lines of stderr without the prefixes of loggers and launchers."""

from __future__ import annotations

import re

from firstfault.utils.text import printable

RANK_PREFIX = re.compile(r"^(?:\[?(?:rank|default|local_rank)[ _]?\d+\]?:\s?|\d{1,5}: (?=\s|\w))+")
"""Put before each line by torch, its launcher or srun."""
_MESSAGE_PREFIX = re.compile(
    r"^\s*(?:what\(\):\s*|\[[EWFI]\d{0,4}(?:\s[\d:.]{0,30})?\s[^\]\s]{0,60}\]\s*|[EWFI]\d{3,4}\s[\d:.]+\s+\S+\s\S+:\d+\]\s*"
    r"|\[(?:PG\s[^\]\n]{0,100}\s)?Rank\s\d+\]\s*|Process group watchdog thread terminated with exception:\s*"
    r"|\S{1,200}\.(?:cuh?|cpp|cc|h(?:pp)?):\d+:[^\n]{0,200}?(?=Assertion )"
    r"|terminate called after throwing an instance of '[^']*'\s*"
    r"|(?:/\S{0,200}/)?python[\d.]*: (?=can't |Error while finding |No module named ))+"
)


def strip_line_prefixes(line: str) -> str:
    """Return a line without the prefixes of loggers, NCCL, C++ and Python's interpreter."""
    return _MESSAGE_PREFIX.sub("", strip_rank_prefix(line)).strip()


def strip_rank_prefix(line: str) -> str:
    """Return a line without control characters, and without the prefix of torch, its launcher or srun."""
    return RANK_PREFIX.sub("", printable(line))
