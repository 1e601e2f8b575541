"""Exceptions in flight: raised, and not yet out of the task function."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.distributed import destroy_process_group as bound_before
from torch.distributed import distributed_c10d as c10d

from firstfault_torch.worker import in_flight
from firstfault_torch.worker.in_flight import (
    InFlight,
    Moment,
    Unwinding,
    find_unwinding,
    get_moment,
    watch_process_groups,
)
from tests.waiting import run_in_thread

pytestmark = pytest.mark.forks

LONG_S = 30.0
NO_GROUP = dist.GroupMember.NON_GROUP_MEMBER
"""Torch's function takes this for a group of other ranks and does nothing."""


class Documents:
    """Lists what was recorded and withdrawn, in place of documents."""

    def __init__(self) -> None:
        self.recorded: list[BaseException] = []
        self.withdrawn: list[BaseException] = []
        self.in_flight = InFlight(self.record, self.withdraw)
        self.undo: Callable[[], None] = lambda: None

    def record(self, error: BaseException) -> str:
        self.recorded.append(error)
        return str(len(self.recorded) - 1)

    def withdraw(self, name: str) -> None:
        self.withdrawn.append(self.recorded[int(name)])


@pytest.fixture(autouse=True)
def documents() -> Iterator[Documents]:
    """Watch torch's own function."""
    made = Documents()
    made.undo = watch_process_groups(made.in_flight)
    yield made
    made.undo()
    for error in made.recorded:
        error.__traceback__ = None  # its frames hold the documents


def _raise(error: BaseException) -> None:
    raise error


# --- its moment -----------------------------------------------------------------------------------


def _left(call: Callable[[], None]) -> tuple[BaseException, Moment]:
    """Return the exception that leaves `call`, and the moment just before it was raised."""
    _cleaned.clear()
    before = Moment.now()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    return caught.value, before


_cleaned: list[Moment] = []


def _clean_up() -> None:
    _cleaned.append(Moment.now())


def _is_early(error: BaseException, before: Moment) -> bool:
    """Whether the moment is that of the raise, and not after the clean-up."""
    moment = get_moment(error)
    assert moment.monotonic_ns >= before.monotonic_ns
    assert moment.wall_ns >= before.wall_ns
    return moment.monotonic_ns <= _cleaned[0].monotonic_ns


def _finally() -> None:
    try:
        raise ValueError("bad batch")
    finally:
        dist.destroy_process_group(NO_GROUP)
        _clean_up()


def _twice() -> None:
    try:
        _finally()
    finally:
        dist.destroy_process_group(NO_GROUP)
        _clean_up()


def _from_it() -> None:
    try:
        _raise(ValueError("bad batch"))
    except ValueError as error:
        dist.destroy_process_group(NO_GROUP)
        _clean_up()
        raise RuntimeError("training failed") from error


def _from_one_from_it() -> None:
    try:
        _from_it()
    except RuntimeError as error:
        _clean_up()
        raise OSError("the job failed") from error


def _handled_before() -> None:
    try:
        _raise(ConnectionError("the first try"))
    except ConnectionError:
        dist.destroy_process_group(NO_GROUP)
        _clean_up()
        _raise(ValueError("the second try, another failure"))


def _without_a_group() -> None:
    try:
        raise ValueError("bad batch")
    finally:
        _clean_up()


@pytest.mark.parametrize(
    ("call", "early"),
    [
        (_finally, True),
        (_twice, True),
        (_from_it, True),
        (_from_one_from_it, True),
        (_handled_before, False),
        (_without_a_group, False),
    ],
)
def test_an_exceptions_time_is_that_of_its_first_clean_up(
    call: Callable[[], None], early: bool, documents: Documents
) -> None:
    """An exception's time is that of the first clean-up of a process group with it,
    or with its cause, in flight.
    """
    error, before = _left(call)
    assert len(documents.recorded) == (call is not _without_a_group)
    assert _is_early(error, before) is early
    assert get_moment(error) == get_moment(error) or not early
    error.__cause__ = KeyError()
    error.__cause__.__cause__ = error  # a circle
    assert isinstance(get_moment(error), Moment)


# --- the end of a process group -------------------------------------------------------------------


def _bound_after() -> None:
    from torch.distributed import destroy_process_group  # noqa: PLC0415 - the style in question

    destroy_process_group()


STYLES: dict[str, Callable[[], None]] = {
    # looked up at the call
    "import torch.distributed as dist": (lambda: dist.destroy_process_group()),  # noqa: PLW0108
    "from torch.distributed import, before": bound_before,
    "from torch.distributed import, after": _bound_after,
    # as above
    "torch.distributed.distributed_c10d": (lambda: c10d.destroy_process_group()),  # noqa: PLW0108
    "a keyword": functools.partial(bound_before, group=None),
    "the world": lambda: bound_before(dist.group.WORLD),
}


@pytest.mark.parametrize("style", STYLES)
def test_an_exception_is_recorded_before_its_group_is_destroyed(
    style: str, documents: Documents
) -> None:
    """The exception in flight is recorded before the group is destroyed,
    however torch's function was imported.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    error = ValueError("bad batch")
    seen = []
    documents.in_flight._record = lambda error: str(seen.append((error, dist.is_initialized())))

    def train() -> None:
        try:
            raise error
        finally:
            STYLES[style]()

    with pytest.raises(ValueError, match="bad batch"):
        train()
    assert seen == [(error, True)]
    assert not dist.is_initialized()


def test_a_group_is_destroyed_as_usual_without_an_exception(documents: Documents) -> None:
    """A process group is destroyed as usual if no exception is in flight."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert documents.recorded == []
    assert dist.destroy_process_group.__doc__ == bound_before.__doc__
    with pytest.raises(TypeError, match="takes from 0 to 1 positional arguments but 2 were given"):
        dist.destroy_process_group(NO_GROUP, NO_GROUP)


def test_a_nested_task_function_hooks_nothing_again(documents: Documents) -> None:
    """A nested task function does not hook torch's function again; undone, that is as before,
    and can be hooked.
    """
    inner = Documents()
    undo = watch_process_groups(inner.in_flight)
    first, _ = _left(_finally)
    undo()
    second, _ = _left(_finally)
    own = set(vars(c10d))
    documents.undo()
    documents.undo()
    code = bound_before.__code__
    assert (code.co_name, code.co_filename) == ("destroy_process_group", c10d.__file__)
    assert set(vars(c10d)) < own
    _left(_finally)
    again = Documents()
    again.undo = watch_process_groups(again.in_flight)
    third, _ = _left(_finally)
    again.undo()
    assert (documents.recorded, inner.recorded, again.recorded) == ([first, second], [], [third])
    assert bound_before.__code__ is code


class _LockedError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise PermissionError(name)


def test_an_unrecordable_exception_is_not_replaced(
    documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that cannot be recorded is not replaced, and the process group is destroyed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    error = _LockedError()

    def fail() -> None:
        try:
            raise error
        finally:
            dist.destroy_process_group()

    with pytest.raises(_LockedError):
        fail()
    assert not dist.is_initialized()
    assert documents.recorded == []
    assert "firstfault: failed while noting an exception in flight (PermissionError" in caplog.text
    assert isinstance(get_moment(error), Moment)


def test_an_exception_leaves_although_its_recording_raised(
    documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    """If our own recording raises, the user's exception leaves, with its moment."""
    documents.in_flight._record = Mock(side_effect=ZeroDivisionError("ours"))
    error, before = _left(_finally)
    assert isinstance(error, ValueError)
    assert _is_early(error, before)
    assert "noting an exception in flight (ZeroDivisionError: ours)" in caplog.text


# --- what is recorded, and what is taken back -----------------------------------------------------


def _with_cause(error: BaseException) -> BaseException:
    other = RuntimeError("training failed")
    other.__cause__ = error
    return other


def _with_context(error: BaseException) -> BaseException:
    other = RuntimeError("the clean-up failed")
    other.__context__ = error
    return other


@pytest.mark.parametrize(
    ("becomes", "withdrawn"),
    [
        (lambda error: error, False),
        (_with_cause, False),
        (lambda error: _with_context(_with_cause(error)), False),
        (_with_context, False),
        (lambda _: RuntimeError("another failure"), True),
        (lambda _: None, True),
    ],
    ids=["itself", "its effect", "an effect's context", "in its context", "another one", "nothing"],
)
def test_only_a_handled_exception_is_withdrawn(
    becomes: Callable[[BaseException], BaseException | None], withdrawn: bool, documents: Documents
) -> None:
    """A recorded exception that was handled is withdrawn once; one that left,
    or caused one that left, is not.
    """
    error, _ = _left(_finally)
    left = becomes(error)
    documents.in_flight.withdraw_handled_except(left)
    documents.in_flight.withdraw_handled_except(left)
    assert documents.withdrawn == ([error] if withdrawn else [])


@pytest.mark.parametrize(
    ("error", "recorded"),
    [
        (ValueError("bad batch"), True),
        (KeyboardInterrupt(), True),
        (SystemExit(1), True),
        (SystemExit("a text"), True),
        (SystemExit(["a", "list"]), True),
        (SystemExit(0.0), True),
        (SystemExit(0), False),
        (SystemExit(None), False),
        (SystemExit(bool(0)), False),
        (GeneratorExit(), False),
        (StopIteration(), False),
        (StopAsyncIteration(), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("asked", [False, True], ids=["at a clean-up", "asked by the agent"])
def test_a_clean_exit_is_not_recorded_as_a_failure(
    error: BaseException,
    recorded: bool,
    asked: bool,
    documents: Documents,
) -> None:
    """An exception that would end the worker with an error is recorded;
    a clean exit or an iterator's end is not.
    """
    try:
        _raise(error)
    except BaseException:  # noqa: BLE001 - any, as long as it is in flight
        if asked:
            documents.in_flight.ask()
        else:
            dist.destroy_process_group(NO_GROUP)
    assert documents.recorded == ([error] if recorded else [])


def _handling(call: Callable[[], None]) -> None:
    try:
        _raise(ValueError("bad batch"))
    except ValueError:
        call()
        raise


def _unwinding(call: Callable[[], None]) -> None:
    try:
        raise ValueError("bad batch")
    finally:
        call()


@pytest.mark.parametrize("train", [_handling, _unwinding])
def test_the_agents_question_records_what_is_in_flight_once(
    train: Callable[[Callable[[], None]], None], documents: Documents
) -> None:
    """`ask` in another thread records once what the main thread is handling,
    or what runs through a finally clause.
    """
    seen = []

    def ask_twice() -> None:
        for _ in range(2):
            run_in_thread(documents.in_flight.ask)
        seen.append((list(documents.recorded), list(documents.withdrawn)))

    error, _ = _left(lambda: train(ask_twice))
    assert seen == [([error], [])]


def test_the_agents_question_withdraws_a_handled_exception(documents: Documents) -> None:
    """`ask` withdraws a handled exception, and records nothing if none is in flight."""
    error, _ = _left(_finally)
    run_in_thread(documents.in_flight.ask)
    assert documents.recorded == documents.withdrawn == [error]


def test_the_agents_question_withdraws_only_earlier_exceptions(
    documents: Documents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ask` withdraws what was recorded before it looked,
    not an exception that the main thread records after that.
    """
    handled = ValueError("handled")
    newer = ValueError("newer")
    documents.in_flight.record_seen(handled)
    # between the look at the main thread, which finds nothing in flight, and the withdrawal
    monkeypatch.setattr(
        in_flight, "handled_exception", lambda _: documents.in_flight.record_seen(newer)
    )
    documents.in_flight.ask()
    assert (documents.recorded, documents.withdrawn) == ([handled, newer], [handled])


def test_exceptions_of_other_threads_and_children_do_not_count(documents: Documents) -> None:
    """What leaves another thread, or a forked child such as a data loader,
    does not leave the task function.
    """
    run_in_thread(lambda: _left(_finally))
    assert documents.recorded == []
    context = multiprocessing.get_context("fork")
    recorded = context.Value("i", -1)

    def child() -> None:
        _left(_finally)
        recorded.value = len(documents.recorded)

    process = context.Process(target=child)
    process.start()
    process.join(LONG_S)
    assert recorded.value == 0


def test_a_signal_handler_may_end_a_group_during_a_recording(documents: Documents) -> None:
    """A signal handler may end a process group while an exception is recorded;
    both exceptions are recorded.
    """
    inner = OSError("in the handler")

    def handler(*_: object) -> None:
        try:
            raise inner
        except OSError:
            dist.destroy_process_group(NO_GROUP)

    def interrupted(error: BaseException) -> str:
        name = documents.record(error)
        if error is not inner:
            signal.raise_signal(signal.SIGUSR1)
        return name

    documents.in_flight._record = interrupted
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        error, _ = _left(_finally)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert documents.recorded == [error, inner]


def test_one_failed_withdrawal_leaves_the_rest(
    documents: Documents, caplog: pytest.LogCaptureFixture
) -> None:
    """If one document cannot be withdrawn, the others are;
    that of the exception that left stays.
    """
    errors = [_left(_finally)[0] for _ in range(3)]
    documents.in_flight._record = lambda _: ""
    _left(_finally)

    def broken(name: str) -> None:
        if name == "0":
            raise OSError("disk full")
        documents.withdraw(name)

    documents.in_flight._withdraw = broken
    documents.in_flight.withdraw_handled_except(errors[2])
    assert documents.recorded == errors
    assert documents.withdrawn == [errors[1]]
    assert "withdrawing an exception that was handled (OSError: disk full)" in caplog.text


_seen: list[Unwinding | None] = []


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[Unwinding | None]]:
    """Return what other threads have seen of the main one, and forget it."""
    _seen.clear()
    yield _seen
    _seen.clear()


def _look() -> None:
    thread = threading.get_ident()
    run_in_thread(lambda: _seen.append(find_unwinding(thread)))


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
def test_the_raise_point_is_known_while_a_frame_unwinds(
    call: Callable[[], None], function: str
) -> None:
    """While a frame drops its iterator, the place is known at which the exception was raised,
    and whose it is.
    """
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    (found,) = _seen
    assert (found.raised_at.file, found.raised_at.function) == (__file__, function)
    assert found.matches(caught.value)
    assert not found.matches(ValueError("another"))


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
def test_a_finalizer_at_a_normal_end_is_no_unwinding(call: Callable[[], None]) -> None:
    """A finaliser at a normal end, and an error that was handled before,
    are not on their way out.
    """
    call()
    assert _seen == [None]
