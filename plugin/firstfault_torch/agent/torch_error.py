"""torch's own words about a failure of this node, about the root cause if that was one of its
workers: the line in its log, and its ChildFailedError.

torch names the failure that it sees first. A worker may see a peer's broken connection, and exit,
while the peer still runs its exit handlers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from firstfault.model import WorkerError
from firstfault_torch.agent.deaths import WorkerExit
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.compat.torch_agent import FAILURE_LOGGER, process_failure

_failures = logging.getLogger(FAILURE_LOGGER)


def keep_failure_lines(report: NodeReport, lines: Iterable[tuple[WorkerExit, str]]) -> None:
    """Keep torch's line about each failed worker until the root cause is known.

    Args:
        report: of the round.
        lines: in the order of the failures.
    """
    report.failure_lines.clear()
    report.failure_lines.update((death.local_rank, line) for death, line in lines)


def log_failure(report: NodeReport, root: WorkerError | None, group_rank: int = 0) -> None:
    """Log torch's line about the root cause, else about this node's first failure; once."""
    lines = report.failure_lines
    local_rank = _find_root(root, group_rank)
    line = lines[local_rank] if local_rank in lines else next(iter(lines.values()), "")
    lines.clear()
    if line:
        _failures.error("%s", line)


def name_root_cause(
    error: Exception, report: NodeReport, root: WorkerError | None, group_rank: int
) -> Exception:
    """Return torch's error about the root cause if that was a worker of this node,
    else the error itself.
    """
    local_rank = _find_root(root, group_rank)
    if not isinstance(error, ChildFailedError) or root is None or local_rank is None:
        return error
    rank, code = root.place.rank, report.exit_codes.get(local_rank)
    if rank is None or rank in error.failures or not code:
        return error
    file = report.error_files.get(local_rank, "")
    failure = process_failure(local_rank, root.place.pid, code, file)
    return ChildFailedError(error.name, {rank: failure})


def _find_root(root: WorkerError | None, group_rank: int) -> int | None:
    """Return the local rank of the root cause; None: it wasn't a worker of this node."""
    is_here = root is not None and root.place.group_rank == group_rank
    return root.place.local_rank if root is not None and is_here else None
