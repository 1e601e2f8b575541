"""Waiting until the nodes of a running or failing attempt have reported."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.layout.paths import is_error_file
from firstfault.model.roster import nodes_done
from firstfault.reading.fetch import read_roster

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from firstfault.model import NodePresence
    from firstfault.store import ReadableStore

__all__ = ["Patience", "await_nodes"]

_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for the nodes, and what ends the wait earlier."""

    seconds: float = 0.0
    """0: do not wait."""
    expected_nodes: int | None = None
    """How many nodes should report; None: as many as the roster names."""
    enough: Callable[[Sequence[NodePresence]], bool] | None = None
    """Asked with the roster at each look; True ends the wait as if every node had reported."""
    give_up: threading.Event | None = None
    """Once set, ends the wait."""


async def await_nodes(
    store: ReadableStore, folder: str | None, patience: Patience
) -> tuple[dict[str, NodePresence], bool]:
    """Read the roster until every node has reported or the wait is over.

    Args:
        store: of the attempt.
        folder: the roster's, relative to the store's root; None: there is none to look at.
        patience: how long.

    Returns:
        The roster entries that were read, by name, and whether every node has reported.

    Raises:
        StoreError: the roster could not be listed.
    """
    deadline = time.monotonic() + patience.seconds
    pause = _FIRST_POLL_S
    known: dict[str, NodePresence] = {}
    unreadable: set[str] = set()
    while patience.seconds > 0 and folder is not None:
        names = [item for item in await store.list(folder) if is_error_file(item.name)]
        # an entry never changes once it is there: each is read once, however often the folder is listed
        read, bad = await read_roster(store, folder, [item for item in names if item.name not in known])
        # an unreadable entry counts by its name, and is tried once more by the look that follows
        known.update(read)
        unreadable.update(item.name for item in bad)
        roster = list(known.values())
        done = nodes_done(roster, patience.expected_nodes)
        left = deadline - time.monotonic()
        if not done and left > 0 and patience.enough is not None:
            done = await asyncio.to_thread(patience.enough, roster)
        if done or left <= 0 or await _gave_up(min(pause, left), patience.give_up):
            return {name: entry for name, entry in known.items() if name not in unreadable}, done
        pause = min(pause * 1.5, _LONGEST_POLL_S)
    return known, False


async def _gave_up(seconds: float, give_up: threading.Event | None) -> bool:
    """Wait; return at once, with True, when the caller gives up."""
    if give_up is None:
        await asyncio.sleep(seconds)
        return False
    return await asyncio.to_thread(give_up.wait, seconds)
