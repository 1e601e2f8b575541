"""Which nodes of a round took part, have reported, or are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.model.failure import Subject
from firstfault.model.job import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.model.failure import Place
    from firstfault.model.job import JobErrors, NodePresence

_FINAL = {Phase.FAILED, Phase.SUCCEEDED}

NodeKey = tuple[str, "int | None"]
"""A node's name and its rank: two agents on one host may have one name."""


def node_key(place: Place) -> NodeKey:
    """Return the key of the node of a process or an agent."""
    return (place.node, place.group_rank)


def node_order(key: NodeKey) -> tuple[str, int]:
    """Return what sorts nodes by name, then by group rank."""
    return (key[0], -1 if key[1] is None else key[1])


def node_label(key: NodeKey) -> str:
    """Return a name for a person, also for a node that has none."""
    node, group_rank = key
    return node or (f"group rank {group_rank}" if group_rank is not None else "a node without a name")


def of_newest_incarnations(
    entries: Sequence[NodePresence], newest: dict[NodeKey, int] | None = None
) -> list[NodePresence]:
    """Return the entries without those of a node's earlier incarnations.

    Args:
        entries: of one round.
        newest: the newest incarnation of each node, as far as it is known from elsewhere.
    """
    newest = dict(newest or {})
    for entry in entries:
        key = node_key(entry.place)
        newest[key] = max(newest.get(key, 0), entry.place.incarnation)
    return [
        entry
        for entry in entries
        if not entry.place.incarnation or entry.place.incarnation >= newest[node_key(entry.place)]
    ]


def nodes_done(roster: Iterable[NodePresence], expected_nodes: int | None = None) -> bool:
    """Whether every node of the last round has reported.

    Without `expected_nodes` the entries tell the number of nodes; without entries the answer is False.
    """
    entries = list(roster)
    last = max((entry.place.round for entry in entries), default=0)
    current = of_newest_incarnations([entry for entry in entries if entry.place.round == last])
    expected = expected_nodes or max((entry.place.group_world_size for entry in current), default=0)
    return expected > 0 and len(nodes_reported(current)) >= expected


def nodes_reported(roster: Iterable[NodePresence]) -> set[NodeKey]:
    """Return the nodes that have reported: they will write nothing more."""
    return {node_key(entry.place) for entry in roster if entry.phase in _FINAL}


def unreported_nodes(job: JobErrors) -> tuple[str, ...]:
    """Return the nodes that took part in the judged round and have not said that they are done, by name."""
    done = nodes_reported(job.roster)
    unreported = {node_key(entry.place) for entry in job.roster} - done
    return tuple(node_label(key) for key in sorted(unreported, key=node_order))


def pods_live(job: JobErrors) -> bool:
    """Whether every pod reported that it is done; if one did not, Flyte reads no file of the attempt.

    If a node joined and did not report, its pod may be gone. If a node's agent is gone, so is the pod, of which it was
    the main process: the node's recorder can write its report, but cannot let the pod succeed.
    """
    is_lost = any(failure.subject is Subject.AGENT and failure.category == "node_lost" for failure in job.failures)
    return not is_lost and not unreported_nodes(job)
