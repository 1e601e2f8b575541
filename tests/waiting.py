"""Waits of tests that a busy machine does not break, and waits beside which other tests run."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

SOON_S = 30.0
"""What takes milliseconds may take so long on a busy machine."""


def wait_until(
    condition: Callable[[], object], what: str = "it never came", seconds: float = SOON_S
) -> None:
    """Return when the condition holds; fail after a time that no busy machine needs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def run_in_thread(call: Callable[[], object]) -> None:
    """Call a function in another thread, and return when it has ended."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()


@contextlib.contextmanager
def run_in_background(
    request: pytest.FixtureRequest, calls: dict[str, Callable[[], Any]]
) -> Iterator[dict[str, Future[Any]]]:
    """Begin, one after the other, what mostly waits, beside the other tests of a module;
    return the results by test.

    By the name of the test that needs the result, `calls` has functions; only those of the chosen
    tests are begun.
    """
    chosen = {
        getattr(item, "originalname", "")
        for item in request.session.items
        if item.path == request.path
    }
    with ThreadPoolExecutor(1) as pool:
        yield {name: pool.submit(call) for name, call in calls.items() if name in chosen}
