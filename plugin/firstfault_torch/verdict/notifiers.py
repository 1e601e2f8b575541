"""Calls the installed notifiers when a verdict has been published.

A notifier is a callable with one argument, the `firstfault.report.Report`, in the entry-point group
``firstfault.notifiers``. The node that concludes calls each once, after the verdict is in the storage.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from firstfault_torch.guard import bounded, caught, guarded, logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault.report import Report

__all__ = ["GROUP", "notify"]

GROUP = "firstfault.notifiers"
"""The entry-point group of notifiers."""
_LONGEST_S = 3.0
"""All notifiers together; one that takes longer goes on in its thread until the process ends."""


def notify(report: Report) -> None:
    """Call all notifiers at the same time; wait for them at most 3 s. A notifier that fails is a warning."""
    deadline = time.monotonic() + _LONGEST_S
    # the lookup reads the metadata of every installed package, from a disk that may be slow
    found = bounded(lambda: list(entry_points(group=GROUP)), _LONGEST_S, "looking for installed notifiers")
    if found is None:
        logger.warning("installed notifiers are not called: they were not found within %g s", _LONGEST_S)
    begun = [_begun(point.name, partial(_loaded, point, report)) for point in found or ()]
    for name, ended in begun:
        if not ended.wait(max(deadline - time.monotonic(), 0)):
            logger.warning("the notifier %s has not ended within %g s; it is not waited for", name, _LONGEST_S)


def _begun(name: str, call: Callable[[], object]) -> tuple[str, threading.Event]:
    """Begin a call in a thread of its own; return its name, and what is set when it has ended or could not begin."""
    ended = threading.Event()
    with guarded(f"starting the notifier {name}"):
        threading.Thread(target=_run, args=(name, call, ended), name="firstfault-notify", daemon=True).start()
        return name, ended
    ended.set()
    return name, ended


def _run(name: str, call: Callable[[], object], ended: threading.Event) -> None:
    _, error = caught(call)
    if error is not None:
        logger.warning("the notifier %s failed (%s: %s)", name, type(error).__name__, error)
    ended.set()


def _loaded(found: Any, report: Report) -> None:
    found.load()(report)
