"""Calls the installed notifiers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from firstfault_torch import time_limits
from firstfault_torch.guard import call_with_timeout, logger, start_in_thread, try_call

if TYPE_CHECKING:
    from firstfault.report import Report

NOTIFIERS = "firstfault.notifiers"
"""The entry-point group of notifiers."""


def notify(about: Report | Mapping[str, Any]) -> None:
    """Call all installed notifiers at the same time;
    wait for them at most 3 s. A notifier that fails is a warning.

    A notifier is a callable with one argument, the report, in the entry-point group
    ``firstfault.notifiers``. The node that concludes calls each once, after the verdict is in the
    storage. Its `on_stall`, if it has one, is given a stall's data.
    """

    def give(point: EntryPoint) -> None:
        notifier = point.load()
        call = getattr(notifier, "on_stall", None) if isinstance(about, Mapping) else notifier
        if call is not None:
            call(about)

    def tell(point: EntryPoint) -> None:
        _, error = try_call(partial(give, point))
        if error is not None:
            logger.warning(
                "the notifier %s failed (%s: %s)",
                point.name,
                type(error).__name__,
                error,
            )

    # One deadline for the lookup and all notifiers: the pod is about to exit.
    seconds = time_limits.NOTIFIERS_TIMEOUT_SECONDS
    deadline = time.monotonic() + seconds
    # the lookup reads the metadata of every installed package, from a disk that may be slow
    found = call_with_timeout(
        lambda: list(entry_points(group=NOTIFIERS)), seconds, "looking for installed notifiers"
    )
    if found is None:
        logger.warning("not calling notifiers: loading them took more than %g s", seconds)
    # All are started before the first is waited for, so a slow notifier takes no time from another.
    # The threads are daemons: one that doesn't end in time doesn't keep the process alive.
    told = [
        (point.name, start_in_thread(partial(tell, point), "calling a notifier"))
        for point in found or ()
    ]
    for name, ended in told:
        if not ended.wait(max(deadline - time.monotonic(), 0)):
            logger.warning(
                "the notifier %s didn't return within %g s; not waiting for it", name, seconds
            )
