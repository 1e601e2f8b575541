"""Hooks that run after a fault, when the wrapped function has ended and before the health check."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from firstfault_torch.guard import caught
from firstfault_torch.inprocess.compose import Hook
from firstfault_torch.inprocess.exception import TimeoutError as RestartTimeoutError

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Mapping

    from firstfault_torch.inprocess.state import State

T = TypeVar("T")


class Finalize(Hook):
    """Cleans up after a fault, so that the function can be called again: global variables, pending asynchronous work.

    It runs on each rank after the process groups were aborted. If it raises, this rank leaves the job.
    """


class ThreadedFinalize(Finalize):
    """Calls a function in a thread, with a time limit.

    If the process uses CUDA, the thread has the same current device as the thread that starts it.

    Args:
        timeout: the longest wait for the function.
        fn: the function. What it returns is not used.
        args: its positional arguments.
        kwargs: its keyword arguments; None for none.

    Raises:
        ValueError: the timeout is not positive.
    """

    def __init__(
        self,
        timeout: dt.timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | None = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_timeout(timeout)
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: State) -> State:
        """Call the function and wait for its end.

        Raises:
            TimeoutError: the one of in-process restart: it did not end in time. Its thread is left running.
            BaseException: whatever the function raised.
        """
        device = current_cuda_device()

        def call() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            self.fn(*self.args, **self.kwargs)

        name = getattr(self.fn, "__qualname__", repr(self.fn))
        call_in_thread(call, self.timeout, f"firstfault-finalize-{state.rank}", lambda: f"the finalize function {name}")
        return state


def call_in_thread(call: Callable[[], T], timeout: dt.timedelta, name: str, doing: Callable[[], str]) -> T:
    """Return what `call` returns, or raise what it raises; it runs in a daemon thread with this name.

    Raises:
        TimeoutError: the one of in-process restart: it did not end in time, and is left running. The message has what
            `doing` returns then, such as "the cleanup".
    """
    outcomes: list[tuple[T | None, BaseException | None]] = []
    # not join(): after a signal handler raised in it, Python takes the thread for dead
    done = threading.Event()

    def run() -> None:
        outcomes.append(caught(call))
        done.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    if not done.wait(timeout.total_seconds()):
        raise RestartTimeoutError(f"{doing()} did not end within {timeout.total_seconds():g} s")
    result, error = outcomes[0]
    if error is not None:
        raise error
    return cast("T", result)


def check_timeout(timeout: dt.timedelta) -> None:
    """Raise a ValueError if a time limit is not positive."""
    if timeout.total_seconds() <= 0:
        raise ValueError(f"timeout is {timeout.total_seconds():g} s; it must be more than 0 s")


def current_cuda_device() -> int | None:
    """Return the current CUDA device of this thread; None if this process has not used CUDA."""
    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if is_used else None
