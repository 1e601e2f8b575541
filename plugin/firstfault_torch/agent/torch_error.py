"""torch's own words about a failure of this node, about the root cause if that was one of its
workers: the line in its log, and its ChildFailedError.

torch names the failure that it sees first. A worker may see a peer's broken connection, and exit,
while the peer still runs its exit handlers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.compat.torch_agent import FAILURE_LOGGER, process_failure

_failures = logging.getLogger(FAILURE_LOGGER)


def keep_failure_lines(report: NodeReport, lines: Iterable[tuple[int, str]]) -> None:
    """Keep torch's line about each failed worker until the root cause is known.

    Args:
        report: of the round.
        lines: with the workers' ranks, in the order of the failures.
    """
    report.failure_lines.clear()
    report.failure_lines.update(lines)


def log_failure(report: NodeReport, root_ranks: Sequence[int] = ()) -> None:
    """Log torch's line about the root cause, else about this node's first failure; once."""
    lines = report.failure_lines
    named = next((rank for rank in (*root_ranks, *lines) if rank in lines), None)
    line = lines[named] if named is not None else ""
    lines.clear()
    if line:
        _failures.error("%s", line)


def name_root_cause(error: Exception, report: NodeReport, root_ranks: Sequence[int]) -> Exception:
    """Return torch's error about the root cause if that was a worker of this node,
    else the error itself.
    """
    rank = next((rank for rank in root_ranks if rank in report.exits), None)
    if not isinstance(error, ChildFailedError) or rank is None or rank in error.failures:
        return error
    ended = report.exits[rank]
    if not ended.exit_code:
        return error  # torch takes it for a success
    file = report.error_files.get(ended.local_rank, "")
    failure = process_failure(ended.local_rank, ended.pid, ended.exit_code, file)
    return ChildFailedError(error.name, {rank: failure})
