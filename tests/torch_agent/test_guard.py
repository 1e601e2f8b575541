"""Guarding our own code: every exception becomes one warning."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from firstfault_torch import guard
from firstfault_torch.guard import (
    call_with_timeout,
    ignore_worker_signals,
    run_loop,
    suppress_internal_errors,
)
from tests.waiting import run_in_thread

LONG_S = 60.0
SOON_S = 30.0
"""Longest wait of a busy machine; what hangs, hangs for `LONG_S`."""


class _HostileError(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


ERRORS = [ValueError("boom"), KeyboardInterrupt(), SystemExit(7), _HostileError(), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_internal_error_becomes_one_warning(
    error: BaseException, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of our own code becomes one warning that names what it was doing;
    with the traceback on request.
    """
    with suppress_internal_errors("counting sheep"):
        pass
    assert not caplog.records
    with suppress_internal_errors("counting sheep"):
        raise error
    (record,) = caplog.records
    assert call_with_timeout(Mock(side_effect=error), 30, "counting sheep") is None
    assert [found.getMessage() for found in caplog.records] == [record.getMessage()] * 2
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        f"firstfault: failed while counting sheep ({type(error).__name__}: "
    )
    assert record.exc_info in {None, False}
    caplog.clear()
    monkeypatch.setenv("FIRSTFAULT_DEBUG", "1")
    with suppress_internal_errors("counting sheep"):
        raise ValueError("boom")
    assert "ValueError: boom" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("seconds", [0.2, 0, -3])
def test_a_bounded_call_that_hangs_gives_none(seconds: float) -> None:
    """A call that hangs gives None at its deadline, at once if that is past,
    and does not keep the process.
    """
    release = threading.Event()
    before = set(threading.enumerate())  # another test's threads may still end
    began = time.monotonic()
    assert call_with_timeout(lambda: release.wait(LONG_S), seconds, "counting sheep") is None
    took = time.monotonic() - began
    begun = set(threading.enumerate()) - before
    assert [thread.daemon for thread in begun if thread.name == "firstfault-call"] == [True]
    release.set()
    assert max(seconds, 0) <= took < SOON_S


@pytest.mark.parametrize(("hurried_s", "found"), [(LONG_S, "done"), (0.1, None)])
def test_a_signal_handlers_exception_ends_a_long_wait(
    hurried_s: float,
    found: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a signal handler raised, a call that is almost done completes,
    and a long one is not waited for.
    """
    monkeypatch.setattr(guard, "SHUTDOWN_CALL_TIMEOUT_SECONDS", hurried_s)
    raised = threading.Event()
    release = threading.Event()

    def handler(*_: object) -> None:
        raised.set()
        raise InterruptedError("terminated")

    def call() -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        (raised if found else release).wait(LONG_S)
        return "done"

    before = signal.signal(signal.SIGUSR1, handler)
    began = time.monotonic()
    try:
        assert call_with_timeout(call, LONG_S, "counting sheep") == found
    finally:
        release.set()
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - began < SOON_S
    assert "while counting sheep (InterruptedError: terminated)" in caplog.text


def test_a_shutdown_request_ends_a_wait() -> None:
    """A wait ends soon after `shutdown_requested` is set, with the result if there is one."""
    over = threading.Event()
    never = threading.Event()
    began = time.monotonic()
    threading.Timer(0.2, over.set).start()
    assert call_with_timeout(lambda: never.wait(LONG_S), LONG_S, "waiting", over) is None
    assert 0.2 <= time.monotonic() - began < SOON_S
    assert call_with_timeout(lambda: 7, LONG_S, "counting", over, shutdown_seconds=LONG_S) == 7
    never.set()


@pytest.fixture
def handlers() -> Iterator[dict[signal.Signals, object]]:
    """Give SIGINT a handler that raises, and SIGTERM none."""
    raises = Mock(side_effect=InterruptedError("terminated"))
    set_: dict[signal.Signals, Any] = {signal.SIGINT: raises, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in set_.items()}
    yield set_
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("handled_only", [True, False])
def test_ignored_signals_do_not_interrupt(
    handlers: dict[signal.Signals, object], handled_only: bool
) -> None:
    """Signals are ignored; with `handled_only` one without a handler still ends the process."""
    with ignore_worker_signals(handled_only=handled_only):
        signal.raise_signal(signal.SIGINT)
        inside = signal.getsignal(signal.SIGTERM)
    assert inside is (signal.SIG_DFL if handled_only else signal.SIG_IGN)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    with pytest.raises(InterruptedError):
        signal.raise_signal(signal.SIGINT)


def test_outside_of_the_main_thread_no_handler_changes(
    handlers: dict[signal.Signals, object],
) -> None:
    """Outside of the main thread no handler is changed."""
    inside = []

    def look() -> None:
        with ignore_worker_signals():
            inside.append({number: signal.getsignal(number) for number in handlers})

    run_in_thread(look)
    assert inside == [handlers]


def test_a_child_that_dies_meanwhile_can_still_be_waited_for() -> None:
    """A data loader's handler does not break in, and the child can still be waited for."""
    handler = Mock(side_effect=InterruptedError("a child has died"))
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        with ignore_worker_signals(handled_only=True):
            child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
            assert child.wait() == 7
        assert signal.getsignal(signal.SIGCHLD) is handler
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_loop_survives_single_errors(caplog: pytest.LogCaptureFixture) -> None:
    """One internal error costs one pass; three in a row end the loop with a warning."""
    outcomes = iter([ValueError, True, ValueError, ValueError, True, False])

    def step() -> bool:
        outcome = next(outcomes)
        if outcome is ValueError:
            raise ValueError
        return bool(outcome)

    run_loop(step, "polling")
    assert next(outcomes, "no more") == "no more"
    assert "stopped polling" not in caplog.text
    outcomes = iter([ValueError] * 5)
    run_loop(step, "polling")
    assert len(list(outcomes)) == 2
    assert "stopped polling after 3 errors in a row" in caplog.text


def test_a_loop_outlives_a_shortage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the system has no thread, process, memory, descriptor or disk left,
    the loop continues after it.
    """
    monkeypatch.setattr(guard, "LOOP_SHORTAGE_PAUSE_SECONDS", 0.0)
    shortages: list[Exception] = [
        OSError(errno.ENOSPC, ""),
        BlockingIOError(errno.EAGAIN, ""),
        MemoryError(),
    ]
    outcomes = iter(
        [
            RuntimeError("can't start new thread"),
            *shortages,
            *shortages,
            ValueError(),
            *shortages,
            None,
        ]
    )

    def step() -> bool:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return False

    run_loop(step, "polling")
    assert next(outcomes, "no more") == "no more"
    assert "stopped polling" not in caplog.text
    assert len(caplog.records) < 5, "one line for a shortage"
