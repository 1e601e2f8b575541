"""The bridge from the async core to plain calls."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = ["run_sync"]

T = TypeVar("T")


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` to its end and return its result, also from inside a running event loop.

    Each call has an event loop of its own, so that nothing survives a fork and nothing is shared with the caller's.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - handed to the calling thread, whatever it is
            failure.append(error)

    thread = threading.Thread(target=run, name="firstfault-run-sync")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
