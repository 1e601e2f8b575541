"""How often verdicts of each confidence are right: the confidence means something only if it is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["TARGETS", "Calibration"]

TARGETS = {"high": 0.995, "medium": 0.90}
"""Least share of right verdicts, by confidence; `low` promises nothing."""
_LEVELS = ("high", "medium", "low")


@dataclass(slots=True)
class Calibration:
    """Counts of verdicts that name a rank, ranks or a node."""

    counts: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    """By source, confidence, and whether the verdict was right."""

    def add(self, source: str, confidence: str, outcome: str) -> None:
        """Count a verdict; one that names nothing claims nothing.

        Args:
            source: where the cascade comes from.
            confidence: the verdict's.
            outcome: "right", "wrong"; any other is not counted.
        """
        if outcome in {"right", "wrong"}:
            self.counts[source, confidence, outcome == "right"] += 1

    def of(self, confidence: str, source: str = "") -> tuple[int, int]:
        """Return how many verdicts were right, and how many there were; of all sources unless one is given."""
        chosen = {key: count for key, count in self.counts.items() if key[1] == confidence and source in {"", key[0]}}
        return sum(count for key, count in chosen.items() if key[2]), sum(chosen.values())

    def missed(self) -> list[str]:
        """Return the confidences whose verdicts are right less often than they have to be."""
        shares = {level: self.of(level) for level in TARGETS}
        return [level for level, (right, count) in shares.items() if count and right < TARGETS[level] * count]

    def table(self) -> str:
        """Return the table, a row for each source."""
        rows = [*dict.fromkeys(source for source, _, _ in self.counts), ""]
        lines = [f"{'right of those with a confidence of':36}" + "".join(f"{level:>24}" for level in _LEVELS)]
        lines += [
            f"{source or 'all':36}" + "".join(_cell(*self.of(level, source)) for level in _LEVELS) for source in rows
        ]
        targets = "".join(f"{f'{100 * TARGETS[level]:g} %' if level in TARGETS else '':>24}" for level in _LEVELS)
        return "\n".join([*lines, f"{'at least':36}{targets}"])


def _cell(right: int, count: int) -> str:
    text = f"{right} of {count}, {100 * right / count:.1f} %" if count else "-"
    return f"{text:>24}"
