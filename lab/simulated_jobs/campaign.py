"""Plays many schedules, counts violations, and shrinks a schedule to its smallest set of faults."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.invariants import find_violations
from lab.simulated_jobs.job import Rules, SimulatedJob


@dataclass
class Result:
    """What a campaign has found."""

    played: int = 0
    seconds: float = 0.0
    """Of the CPU."""
    seeds: dict[str, list[int]] = field(default_factory=dict)
    """The seeds of each violated invariant."""


def play(seeds: Iterable[int], rules: Rules, nodes: int | None = None) -> Result:
    """Play the schedules of these seeds."""
    result = Result()
    began = time.process_time()
    for seed in seeds:
        job = SimulatedJob(seed, rules, nodes).play()
        result.played += 1
        for name in dict(find_violations(job)):
            result.seeds.setdefault(name, []).append(seed)
    result.seconds = time.process_time() - began
    return result


def shrink(seed: int, rules: Rules, name: str, nodes: int | None = None) -> Sequence[Fault]:
    """Return the fewest faults of a seed with which an invariant is still violated."""
    faults = SimulatedJob(seed, rules, nodes).faults
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for index in range(len(faults)):
            fewer = [*faults[:index], *faults[index + 1 :]]
            job = SimulatedJob(seed, rules, nodes, fewer).play()
            if name in dict(find_violations(job)):
                faults = fewer
                is_smaller = True
                break
    return faults
