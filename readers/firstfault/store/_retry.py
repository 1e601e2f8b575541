"""Retries of requests that the storage did not answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from firstfault.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["ATTEMPTS", "retried"]

T = TypeVar("T")

ATTEMPTS = 4
_TIMEOUT_S = 15.0
"""No retry after this time, seconds."""


async def retried(call: Callable[[], Awaitable[T]], typed: Callable[[Exception], Exception], attempts: int) -> T:
    """Return the result of `call`; call it again, after a pause, while the storage is unavailable.

    Args:
        call: sends one request.
        typed: returns our error for one of the client's, any other error as it is.
        attempts: how often to call at most.

    Raises:
        firstfault.errors.StoreError: the last error, converted by `typed`.
    """
    import stamina  # noqa: PLC0415 - slow, and only needed for a request

    async for attempt in stamina.retry_context(
        on=StoreUnavailableError, attempts=attempts, timeout=_TIMEOUT_S, wait_initial=0.1, wait_max=2.0
    ):
        with attempt:
            try:
                return await call()
            except Exception as error:
                raise typed(error) from error
    raise AssertionError  # stamina either returns or raises
