"""torch's rendezvous handler with two of its faults worked around."""

from __future__ import annotations

from typing import Any

from firstfault_torch.compat.torch_agent import discard_shared_store
from firstfault_torch.guard import BackgroundCall


class PatchedRendezvous:
    """A rendezvous handler, torch's or another, with two faults worked around.

    1. It blocks the agent's main loop. After each poll of its workers, torch's agent asks the
       store's host how many nodes wait to join; if that machine is frozen, the call blocks for
       minutes. Here it runs in the background, and the answer is 0 until it returns.
    2. Restarted workers find stale addresses. torch 2.6 to 2.13 keep the store of the first round,
       so gloo and NCCL connect to the addresses of the previous workers (pytorch#135712). Here each
       round gets a new store.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self.num_nodes_waiting = BackgroundCall[int](handler.num_nodes_waiting, 0)

    def next_rendezvous(self) -> Any:
        """See `torch.distributed.elastic.rendezvous.RendezvousHandler`."""
        discard_shared_store(self._handler)
        return self._handler.next_rendezvous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)
