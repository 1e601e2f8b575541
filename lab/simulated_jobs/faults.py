"""The faults of a schedule: what fails first, and up to three more."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_S = 1.0
"""When the first failure comes."""
_FIRST = {"worker": 6, "kill": 3, "signal": 3, "machine gone": 1}
_MORE = {
    "kill": 4,
    "freeze": 4,
    "slow link": 4,
    "worker": 2,
    "reset": 2,
    "signal": 2,
    "storage outage": 2,
    "silent connection": 1,
    "machine gone": 1,
}
_SHARE_OF_SIGNALS_TO_ALL = 0.5


@dataclass(frozen=True)
class Fault:
    """Something that happens to a node."""

    seconds: float
    """Since the start of the schedule."""
    kind: str
    node: int
    size: float
    """Seconds that it lasts, if it does."""

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s: {self.kind} of node {self.node} ({self.size:.1f})"


def draw_faults(seed: str, nodes: int) -> list[Fault]:
    """Return the faults of a seed. The first one ends the job, the others come at any time."""
    draw = random.Random(f"{seed}/faults")
    (kind,) = draw.choices(list(_FIRST), list(_FIRST.values()))
    node = draw.randrange(nodes)
    faults = [Fault(FIRST_S, kind, node, 0.0)]
    if kind == "signal" and draw.random() < _SHARE_OF_SIGNALS_TO_ALL:
        others = (each for each in range(nodes) if each != node)
        faults += [Fault(FIRST_S + draw.random(), "signal", each, 0.0) for each in others]
    (count,) = draw.choices([0, 1, 2, 3], [3, 4, 3, 1])
    for _ in range(count):
        (kind,) = draw.choices(list(_MORE), list(_MORE.values()))
        when = draw.choice([draw.uniform(-0.5, 3), draw.uniform(0, 25)])
        size = draw.choice([draw.uniform(0.3, 3), draw.uniform(2, 20)])
        faults.append(Fault(max(FIRST_S + when, 0.01), kind, draw.randrange(nodes), size))
    return faults
