"""Whom the failures name: pointers resolved to ranks and nodes, and counted by who names them."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from firstfault.evidence.classification import ClassifiedFailure
    from firstfault.evidence.texts import Pointer
    from firstfault.model import CausedBy, JobErrors

__all__ = ["Accusations", "accusations_of"]


@dataclass(frozen=True, slots=True)
class Accusations:
    """Who is named by how many others."""

    ranks: Counter[int] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    told: Counter[CausedBy] = field(default_factory=Counter)
    """Whose failure the agents were told of, without its document: the first that somebody noticed."""

    def of(self, judged: ClassifiedFailure) -> int:
        """Return how many others name this failure's process, or its node."""
        rank, node = judged.failure.rank, judged.failure.node
        return (self.ranks[rank] if rank is not None else 0) + self.nodes[node]

    def told_times(self, judged: ClassifiedFailure) -> int:
        """Return how many were stopped because of it: the first to be noticed, which need not be the first."""
        rank, node = judged.failure.rank, judged.failure.node
        return sum(
            count
            for cause, count in self.told.items()
            if (cause.rank == rank if cause.rank is not None else cause.node == node)
        )


def accusations_of(job: JobErrors, classified: Iterable[ClassifiedFailure]) -> Accusations:
    """Return who is named, each time by somebody else."""
    at = _nodes_by_address(job)
    accusations = Accusations()
    for entry in job.roster:
        if entry.first_failure is not None:
            accusations.told[replace(entry.first_failure, document="")] += 1
    for judged in classified:
        failure = judged.failure
        if failure.caused_by is not None:
            accusations.told[replace(failure.caused_by, document="")] += 1
        if judged.pointer is None:
            continue
        rank = judged.pointer.rank
        if rank is not None and rank != failure.rank:
            accusations.ranks[rank] += 1
        node = _named_node(judged.pointer, at)
        if node and node != failure.node:
            accusations.nodes[node] += 1
    return accusations


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
