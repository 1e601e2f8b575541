"""Waits of tests that a busy machine does not break."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SOON_S = 30.0
"""What takes milliseconds may take so long on a busy machine."""


def until(condition: Callable[[], object], what: str = "it never came") -> None:
    """Return when the condition holds; fail after a time that no busy machine needs."""
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
