"""The sealed verdict as data: what an engine publishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion
    from firstfault.model import Decision, Seal, Verdict
    from firstfault.report import Report
    from firstfault_torch.context import Recording


@dataclass(frozen=True, slots=True)
class SealedVerdict:
    """The verdict on a failed attempt, ready to be published."""

    verdict: Verdict
    """Without credentials."""
    decision: Decision
    seal: Seal
    document: bytes
    """The ``error.pb``."""
    recording: Recording
    """This node's."""
    conclusion: Conclusion | None = None
    """None: another node concluded."""
    report: Report | None = None
    """Without credentials; message and deck are rendered from it. None: another node concluded."""
    for_all: bool = False
    """All nodes settled on it: only the node that concluded publishes it."""
    durable: bool = False
    """Whether the ``error.pb`` is in the storage."""
    bundle: bytes = b""
    """Copies of what the verdict rests on, for later readers; empty: another node concluded."""
