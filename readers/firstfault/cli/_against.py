"""``firstfault show --against``: what the log of another run doesn't have."""

from __future__ import annotations

from pathlib import Path

from firstfault.attempt import Attempt, digest_logs
from firstfault.brief.comparison import Comparison, compare
from firstfault.errors import UsageError


def compare_logs(read: Attempt, other: Path) -> Comparison:
    """Compare the logs that were read with another log, or folder of logs.

    Raises:
        UsageError: no logs were read.
    """
    logs = [source for source in read.sources if isinstance(source, Path)]
    if not logs:
        raise UsageError("--against compares logs; pass the log as a file or a folder")
    return compare(
        digest_logs(logs, {}, reads_all=True), digest_logs([other], {}, reads_all=True), other.name
    )
