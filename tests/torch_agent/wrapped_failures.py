"""Trainings that wrap the exception of their step, or fail again while they handle it, as programs do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AFTERMATH", "FALLBACKS", "PEER", "WRAPPED", "TrainingError"]

PEER = "Connection closed by peer [10.0.0.1]:4211"
_CACHE: dict[str, Any] = {}


class TrainingError(Exception):
    """What the program raises for any failure. Its text has words of storage and services, which prove nothing here."""

    def __init__(self) -> None:
        super().__init__("failed to save the checkpoint of https://hub.example.org/run after Disk quota exceeded")


def step(error: Exception) -> None:
    """Fail."""
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
    WRAPPED |= {"task group": _task_group, "around a group": _around_task_group, "within a group": _in_task_group}
AFTERMATH: dict[str, Callable[[Exception], None]] = {"tried again": _tried_again, "save": _save, "close": _close}
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
