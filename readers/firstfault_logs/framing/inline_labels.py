"""Ranks and process ids that native code prints about itself in its lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.framing.named_ranks import LOGGED_RANK

if TYPE_CHECKING:
    from firstfault_logs.framing.labels import Label

# Native code and libraries print the rank of their process.
_INLINE_RANK = LazyPattern(r"""
  ^(?:\[\d{1,5}\]:[ ]?)?(?:\[[EWIF][^\]\n]{1,120}\][ ])?
  \[(?:PG[ ][^\]\n]{0,80}\(default_pg\)[ ])?Rank[ ](?P<rank>\d{1,6})\]
| \bRankID:(?P<rank_id>\d{1,6})\b
| \[rank=(?P<rank_is>\d{1,6}),[ ]world=\d
| GLOBAL_RANK:[ ](?P<global>\d{1,6}),[ ]MEMBER
""")


# Native code and libraries print the number of their process
_INLINE_PID = LazyPattern(
    r"\(PID:[ ]?(?P<pid>\d{1,10}),|^\S{0,12}[ ]?\[PID:[ ]?(?P<pid2>\d{1,10})\]"
)

# Begins a line of NCCL.
_NCCL_LINE_START = LazyPattern(
    r"^(?P<host>[\w.-]{1,120}):(?P<pid>\d{1,10}):\d{1,10}[ ]\[\d{1,3}\][ ](?:\S+[ ]\S+[ ])?NCCL[ ]"
)


def add_inline_label(label: Label, text: str) -> Label:
    """Return a label with the rank and process id that native code prints about itself."""
    names_a_rank = label.rank is None and ("Rank" in text or "RANK" in text or "[rank=" in text)
    if names_a_rank and (rank_match := _INLINE_RANK.search(text)):
        label = label._replace(rank=int(next(filter(None, rank_match.groups()))))
    elif (
        label.pid is not None
        and label.rank is None
        and "[" in text[:30]
        and (logged_rank := LOGGED_RANK.match(text))
    ):
        label = label._replace(rank=int(logged_rank["rank"]))
    if label.pid is None and "PID" in text and (pid_match := _INLINE_PID.search(text)):
        label = label._replace(pid=int(pid_match["pid"] or pid_match["pid2"]))
    if " NCCL " in text and (line_start := _NCCL_LINE_START.match(text)):
        label = label._replace(
            pid=label.pid or int(line_start["pid"]), node=label.node or line_start["host"]
        )
    return label
