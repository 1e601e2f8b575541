"""A rank assignment that knows the topology of the job."""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import json
import warnings
from typing import TYPE_CHECKING, cast

from firstfault_torch.inprocess.rank_assignment.base import (
    RankAssignment,
    RankDiscarded,
    first_few,
    key_of,
    rank_and_terminated,
)
from firstfault_torch.inprocess.rank_assignment.topology import Group, LayerFlag, Leaf, Topology
from firstfault_torch.inprocess.state import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from firstfault_torch.inprocess.rank_assignment.base import RankAssignmentCtx
    from firstfault_torch.inprocess.rank_assignment.topology import Layer
    from firstfault_torch.inprocess.state import State

__all__ = ["Tree"]


class Tree(RankAssignment):
    """Assigns and activates ranks by the topology of the job: groups of ranks within groups.

    Each `Layer` is one level of the topology, from the whole job to, for instance, the host. At the first call the
    ranks exchange their keys, and each process builds the same tree. In the order of the tree, a rank becomes active
    unless one of its groups already has `max_ranks` active ones; the others are inactive and form the reserve. When
    ranks are terminated:

    1. A group with fewer healthy ranks than `min_ranks` is terminated as a whole, the innermost groups first.
    2. An inactive rank replaces a terminated active one and takes its active rank. It comes from the innermost group
       that has one, as long as all layers from the rank up to that group have `LayerFlag.RESERVE`.
    3. The highest active ranks take the active ranks that are still vacant, within the outermost group up to which all
       layers have `LayerFlag.BACKFILL`.
    4. What is vacant then is closed by shifting all higher active ranks down.
    5. If `world_size_filter` returns less than the number of active ranks, the highest become inactive.

    It cannot be chained with other rank assignments. Each process needs an instance of its own. The tree is kept
    between iterations, and built anew when the wrapped function is called again.

    Args:
        layers: the layers, from the whole job inwards. All ranks must have the same key in the first one.
        world_size_filter: gets the number of active ranks, and returns how many of them the function needs.

    Raises:
        ValueError: there are no layers, or a limit of one is out of range.
    """

    def __init__(self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None) -> None:
        if not layers:
            raise ValueError("Tree needs at least one layer")
        for layer in layers:
            layer.check()
        self.layers = list(layers)
        self.world_size_filter = world_size_filter
        self._topology: Topology | None = None
        self._own: Leaf | None = None
        self._by_rank: list[Leaf] = []
        self._active_world_size = 0

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return the next state of this rank.

        Raises:
            RankDiscarded: this rank is terminated, or its group has too few healthy ranks.
            RuntimeError: the ranks have different keys in the first layer, or different numbers of layers.
            TimeoutError: the one of in-process restart: at the first call, not all ranks sent their keys in time.
            ValueError: a terminated rank is outside the world, or `world_size_filter` returned more than it got.
        """
        rank, terminated = rank_and_terminated(ctx)
        exchanges = ctx.exchanges
        if self._topology is None or self._own is None or ctx.state.mode is Mode.INITIALIZED:
            self._topology = self._built(ctx, rank)
            exchanges += 1
            self._by_rank = sorted(self._topology.leaves, key=lambda leaf: leaf.initial_rank)
            self._own = self._by_rank[rank]
            self._active_world_size = _activate_first(self._topology)
        self._remove(self._topology, [self._by_rank[number] for number in sorted(terminated)])
        self._filter_active(self._topology)
        self._by_rank = [leaf for leaf in self._topology.leaves if leaf.mode is not Mode.TERMINATED]
        for number, leaf in enumerate(self._by_rank):
            leaf.rank = number
        return dataclasses.replace(
            ctx, state=self._next_state(ctx, self._own), terminated_ranks=set(), exchanges=exchanges
        )

    def _next_state(self, ctx: RankAssignmentCtx, own: Leaf) -> State:
        if own.mode is Mode.TERMINATED:
            raise RankDiscarded(own.lost_because or f"rank {ctx.state.rank} is terminated")
        return dataclasses.replace(
            ctx.state,
            rank=own.rank,
            world_size=len(self._by_rank),
            active_rank=own.active_rank,
            active_world_size=self._active_world_size,
            mode=own.mode,
        )

    def _built(self, ctx: RankAssignmentCtx, rank: int) -> Topology:
        """Exchange keys with all ranks, and return the topology."""
        own_keys = [key_of(layer.key_or_fn, ctx.state) for layer in self.layers]
        ranks = range(ctx.state.world_size)
        name = f"{type(self).__name__}.{ctx.exchanges}"
        texts = ctx.store.exchange(name, rank, json.dumps(own_keys), ranks)
        keys: list[list[str]] = [json.loads(texts[number]) for number in ranks]
        different = [number for number, names in enumerate(keys) if len(names) != len(own_keys)]
        if different:
            raise RuntimeError(
                f"all ranks must have as many layers as rank {rank}, but these have not: {first_few(different)}"
            )
        roots = sorted({names[0] for names in keys})
        if len(roots) > 1:
            raise RuntimeError(
                f"all ranks must have the same key in the first layer, but there are {len(roots)}: "
                f"{', '.join(map(repr, roots[:3]))}{', ...' if len(roots) > 3 else ''}"  # noqa: PLR2004 - a few examples
            )
        topology = Topology(self.layers, keys)
        moved = next(((at, leaf) for at, leaf in enumerate(topology.leaves) if leaf.initial_rank != at), None)
        if moved is not None:
            warnings.warn(
                f"the ranks do not follow the topology: rank {moved[1].initial_rank} gets the number {moved[0]}, "
                "because ranks of one group get successive numbers",
                stacklevel=3,
            )
        return topology

    def _remove(self, topology: Topology, leaves: Sequence[Leaf]) -> None:
        """Terminate ranks, and give the active ranks of these to others."""
        lost = _with_small_groups(topology, leaves)
        vacant = sorted((leaf for leaf in lost if leaf.mode is Mode.ACTIVE), key=lambda leaf: cast("int", leaf.rank))
        for leaf in lost:
            leaf.terminate()
        vacant = [leaf for leaf in vacant if not _replaced_from_reserve(leaf)]
        closed = sorted(_backfilled(vacant))
        for leaf in topology.leaves:
            if leaf.mode is Mode.ACTIVE:
                leaf.active_rank = _active_rank(leaf) - bisect.bisect_left(closed, _active_rank(leaf))
        self._active_world_size -= len(closed)
        for leaf in lost:
            leaf.rank = leaf.active_rank = None

    def _filter_active(self, topology: Topology) -> None:
        """Deactivate the highest active ranks that the function does not need."""
        if self.world_size_filter is None:
            return
        wanted = self.world_size_filter(self._active_world_size)
        if not 0 <= wanted <= self._active_world_size:
            raise ValueError(
                f"world_size_filter returned {wanted} for {self._active_world_size} active ranks; "
                f"it must return 0 to {self._active_world_size}"
            )
        for leaf in topology.leaves:
            if leaf.mode is Mode.ACTIVE and _active_rank(leaf) >= wanted:
                leaf.deactivate()
        self._active_world_size = wanted


def _activate_first(topology: Topology) -> int:
    """Activate ranks in the order of the tree, as far as `max_ranks` admits, and return how many."""
    groups = itertools.chain.from_iterable(topology.levels)
    room = {group: group.layer.max_ranks for group in groups if group.layer.max_ranks is not None}
    count = 0
    for leaf in topology.leaves:
        limited = [group for group in leaf.path if group in room]
        if all(room[group] > 0 for group in limited):
            leaf.activate(count)
            count += 1
            for group in limited:
                room[group] -= 1
        else:
            leaf.deactivate()
    return count


def _with_small_groups(topology: Topology, leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return `leaves` and the healthy ranks of all groups that become too small; count none of them as healthy."""
    lost: dict[Leaf, None] = {}

    def lose(leaf: Leaf) -> None:
        lost[leaf] = None
        for group in leaf.path:
            group.healthy -= 1

    for leaf in leaves:
        lose(leaf)
    for level in reversed(topology.levels):
        for group in level:
            if not 0 < group.healthy < group.layer.min_ranks:
                continue
            ranks = "1 healthy rank" if group.healthy == 1 else f"{group.healthy} healthy ranks"
            reason = f"group {group.name!r} has only {ranks}, at least {group.layer.min_ranks} are needed"
            for leaf in group.leaves:
                if leaf.mode is not Mode.TERMINATED and leaf not in lost:
                    leaf.lost_because = f"rank {leaf.rank} is removed: {reason}"
                    lose(leaf)
    return list(lost)


def _replaced_from_reserve(vacant: Leaf) -> bool:
    """Activate an inactive rank for a terminated one, and return True; return False if there is none."""
    for group in vacant.domain(LayerFlag.RESERVE):
        if group.reserve:
            next(reversed(group.reserve)).activate(_active_rank(vacant))
            return True
    return False


def _backfilled(vacant: Collection[Leaf]) -> set[int]:
    """Give vacant active ranks to the highest active ranks of the same domain.

    Args:
        vacant: the terminated ranks, in ascending order.

    Returns:
        The active ranks that are vacant then, as many as before.
    """
    closed: set[int] = set()
    domains: dict[Group, list[Leaf]] = {}
    for leaf in vacant:
        groups = leaf.domain(LayerFlag.BACKFILL)
        if groups:
            domains.setdefault(groups[-1], []).append(leaf)
        else:
            closed.add(_active_rank(leaf))
    for domain, terminated in domains.items():
        active = (leaf for leaf in domain.leaves if leaf.mode is Mode.ACTIVE)
        highest = heapq.nlargest(len(terminated), active, key=_active_rank)
        for moving, gone in itertools.zip_longest(reversed(highest), terminated):
            closed.add(_active_rank(moving or gone))
            if moving is not None:
                moving.active_rank = gone.active_rank
    return closed


def _active_rank(leaf: Leaf) -> int:
    """Return the active rank of a leaf that is active, or was until it was terminated."""
    return cast("int", leaf.active_rank)
