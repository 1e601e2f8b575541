"""One simulated job: plays the schedule of a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from firstfault_torch import time_limits
from firstfault_torch.protocol.election import Election
from firstfault_torch.protocol.limits import build_limits
from firstfault_torch.protocol.notices import RoundNotices, build_notice_limits
from lab.simulated_jobs.agent import Agent, State, World
from lab.simulated_jobs.events import Events
from lab.simulated_jobs.faults import Fault, draw_faults
from lab.simulated_jobs.former_rules import FormerElection, FormerNotices
from lab.simulated_jobs.storage import Storage
from lab.simulated_jobs.store import Server

LONGEST_S = 400.0
_MOST_NODES = 16
_SHARE_OF_FAST_VICTIMS = 0.2
_SILENCE_S = 62.0
"""After this the kernel notices that a machine has vanished."""


@dataclass(frozen=True)
class Rules:
    """Which rules the agents keep; by default the product's."""

    former_election: bool = False
    """See `former_rules`."""
    creates_once: bool = True
    """Whether the storage creates a file only once. If not, it is asked first whether there is one.
    """
    lingers: bool = True
    """The store's host waits for the others, and a verdict that was published without an election
    is handed to them.
    """
    shares_grace: bool = True
    """Whether a signal to one node gives the workers of all nodes the same time to end."""
    blocks_main: bool = True
    """Whether the main threads of some agents are blocked in C++ when a signal comes."""
    former_notices: bool = False
    """See `former_rules`."""


PRESENT = Rules()
PLAIN_STORAGE = Rules(creates_once=False)
FORMER = Rules(
    former_election=True,
    creates_once=False,
    lingers=False,
    shares_grace=False,
    former_notices=True,
    blocks_main=False,
)


class SimulatedJob:
    """A job of a seed; `play` plays it to its end."""

    def __init__(
        self,
        seed: int,
        rules: Rules,
        nodes: int | None = None,
        faults: Sequence[Fault] | None = None,
        *,
        trace: bool = False,
    ) -> None:
        draw = random.Random(f"{seed}/job")
        size = draw.choice([2, 2, 3, 4, 4, 8, _MOST_NODES])
        self.nodes = size if nodes is None else nodes
        self.seed = seed
        self.rules = rules
        self.events = Events(trace=trace)
        name = str(seed)
        self._draw = random.Random(f"{name}/world")
        # most often the first agent hosts the store, and sometimes nobody in the job
        (where,) = draw.choices(["first", "another", "outside"], [7, 2, 1])
        hosts = {"first": 0, "another": draw.randrange(self.nodes), "outside": -1}
        self.host = hosts[where]
        kind = FormerElection if rules.former_election else Election
        notices = FormerNotices if rules.former_notices else RoundNotices
        self.world = World(
            events=self.events,
            server=Server(self.events, random.Random(f"{name}/store")),
            storage=Storage(self.events, random.Random(f"{name}/storage"), rules.creates_once),
            nodes=self.nodes,
            host=self.host,
            election=lambda rank, count: kind(rank, count, build_limits(count)),
            notices=lambda rank: notices(rank, build_notice_limits()),
            lingers=rules.lingers,
            shares_grace=rules.shares_grace,
            blocks_main=rules.blocks_main,
        )
        self.agents = self.world.agents
        self.agents += [Agent(rank, self.world, name) for rank in range(self.nodes)]
        self.world.processes.extend(self.agents)
        self.faults = list(draw_faults(name, self.nodes) if faults is None else faults)
        self._has_victims = False

    def play(self) -> SimulatedJob:
        """Play the schedule, and return the job."""
        for agent in self.agents:
            agent.start()
        for fault in self.faults:
            self.events.at(fault.seconds, lambda fault=fault: self._inject(fault))  # type: ignore[misc]
        self.events.play(LONGEST_S)
        return self

    def _inject(self, fault: Fault) -> None:  # noqa: C901 - one case for each kind of fault
        agent = self.agents[fault.node]
        if not agent.is_live:
            return
        self.events.log(f"** {fault}")
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
                agent.frozen_seconds += fault.size
            case "slow link":
                agent.slow_down(fault.size)
            case "reset":
                for connection in agent.connections:
                    connection.reset()
            case "silent connection":
                agent.broadcast.waiting.is_silent = True
            case "storage outage":
                self.world.storage.down_until = self.events.now + fault.size

    def _kill(self, agent: Agent, noticed_after: float) -> None:
        agent.kill(with_machine=noticed_after == _SILENCE_S)
        self._fail_victims(agent.rank)
        watchers = [0] if agent.rank else range(1, self.nodes)
        for rank in watchers:
            watcher = self.agents[rank]
            watcher.after(
                noticed_after + self._draw.random() / 10,
                lambda watcher=watcher: watcher.notice_death(agent.rank),  # type: ignore[misc]
            )

    def _fail_victims(self, node: int) -> None:
        """The workers of other nodes lose a peer, and fail within seconds."""
        if self._has_victims:
            return
        self._has_victims = True
        for agent in self.agents:
            if agent.rank != node:
                # some see a closed socket before their agents get the notice
                is_fast = self._draw.random() < _SHARE_OF_FAST_VICTIMS
                took = self._draw.uniform(0.0, 0.01) if is_fast else self._draw.uniform(0.3, 6)
                agent.after(took, agent.fail)

    @property
    def has_failed(self) -> bool:
        """Whether any agent has noticed a failure."""
        return any(agent.state is not State.RUNNING for agent in self.agents)
