"""A simulated job that may restart: its agents vote after a failure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from firstfault_torch import time_limits
from firstfault_torch.protocol.notices import NoticeLimits, RoundNotices, build_notice_limits
from firstfault_torch.protocol.restart_vote import (
    NodeFailedForGood,
    RestartVote,
    VoteEvent,
    VoteInstruction,
    VotePhase,
)
from lab.simulated_jobs.events import Events
from lab.simulated_jobs.faults import FIRST_S, Fault
from lab.simulated_jobs.former_rules import FormerNotices
from lab.simulated_jobs.process import Machines
from lab.simulated_jobs.store import Server
from lab.simulated_jobs.vote_agent import Rendezvous, VoteAgent, VoterState

SAME_DECISION = "I11 no node restarts after another has refused"
OVERRULED = "I11 a fatal failure overrules a restart"
ENDS = "I2 each live agent ends or restarts"
REMEMBERED = "I13 a failure that an agent knows stays known"
LONGEST_VOTE_S = 120.0
_LONGEST_S = 900.0
_SILENCE_S = 62.0
_FAULTS = {
    "kill": 3,
    "freeze": 4,
    "slow link": 4,
    "worker": 2,
    "reset": 3,
    "forgotten connections": 1,
    "signal": 3,
    "machine gone": 1,
}


class StubbornVote(RestartVote):
    """A wrong alternative: what is decided stays decided, whatever becomes of a third node."""

    def handle(self, event: VoteEvent) -> list[VoteInstruction]:
        if isinstance(event, NodeFailedForGood) and self.phase is VotePhase.DECIDED:
            return []
        return super().handle(event)


NOTICES: dict[str, Callable[[int, NoticeLimits], RoundNotices]] = {"forgetful": FormerNotices}
"""By the rules; else the product's."""
VOTES: dict[str, Callable[[], RestartVote]] = {
    "present": RestartVote,
    "stubborn": StubbornVote,
    "quiet": RestartVote,  # a wrong alternative: a refusal isn't announced, nor the rendezvous closed
    "alone": RestartVote,  # and each agent decides by itself
    "forgetful": RestartVote,  # with the former notices
}


class VoteJob:
    """A job of a seed; `play` plays it until its agents have ended, or run again."""

    def __init__(
        self,
        seed: int,
        rules: str = "present",
        nodes: int | None = None,
        faults: Sequence[Fault] | None = None,
        *,
        trace: bool = False,
    ) -> None:
        draw = random.Random(f"vote/{seed}/job")
        size = draw.choice([2, 3, 3, 4, 4, 8, 16])
        self.seed = seed
        self.rules = rules
        self.nodes = size if nodes is None else nodes
        (where,) = draw.choices(["first", "another", "outside"], [7, 2, 1])
        host = {"first": 0, "another": draw.randrange(self.nodes), "outside": -1}[where]
        self.min_nodes = self.nodes - draw.choice([0, 0, 1])
        self.events = Events(trace=trace)
        name = f"vote/{seed}"
        server = Server(self.events, random.Random(f"{name}/store"))
        self.machines = Machines(self.events, server, self.nodes, host)
        self.rendezvous = Rendezvous(self.nodes, self.min_nodes)
        self.agents = [
            VoteAgent(
                rank,
                self.machines,
                name,
                vote=VOTES[rules](),
                notices=NOTICES.get(rules, RoundNotices)(rank, build_notice_limits()),
                rendezvous=self.rendezvous,
            )
            for rank in range(self.nodes)
        ]
        self.machines.processes.extend(self.agents)
        self.faults = list(_draw_faults(name, self.nodes) if faults is None else faults)
        self._draw = random.Random(f"{name}/world")
        self._has_victims = False
        self._last_fault_at = 0.0

    def play(self) -> VoteJob:
        """Play the schedule, and return the job."""
        for agent in self.agents:
            agent.announces_refusal = self.rules not in {"quiet", "alone"}
            agent.decides_alone = self.rules == "alone"
            agent.start()
        for fault in self.faults:
            self.events.at(fault.seconds, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        self.events.play(_LONGEST_S)
        return self

    def _inject(self, fault: Fault) -> None:  # noqa: C901 - one case for each kind of fault
        agent = self.agents[fault.node]
        if not agent.is_live or agent.state is VoterState.RESTARTED:
            return
        self.events.log(f"** {fault}")
        self._last_fault_at = self.events.now + fault.size
        match fault.kind:
            case "worker":
                agent.do(agent.fail)
                self._fail_victims(fault.node)
            case "signal":
                agent.do(agent.terminate)
                self._fail_victims(fault.node)
            case "kill":
                self._kill(agent, time_limits.RECONNECT_TIMEOUT_SECONDS + 0.1)
            case "machine gone":
                self._kill(agent, _SILENCE_S)
            case "freeze":
                agent.freeze(fault.size)
            case "slow link":
                agent.slow_down(fault.size)
            case "reset":
                for connection in agent.connections if agent.rank != self.machines.host else ():
                    connection.reset()
            case "forgotten connections":
                for connection in agent.connections if agent.rank != self.machines.host else ():
                    connection.is_silent = True

    def _kill(self, agent: VoteAgent, noticed_after: float) -> None:
        agent.kill(with_machine=noticed_after == _SILENCE_S)
        self.rendezvous.joined.pop(agent.rank, None)
        self._fail_victims(agent.rank)
        for watcher in [self.agents[0]] if agent.rank else self.agents[1:]:
            watcher.after(
                noticed_after + self._draw.random() / 10,
                lambda watcher=watcher: watcher.notice_death(agent.rank),  # type: ignore[misc]
            )

    def _fail_victims(self, node: int) -> None:
        """The workers of other nodes lose a peer, and fail within seconds."""
        if not self._has_victims:
            self._has_victims = True
            for agent in self.agents:
                if agent.rank != node:
                    agent.after(self._draw.uniform(0.3, 6), agent.fail)

    # --- what must hold -----------------------------------------------------------------------

    def find_violations(self) -> Iterator[tuple[str, str]]:
        """Yield the invariants that the played job violates, each with what was seen."""
        restarted = [one.rank for one in self.agents if one.state is VoterState.RESTARTED]
        refused = [one.rank for one in self.agents if one.refused]
        if restarted and refused:
            yield SAME_DECISION, f"nodes {restarted} after nodes {refused} had refused"
        deaf = [one.rank for one in self.agents if one.ignored_failure]
        if deaf:
            yield OVERRULED, f"nodes {deaf} restarted, and knew of it"
        forgetful = [one.rank for one in self.agents if one.has_forgotten_failure]
        if forgetful:
            yield REMEMBERED, f"nodes {forgetful}"
        yield from self._check_ends()

    def _check_ends(self) -> Iterator[tuple[str, str]]:
        done = {VoterState.RESTARTED, VoterState.FAILED}
        running = [one for one in self.agents if one.is_live and one.state not in done]
        # A job whose first failure never came runs on.
        has_failed = any(one.state is not VoterState.WORKING for one in self.agents)
        if running and has_failed:
            states = {one.state.value for one in running}
            yield ENDS, f"nodes {[one.rank for one in running]}: {states}"
        is_complete = not any(one.is_dead or one.is_terminated for one in self.agents)
        stuck = [one.rank for one in self.agents if one.ended_by_torch]
        if stuck and is_complete:  # torch waits as long for a node that is gone
            yield ENDS, f"nodes {stuck} waited in the rendezvous for nodes that live"


def _draw_faults(name: str, nodes: int) -> Iterator[Fault]:
    """Yield the first failure, and up to three faults more."""
    draw = random.Random(f"{name}/faults")
    (kind,) = draw.choices(["worker", "kill", "signal"], [6, 2, 1])
    yield Fault(FIRST_S, kind, draw.randrange(nodes), 0.0)
    (count,) = draw.choices([0, 1, 2, 3], [2, 4, 4, 2])
    for _ in range(count):
        (kind,) = draw.choices(list(_FAULTS), list(_FAULTS.values()))
        when = FIRST_S + draw.choice([draw.uniform(-0.5, 3), draw.uniform(0, 12)])
        size = draw.choice([draw.uniform(0.3, 3), draw.uniform(2, 20)])
        lasting = {"freeze", "slow link"}
        yield Fault(when, kind, draw.randrange(nodes), size if kind in lasting else 0.0)
