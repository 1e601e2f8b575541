"""Whether a job can still be placed if it must not use one of its nodes.

Slurm accepts any list of excluded nodes. A job that can't be placed with it waits for ever, with
the reason BadConstraints or ReqNodeNotAvail.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from firstfault.slurm.client import SEPARATOR, SlurmError, expand_nodes, run_slurm

_NODE_COLUMNS = ("%N", "%T", "%c", "%X", "%Y", "%Z", "%G", "%m", "%d", "%b")
_RESERVATION_COLUMNS = ("name", "state", "start", "end", "duration", "nodes")
_USABLE_STATES = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
_HARMLESS_FLAGS = "~#!%+-"
"""Suffixes of a state: powered down, starting, stopping, partly completing, planned. With another,
it's not usable.
"""
_FEATURE_LIST = re.compile(r"[\w.:/=-]+(&[\w.:/=-]+)*")
"""Features that a node must all have. Other expressions have counts, alternatives and groups."""
_SWITCH_NODES = re.compile(r"\sNodes=(\S+)")
_EMPTY_VALUES = {"", "(null)", "N/A", "n/a"}


class Constraints(NamedTuple):
    """Where a job ran, and which nodes it accepts."""

    nodes: frozenset[str]
    """The nodes of its last start."""
    required: frozenset[str]
    excluded: frozenset[str]
    partition: str
    reservation: str
    features: str
    other: str = ""
    """A constraint that isn't understood here, or empty if there is none."""


class Node(NamedTuple):
    """A node of the job's partition."""

    name: str
    state: str
    hardware: tuple[str, ...]
    """Processors and generic resources."""
    memory: int
    disk: int
    features: frozenset[str]

    @property
    def is_usable(self) -> bool:
        """Whether Slurm starts jobs there, now or after other jobs have ended."""
        return self.state.rstrip(_HARMLESS_FLAGS) in _USABLE_STATES


def explain_exclusion_problem(
    constraints: Constraints,
    bad_node: str,
    partition_nodes: Collection[Node],
    blocked: Collection[str] | None,
    connected: Collection[str] | None,
) -> str:
    """Return why the job must not exclude a node, or an empty string if enough nodes are left.

    The job has run on its nodes, so they satisfy it, and so does the same set with other nodes of
    the same kind. No other set is considered, so the constraints needn't be understood.

    Args:
        constraints: of the job.
        bad_node: a node that the job ran on.
        partition_nodes: all nodes of its partition.
        blocked: nodes that the job can't use because of reservations, or None if unknown.
        connected: nodes that a switch connects with the bad node, or None for all nodes.
    """
    if bad_node not in constraints.nodes:
        return "Slurm doesn't list it as a node of this job"
    if constraints.other:
        return f"the job has {constraints.other}"
    if bad_node in constraints.required:
        return "the job requires it"
    node_by_name = {node.name: node for node in partition_nodes}
    if not constraints.nodes <= node_by_name.keys():
        return f"Slurm doesn't list all nodes of partition {constraints.partition}"
    if blocked is None:
        return f"the nodes of reservation {constraints.reservation} are unknown"
    forbidden = {bad_node, *constraints.excluded, *blocked}
    usable = {
        node for node in node_by_name.values() if node.is_usable and node.name not in forbidden
    }
    usable_requested = {node for node in usable if node.name in constraints.nodes}
    unusable_requested = [
        node_by_name[name] for name in constraints.nodes - {node.name for node in usable_requested}
    ]
    spare = {
        node
        for node in usable - usable_requested
        if (connected is None or node.name in connected)
        and all(_can_replace(node, other, constraints.features) for other in unusable_requested)
    }
    count = len(usable_requested) + len(spare)
    needed = len(constraints.nodes)
    return (
        ""
        if count >= needed
        else f"the job needs {needed} nodes, and {count} that satisfy it would be left"
    )


def _can_replace(node: Node, other: Node, features: str) -> bool:
    is_as_large = (
        node.hardware == other.hardware and node.memory >= other.memory and node.disk >= other.disk
    )
    if features in _EMPTY_VALUES:
        return is_as_large
    if _FEATURE_LIST.fullmatch(features):
        return is_as_large and set(features.split("&")) <= node.features
    return is_as_large and node.features == other.features


def find_exclusion_problem(constraints: Constraints, bad_node: str) -> str:
    """Ask Slurm about the job's partition. Return why the job must not exclude a node, or an empty
    string if nothing is against it.
    """
    try:
        nodes = parse_nodes(
            run_slurm("sinfo", "-h", "-N", "-p", constraints.partition, "-o", _join(_NODE_COLUMNS))
        )
        blocked = find_blocked_nodes(run_slurm("sinfo", "-h", "-T"), constraints.reservation, nodes)
        return explain_exclusion_problem(
            constraints,
            bad_node,
            nodes,
            blocked,
            _find_connected_nodes(bad_node),
        )
    except (SlurmError, ValueError) as error:
        return f"whether enough nodes are left is unknown ({error})"


def parse_nodes(printed: str) -> list[Node]:
    """Return the nodes of sinfo's rows."""
    nodes = []
    for row in printed.splitlines():
        name, state, *hardware, memory, disk, features = (
            text.strip() for text in row.split(SEPARATOR)
        )
        known_features = frozenset(features.split(",")) - _EMPTY_VALUES
        nodes.append(Node(name, state, tuple(hardware), int(memory), int(disk), known_features))
    return nodes


def find_blocked_nodes(printed: str, reservation: str, nodes: Collection[Node]) -> set[str] | None:
    """Return the nodes that a job can't use now because of reservations, or None if its own
    reservation isn't known.

    Args:
        printed: rows of ``sinfo -T``.
        reservation: the job's own.
        nodes: of the job's partition.
    """
    blocked: set[str] = set()
    own_nodes: set[str] | None = None
    for row in printed.splitlines():
        columns = row.rsplit(maxsplit=len(_RESERVATION_COLUMNS) - 1)
        if len(columns) < len(_RESERVATION_COLUMNS):
            continue  # a reservation of licenses, or a sentence that there is none
        name, state, names = columns[0], columns[1], columns[-1]
        if name == reservation:
            own_nodes = set(expand_nodes(names))
        elif state == "ACTIVE":
            blocked |= set(expand_nodes(names))
    if reservation in _EMPTY_VALUES:
        return blocked
    return None if own_nodes is None else blocked | ({node.name for node in nodes} - own_nodes)


def _find_connected_nodes(node: str) -> set[str] | None:
    """Return the nodes that share a switch or block with a node, or None without a topology.

    A job can't use nodes that no switch connects.
    """
    try:
        printed = run_slurm("scontrol", "show", "topology", node)
    except SlurmError:
        printed = ""
    return {
        name for names in _SWITCH_NODES.findall(printed) for name in expand_nodes(names)
    } or None


def _join(columns: tuple[str, ...]) -> str:
    return SEPARATOR.join(columns)
