"""Lets forked workers wait until all of a node's workers have been forked.

The agent may host a store, whose thread resolves the address of each client that connects. If the agent forks another
worker at that moment, glibc's lock of the resolver stays locked in that worker, and the first name that it resolves
blocks it without end. So no worker of this node connects before the last one has been forked.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
from typing import TYPE_CHECKING

from firstfault_torch.budgets import SIBLINGS_S

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLE = "FIRSTFAULT_START"


@contextlib.contextmanager
def starting(start_method: str) -> Iterator[dict[str, str]]:
    """Fork the workers in this block; yield a variable for their environment."""
    if start_method != "fork":
        yield {}  # a new process has locks of its own
        return
    reading, writing = os.pipe()
    try:
        yield {_VARIABLE: f"{os.getpid()} {reading} {writing}"}
    finally:
        os.close(writing)
        os.close(reading)


def await_siblings() -> None:
    """Wait, in a forked worker, until all others have been forked."""
    agent, _, numbers = os.environ.pop(_VARIABLE, "").partition(" ")
    if agent != str(os.getppid()):
        return
    reading, writing = map(int, numbers.split())
    with contextlib.suppress(OSError):
        if not all(stat.S_ISFIFO(os.fstat(number).st_mode) for number in (reading, writing)):
            return
        os.close(writing)
        # it is readable when all others, too, have closed their copy of the other end
        select.select([reading], [], [], SIBLINGS_S)
        os.close(reading)
