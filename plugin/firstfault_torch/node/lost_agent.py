"""The document about an agent that died; one of its workers or its recorder writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.model import Subject, Writer
from firstfault_torch.error_classes import ErrorClass, failure_record

if TYPE_CHECKING:
    from firstfault.model import Place, WorkerError

__all__ = ["lost_agent"]


def lost_agent(place: Place) -> WorkerError:
    """Return the failure record of an agent that died, without its time.

    Args:
        place: the agent's.
    """
    return failure_record(
        ErrorClass.LOST_AGENT,
        place,
        message="the agent died and left no report; its workers were terminated",
        writer=Writer.WORKER,
        subject=Subject.AGENT,
    )
