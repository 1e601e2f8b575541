"""The topology of a job as a tree: groups of ranks within groups, and the ranks as its leaves."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from firstfault_torch.inprocess.state import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from firstfault_torch.inprocess.state import State

__all__ = ["Group", "Layer", "LayerFlag", "Leaf", "Topology"]


class LayerFlag(enum.Flag):
    """How `Tree` may replace a terminated active rank within a group of a layer."""

    RESERVE = enum.auto()
    """by an inactive rank of the same group"""
    BACKFILL = enum.auto()
    """by the active rank with the highest number in the same group"""


@dataclasses.dataclass
class Layer:
    """One level of the topology that `Tree` builds: the job, a rack, a host.

    Attributes:
        min_ranks: fewest healthy ranks of a group, active or not. If a group has fewer, all its ranks are terminated.
        max_ranks: most ranks of a group that are active at first; None for no limit. A replacement from a reserve can
            bring a group above it.
        key_or_fn: the key of this rank's group: a text, or a function that returns it for the state of this rank.
        flag: how terminated active ranks may be replaced within a group; None if they may not.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[State], str] = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check the limits.

        Raises:
            ValueError: `min_ranks` is negative, or `max_ranks` is below 1.
        """
        if self.min_ranks < 0:
            raise ValueError(f"min_ranks is {self.min_ranks}; it must be at least 0")
        if self.max_ranks is not None and self.max_ranks < 1:
            raise ValueError(f"max_ranks is {self.max_ranks}; it must be at least 1, or None for no limit")

    def allows(self, flag: LayerFlag) -> bool:
        """Return True if the layer has this flag."""
        return self.flag is not None and bool(self.flag & flag)


@dataclasses.dataclass(eq=False)
class Group:
    """A group of ranks in one layer.

    Attributes:
        name: its key.
        layer: its layer's settings.
        parent: the group that contains it; None for the root.
        groups: the groups of the next layer that it contains, by key, in the order of their first ranks.
        own_leaves: its ranks if it is in the last layer, in the order of their initial ranks.
        leaves: all ranks below it, in the order of the tree.
        healthy: how many of them are not terminated.
        reserve: those that are inactive, the last one deactivated at the end.
    """

    name: str
    layer: Layer
    parent: Group | None = None
    groups: dict[str, Group] = dataclasses.field(default_factory=dict)
    own_leaves: list[Leaf] = dataclasses.field(default_factory=list)
    leaves: list[Leaf] = dataclasses.field(default_factory=list)
    healthy: int = 0
    reserve: dict[Leaf, None] = dataclasses.field(default_factory=dict)

    def walk(self) -> Iterator[Leaf]:
        """Yield all ranks below this group, depth first."""
        yield from self.own_leaves
        for group in self.groups.values():
            yield from group.walk()


@dataclasses.dataclass(eq=False)
class Leaf:
    """A rank of the topology.

    Attributes:
        initial_rank: its number when the tree was built.
        path: the groups that contain it, the innermost first.
        rank: its present number; None if it is terminated.
        active_rank: its number among the active ranks; None if it is not active.
        mode: what it does.
        lost_because: if its group was terminated as a whole, a sentence that says why.
    """

    initial_rank: int
    path: tuple[Group, ...]
    rank: int | None
    active_rank: int | None = None
    mode: Mode = Mode.INITIALIZED
    lost_because: str = ""

    def activate(self, active_rank: int) -> None:
        """Make the rank active."""
        self.mode, self.active_rank = Mode.ACTIVE, active_rank
        for group in self.path:
            group.reserve.pop(self, None)

    def deactivate(self) -> None:
        """Make the rank a reserve of all its groups."""
        self.mode, self.active_rank = Mode.INACTIVE, None
        for group in self.path:
            group.reserve[self] = None

    def terminate(self) -> None:
        """Take the rank out of the reserves. Its numbers stay until it is replaced."""
        self.mode = Mode.TERMINATED
        for group in self.path:
            group.reserve.pop(self, None)

    def domain(self, flag: LayerFlag) -> Sequence[Group]:
        """Return the innermost groups that contain the rank, up to the first whose layer lacks `flag`."""
        count = next((at for at, group in enumerate(self.path) if not group.layer.allows(flag)), len(self.path))
        return self.path[:count]


class Topology:
    """All ranks of a job, in groups.

    Args:
        layers: the layers, the root's first.
        keys: for each initial rank, the key of its group in each layer. All have the same first key.

    Attributes:
        root: the group of all ranks.
        levels: the groups of each layer, the root's first.
        leaves: all ranks, in the order of the tree: depth first, groups in the order of their lowest initial ranks.
    """

    def __init__(self, layers: Sequence[Layer], keys: Sequence[Sequence[str]]) -> None:
        self.root = Group(keys[0][0], layers[0])
        self.levels: list[list[Group]] = [[self.root], *([] for _ in layers[1:])]
        for rank, names in enumerate(keys):
            path = [self.root]
            for level, layer, name in zip(self.levels[1:], layers[1:], names[1:], strict=True):
                parent = path[-1]
                group = parent.groups.get(name)
                if group is None:
                    group = parent.groups[name] = Group(name, layer, parent)
                    level.append(group)
                path.append(group)
            path[-1].own_leaves.append(Leaf(rank, tuple(reversed(path)), rank))
        self.leaves = list(self.root.walk())
        for leaf in self.leaves:
            for group in leaf.path:
                group.leaves.append(leaf)
                group.healthy += 1
