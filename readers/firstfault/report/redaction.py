"""A verdict without credentials: what it quotes may come from a file of Flyte's own, which nobody has redacted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.text import redact

if TYPE_CHECKING:
    from firstfault.model import Verdict

__all__ = ["redacted"]


def redacted(verdict: Verdict) -> Verdict:
    """Return the verdict with ``***`` for what looks like a credential; its root, for who needs it, is unchanged."""
    victims, coverage = verdict.victims, verdict.coverage
    return replace(
        verdict,
        headline=redact(verdict.headline),
        message=redact(verdict.message),
        why=tuple(redact(sentence) for sentence in verdict.why),
        suspects=tuple(replace(suspect, why=redact(suspect.why)) for suspect in verdict.suspects),
        victims=replace(victims, by_rank=tuple((rank, redact(line)) for rank, line in victims.by_rank)),
        coverage=replace(coverage, notes=tuple(redact(note) for note in coverage.notes)),
    )
