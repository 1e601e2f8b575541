"""Nodes that have lost the store they share conclude in turn, so that not all of them read the storage.

The first nodes by group rank each have a turn of their own. The others look now and then for the verdict that one of
those publishes. If there is none, ever larger groups of them try, each node at a random moment.
"""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING

from firstfault_torch.budgets import (
    FIRST_TURN_S,
    LATER_TURN_S,
    LONGEST_TURN_PAUSE_S,
    NEXT_TURN_S,
    TURN_LOOK_S,
    TURN_PAUSE_S,
)
from firstfault_torch.guard import bounded, caught, logger

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from firstfault_torch.verdict.sealed import SealedVerdict

_SINGLE = 4
"""So many nodes have turns of their own."""


def turn_of(group_rank: int) -> float:
    """Return how many seconds after its report a node may conclude.

    Node 0 most likely hosted the store. If it lives, it concludes at once, as node 1 does.
    """
    position = max(group_rank - 1, 0)
    if position == 0:
        return 0.0
    if position < _SINGLE:
        return FIRST_TURN_S + NEXT_TURN_S * (position - 1)
    group = (position // _SINGLE).bit_length()
    return FIRST_TURN_S + NEXT_TURN_S * (_SINGLE - 1) + LATER_TURN_S * (group - 1 + random.random())  # noqa: S311 - no secret


def await_turn(
    find: Callable[[], SealedVerdict | None], seconds: float, give_up: threading.Event
) -> SealedVerdict | None:
    """Look for another node's verdict until this node's turn has come; None if there is none.

    Args:
        find: returns the verdict that another node published, None if there is none.
        seconds: until this node's turn.
        give_up: once set, ends the wait.
    """
    deadline = time.monotonic() + seconds
    pause = TURN_PAUSE_S * (1 + random.random())  # noqa: S311 - as above
    while True:
        answer = bounded(partial(caught, find, Exception), TURN_LOOK_S, "looking for another node's verdict", give_up)
        found, error = answer or (None, None)
        if found is not None:
            return found
        if error is not None:
            logger.debug("no verdict of another node can be read: %s", error)
        left = deadline - time.monotonic()
        if left <= 0 or give_up.wait(min(pause, left)):
            return None
        pause = min(1.5 * pause, LONGEST_TURN_PAUSE_S)
