"""Keeps an agent responsive while the machine that hosts the rendezvous does not answer."""

from __future__ import annotations

from typing import Any

from firstfault_torch.guard import NonBlocking

__all__ = ["ResponsiveRendezvous"]


class ResponsiveRendezvous:
    """A rendezvous handler that never blocks the agent's main loop.

    After each look at its workers torch's agent asks how many nodes wait to join, and the answer comes from the store's
    host. If that machine is frozen or unreachable, the question blocks for minutes, and the agent does not see what
    happens to its own workers. Here the answer is 0 until the host replies.

    Args:
        handler: torch's, or any other; all else is passed to it.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self.num_nodes_waiting = NonBlocking[int](handler.num_nodes_waiting, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)
