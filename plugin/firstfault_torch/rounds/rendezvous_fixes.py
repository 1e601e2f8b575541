"""torch's rendezvous handler with two of its faults worked around."""

from __future__ import annotations

from typing import Any

from firstfault_torch.compat.torch_agent import forget_shared_store
from firstfault_torch.guard import BackgroundCall


class PatchedRendezvous:
    """torch's rendezvous handler, or another one, without two faults.

    It never blocks the agent's main loop. After each look at its workers torch's agent asks the store's host how many
    nodes wait to join. If that machine is frozen, the question blocks for minutes. Here the answer is 0 until then.

    It gives the workers of each round a store of their own. torch 2.6 to 2.13 keep that of the first round, so that
    workers who are started again find the addresses of those before them, and gloo and NCCL cannot connect
    (pytorch#135712).
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self.num_nodes_waiting = BackgroundCall[int](handler.num_nodes_waiting, 0)

    def next_rendezvous(self) -> Any:
        """Return torch's answer; see `torch.distributed.elastic.rendezvous.RendezvousHandler`."""
        forget_shared_store(self._handler)
        return self._handler.next_rendezvous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)
