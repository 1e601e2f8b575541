"""Scenes of exceptions that a program handles; prints as JSON what is known of them afterwards.

A program of its own, which needs no torch, so that it can run on other versions of Python than the
tests do.
"""

import contextlib
import copy
import inspect
import json
import logging
import os
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from firstfault_torch.worker import handled_exceptions
from firstfault_torch.worker.handled_exceptions import HandledExceptions

logging.basicConfig(stream=open(os.devnull, "w"))  # noqa: PTH123, SIM115 - until the end


class Batch:
    """An object that can be referred to weakly."""


class SlowError(Exception):
    """An exception whose text waits for a GPU."""

    texts = 0

    def __str__(self) -> str:
        type(self).texts += 1
        return "slow"


def step(number: int) -> None:
    """Fail."""
    raise ValueError(f"batch {number} has no labels")


def dropped(handled: HandledExceptions) -> Any:
    with contextlib.suppress(ValueError):
        step(1)
    return handled.list()


def logged(handled: HandledExceptions) -> Any:
    try:
        step(2)
    except ValueError:
        logging.getLogger("training").exception("trying again")
    return handled.list()


def kept(handled: HandledExceptions) -> Any:
    errors = []
    try:
        step(3)
    except ValueError as error:
        errors.append(error)
    return handled.list()


def cleaned_up(handled: HandledExceptions) -> Any:
    try:
        try:
            step(4)
        finally:
            len("clean")
    except ValueError:
        traceback.format_exc()
    return handled.list()


def raised_again(handled: HandledExceptions) -> Any:
    last: ValueError | None = None
    try:
        step(5)
    except ValueError as error:
        traceback.format_exc()
        last = error
    try:
        raise RuntimeError("all tries failed") from last  # noqa: TRY301 - as programs do
    except RuntimeError as error:
        return handled.list(error)


def business(handled: HandledExceptions) -> Any:
    for number in range(200):
        try:
            step(number)
        except ValueError:
            traceback.format_exc()
    # collectives were called between the first and the last one
    before = handled.list(None, lambda _: 0)
    times = iter(range(10))
    return [len(before), len(handled.list(None, lambda _: next(times)))]


def of_a_thread(handled: HandledExceptions) -> Any:
    thread = threading.Thread(target=logged, args=(handled,))
    thread.start()
    thread.join()
    return handled.list()


def lets_go(handled: HandledExceptions) -> Any:
    def fails() -> None:
        batch = Batch()
        batches.append(weakref.ref(batch))
        raise SlowError("out of memory", batch)

    batches: list[Any] = []
    try:
        fails()
    except SlowError:
        before = SlowError.texts
        handled._on_handled(None, 0, sys.exc_info()[1])  # type: ignore[arg-type]
        texts = SlowError.texts - before
    (found,) = handled.list()
    return [found.exception.message, texts, batches[0]() is None]


def far_too_many(handled: HandledExceptions) -> Any:
    if handled._tool_id is None:
        return None

    def is_on() -> bool:
        monitoring: Any = vars(sys)["monitoring"]
        return bool(monitoring.get_events(handled._tool_id))

    found: dict[str, int] = {}
    states = [is_on()]
    for _ in range(handled_exceptions._STARTUP_BUDGET + 10):
        with contextlib.suppress(KeyError):
            found["nothing"]
    states.append(is_on())
    handled.refill()
    states.append(is_on())
    handled._refilled_ns -= handled_exceptions._REFILL_NS
    handled.refill()
    return [*states, is_on()]


def forked(handled: HandledExceptions) -> Any:
    if not (child := os.fork()):
        try:
            logged(handled)
            os._exit(len(handled.list()))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def taken(_: HandledExceptions) -> Any:
    if not hasattr(sys, "monitoring"):
        return None
    for tool in (3, 4):
        if sys.monitoring.get_tool(tool) is None:
            sys.monitoring.use_tool_id(tool, "another")
    found = HandledExceptions()
    found.watch()
    known = logged(found)
    found.close()
    for tool in (3, 4):
        if sys.monitoring.get_tool(tool) == "another":
            sys.monitoring.free_tool_id(tool)
    return known


def for_hours(handled: HandledExceptions) -> Any:
    handled._left, handled._refilled_ns = 0, handled._refilled_ns - handled_exceptions._REFILL_NS
    try:
        step(6)
    except ValueError:
        traceback.format_exc()
    return handled.list()


class Formatted(traceback.TracebackException):
    """A class of the program with other parameters."""

    def __init__(self, error: BaseException, *, lines: bool = False) -> None:
        kind = type(error)
        trace = error.__traceback__
        super().__init__(
            exc_type=kind,
            exc_value=error,
            exc_traceback=trace,
            limit=-1,
            capture_locals=lines,
        )


def _format_in_all_ways(error: BaseException) -> list[Any]:
    kind = type(error)
    trace = error.__traceback__
    cls = traceback.TracebackException
    ways: list[Callable[[], Any]] = [
        lambda: list(Formatted(error).format()),
        lambda: list(Formatted(error, lines=True).format()),
        lambda: list(cls(kind, error, trace).format()),
        lambda: list(cls(kind, exc_value=error, exc_traceback=trace).format()),
        lambda: list(cls(exc_type=kind, exc_value=error, exc_traceback=trace, limit=1).format()),
        lambda: list(cls.from_exception(error, limit=1, compact=True).format()),
        lambda: list(copy.copy(cls.from_exception(error)).format()),
        lambda: traceback.format_exception(error),
        lambda: traceback.format_exception(kind, error, trace),
        lambda: traceback.format_exception(kind, value=error, tb=trace, limit=1, chain=False),
        lambda: traceback.format_exception(None, None, None),
        lambda: traceback.format_exception(kind, None, None),
        lambda: traceback.format_exception_only(error),
        lambda: traceback.format_exception_only(kind, error),
        cls,  # type: ignore[call-arg]
        lambda: pickle.loads(pickle.dumps(cls.__init__)) is cls.__init__,  # noqa: S301 - its own
        lambda: (cls.__init__.__qualname__, cls.__init__.__doc__, str(inspect.signature(cls))),
    ]
    return [_result(way) for way in ways]


def _result(call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except Exception as error:  # noqa: BLE001 - compared
        return repr(error)


def _descend(number: int) -> int:
    try:
        return _descend(number + 1)
    except RecursionError:
        return number


def _format_near_the_limit(error: BaseException, frames: int) -> str:
    if frames:
        return _format_near_the_limit(error, frames - 1)
    try:
        return "".join(traceback.format_exception(error)[-1:])
    except RecursionError:
        return "too deep"


def as_before(handled: HandledExceptions) -> Any:
    try:
        step(7)
    except ValueError as failed:
        error = failed
    deepest = _descend(0) - 1
    depths = range(deepest - 60, deepest - 5)

    def look() -> list[Any]:
        return _format_in_all_ways(error) + [
            _format_near_the_limit(error, depth) for depth in depths
        ]

    watched = look()
    handled.close()
    before = look()
    differ = [
        (number, one, other)
        for number, (one, other) in enumerate(zip(watched, before, strict=True))
    ]
    differ = [item for item in differ if item[1] != item[2]]
    # what is replaced needs one frame more
    at_limit = [item for item in differ if item[1] == "too deep"]
    return [item for item in differ if item not in at_limit[:1]]


SCENES: list[Callable[[HandledExceptions], Any]] = [
    *(
        dropped,
        logged,
        kept,
        cleaned_up,
        raised_again,
        business,
        of_a_thread,
        lets_go,
        far_too_many,
        for_hours,
        as_before,
        forked,
        taken,
    )
]


def _to_json(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return [
        [
            item.exception.type,
            item.exception.message,
            [frame.function for frame in item.exception.frames],
            item.times,
        ]
        for item in value
    ]


def main() -> None:
    original, found = traceback.TracebackException.__init__, {}
    for scene in SCENES:
        handled = HandledExceptions()
        handled.watch()
        found[scene.__name__] = _to_json(scene(handled))
        handled.close()
    found["undone"] = traceback.TracebackException.__init__ is original
    print(json.dumps(found))


if __name__ == "__main__":
    main()
