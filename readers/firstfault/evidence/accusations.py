"""Whom the failures name: pointers resolved to ranks and nodes, and counted by who names them."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from firstfault.evidence.classification import Finding
    from firstfault.evidence.texts import Pointer
    from firstfault.model import CausedBy, JobErrors

__all__ = ["Blame", "blame_of"]


@dataclass(frozen=True, slots=True)
class Blame:
    """Who is named by how many others."""

    ranks: Counter[int] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    told: Counter[CausedBy] = field(default_factory=Counter)
    """Whose failure the agents were told of, without its document: the first that somebody noticed."""

    def of(self, finding: Finding) -> int:
        """Return how many others name this failure's process, or its node."""
        rank, node = finding.failure.rank, finding.failure.node
        return (self.ranks[rank] if rank is not None else 0) + self.nodes[node]

    def told_times(self, finding: Finding) -> int:
        """Return how many were stopped because of it: the first to be noticed, which need not be the first."""
        rank, node = finding.failure.rank, finding.failure.node
        return sum(
            count
            for cause, count in self.told.items()
            if (cause.rank == rank if cause.rank is not None else cause.node == node)
        )


def blame_of(job: JobErrors, findings: Iterable[Finding]) -> Blame:
    """Return who is named, each time by somebody else."""
    at = _nodes_by_address(job)
    blame = Blame()
    for entry in job.roster:
        if entry.first_failure is not None:
            blame.told[replace(entry.first_failure, document="")] += 1
    for finding in findings:
        failure = finding.failure
        if failure.caused_by is not None:
            blame.told[replace(failure.caused_by, document="")] += 1
        if finding.pointer is None:
            continue
        rank = finding.pointer.rank
        if rank is not None and rank != failure.rank:
            blame.ranks[rank] += 1
        node = _named_node(finding.pointer, at)
        if node and node != failure.node:
            blame.nodes[node] += 1
    return blame


def _nodes_by_address(job: JobErrors) -> dict[str, set[str]]:
    """The nodes behind each address and host name; an address that several share says nothing."""
    at: dict[str, set[str]] = defaultdict(set)
    places = [entry.place for entry in job.roster] + [failure.place for failure in job.failures]
    for place in places:
        for name in (place.ip, place.host, place.host.partition(".")[0], place.node):
            if name and place.node:
                at[name].add(place.node)
    return at


def _named_node(pointer: Pointer, at: dict[str, set[str]]) -> str:
    for name in (_plain(pointer.ip), pointer.host, pointer.host.partition(".")[0]):
        nodes = at.get(name, set()) if name else set()
        if len(nodes) == 1:
            return next(iter(nodes))
    return ""


def _plain(ip: str) -> str:
    """An IPv4 address without the IPv6 clothes that a dual-stack socket gives it."""
    bare = ip.removeprefix("::ffff:")
    try:
        socket.inet_aton(bare)
    except OSError:
        return ip
    return bare
