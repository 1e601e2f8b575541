"""Runs async code: in sync callers, many calls at once, and calls that may raise anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from firstfault.errors import FirstFaultError

T = TypeVar("T")
R = TypeVar("R")

_MAX_CONCURRENT_CALLS = 64


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` to its end and return its result, also from inside a running event loop.

    Each call has its own event loop: nothing survives a fork, and nothing is shared with the
    caller's loop.
    """
    # a tenth of the time that reading a small log takes; logs need no event loop
    import asyncio  # noqa: PLC0415

    results: list[T] = []
    failed: list[Exception] = []

    async def kept() -> None:
        # Not as the task's result: when asyncio.run() restores the SIGINT handler, Python calls
        # repr() on the task, and so on a result that may be large. Nor as its exception: the task
        # and its frames hold each other, and so the frames of all callers until the next
        # collection of garbage.
        try:
            results.append(await coroutine)
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(kept())
    else:
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - seldom needed

        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, kept()).result()
    if failed:
        raise failed.pop()
    return results[0]


async def gather_all(*calls: Awaitable[T]) -> list[T]:
    """Wait until all calls have ended; return their results, or raise the first error.

    `asyncio.gather` raises at once while its other calls continue; if a storage client's request
    outlives the event loop, the client then writes to stderr.
    """
    import asyncio  # noqa: PLC0415 - as above

    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def map_concurrently(
    call: Callable[[T], Awaitable[R]], items: Iterable[T], at_once: int = _MAX_CONCURRENT_CALLS
) -> list[R]:
    """Return the results of `call` for all items, in their order;
    at most `at_once` calls run at a time.
    """
    wanted = list(items)
    results: dict[int, R] = {}
    left = iter(enumerate(wanted))

    # All tasks take from one iterator. They run in one thread, so no item is taken twice.
    async def work() -> None:
        for index, item in left:
            results[index] = await call(item)

    await gather_all(*(work() for _ in range(min(at_once, len(wanted)))))
    return [results[index] for index in range(len(wanted))]


async def try_await(call: Awaitable[T]) -> tuple[T | None, str]:
    """Return what a call returns, and why it failed, else an empty text.

    Storage clients and users' strategies raise errors of any type; the library catches every
    exception here alone.
    """
    try:
        return await call, ""
    except Exception as error:  # noqa: BLE001 - see above
        return None, (
            str(error) if isinstance(error, FirstFaultError) else f"{type(error).__name__}: {error}"
        )
