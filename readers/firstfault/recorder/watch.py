"""Noticing that the agent has ended."""

from __future__ import annotations

import asyncio
import os

__all__ = ["agent_gone"]

_POLL_S = 0.1
"""Between two looks where the kernel does not tell, seconds."""


async def agent_gone(pid: int) -> None:
    """Return when the process `pid`, which started this one, has ended; at once if it already has.

    The kernel tells where it has pidfd_open(2) and allows it, else this looks ten times a second.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        await _polled(pid)
        return
    try:
        await _readable(descriptor, pid)
    finally:
        os.close(descriptor)


async def _readable(descriptor: int, pid: int) -> None:
    # looked at only now: if it is still our parent, the descriptor is of no later process with the same number
    if os.getppid() != pid:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)


async def _polled(pid: int) -> None:
    while os.getppid() == pid:  # noqa: ASYNC110 - there is nothing to wait for
        await asyncio.sleep(_POLL_S)
