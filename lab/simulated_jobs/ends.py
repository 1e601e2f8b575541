"""Campaigns of jobs that end or restart: many seeds, and the smallest set of faults of one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from lab.simulated_jobs.campaign import Result
from lab.simulated_jobs.exit_job import BARRIERS, ExitJob
from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.vote_job import VOTES, VoteJob

JOBS = {"exit": ExitJob, "vote": VoteJob}
RULES = {"exit": tuple(BARRIERS), "vote": tuple(VOTES)}
"""The product's rules, and others, which show that the simulator can see."""


def play(job: str, seeds: Iterable[int], rules: str = "present") -> Result:
    """Play the schedules of these seeds."""
    result = Result()
    began = time.process_time()
    for seed in seeds:
        played = JOBS[job](seed, rules).play()
        result.played += 1
        for name, _ in played.find_violations():
            result.seeds.setdefault(name, []).append(seed)
    result.seconds = time.process_time() - began
    return result


def find_violations(
    job: str, seed: int, rules: str, faults: Sequence[Fault] | None = None
) -> dict[str, str]:
    """Play one schedule; return what it violates."""
    return dict(JOBS[job](seed, rules, None, faults).play().find_violations())


def shrink(job: str, seed: int, rules: str, name: str) -> Sequence[Fault]:
    """Return the fewest faults of a seed with which an invariant is still violated."""
    faults = JOBS[job](seed, rules).faults
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for index in range(len(faults)):
            fewer = [*faults[:index], *faults[index + 1 :]]
            if name in find_violations(job, seed, rules, fewer):
                faults = fewer
                is_smaller = True
                break
    return faults


def play_one(job: str, seed: int, rules: str, *, shrinks: bool) -> int:
    """Print the trace of one schedule, and what it violates."""
    faults: Sequence[Fault] | None = None
    violations = find_violations(job, seed, rules)
    if shrinks and violations:
        faults = shrink(job, seed, rules, next(iter(violations)))
    played = JOBS[job](seed, rules, None, faults, trace=True).play()
    print(f"{played.machines.nodes} nodes, the store's host is {played.machines.host}")
    print("\n".join(played.events.lines))
    violations = dict(played.find_violations())
    for name, seen in violations.items():
        print(f"violated: {name}: {seen}")
    return int(bool(violations))
