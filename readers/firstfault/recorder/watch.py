"""Waits for the end of the agent."""

from __future__ import annotations

import asyncio
import os

from firstfault.recorder.budgets import AGENT_POLL_S

__all__ = ["agent_gone"]


async def agent_gone(pid: int) -> None:
    """Return when the parent process `pid` has ended; at once if it already has.

    Uses pidfd_open(2), and polls ten times a second where that is missing or forbidden.
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
    # checked after opening: if `pid` is still our parent, the number was not reused for another process
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
    while os.getppid() == pid:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(AGENT_POLL_S)
