"""Frames of all threads are read without a collection of garbage."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable

import pytest

from firstfault.utils.frames import get_current_exceptions, get_current_frames


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("_current_frames", get_current_frames),
        ("_current_exceptions", get_current_exceptions),
    ],
)
def test_no_garbage_is_collected_while_threads_are_listed(
    name: str,
    read: Callable[[], dict[int, object]],
    is_enabled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Afterwards the collection is as it was."""
    was_enabled: list[bool] = []
    original = getattr(sys, name)

    def record() -> dict[int, object]:
        was_enabled.append(gc.isenabled())
        result: dict[int, object] = original()
        return result

    monkeypatch.setattr(sys, name, record)
    if not is_enabled:
        gc.disable()
    try:
        found = read()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
    assert was_enabled == [False]
    assert threading.get_ident() in found
