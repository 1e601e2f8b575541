"""Who has to fix a root cause: the author of the code, or the platform."""

from __future__ import annotations

import enum

from firstfault.model.failure import ABOUT_CATEGORIES
from firstfault.report.engine_words import EngineWords


class FaultOwner(str, enum.Enum):
    """Who has to fix it: the author of the code, or the platform."""

    CODE = "your code"
    INFRASTRUCTURE = "infrastructure"
    EITHER = "your code or infrastructure"
    """Memory, disk, native code, waiting and a lost pod depend on the code and on what
    the platform gives it.
    """
    TRANSIENT = "raised as recoverable"
    NONE = "not a fault"
    UNKNOWN = "code or infrastructure: unknown"


def describe_fault_owner(category: str, engine: EngineWords) -> tuple[FaultOwner, str]:
    """Return who has to fix a root cause, and what to do first;
    an unknown category gets the words of "unknown".
    """
    about = ABOUT_CATEGORIES.get(category, ABOUT_CATEGORIES["unknown"])
    advice = about["advice"].format(
        log=engine.log,
        events=engine.events,
        nodes=engine.nodes,
        node=engine.node,
    )
    return FaultOwner[about["owner"].upper()], advice
