"""A round's names in the store that the agents share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from typing_extensions import Self


def round_store(store: Any, number: int) -> Any:
    """Return the store of a round of which another connection can be opened: torch's own, or one beside it.

    Args:
        store: torch's, of this round.
        number: the round's, the same on all nodes.
    """
    return store if hasattr(store, "clone") else RoundStore(store, number)


class RoundStore(dist.PrefixStore):  # type: ignore[name-defined]
    """The store of one round, of which another connection can be opened.

    The stores of torch before 2.8 have no ``clone``, and cannot tell under which prefix they keep a round.

    Args:
        store: torch's, of this or any other round; the agents share the one below it.
        number: the round's, the same on all nodes.
    """

    def __init__(self, store: Any, number: int) -> None:
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        super().__init__(f"firstfault/round-{number}", store)
        self._number = number

    def clone(self) -> Self:
        """Return the same store on a connection of its own.

        Raises:
            torch.distributed.DistNetworkError: the store's host does not answer.
        """
        shared = self.underlying_store
        connected = dist.TCPStore(  # type: ignore[attr-defined]
            shared.host, shared.port, wait_for_workers=False, timeout=shared.timeout
        )
        return type(self)(connected, self._number)


def set_once(store: Any, key: str, value: str | bytes) -> bytes:
    """Set a key unless it is set, wake those who wait for it, and return its value.

    torch's store without libuv, the default before torch 2.4, wakes no waiting thread at a ``compare_set``.
    """
    found = bytes(store.compare_set(key, "", value))
    if found == (value.encode() if isinstance(value, str) else value):
        store.append(key, "")
    return found
