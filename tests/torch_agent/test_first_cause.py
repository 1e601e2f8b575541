"""Exceptions that programs wrap or meet again: verdict, headline,
place and fingerprint are of the first cause.
"""

import asyncio
import concurrent.futures
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from firstfault.evidence.classification import FailureClass, classify_failures
from firstfault.exceptions.fingerprint import compute_fingerprint
from firstfault.exceptions.first_cause import find_first_cause
from firstfault.model import DocumentRef, WorkerError
from firstfault.report import build_report
from firstfault.report.first_line import first_line
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job
from firstfault.wire.documents import decode, encode
from firstfault_torch.failures.capture import capture

PEER = "Connection closed by peer [10.0.0.1]:4211"
_CACHE: dict[str, Any] = {}


class TrainingError(Exception):
    """What the program raises for any failure. Its text has words of storage and services,
    which prove nothing here.
    """

    def __init__(self) -> None:
        super().__init__(
            "failed to save the checkpoint of https://hub.example.org/run after Disk quota exceeded"
        )


def step(error: Exception) -> None:
    raise error


def _from(error: Exception) -> None:
    try:
        step(error)
    except Exception as caught:
        raise TrainingError from caught


def _in_handler(error: Exception) -> None:
    try:
        step(error)
    except Exception:  # noqa: BLE001 - as programs do
        raise TrainingError  # noqa: B904 - as programs do


def _from_none(error: Exception) -> None:
    try:
        step(error)
    except Exception:  # noqa: BLE001 - as programs do
        raise TrainingError from None


def _twice(error: Exception) -> None:
    try:
        _from_none(error)
    except TrainingError as caught:
        raise RuntimeError("run 7 failed") from caught


async def _task(error: Exception) -> None:
    await asyncio.sleep(0)
    step(error)


async def _tasks(error: Exception) -> None:
    async with asyncio.TaskGroup() as group:  # type: ignore[attr-defined, unused-ignore]
        group.create_task(_task(error))
        group.create_task(asyncio.sleep(60))


def _task_group(error: Exception) -> None:
    asyncio.run(_tasks(error))


def _around_task_group(error: Exception) -> None:
    try:
        _task_group(error)
    except Exception as caught:
        raise TrainingError from caught


async def _wrapping_tasks(error: Exception) -> None:
    async with asyncio.TaskGroup() as group:  # type: ignore[attr-defined, unused-ignore]
        group.create_task(asyncio.to_thread(_from_none, error))


def _in_task_group(error: Exception) -> None:
    asyncio.run(_wrapping_tasks(error))


def _executor(error: Exception) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(step, error)
    try:
        future.result()
    except Exception as caught:
        raise TrainingError from caught


def _tried_again(error: Exception) -> None:
    try:
        step(error)
    except Exception:  # noqa: BLE001 - as programs do
        step(ValueError("trying to initialize the default process group twice!"))


def _save(error: Exception) -> None:
    try:
        step(error)
    except Exception:
        step(OSError(28, "No space left on device"))
        raise


def _close(error: Exception) -> None:
    try:
        step(error)
    finally:
        step(RuntimeError(PEER))


WRAPPED: dict[str, Callable[[Exception], None]] = {
    "from": _from,
    "in a handler": _in_handler,
    "from None": _from_none,
    "twice": _twice,
    "executor": _executor,
}
"""What left the training was raised to report the error."""
if sys.version_info >= (3, 11):
    WRAPPED |= {
        "task group": _task_group,
        "around a group": _around_task_group,
        "within a group": _in_task_group,
    }
AFTERMATH: dict[str, Callable[[Exception], None]] = {
    "tried again": _tried_again,
    "save": _save,
    "close": _close,
}
"""What left the training failed by itself, while the error was being handled."""


def _look_up(error: Exception) -> None:
    try:
        return _CACHE["model"]
    except KeyError:
        step(error)


def _import(error: Exception) -> None:
    try:
        import no_such_package  # type: ignore[import-not-found, unused-ignore]  # noqa: F401, PLC0415
    except ImportError:
        step(error)


def _hidden(error: Exception) -> None:
    try:
        _CACHE["model"]
    except KeyError:
        raise error from None


def _translated(error: Exception) -> None:
    try:
        _CACHE["model"]
    except KeyError as missing:
        raise error from missing


FALLBACKS: dict[str, Callable[[Exception], None]] = {
    "look up": _look_up,
    "import": _import,
    "hidden": _hidden,
    "translated": _translated,
}
"""The error was raised in the handler of a lookup that the program expects to fail."""


def _fused(text: str) -> None:
    raise NotImplementedError(text)


def _slow(error: Exception) -> bool:
    step(error)
    return True


def _another_way(error: Exception) -> None:
    try:
        _fused("no fused kernel for 3 columns")
    except NotImplementedError as missing:
        logging.getLogger(__name__).debug("the slow way: %s", missing)
        # these lines
        # are more than
        # a frame has above its own
        _slow(error)


def _for_any_error(error: Exception) -> None:
    try:
        step(RuntimeError("no compiler"))
    except Exception:  # noqa: BLE001 - as programs do
        _CACHE["done"] = _slow(error)


def _rename(error: Exception) -> None:
    try:
        Path("/no/such/file").rename("/no/such/folder/file")
    except OSError:
        _slow(error)


FALLBACKS["another way"] = _another_way
OTHER_WAYS: dict[str, Callable[[Exception], None]] = {
    "for any error": _for_any_error,
    "rename": _rename,
}
"""The error was raised in place of what had failed. An error about a peer there would
not tell which was first.
"""


def _save_for_type(error: Exception) -> None:
    try:
        step(error)
    except (TypeError, ValueError, RuntimeError):
        _CACHE["saved"] = _save_state()


def _save_state() -> None:
    raise OSError(28, "No space left on device")


def _rescue(error: Exception) -> None:
    try:
        step(error)
    except Exception:  # noqa: BLE001 - as programs do
        _slow(OSError(28, "No space left on device"))


def _looks_up(error: Exception) -> None:
    try:
        step(error)
    except (TypeError, ValueError, RuntimeError):
        rank = os.environ["NO_SUCH_VARIABLE"]
        _CACHE["rank"] = rank
        _CACHE["failed"] = True
        # the program says so
        raise


def _about_the_error(error: Exception) -> None:
    try:
        step(error)
    except Exception as caught:  # noqa: BLE001 - as programs do
        _CACHE["code"] = caught.errno  # type: ignore[attr-defined]


def _helper(error: Exception) -> None:
    try:
        step(error)
    except Exception as caught:  # noqa: BLE001 - as programs do
        _raise_wrapper(caught)


def _raise_wrapper(error: Exception) -> None:
    """Raise a wrapper that repeats the error's text."""
    raise LookupError(f"epoch 3: {error}")


def _again(error: Exception) -> None:
    try:
        step(error)
    except Exception:  # noqa: BLE001 - as programs do
        _CACHE["again"] = step(RuntimeError("backward through the graph a second time"))  # type: ignore[func-returns-value]


def _with_peers(error: Exception) -> None:
    try:
        step(error)
    except (TypeError, ValueError, RuntimeError):
        _CACHE["flag"] = _slow(RuntimeError(PEER))


AFTERMATH |= {
    "save for a type": _save_for_type,
    "rescue": _rescue,
    "looks up": _looks_up,
    "about the error": _about_the_error,
    "again": _again,
    "with peers": _with_peers,
}

_ALL = WRAPPED | AFTERMATH | FALLBACKS | {"helper": _helper}


def _failure(way: Callable[[Exception], None], error: Exception, rank: int = 3) -> WorkerError:
    """Return the failure of a rank as a reader gets it, without the document's name."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each way has its own
        way(error)
    found = decode(
        encode(make_error(rank, node="worker-1", exception=capture(caught.value))),
        DocumentRef("e1.pb"),
    )
    assert isinstance(found, WorkerError)
    return found


@pytest.mark.parametrize("way", _ALL)
def test_the_first_cause_is_judged(way: str) -> None:
    """A victim stays a victim, and a fault one, whatever the program or its clean-up made of it.

    Faults under one wrapper have fingerprints of their own, in which numbers and clean-ups do not
    matter.
    """
    errors = (
        RuntimeError(PEER),
        TypeError("3 columns"),
        ValueError("3 columns"),
        TypeError("7 columns"),
    )
    failures = [_failure(_ALL[way], error) for error in errors]
    (victim,), (culprit,) = (classify_failures(make_job(failure)) for failure in failures[:2])
    assert victim.failure_class is FailureClass.CONSEQUENCE
    assert (culprit.failure_class, culprit.category) == (FailureClass.OWN_FAULT, "")
    found = [compute_fingerprint(failure) for failure in failures]
    assert len(set(found[:3])) == 3
    assert found[3] == found[1]


@pytest.mark.parametrize("way", _ALL | OTHER_WAYS)
def test_the_report_tells_the_first_cause(way: str) -> None:
    """First line, headline, code and the next step name the first cause and its line;
    the wrapper comes second.
    """
    job = make_job(_failure((_ALL | OTHER_WAYS)[way], TypeError("3 columns")))
    verdict = run_strategy(get_strategy("evidence"), job)
    report = build_report(job, verdict, decide(verdict))
    assert first_line(verdict, report.decision).startswith(
        "TypeError rank 3 worker-1 no retry: 3 columns"
    )
    assert verdict.headline.startswith("TypeError, rank 3 on worker-1: 3 columns")
    assert report.answers.what.startswith("TypeError: 3 columns")
    place = report.answers.code
    assert place.startswith("test_first_cause.py:")
    assert place.endswith(("step", "_hidden", "_translated"))
    assert report.answers.steps[0].text.endswith(place)
    if way in {"from", "in a handler", "from None"}:
        assert verdict.headline.endswith(f"; raised as TrainingError: {TrainingError()}")
    if way in AFTERMATH:
        assert "; then " in verdict.headline


def test_a_wrapped_victim_is_not_the_same_fault() -> None:
    """Victims whose program raises the same wrapper as the culprit's do not count as
    failed in the same way.
    """
    wrap = WRAPPED["from None"]
    victims = [_failure(wrap, RuntimeError(PEER), rank) for rank in (0, 1, 2)]
    verdict = run_strategy(
        get_strategy("evidence"), make_job(_failure(wrap, KeyError("labels")), *victims)
    )
    assert (verdict.ranks, verdict.category, verdict.victims.count) == ((3,), "user_code", 3)


def test_a_wrapper_names_the_service_of_a_lost_connection() -> None:
    """A connection of which it is unknown whose it was belongs to what the wrapper names."""
    (judged,) = classify_failures(
        make_job(_failure(WRAPPED["from"], ConnectionResetError(104, "reset by peer")))
    )
    assert judged.failure_class is FailureClass.OWN_FAULT


def test_an_error_behind_a_failed_clean_up_is_the_first_cause() -> None:
    """If a library's clean-up fails after an error, that error is the first cause."""
    with pytest.raises(RuntimeError) as caught:
        torch.save({"weights": torch.ones(1 << 18)}, "/dev/full")

    hidden = caught.value.__context__
    assert hidden is not None
    assert "unexpected pos" in str(caught.value)
    assert find_first_cause(capture(caught.value)).message == str(hidden)
