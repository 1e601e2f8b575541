"""Who is the root cause when nobody said so: the rank that others waited for, or of which nothing is left."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.evidence.stacks import Stood, where_it_stood
from firstfault.model import Phase, Subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.evidence.blame import Blame
    from firstfault.evidence.standing import Finding
    from firstfault.model import JobErrors, WorkerError

__all__ = ["Silent", "hung", "lost_documents", "silent_nodes_of"]

_MANY = 3
"""More silent ranks than this are not one fault."""


@dataclass(frozen=True, slots=True)
class Silent:
    """Somebody who said nothing, and why it is likely to be the root cause."""

    why: str
    weight: int
    """Independent reasons for it."""
    rank: int | None = None
    node: str = ""
    failure: WorkerError | None = None
    """What its agent wrote when it stopped it."""
    category: str = "hang"


def hung(findings: Sequence[Finding]) -> list[Silent]:
    """Return the ranks that the others waited for, by stacks, counters of collectives and threads that have died.

    Only those that stand out: where all stand at the same place, nobody does.
    """
    alive = [finding.failure for finding in findings if finding.failure.subject is Subject.WORKER]
    reasons: dict[int, list[str]] = defaultdict(list)
    for rank, why in (*_behind(alive), *_apart(alive), *_elsewhere(alive), *_threads(alive)):
        reasons[rank].append(why)
    by_rank = {failure.rank: failure for failure in alive}
    return [
        Silent("; ".join(why), len(why), rank, by_rank[rank].node, by_rank[rank])
        for rank, why in sorted(reasons.items())
    ]


def _behind(alive: Sequence[WorkerError]) -> list[tuple[int, str]]:
    """The ranks that have been given fewer collectives of a group than most of its members."""
    found = []
    groups: dict[str, dict[int, int]] = defaultdict(dict)
    for failure in alive:
        for progress in failure.collectives:
            if failure.rank is not None:
                groups[progress.group][failure.rank] = progress.enqueued
    for group, counts in sorted(groups.items()):
        most, members = Counter(counts.values()).most_common(1)[0]
        if members * 2 <= len(counts):
            most = max(counts.values())
        late = {rank: count for rank, count in counts.items() if count < most}
        if len(late) * 2 <= len(counts):
            found += [
                (rank, f"it had been given {count} collectives of group {group}, the others {most}")
                for rank, count in sorted(late.items())
            ]
    return found


def _apart(alive: Sequence[WorkerError]) -> list[tuple[int, str]]:
    """The ranks whose last collective of a group, by its number the same as the others', was another operation."""
    found = []
    steps: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for failure in alive:
        for progress in failure.collectives:
            if failure.rank is not None and progress.last_operation:
                steps[progress.group, progress.enqueued][failure.rank] = progress.last_operation
    for (group, number), operations in sorted(steps.items()):
        usual, members = Counter(operations.values()).most_common(1)[0]
        if members * 2 <= len(operations):
            continue  # nobody stands out
        found += [
            (rank, f"as collective {number} of group {group} it had {operation}, the others {usual}")
            for rank, operation in sorted(operations.items())
            if operation != usual
        ]
    return found


def _elsewhere(alive: Sequence[WorkerError]) -> list[tuple[int, str]]:
    """The ranks that stood outside of any collective while others waited in one."""
    stood = {failure.rank: where_it_stood(failure) for failure in alive if failure.rank is not None}
    waiting = [rank for rank, where in stood.items() if where.stood is Stood.COLLECTIVE]
    timed_out = [failure for failure in alive if failure.exception is not None]
    away = {rank: where for rank, where in stood.items() if where.stood is Stood.ELSEWHERE}
    if not away or not (waiting or timed_out) or len(away) > _MANY:
        return []
    return [(rank, f"it stood at {where.frame} while the others waited for it") for rank, where in sorted(away.items())]


def _threads(alive: Sequence[WorkerError]) -> list[tuple[int, str]]:
    return [
        (failure.rank, f"its thread {thread.thread!r} had died of {thread.exception.type}: {thread.exception.message}")
        for failure in alive
        if failure.rank is not None
        for thread in failure.thread_failures[:1]
    ]


def lost_documents(job: JobErrors) -> list[Silent]:
    """Return the ranks of nodes that are done of which nothing could be read, though they are known to have failed."""
    heard = {failure.rank for failure in job.failures}
    found = []
    for entry in job.roster:
        if entry.phase is not Phase.FAILED:
            continue
        lost = {receipt.rank: receipt for receipt in entry.receipts if not receipt.durable and not receipt.withdrawn}
        for rank in entry.ranks:
            if rank in heard:
                continue
            reason = lost[rank].error if rank in lost else "its document is missing"
            found.append(Silent(f"nothing could be read of it ({reason})", 1, rank, entry.place.node, None, "unknown"))
    return found if len(found) <= _MANY else []


def silent_nodes_of(job: JobErrors, blame: Blame) -> list[Silent]:
    """Return the nodes that took part and have not been heard of since."""
    joined = {entry.place.node for entry in job.roster}
    done = {entry.place.node for entry in job.roster if entry.phase is not Phase.JOINED}
    heard = {failure.node for failure in job.failures}
    found = []
    for node in sorted(joined - done - heard):
        votes = blame.nodes[node]
        named = f", and {votes} name it" if votes else ""
        found.append(
            Silent(f"it took part and was not heard of again{named}", 1 + bool(votes), None, node, None, "node_lost")
        )
    return found
