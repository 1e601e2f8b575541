"""Plays jobs that stall, for days and weeks: ``python -m lab.simulated_jobs --stalls``.

The agents' watches are the product's (`firstfault_torch.protocol.stalls`); nodes poll out of phase,
agents and pods freeze, connections to the store break.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from firstfault_torch.protocol.stall_limits import build_stall_limits
from firstfault_torch.protocol.stalls import StallProtocol
from lab.simulated_jobs.events import Events
from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.former_stall_rules import DriftingStalls, FormerStalls, KeepingStalls
from lab.simulated_jobs.stalling_agent import (
    REPORT_BYTES,
    StallingAgent,
    StallServer,
    StallWorld,
)

RULES: dict[str, Callable[..., StallProtocol]] = {
    "present": StallProtocol,
    "drifting looks": DriftingStalls,
    "no deletions": KeepingStalls,
    "former": FormerStalls,
}
WARN_S = 60.0
DAY_S = 86400.0
HOUR_S = 3600.0
SMALL_BYTES = 30_000
"""What a comparison leaves in the store beside the nodes' observations."""
LONGEST_POLL_S = 120.0
"""Most seconds of one poll with a comparison, plus what agents were frozen."""
_AFTER_S = 900.0
_KINDS = {"reset": 4, "freeze agent": 3, "freeze pod": 2, "slow link": 2}


@dataclass(frozen=True)
class Plan:
    """What a seed decides before the faults."""

    nodes: int
    host: int
    """The agent that hosts the store; -1: none of the job."""
    end_seconds: float | None
    kind: str
    """`hourly` stalls, `some` stalls, or one `long` hang."""


def draw_plan(seed: int) -> Plan:
    """Return the plan of a seed."""
    draw = random.Random(f"{seed}/stalling job")
    nodes = draw.choice([2, 2, 3, 4, 8])
    (where,) = draw.choices([0, draw.randrange(nodes), -1], [7, 2, 1])
    (kind,) = draw.choices(["hourly", "some", "long"], [5, 4, 1])
    end = draw.choice([None, None, 300.0]) if kind != "hourly" else None
    return Plan(nodes, where, end, kind)


def draw_faults(seed: int, plan: Plan, days: float) -> list[Fault]:
    """Return the stalls of a seed, and what happens to agents and connections meanwhile."""
    draw = random.Random(f"{seed}/stalls")
    faults: list[Fault] = []
    for began, seconds in _draw_stalls(draw, plan, days):
        faults.append(Fault(began, "stall", draw.randrange(plan.nodes), seconds))
        if draw.random() < 0.3:
            faults += _draw_faults_of_stall(draw, plan, began, seconds)
    for _ in range(draw.randrange(3)):
        size = draw.choice([draw.uniform(5, 60), draw.uniform(60, 400)])
        node, when = draw.randrange(plan.nodes), draw.uniform(100, days * DAY_S)
        faults.append(Fault(when, draw.choice(["freeze agent", "freeze pod"]), node, size))
    return sorted(faults, key=lambda fault: fault.seconds)


def _draw_stalls(draw: random.Random, plan: Plan, days: float) -> Iterator[tuple[float, float]]:
    if plan.kind == "long":
        yield draw.uniform(200, HOUR_S), draw.uniform(1, 24) * HOUR_S * min(days, 1)
        return
    step = HOUR_S if plan.kind == "hourly" else draw.uniform(2, 12) * HOUR_S
    for number in range(int(days * DAY_S / step)):
        seconds = draw.choices(
            [draw.uniform(20, 60), draw.uniform(62, 115), draw.uniform(120, 400)], [5, 10, 4]
        )[0]
        if draw.random() < 0.05:
            seconds = draw.uniform(400, 1500)
        yield 200 + number * step + draw.uniform(0, 600), seconds


def _draw_faults_of_stall(
    draw: random.Random, plan: Plan, began: float, seconds: float
) -> Iterator[Fault]:
    for _ in range(draw.choice([1, 1, 2])):
        (kind,) = draw.choices(list(_KINDS), list(_KINDS.values()))
        at_limit = draw.choice([1, 2]) * WARN_S + draw.uniform(-10, 20)
        when = began + draw.choice([at_limit, at_limit, draw.uniform(0, seconds)])
        size = draw.choice([draw.uniform(1, 10), draw.uniform(10, 200)])
        node = draw.randrange(plan.nodes)
        is_common = kind == "reset" and draw.random() < 0.3  # the store's host has restarted a link
        for each in range(plan.nodes) if is_common else [node]:
            yield Fault(when, kind, each, size)


class StallingJob:
    """A job of a seed; `play` plays it to its end."""

    def __init__(
        self,
        seed: int,
        rules: str = "present",
        days: float = 1.0,
        faults: Sequence[Fault] | None = None,
        *,
        trace: bool = False,
    ) -> None:
        self.plan = plan = draw_plan(seed)
        self.faults = list(draw_faults(seed, plan, days) if faults is None else faults)
        self.events = Events(trace=trace)
        self._seed = seed
        hangs = [self._find_hangs(rank) for rank in range(plan.nodes)]
        times = {fault.seconds for fault in self.faults} | {
            begin for each in hangs for begin, _ in each
        }
        self.world = StallWorld(
            self.events,
            StallServer(self.events, random.Random(f"{seed}/store")),
            plan.nodes,
            build_stall_limits(WARN_S, plan.end_seconds),
            RULES[rules],
            sorted(times),
            find_straggler=self._find_straggler,
        )
        self.agents = self.world.agents
        self.agents += [
            StallingAgent(rank, self.world, str(seed), hangs[rank], is_host=rank == plan.host)
            for rank in range(plan.nodes)
        ]

    def play(self) -> StallingJob:
        """Play the schedule, and return the job."""
        for agent in self.agents:
            agent.start()
        for fault in self.faults:
            self.events.at(fault.seconds, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        last = max((fault.seconds + fault.size for fault in self.faults), default=0.0)
        self.events.play(last + _AFTER_S, most=100_000_000)
        return self

    def _find_hangs(self, rank: int) -> list[tuple[float, float]]:
        """Return when the workers of a node make no progress: begin and end, in order."""
        found: list[tuple[float, float]] = []
        for fault in self.faults:
            if fault.kind not in {"stall", "freeze pod"}:
                continue
            draw = random.Random(f"{self._seed}/{fault.seconds}/{rank}")
            # in another group, a node may go on for a while
            goes_on = draw.uniform(0, 2) if draw.random() < 0.8 else draw.uniform(2, 90)
            is_own = fault.kind == "freeze pod" and fault.node == rank
            begin = fault.seconds + (0.0 if is_own else goes_on)
            end = fault.seconds + fault.size + draw.random()
            if begin >= end:
                continue
            if found and begin <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], end)
            else:
                found.append((begin, end))
        return found

    def _find_straggler(self, now: float) -> tuple[int, str]:
        for fault in self.faults:
            if fault.kind == "stall" and fault.seconds <= now < fault.seconds + fault.size + 1:
                draw = random.Random(f"{self._seed}/{fault.seconds}/line")
                return fault.node, draw.choice(["save", "save", "save", "load", "evaluate"])
        return 0, "frozen"

    def _inject(self, fault: Fault) -> None:
        agent = self.agents[fault.node]
        self.events.log(f"** {fault}")
        match fault.kind:
            case "freeze agent" | "freeze pod":
                agent.freeze(fault.size)
                if agent.is_host:
                    self.world.server.frozen_until = agent.frozen_until
            case "reset":
                for connection in agent.connections:
                    connection.reset()
            case "slow link":
                agent.link.slow_until = self.events.now + fault.size
                agent.link.slow_by = 1 + fault.size / 3


def find_violations(job: StallingJob) -> Iterator[tuple[str, str]]:
    """Yield the invariants that a played job violates, each with what was seen."""
    world = job.world
    busy = [agent.rank for agent in job.agents if not agent.is_watching]
    if busy:
        states = {job.agents[rank].protocol.phase.value for rank in busy}
        yield "I2 every watch returns to ADVANCING or ends", f"nodes {busy}: {states}"
    frozen = sum(end - begin for agent in job.agents for begin, end in agent.froze_at)
    longest = max(agent.longest_poll for agent in job.agents)
    if longest > LONGEST_POLL_S + frozen:
        yield "I2 every watch returns to ADVANCING or ends", f"a poll took {longest:.0f} s"
    if world.accused:
        yield "I9 no live node that hangs is said not to respond", world.accused[0]
    bound = 2 * (job.plan.nodes * REPORT_BYTES + SMALL_BYTES)
    if world.server.largest > bound:
        yield "I10 the store stays small", f"{world.server.largest} bytes, more than {bound}"
    # a frozen agent may write late to one that was deleted, and then deletes it itself
    if world.server.most_comparisons > (2 if not frozen else 3):
        yield "I10 at most two comparisons have keys", f"{world.server.most_comparisons}"
    for number, printed in world.printed.items():
        lines = {each for each in printed.values() if each}
        if number >= 0 and len(lines) > 1:
            yield "all nodes print the same report", f"stall {number}: {lines}"
            return
        began = world.begun.get(number, 0.0)
        silent = [rank for rank, each in printed.items() if not each]
        # one that was frozen doesn't print what is long over
        silent = [r for r in silent if not job.agents[r].was_frozen(began, began + LONGEST_POLL_S)]
        if lines and silent and not world.is_over:
            yield "all nodes print a report or none does", f"stall {number}: {printed}"
            return


@dataclass
class StallResult:
    """What a campaign has found."""

    played: int = 0
    comparisons: int = 0
    largest: int = 0
    """The most bytes in a store."""
    seconds: float = 0.0
    """Of the CPU."""
    seeds: dict[str, list[int]] = field(default_factory=dict)
    """The seeds of each violated invariant."""


def play(seeds: Iterable[int], rules: str, days: float) -> StallResult:
    """Play the jobs of these seeds."""
    result = StallResult()
    began = time.process_time()
    for seed in seeds:
        job = StallingJob(seed, rules, days).play()
        result.played += 1
        result.comparisons += len(job.world.begun)
        result.largest = max(result.largest, job.world.server.largest)
        for name in dict(find_violations(job)):
            result.seeds.setdefault(name, []).append(seed)
    result.seconds = time.process_time() - began
    return result


def shrink(seed: int, rules: str, days: float, name: str) -> Sequence[Fault]:
    """Return the fewest stalls and faults of a seed with which an invariant is still violated."""
    faults: Sequence[Fault] = StallingJob(seed, rules, days).faults
    size = max(len(faults) // 2, 1)
    while True:
        for first in range(0, len(faults), size):
            fewer = [*faults[:first], *faults[first + size :]]
            if name in dict(find_violations(StallingJob(seed, rules, days, fewer).play())):
                faults = fewer
                break
        else:
            if size == 1:
                return faults
            size //= 2


def main(arguments: Sequence[str]) -> int:
    """Play seeds, or one of them with its trace."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.simulated_jobs --stalls", description=__doc__
    )
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 100), metavar=("FIRST", "END"))
    parser.add_argument("--seed", type=int, help="play this one, and print its trace")
    parser.add_argument("--days", type=float, default=1.0, help="of each job; by default 1")
    parser.add_argument("--rules", choices=[*RULES, "all"], default="all")
    parser.add_argument("--shrink", action="store_true", help="drop faults that change nothing")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        rules = "present" if given.rules == "all" else given.rules
        return _play_one(given.seed, rules, given.days, shrinks=given.shrink)
    for name in RULES if given.rules == "all" else [given.rules]:
        result = play(range(*given.seeds), name, given.days)
        print(
            f"{name} rules: {result.played} jobs of {given.days:g} days,"
            f" {result.comparisons} comparisons, {result.seconds:.0f} s,"
            f" at most {result.largest} bytes in a store"
        )
        for invariant, seeds in sorted(result.seeds.items()):
            print(f"  {len(seeds):6} violate {invariant}; seeds {seeds[:6]}")
    return 0


def _play_one(seed: int, rules: str, days: float, *, shrinks: bool) -> int:
    job = StallingJob(seed, rules, days, trace=True).play()
    violations = dict(find_violations(job))
    if shrinks and violations:
        faults = shrink(seed, rules, days, next(iter(violations)))
        job = StallingJob(seed, rules, days, faults, trace=True).play()
        violations = dict(find_violations(job))
    print(job.plan)
    print("\n".join(job.events.lines))
    for name, seen in violations.items():
        print(f"violated: {name}: {seen}")
    return int(bool(violations))
