"""How often failures name each rank and node."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from firstfault.evidence.classification import ClassifiedFailure
    from firstfault.evidence.text_classification import Pointer
    from firstfault.model import CausedBy, JobErrors


@dataclass(frozen=True, slots=True)
class Accusations:
    """How many others name each rank and node."""

    ranks: Counter[int] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    broadcast: Counter[CausedBy] = field(default_factory=Counter)
    """How many agents and workers were stopped for each failure that the agents broadcast, without its document."""

    def of(self, judged: ClassifiedFailure) -> int:
        """Return how many others name this failure's process or its node."""
        rank, node = judged.failure.rank, judged.failure.node
        return (self.ranks[rank] if rank is not None else 0) + self.nodes[node]

    def times_broadcast(self, judged: ClassifiedFailure) -> int:
        """Return how many were stopped because of it. The agents noticed it first, but it need not have been first."""
        rank, node = judged.failure.rank, judged.failure.node
        return sum(
            count
            for cause, count in self.broadcast.items()
            if (cause.rank == rank if cause.rank is not None else cause.node == node)
        )


def accusations_of(job: JobErrors, classified: Iterable[ClassifiedFailure]) -> Accusations:
    """Return how often each rank and node is named; a failure that names itself does not count."""
    at = _nodes_by_address(job)
    accusations = Accusations()
    for entry in job.roster:
        if entry.first_failure is not None:
            accusations.broadcast[replace(entry.first_failure, document="")] += 1
    for judged in classified:
        failure = judged.failure
        if failure.caused_by is not None:
            accusations.broadcast[replace(failure.caused_by, document="")] += 1
        if judged.pointer is None:
            continue
        rank = judged.pointer.rank
        if rank is not None and rank != failure.rank:
            accusations.ranks[rank] += 1
        node = _named_node(judged.pointer, at)
        if node and node != failure.node:
            accusations.nodes[node] += 1
    return accusations


def names_it(count: int) -> str:
    """Return "1 failure names it", "3 failures name it"."""
    return "1 failure names it" if count == 1 else f"{count} failures name it"


def _nodes_by_address(job: JobErrors) -> dict[str, set[str]]:
    """Return the nodes behind each address and host name; an address that several share names none."""
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
    """Strip the IPv4-mapped IPv6 prefix that a dual-stack socket adds."""
    bare = ip.removeprefix("::ffff:")
    try:
        socket.inet_aton(bare)
    except OSError:
        return ip
    return bare
