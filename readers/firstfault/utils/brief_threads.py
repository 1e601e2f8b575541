"""A pool of threads for calls that come seldom."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class BriefThreads(ThreadPoolExecutor):
    """A ThreadPoolExecutor that ends its threads when nothing is left to do.

    An agent and a recorder upload a few documents, and then wait for weeks while a training runs.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        super().__init__(max_threads, name)
        self._name = name
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn(*args, **kwargs)`` in a thread.

        Raises:
            RuntimeError: the pool is shut down, or the system allows no thread.
        """
        future: Future[T] = Future()
        call = future, partial(fn, *args, **kwargs)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool of threads is shut down")
            self._calls.append(call)
            if len(self._running) < self._max_threads:
                thread = threading.Thread(target=self._run, name=self._name)
                # Before the start, which a signal's exception may interrupt.
                self._running.add(thread)
                try:
                    thread.start()
                except RuntimeError:
                    self._running.discard(thread)
                    # Another thread of the pool takes the call, if there is one.
                    if not self._running:
                        self._calls.remove(call)
                        raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no further calls, and wait for the end of all threads."""
        with self._lock:
            self._is_closed = True
            threads = list(self._running)
            while cancel_futures and self._calls:
                self._calls.popleft()[0].cancel()
        for thread in threads:
            if wait and thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        while True:
            # Under one lock with `submit`: a call is either seen here, or starts a new thread.
            with self._lock:
                if not self._calls:
                    self._running.discard(threading.current_thread())
                    return
                future, call = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - for the caller, as in any executor
                future.set_exception(error)
            else:
                future.set_result(result)
