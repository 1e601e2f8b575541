"""Asking again where a storage did not answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from firstfault.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["ATTEMPTS", "retried"]

T = TypeVar("T")

ATTEMPTS = 4
_TIMEOUT_S = 15.0
"""After which nothing is tried again, seconds."""


async def retried(call: Callable[[], Awaitable[T]], typed: Callable[[Exception], Exception], attempts: int) -> T:
    """Return what `call` returns, asked again a little later where the storage was not available.

    Args:
        call: one request.
        typed: our error for one of the client's; a programming error comes back as it is.
        attempts: how often to ask at most.

    Raises:
        firstfault.errors.StoreError: what `typed` made of the last error.
    """
    import stamina  # noqa: PLC0415 - only who asks a storage pays for it

    async for attempt in stamina.retry_context(
        on=StoreUnavailableError, attempts=attempts, timeout=_TIMEOUT_S, wait_initial=0.1, wait_max=2.0
    ):
        with attempt:
            try:
                return await call()
            except Exception as error:
                raise typed(error) from error
    raise AssertionError  # stamina either returns or raises
