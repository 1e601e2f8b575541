"""When an exception was on its way out before it left the task function."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from flytekitplugins.firstfault.in_flight import Moment, moment_of, watch_process_groups

if TYPE_CHECKING:
    from collections.abc import Callable

SLOW_S = 0.05


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Watch a stand-in for torch's own function; return the arguments of its calls."""
    calls: list[tuple[Any, ...]] = []

    def destroy_process_group(*args: Any, **kwargs: Any) -> str:
        """Torch's own words."""
        calls.append((args, kwargs))
        return "torch's own result"

    monkeypatch.setattr(dist, "destroy_process_group", destroy_process_group)
    watch_process_groups()
    return calls


def _left(call: Callable[[], None]) -> tuple[BaseException, Moment]:
    """Return the exception that leaves `call`, and the moment just before it was raised."""
    before = Moment.now()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    return caught.value, before


def _is_early(error: BaseException, before: Moment) -> bool:
    """Whether the moment is that of the raise, not one after the slow clean-up."""
    moment = moment_of(error)
    assert moment.monotonic_ns >= before.monotonic_ns
    assert moment.wall_ns >= before.wall_ns
    return moment.monotonic_ns - before.monotonic_ns < SLOW_S * 1e9


def _finally() -> None:
    try:
        raise ValueError("bad batch")
    finally:
        dist.destroy_process_group()
        time.sleep(SLOW_S)


def _twice() -> None:
    try:
        _finally()
    finally:
        dist.destroy_process_group()
        time.sleep(SLOW_S)


def _from_it() -> None:
    try:
        _raise(ValueError("bad batch"))
    except ValueError as error:
        dist.destroy_process_group()
        time.sleep(SLOW_S)
        raise RuntimeError("training failed") from error


def _handled_before() -> None:
    try:
        _raise(ConnectionError("the first try"))
    except ConnectionError:
        dist.destroy_process_group()
        time.sleep(SLOW_S)
        _raise(ValueError("the second try, another failure"))


def _without_a_group() -> None:
    try:
        raise ValueError("bad batch")
    finally:
        time.sleep(SLOW_S)


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("call", "early"),
    [(_finally, True), (_twice, True), (_from_it, True), (_handled_before, False), (_without_a_group, False)],
)
def test_moment(call: Callable[[], None], early: bool) -> None:
    """An exception's time is that of the first clean-up of a process group with it, or with its cause, in flight."""
    assert _is_early(*_left(call)) is early


def test_the_moment_stays() -> None:
    """Asked again later, the moment is the same."""
    error, _ = _left(_finally)
    first = moment_of(error)
    assert moment_of(error) == first


def test_causes_in_a_circle() -> None:
    """Exceptions that name each other as their causes have a moment too."""
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    before = Moment.now()
    assert moment_of(first).monotonic_ns >= before.monotonic_ns


def test_torchs_function_is_called(ended: list[tuple[Any, ...]]) -> None:
    """The call goes through, with its arguments, its result and its documentation."""
    assert dist.destroy_process_group("group", option=1) == "torch's own result"
    assert ended == [(("group",), {"option": 1})]
    assert dist.destroy_process_group.__doc__ == "Torch's own words."


def test_it_is_watched_once() -> None:
    """A process that runs several task functions wraps the function once."""
    watched = dist.destroy_process_group
    watch_process_groups()
    assert dist.destroy_process_group is watched


class _LockedError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise PermissionError(name)


def test_a_hostile_exception(ended: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture) -> None:
    """An exception that cannot be noted is not replaced, and the process group is destroyed all the same."""
    error = _LockedError()

    def fail() -> None:
        try:
            raise error
        finally:
            dist.destroy_process_group()

    with pytest.raises(_LockedError):
        fail()
    assert len(ended) == 1
    assert "firstfault failed while noting an exception in flight (PermissionError" in caplog.text
    assert isinstance(moment_of(error), Moment)
