"""Calls the installed notifiers when a verdict has been published.

A notifier is a callable with one argument, the `firstfault.report.Report`, in the entry-point group
``firstfault.notifiers``. The node that concludes calls each once, after the verdict is in the storage.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from firstfault_torch.budgets import NOTIFIERS_S
from firstfault_torch.guard import begun, bounded, caught, logger

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from firstfault.report import Report

GROUP = "firstfault.notifiers"
"""The entry-point group of notifiers."""


def notify(report: Report) -> None:
    """Call all notifiers at the same time; wait for them at most 3 s. A notifier that fails is a warning."""
    deadline = time.monotonic() + NOTIFIERS_S
    # the lookup reads the metadata of every installed package, from a disk that may be slow
    found = bounded(lambda: list(entry_points(group=GROUP)), NOTIFIERS_S, "looking for installed notifiers")
    if found is None:
        logger.warning("installed notifiers are not called: they were not found within %g s", NOTIFIERS_S)
    told = [(point.name, begun(partial(_tell, point, report), "calling a notifier")) for point in found or ()]
    for name, ended in told:
        if not ended.wait(max(deadline - time.monotonic(), 0)):
            logger.warning("the notifier %s has not ended within %g s; it is not waited for", name, NOTIFIERS_S)


def _tell(point: EntryPoint, report: Report) -> None:
    _, error = caught(lambda: point.load()(report))
    if error is not None:
        logger.warning("the notifier %s failed (%s: %s)", point.name, type(error).__name__, error)
