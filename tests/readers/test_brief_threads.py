"""A pool of threads that end when nothing is left to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from firstfault.utils.brief_threads import BriefThreads

LONG_S = 60.0
NAME = "pool-of-this-test"


@pytest.fixture
def pool() -> Iterator[BriefThreads]:
    """Return a pool of two threads."""
    made = BriefThreads(2, NAME)
    yield made
    made.shutdown()


def _find_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_its_threads_end_after_the_last_call(pool: BriefThreads) -> None:
    goes_on = threading.Event()
    calls = [pool.submit(goes_on.wait, LONG_S) for _ in range(5)]
    threads = _find_threads()
    assert len(threads) == 2, "no more than the pool may have"
    goes_on.set()
    assert all(call.result(LONG_S) for call in calls)
    for thread in threads:
        thread.join(LONG_S)
    assert _find_threads() == []


def test_a_call_is_never_left_behind(pool: BriefThreads) -> None:
    """Also if it comes while the last thread ends."""
    assert [pool.submit(int, str(number)).result(LONG_S) for number in range(2000)] == list(
        range(2000)
    )


def test_an_exception_is_the_callers(pool: BriefThreads) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "no number").result(LONG_S)
    assert pool.submit(int, "1").result(LONG_S) == 1


def test_a_shutdown_waits_for_all_calls(pool: BriefThreads) -> None:
    ended = []
    for number in range(10):
        pool.submit(ended.append, number)
    pool.shutdown()
    assert sorted(ended) == list(range(10))
    assert _find_threads() == []
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(int)


def test_without_a_thread_a_call_is_refused(
    pool: BriefThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any pool refuses it; the next call may find one."""
    with monkeypatch.context() as patch:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(int)
    assert pool.submit(int).result(LONG_S) == 0
