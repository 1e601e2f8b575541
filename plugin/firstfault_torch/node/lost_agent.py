"""The document about an agent that died; one of its workers or its recorder writes it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.exceptions.fingerprint import fingerprint_of
from firstfault.model import Subject, WorkerError, Writer
from firstfault_torch.context import boot_id, versions
from firstfault_torch.error_classes import FLYTE_CLASSES, ErrorClass

if TYPE_CHECKING:
    from firstfault.model import Place

__all__ = ["lost_agent"]


def lost_agent(place: Place) -> WorkerError:
    """Return the failure record of an agent that died, without its time.

    Args:
        place: the agent's.
    """
    flyte = FLYTE_CLASSES[ErrorClass.LOST_AGENT]
    failure = WorkerError(
        code=flyte.code,
        message=f"the agent died (pid {place.pid}) and left no report; its workers were terminated",
        kind=flyte.kind,
        origin=flyte.origin,
        worker=place.node,
        place=place,
        writer=Writer.WORKER,
        subject=Subject.AGENT,
        category=flyte.category,
        boot_id=boot_id(),
        versions=versions(),
    )
    return replace(failure, fingerprint=fingerprint_of(failure))
