"""The places of a node's agent and workers in the present round."""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.elastic.agent.server.api import WorkerGroup

from firstfault.model import Place
from firstfault_torch.node_context import NodeContext
from firstfault_torch.places import get_node_place


class PlaceFactory:
    """The places of a node's agent and of its workers in the present round."""

    def __init__(self, group: WorkerGroup, node_context: NodeContext) -> None:
        self._group = group
        self._base = replace(get_node_place(node_context), incarnation=node_context.incarnation)

    def begin_round(self, number: int, restarts_used: int) -> None:
        """Set what torch's group doesn't know."""
        self._base = replace(self._base, round=number, restart_count=restarts_used)

    def of(self, local_rank: int | None = None) -> Place:
        """Return the place of the agent, or of one of its workers."""
        group = self._group
        workers = {worker.local_rank: worker for worker in group.workers}
        worker = workers.get(local_rank) if local_rank is not None else None
        return replace(
            self._base,
            rank=worker.global_rank if worker else None,
            local_rank=local_rank,
            group_rank=group.group_rank,
            world_size=(
                worker.world_size
                if worker
                else next((item.world_size for item in group.workers), 0)
            ),
            group_world_size=group.group_world_size or 0,
            role=group.spec.role,
            pid=worker.id if worker is not None and isinstance(worker.id, int) else self._base.pid,
        )

    def rank_of(self, local_rank: int) -> int | None:
        """Return the global rank of a worker."""
        return self.of(local_rank).rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of all workers of this node; -1 in torch:
        the rendezvous hasn't given one.
        """
        return tuple(
            worker.global_rank for worker in self._group.workers if worker.global_rank >= 0
        )

    @property
    def nodes(self) -> int:
        """How many nodes the round has."""
        return self._group.group_world_size or 1
