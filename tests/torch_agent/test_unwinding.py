"""Exceptions that are leaving a frame in which Python shows none."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from firstfault_torch.worker.in_flight import Unwinding, unwinding_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_seen: list[Unwinding | None] = []


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[Unwinding | None]]:
    """Return what other threads have seen of the main one, and forget it."""
    _seen.clear()
    yield _seen
    _seen.clear()


def _look() -> None:
    thread = threading.get_ident()
    looking = threading.Thread(target=lambda: _seen.append(unwinding_of(thread)))
    looking.start()
    looking.join()


class _Batches:
    """An iterator with a finaliser, such as a data loader's."""

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> int:
        return 1

    def __del__(self) -> None:
        _look()


def _batches() -> Iterator[int]:
    try:
        yield 1
        yield 2
    finally:
        _look()


def _fail() -> None:
    raise KeyError("label")


def _raises_in_a_loop() -> None:
    for _ in _Batches():
        raise ValueError("bad batch")


def _calls_what_raises() -> None:
    for _ in _Batches():
        _fail()


def _calls_c_code_that_raises() -> None:
    for _ in _Batches():
        int("x")


def _raises_beside_a_generator() -> None:
    for _ in _batches():
        raise ValueError("bad batch")


def _calls_what_raises_beside_a_generator() -> None:
    for _ in _batches():
        _fail()


class _MakingError(Exception):
    def __init__(self) -> None:
        _look()


def _makes_its_exception() -> None:
    raise _MakingError


@pytest.mark.parametrize(
    ("call", "function"),
    [
        (_raises_in_a_loop, "_raises_in_a_loop"),
        (_calls_what_raises, "_fail"),
        (_calls_c_code_that_raises, "_calls_c_code_that_raises"),
        (_raises_beside_a_generator, "_raises_beside_a_generator"),
        (_calls_what_raises_beside_a_generator, "_fail"),
        (_makes_its_exception, "_makes_its_exception"),
    ],
)
def test_an_exception_on_its_way_out(call: Callable[[], None], function: str) -> None:
    """While a frame drops its iterator, the place is known at which the exception was raised, and whose it is."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    (found,) = _seen
    assert found is not None
    assert (found.raised_at.file, found.raised_at.function) == (__file__, function)
    assert found.is_of(caught.value)
    assert not found.is_of(ValueError("another"))


def _ends() -> None:
    batches = _Batches()
    next(batches)


def _closes() -> None:
    for number in _batches():
        if number:
            break


def _kept_an_error() -> None:
    kept = []
    for tries in range(2):
        try:
            _ends() if tries else _fail()
        except KeyError as error:
            kept.append(error)


@pytest.mark.parametrize("call", [_ends, _closes, _kept_an_error])
def test_no_exception(call: Callable[[], None]) -> None:
    """A finaliser at a normal end, and an error that was handled before, are not on their way out."""
    call()
    assert _seen == [None]
