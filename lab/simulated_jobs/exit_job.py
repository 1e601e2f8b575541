"""A simulated job at its end: the workers of all nodes succeed, unless a fault comes between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from firstfault_torch import time_limits
from firstfault_torch.protocol.exit_barrier import (
    BarrierEvent,
    BarrierInstruction,
    BarrierLimits,
    BarrierPhase,
    ExitBarrier,
    IgnoreSignals,
    RosterRead,
    RosterUnanswered,
    Succeed,
    build_barrier_limits,
)
from firstfault_torch.protocol.notices import NoticeLimits, RoundNotices, build_notice_limits
from lab.simulated_jobs.events import Events
from lab.simulated_jobs.exit_agent import JOINED_KEY, ExitAgent, ExitState, ForeignAgent, Roster
from lab.simulated_jobs.faults import Fault
from lab.simulated_jobs.former_rules import FormerNotices, OnceNotices
from lab.simulated_jobs.process import Machines
from lab.simulated_jobs.store import Server

SUCCESS_TOO_EARLY = "I12 no agent ends with success while a node can still fail"
FAILURE_OF_SUCCESS = "I12 no agent ends with a failure after all nodes have succeeded"
DIFFERENT_ENDS = "I12 the agents of a job whose store lives end alike"
ENDS = "I2 each live agent ends"
SECOND_SOURCE = "I8 each wait of an agent has a second source"
_LONGEST_S = 1000.0
_SILENCE_S = 62.0
"""After this the kernel notices that a machine has vanished."""
_FAULTS = {
    "kill": 3,
    "freeze": 4,
    "slow link": 3,
    "reset": 3,
    "forgotten connections": 3,
    "signal": 4,
    "worker": 2,
    "storage outage": 1,
    "machine gone": 1,
}


class FormerBarrier(ExitBarrier):
    """The exit barrier before its rules were repaired."""

    def handle(self, event: BarrierEvent, now: float) -> list[BarrierInstruction]:
        self._now = now
        if isinstance(event, RosterUnanswered):
            event = RosterRead(has_all=False)  # an error ended the agent
        instructions = super().handle(event, now)
        # A signal failed an agent that knew that all nodes had finished.
        return [item for item in instructions if not isinstance(item, IgnoreSignals)]

    def _take_names(self, names: bytes | None, now: float) -> list[BarrierInstruction]:
        del names  # there were none
        return super()._take_names(None, now)

    def _lose_store(self, why: str, now: float) -> list[BarrierInstruction]:
        if self.phase is BarrierPhase.CHECKING:
            return self._poll()  # a silent store was waited for
        instructions = super()._lose_store(why, now)
        self._roster_until = now  # the roster was read once
        return instructions

    def _take_firstfault_nodes(self, number: int | None, now: float) -> list[BarrierInstruction]:
        # It asked once, also without an answer.
        return super()._take_firstfault_nodes(self._nodes if number is None else number, now)

    def _announce(self) -> list[BarrierInstruction]:
        # Whatever the store had, this agent had finished.
        return [*super()._announce(), *self._confirm(self._now)]


class HastyBarrier(ExitBarrier):
    """A wrong alternative: an agent ends as soon as it knows that all nodes have finished."""

    def _confirm(self, now: float) -> list[BarrierInstruction]:
        del now
        return self._end(Succeed())


class TrustingBarrier(ExitBarrier):
    """A wrong alternative: without the store, all nodes count as finished."""

    def _lose_store(self, why: str, now: float) -> list[BarrierInstruction]:
        del why, now
        return self._end(Succeed())


NOTICES: dict[str, Callable[[int, NoticeLimits], RoundNotices]] = {
    "once": OnceNotices,
    "former": FormerNotices,
}
"""By the rules; else the product's."""
BARRIERS: dict[str, Callable[[int, int, BarrierLimits], ExitBarrier]] = {
    "present": ExitBarrier,
    "once": ExitBarrier,  # but a notice without an answer isn't sent again on a new connection
    "former": FormerBarrier,
    "hasty": HastyBarrier,
    "trusting": TrustingBarrier,
}


@dataclass(frozen=True)
class _Plan:
    """What a seed says about its job, apart from the faults."""

    nodes: int
    host: int
    is_folder_shared: bool
    can_restart: bool
    foreign: frozenset[int]
    ends: tuple[float, ...]
    """When the workers of each node succeed."""


class ExitJob:
    """A job of a seed; `play` plays it to its end."""

    def __init__(
        self,
        seed: int,
        rules: str = "present",
        nodes: int | None = None,
        faults: Sequence[Fault] | None = None,
        *,
        trace: bool = False,
    ) -> None:
        self.seed = seed
        self.rules = rules
        self.plan = _draw_plan(seed, nodes)
        self.events = Events(trace=trace)
        name = f"exit/{seed}"
        self._draw = random.Random(f"{name}/world")
        server = Server(self.events, random.Random(f"{name}/store"))
        plan = self.plan
        self.machines = Machines(self.events, server, plan.nodes, plan.host)
        self.roster = Roster(is_shared=plan.is_folder_shared)
        limits = build_barrier_limits()
        self.agents: list[ExitAgent | ForeignAgent] = [
            ForeignAgent(rank, self.machines, name)
            if rank in plan.foreign
            else ExitAgent(
                rank,
                self.machines,
                name,
                barrier=BARRIERS[rules](rank, plan.nodes, limits),
                notices=NOTICES.get(rules, RoundNotices)(rank, build_notice_limits()),
                roster=self.roster,
                can_restart=plan.can_restart,
            )
            for rank in range(plan.nodes)
        ]
        self.machines.processes.extend(self.agents)
        server.values[JOINED_KEY] = b"%d" % (plan.nodes - len(plan.foreign))
        self.faults = list(_draw_faults(name, plan) if faults is None else faults)
        self._too_early: list[str] = []
        self._last_fault_at = 0.0

    def play(self) -> ExitJob:
        """Play the schedule, and return the job."""
        for agent, end in zip(self.agents, self.plan.ends, strict=True):
            agent.start()
            self.events.at(end, lambda agent=agent: agent.do(agent.succeed))  # type: ignore[misc]
            if isinstance(agent, ExitAgent):
                agent.reads_outcome_newly = self.rules != "former"
                agent.watch_end = lambda agent=agent: self._check_success(agent)  # type: ignore[misc]
        for fault in self.faults:
            self.events.at(fault.seconds, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        self.events.play(_LONGEST_S)
        return self

    def _inject(self, fault: Fault) -> None:  # noqa: C901, PLR0912 - one case for each kind of fault
        agent = self.agents[fault.node]
        if not agent.is_live:
            return
        self.events.log(f"** {fault}")
        self._last_fault_at = self.events.now + fault.size
        match fault.kind:
            case "worker":
                if not agent.has_succeeded:
                    agent.do(agent.fail)
            case "signal":
                agent.do(agent.terminate)
            case "kill":
                self._kill(agent, time_limits.RECONNECT_TIMEOUT_SECONDS + 0.1)
            case "machine gone":
                self._kill(agent, _SILENCE_S)
            case "freeze":
                agent.freeze(fault.size)
            case "slow link":
                agent.slow_down(fault.size)
            case "reset":
                for connection in agent.connections if agent.rank != self.plan.host else ():
                    connection.reset()
            case "forgotten connections":  # a firewall drops what was idle, without a word
                for connection in agent.connections if agent.rank != self.plan.host else ():
                    connection.is_silent = True
            case "storage outage":
                self.roster.events_down_until = self.events.now + fault.size

    def _kill(self, agent: ExitAgent | ForeignAgent, noticed_after: float) -> None:
        agent.kill(with_machine=noticed_after == _SILENCE_S)
        if isinstance(agent, ForeignAgent):
            return
        for watcher in [self.agents[0]] if agent.rank else self.agents[1:]:
            watcher.after(
                noticed_after + self._draw.random() / 10,
                lambda watcher=watcher: watcher.notice_death(agent.rank),  # type: ignore[misc]
            )

    # --- what must hold -----------------------------------------------------------------------

    def _check_success(self, agent: ExitAgent) -> None:
        """Compare an end with success with the truth at that moment."""
        if not agent.is_certain:
            return  # it can't know: the store is gone, and no folder is shared
        running = [other.rank for other in self.agents if not other.has_succeeded]
        first = min(each.arrived_at for each in self.own_agents if each.has_succeeded)
        waited = self.events.now - first
        if self.plan.foreign and waited >= time_limits.EXIT_BARRIER_TIMEOUT_SECONDS:
            return  # as in torch
        if running:
            self._too_early.append(f"node {agent.rank} at {self.events.now:.1f}, before {running}")

    @property
    def own_agents(self) -> list[ExitAgent]:
        """Return the agents that run firstfault."""
        return [agent for agent in self.agents if isinstance(agent, ExitAgent)]

    def find_violations(self) -> Iterator[tuple[str, str]]:
        """Yield the invariants that the played job violates, each with what was seen."""
        if self._too_early:
            yield SUCCESS_TOO_EARLY, "; ".join(self._too_early)
        yield from self._check_failures()
        yield from self._check_ends()

    def _check_failures(self) -> Iterator[tuple[str, str]]:
        agents = self.own_agents
        is_host_killed = self.plan.host >= 0 and self.agents[self.plan.host].is_dead
        if is_host_killed or not all(agent.has_succeeded for agent in self.agents):
            return
        judged = [agent for agent in agents if not (agent.is_dead or agent.is_terminated)]
        if self.plan.foreign:  # agents without firstfault have no entry in the roster
            judged = [agent for agent in judged if not agent.has_lost_store]
        failed = [agent.rank for agent in judged if agent.state is ExitState.FAILED]
        is_anyone_gone = any(agent.is_dead or agent.is_terminated for agent in self.agents)
        if failed and not is_anyone_gone:
            yield FAILURE_OF_SUCCESS, f"nodes {failed}"
        if failed and any(
            agent.state is ExitState.SUCCEEDED and not agent.has_lost_store for agent in judged
        ):
            yield DIFFERENT_ENDS, f"nodes {failed} with a failure, others with success"

    def _check_ends(self) -> Iterator[tuple[str, str]]:
        live = [agent for agent in self.own_agents if agent.is_live]
        waiting = [agent for agent in live if agent.state is ExitState.WAITING]
        if waiting:
            phases = {agent.barrier.phase.value for agent in waiting}
            yield ENDS, f"nodes {[agent.rank for agent in waiting]}: {phases}"
        needs_deadline = {BarrierPhase.WAITING, BarrierPhase.AWAITING_ACKS}
        if any(
            agent.barrier.phase in needs_deadline and agent.barrier.deadline is None
            for agent in waiting
        ):
            yield SECOND_SOURCE, "no deadline"
        allowed = max(self._last_fault_at, *self.plan.ends) + 3 * _SILENCE_S
        if self.plan.foreign or self.machines.server.is_silent:
            allowed += time_limits.EXIT_BARRIER_TIMEOUT_SECONDS + 2 * _SILENCE_S
        late = [agent for agent in self.own_agents if (agent.ended_at or 0.0) > allowed]
        if late:
            yield ENDS, f"node {late[0].rank} after {late[0].ended_at:.0f} s"


def _draw_plan(seed: int, nodes: int | None) -> _Plan:
    draw = random.Random(f"exit/{seed}/job")
    size = draw.choice([2, 2, 3, 4, 4, 8, 16])
    count = size if nodes is None else nodes
    # most often the first agent hosts the store, and sometimes nobody in the job
    (where,) = draw.choices(["first", "another", "outside"], [7, 2, 1])
    hosts = {"first": 0, "another": draw.randrange(count), "outside": -1}
    is_shared, can_restart = draw.random() < 0.8, draw.random() < 0.3
    has_foreign = draw.random() < 0.1
    foreign = {rank for rank in range(1, count) if has_foreign and draw.random() < 0.4}
    spread = draw.choice([0.1, 1.0, 5.0, 5.0, 200.0])
    ends = tuple(3.0 + draw.random() * spread for _ in range(count))
    return _Plan(count, hosts[where], is_shared, can_restart, frozenset(foreign), ends)


def _draw_faults(name: str, plan: _Plan) -> Iterator[Fault]:
    """Yield up to three faults, most of them near the time at which the last node finishes."""
    draw = random.Random(f"{name}/faults")
    (count,) = draw.choices([0, 1, 2, 3], [1, 4, 4, 2])
    for _ in range(count):
        (kind,) = draw.choices(list(_FAULTS), list(_FAULTS.values()))
        end = draw.choice([max(plan.ends), draw.choice(plan.ends)])
        when = draw.choice([end + draw.uniform(-0.1, 0.5), end + draw.uniform(-3, 4)])
        size = draw.choice([draw.uniform(0.3, 3), draw.uniform(2, 20)])
        lasting = {"freeze", "slow link", "storage outage"}
        yield Fault(
            max(when, 0.01), kind, draw.randrange(plan.nodes), size if kind in lasting else 0.0
        )
