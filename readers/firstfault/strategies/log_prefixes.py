"""What loggers, launchers and native code put before a message:
a headline begins with the message itself.
"""

from __future__ import annotations

import re
from functools import cache

_PREFIX = r"""
  [\[(]? \d{4}[-/]\d\d[-/]\d\d [T_ -] \d\d:\d\d:\d\d [\d.,:]* (?:Z|[+-]\d\d:?\d\d)? [\])]? (?:[ ]?[-|:,])?
| [\[(]? \d\d:\d\d:\d\d (?:[.,]\d+)? [\])]? (?:[ ]?[-|:,])? (?=\s)
| \[? [EWFI]\d{3,4} [ ] \d\d:\d\d:\d\d [\d.]* (?:[ ]+\d+)? [ ]+ [\w./-]+:\d+ \] :?
| \[ [EWFI] [ ] [\w./:-]+ \]
| [EWFI] [ ] (?=\S+\.(?:cc|cpp|cu|h):\d+)
| \[PG[ ][^\]]{0,80}\]
| [\w.-]+:\d+:\d+ [ ] \[\d+\] (?:[ ]\S+\.cc:\d+)? [ ] NCCL [ ] (?:INFO|WARN|ERROR|TRACE)
| \[ (?:default|rank|worker|trainer|proc)? [ ]? \d{1,6} \] :
| \d{1,5} : (?=\s)
| (?:srun|slurmstepd(?:-[\w.-]+)?|mpirun|mpiexec|torchrun|deepspeed) : (?:[ ]error:)?
| \( [A-Za-z_][\w.-]* [ ] pid=\d+ [^)]{0,80} \)
| [\[(]? (?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL) (?:[\])] :? | [ ]?[:|-](?!\w) | (?=[ \t]+[\w./-]+\.py:\d))
| [\[(]? [\w./-]+\.(?:py|cc|cpp|cu|h):\d+ (?::\w+)? [\])]? [ ]* (?:--?|:|\]) (?=[ ])
| [\u2500-\u259f|]+ (?=\s|$)
"""
"""A time, native code, a NCCL group, NCCL, launchers, Ray, levels, places in code, drawings;
in this order.
"""
_OWN_RANK = r"\[Rank (?P<rank>\d{1,6})\]"
_KEY_ECHO = r"^(?:\^[A-Z\\])+(?=\S)"
"""What a terminal prints for a key such as Ctrl-C, before the next output."""
_MAX_PREFIXES = 8
_WORD = r"[^\W_]{2}"


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return (
        re.compile(rf"\s*(?:{pattern})\s*", re.VERBOSE) if "\n" in pattern else re.compile(pattern)
    )


def strip_log_prefixes(text: str, rank: int | None = None) -> str:
    """Return the first informative line of a log's text, without its prefixes and drawings.

    Args:
        text: some lines of a log.
        rank: of the process; its own rank is a prefix, too.
    """
    for line in text.splitlines():
        message = _strip_line(line.strip(), rank)
        if _compile(_WORD).search(message):
            return message
    return text.strip()


def _strip_line(line: str, rank: int | None) -> str:
    line = _compile(_KEY_ECHO).sub("", line)
    for _ in range(_MAX_PREFIXES):
        prefix = _compile(_PREFIX).match(line)
        own = _compile(_OWN_RANK).match(line) if prefix is None else None
        if own is not None and int(own["rank"]) == rank:
            prefix = own
        if prefix is None or not prefix[0]:
            break
        line = line[prefix.end() :].lstrip()
    return re.sub(r"[\u2500-\u259f]+", "", line).strip(" =*")
