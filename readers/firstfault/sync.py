"""The bridge from the async core to plain calls."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

__all__ = ["gathered", "run_sync"]

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


async def gathered(*calls: Awaitable[T]) -> list[T]:
    """Return the results of all, once all have ended; then raise the first error, if there was one.

    `asyncio.gather` raises at once and leaves the others on their way: a client that answers one of them when the event
    loop is gone complains on stderr.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
