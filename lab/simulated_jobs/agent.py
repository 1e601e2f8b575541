"""A simulated agent: the product's election, and around it what a node does after a failure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from firstfault_torch import time_limits
from firstfault_torch.protocol.election import LEAVING_KEY, LOST_KEY, Agents, Election
from firstfault_torch.protocol.messages import (
    Adopt,
    Answered,
    Append,
    AskStore,
    Concluded,
    ConclusionFailed,
    Event,
    GiveUp,
    Instruction,
    KeySet,
    Lead,
    NoVerdictReason,
    Publish,
    Published,
    Read,
    SetOnce,
    ShutdownRequested,
    Started,
    TimePassed,
    Unanswered,
    WaitingConnectionBroke,
    WatchKeys,
)
from firstfault_torch.protocol.notices import GRACE_KEY, RoundNotices
from lab.simulated_jobs.notices import Broadcast, build_notice
from lab.simulated_jobs.process import Machines, Process
from lab.simulated_jobs.storage import Storage
from lab.simulated_jobs.workers import TERMINATED_STOP_SECONDS, Workers

_SHARE_OF_BLOCKED_MAIN_THREADS = 0.25
"""Of the agents that get a signal."""
_SHARE_OF_FAILED_CONCLUSIONS = 0.03
_SHARE_OF_SLOW_CONCLUSIONS = 0.15


class State(Enum):
    """Where a node stands."""

    RUNNING = "running"
    STOPPING = "stopping"
    ELECTING = "electing"
    BLOCKED = "blocked"
    ALONE = "alone"
    EXITING = "exiting"
    EXITED = "exited"


@dataclass(kw_only=True)
class World(Machines):
    """What all agents of a job share."""

    storage: Storage
    election: Callable[[int, int], Election]
    """Makes the election of a group rank among so many nodes."""
    notices: Callable[[int], RoundNotices]
    """Makes the notices of a group rank."""
    lingers: bool
    """Whether the store's host stays until the others have the verdict."""
    shares_grace: bool
    """Whether a node looks for a signal to another one before it kills its workers."""
    blocks_main: bool
    """Whether main threads may be blocked in C++ when a signal comes."""
    reports: set[int] = field(default_factory=set)
    """Group ranks of the nodes whose documents are in the storage."""
    agents: list[Agent] = field(default_factory=list)


class Agent(Process):
    """One node's agent."""

    def __init__(self, rank: int, world: World, seed: str) -> None:
        super().__init__(rank, world, seed)
        self.state = State.RUNNING
        self.frozen_seconds = 0.0
        self.notified_at: float | None = None
        """When it first sent a notice."""
        self.verdict = b""
        """What it reports."""
        self.notes: list[str] = []
        """Why it went which way."""
        self._world = world
        self._draw = random.Random(f"{seed}/agent/{rank}")
        self.workers = Workers(self, seed, shares_grace=world.shares_grace)
        draw = random.Random(f"{seed}/blocked/{rank}")
        self._is_blocked_by_signal = world.blocks_main and (
            draw.random() < _SHARE_OF_BLOCKED_MAIN_THREADS
        )
        """Whether its main thread is blocked in C++ from the signal on, so that another thread ends
        the process.
        """
        self._election = world.election(rank, world.nodes)
        self._own_conclusion = b""
        self._is_store_lost = False
        self._deadline_number = 0
        self.broadcast = Broadcast(self, world.notices(rank), self._take_outcome)

    def note(self, text: str) -> None:
        """Keep and trace why the agent does something."""
        self.notes.append(text)
        self.events.log(f"agent {self.rank} [{self.state.value}] {text}")

    # --- until the workers have stopped -------------------------------------------------------

    def start(self) -> None:
        """Wait for a failure of any node."""
        self.broadcast.start()

    def _take_outcome(self) -> None:
        outcome = self.broadcast.outcome
        if outcome is not None and outcome.failure is not None:
            self.workers.accept(outcome.failure)

    def fail(self) -> None:
        """A worker of this node fails."""
        if self.state in {State.RUNNING, State.STOPPING}:
            self.workers.fail()

    def terminate(self) -> None:
        """A signal tells this process to end."""
        if self.is_terminated:
            return
        self.is_terminated = True
        self.note("is told to end")
        self.broadcast.mark_leaving()
        if self._world.shares_grace:
            self.broadcast.announce_grace(TERMINATED_STOP_SECONDS)
        if self.state in {State.RUNNING, State.STOPPING}:
            self.notify("SIGTERM", TERMINATED_STOP_SECONDS)
            is_blocked = self._is_blocked_by_signal
            self.workers.terminate(time_limits.MAIN_THREAD_TIMEOUT_SECONDS if is_blocked else 0.0)
        elif self.state is State.ELECTING and self._is_blocked_by_signal:
            self.state = State.BLOCKED
            self.after(float(time_limits.MAIN_THREAD_TIMEOUT_SECONDS), self._leave_election)
        elif self.state is State.ELECTING:
            self._feed(ShutdownRequested())

    def notice_death(self, rank: int) -> None:
        """The connection to another agent has broken."""
        if self.state in {State.RUNNING, State.STOPPING, State.ELECTING, State.BLOCKED}:
            self.broadcast.mark_lost(rank)
            self._note_notice()
            self.broadcast.send(build_notice(rank, "died"))

    def notify(self, what: str, stop_seconds: float) -> None:
        """Broadcast a failure of this node."""
        self._note_notice()
        notice = build_notice(self.rank, what)
        self.broadcast.send(replace(notice, stop_seconds=stop_seconds))

    def _note_notice(self) -> None:
        if self.notified_at is None:
            self.notified_at = self.events.now

    def begin_stop(self, reason: str) -> None:
        """Its main thread begins to stop the workers."""
        self.state = State.STOPPING
        self.note(f"{reason}: stops its workers")

    def ask_for_grace(self, answer: Callable[[bytes | None], None]) -> None:
        """Ask the store whether a node has got a signal; `answer` may be called twice."""
        ask = self.broadcast.using.ask
        ask(Read(GRACE_KEY), lambda value: self.do(lambda: answer(value)))
        self.after(float(time_limits.STORE_TIMEOUT_SECONDS), lambda: answer(None))

    def report(self) -> None:
        """The workers have ended: hand in this node's report."""
        if self.state is not State.STOPPING:
            return
        self._world.reports.add(self.rank)
        if self.is_terminated and self._is_blocked_by_signal:
            self._leave_election()
            return
        self.state = State.ELECTING
        self.broadcast.await_outcome(self._begin_election)

    def _begin_election(self) -> None:
        notices = self.broadcast.machine
        if not notices.may_elect():
            self._is_store_lost = True
            self._conclude_alone("the outcome is unknown, or the store is lost")
            return
        if self.is_terminated:
            self._feed(ShutdownRequested())
        left = notices.get_grace_left(self.events.now)
        settle = float(time_limits.SETTLE_SECONDS) + left
        grace = max(TERMINATED_STOP_SECONDS - left, 0.0)
        self._feed(Started(b"%d " % self.rank, settle, grace))

    # --- the election -------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        if self.state is not State.ELECTING:
            return
        before = self._election.phase
        instructions = self._election.handle(event, self.events.now)
        after = self._election.phase
        self.events.log(
            f"agent {self.rank} {before.value} -> {after.value}: {type(event).__name__}"
        )
        for instruction in instructions:
            self._carry_out(instruction)
        self._deadline_number += 1
        number, deadline = self._deadline_number, self._election.deadline
        if deadline is not None:
            self.events.at(deadline, lambda: self.do(lambda: self._pass_time(number)))

    def _pass_time(self, number: int) -> None:
        if number == self._deadline_number:
            self._feed(TimePassed())

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case AskStore():
                self._ask(instruction)
            case WatchKeys(names):
                self._watch(names)
            case Lead():
                self._conclude(instruction)
            case Publish(is_allowed):
                if is_allowed:
                    self._publish(self._own_conclusion)
            case Adopt(verdict):
                self._exit(verdict)
            case GiveUp(reason):
                self._give_up(reason)

    def _ask(self, request: AskStore) -> None:  # noqa: C901 - nested callbacks instead of threads
        """Carry out a request within its time, once more on a new connection if one broke."""
        is_over = False

        def end(event: Answered | Unanswered) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._feed(event)

        def begin(*, may_repeat: bool) -> None:
            values: list[bytes] = []
            connection = self.broadcast.using

            def step(value: bytes | None) -> None:
                if is_over:
                    return
                if value is None:
                    if may_repeat and not self._world.server.is_dead:
                        self.broadcast.using = self.connect()
                        begin(may_repeat=False)
                    else:
                        end(Unanswered(request.request))
                    return
                values.append(value)
                ask_next()

            def ask_next() -> None:
                if len(values) == len(request.operations):
                    end(Answered(request.request, tuple(values)))
                    return
                operation = request.operations[len(values)]
                connection.ask(operation, lambda value: self.do(lambda: step(value)))

            ask_next()

        begin(may_repeat=True)
        seconds = time_limits.ELECTION_STEP_TIMEOUT_SECONDS
        seconds += time_limits.ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE * self._world.nodes
        if request.is_optional and self.is_terminated:
            seconds = min(seconds, float(time_limits.STORE_TIMEOUT_SECONDS))
        self.after(seconds, lambda: end(Unanswered(request.request)))

    def _watch(self, names: Sequence[str]) -> None:
        if not names:
            return
        name, *rest = names

        def take(value: bytes | None) -> None:
            if value is None:
                self._feed(WaitingConnectionBroke())
                return
            self._feed(KeySet(name, value))
            self._watch(rest)

        key = self._election.key(name)
        self.broadcast.waiting.wait(key, lambda value: self.do(lambda: take(value)))

    def _draw_conclusion(self) -> float:
        draw = self._draw
        if draw.random() < _SHARE_OF_SLOW_CONCLUSIONS:
            return draw.uniform(1.5, 15)
        return 0.2 + draw.expovariate(4)

    def _conclude(self, leading: Lead) -> None:
        fails = self._draw.random() < _SHARE_OF_FAILED_CONCLUSIONS
        document = build_verdict(self.rank, sorted(leading.arrived), sorted(leading.lost))

        def end() -> None:
            if fails:
                self._feed(ConclusionFailed())
                return
            self._own_conclusion = document
            self._feed(Concluded())

        self.after(self._draw_conclusion(), end)

    def _publish(self, document: bytes) -> None:
        self._write(document, lambda counts: self._feed(Published(counts)))

    def _write(self, document: bytes, answer: Callable[[bytes], None]) -> None:
        """Upload a verdict; answer with the one that counts."""
        seconds = (
            time_limits.TERMINATED_PUBLISH_TIMEOUT_SECONDS
            if self.is_terminated
            else time_limits.PUBLISH_TIMEOUT_SECONDS
        )

        def end(counts: bytes | None) -> None:
            if counts is None:
                # without an answer it may have landed, or another one's: what is there counts
                self._read(lambda found: answer(found or document))
            else:
                answer(counts)

        self._world.storage.write(
            self.rank, document, float(seconds), lambda value: self.do(lambda: end(value))
        )

    def _give_up(self, reason: NoVerdictReason) -> None:
        if reason is NoVerdictReason.LEFT_TO_OTHERS:
            self.note("leaves the decision to the others")
            self._exit(b"")
            return
        if self._own_conclusion:
            self.note(f"{reason.value}: publishes its own conclusion unless there is one")
            self.state = State.ALONE
            self._write(self._own_conclusion, self._hand_over)
        else:
            self._conclude_alone(reason.value)

    # --- while the main thread is blocked -----------------------------------------------------

    def _leave_election(self) -> None:
        """Do what the signal thread does, on a connection of its own: leave the verdict to agents
        that stay, or conclude alone.
        """
        self.state = State.BLOCKED
        self.note("ends in its signal thread")
        self.broadcast.using = self.connect()
        key = self._election.key
        keys = [key("verdict"), key("arrived"), key("heard"), LOST_KEY, LEAVING_KEY]
        operations = [Append(key("arrived"), b"%d! " % self.rank), *map(Read, keys)]

        def take(values: tuple[bytes, ...] | None) -> None:
            if values is None:
                self._conclude_alone("the store doesn't answer the signal thread")
                return
            _, verdict, *states = values
            if verdict:
                self._exit(verdict)
            elif Agents.parse(*states).staying - {self.rank}:
                self.note("leaves the decision to the others")
                self._exit(b"")
            else:
                self._conclude_alone("no agent stays")

        seconds = float(time_limits.EXIT_STEP_TIMEOUT_SECONDS)
        self.ask(self.broadcast.using, operations, seconds, take)

    # --- without an election ------------------------------------------------------------------

    def _conclude_alone(self, why: str) -> None:
        self.state = State.ALONE
        self.note(f"{why}: concludes alone")
        delay = 0.0 if self.is_terminated else get_turn(self.rank, self._draw)
        self._await_turn(self.events.now + delay)

    def _await_turn(self, until: float) -> None:
        def look(found: bytes | None) -> None:
            if found:
                self._exit(found)
            elif self.events.now >= until or self.is_terminated:
                self._await_reports(self.events.now + time_limits.SETTLE_SECONDS)
            else:
                pause = min(self._draw.uniform(0.5, 2), until - self.events.now)
                self.after(pause, lambda: self._await_turn(until))

        self._read(look)

    def _read(self, answer: Callable[[bytes | None], None]) -> None:
        seconds = 0.3 if self.is_terminated else time_limits.VERDICT_READ_TIMEOUT_SECONDS
        self._world.storage.read(float(seconds), lambda value: self.do(lambda: answer(value)))

    def _await_reports(self, until: float) -> None:
        world = self._world
        live = {agent.rank for agent in world.agents if agent.is_live}
        if not live <= world.reports and self.events.now < until and not self.is_terminated:
            self.after(0.5, lambda: self._await_reports(until))
            return
        document = build_verdict(self.rank, sorted(world.reports), [])
        self.after(self._draw_conclusion(), lambda: self._write(document, self._hand_over))

    def _hand_over(self, verdict: bytes) -> None:
        """Let the agents have a verdict that is published without an election; take theirs."""
        is_over = False

        def end(counts: bytes | None) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._exit(counts or verdict)

        if self._is_store_lost or not self._world.lingers:
            end(None)
            return
        operation = SetOnce(self._election.key("verdict"), verdict)
        self.broadcast.using.ask(operation, lambda value: self.do(lambda: end(value)))
        self.after(float(time_limits.STORE_TIMEOUT_SECONDS), lambda: end(None))

    # --- the end ------------------------------------------------------------------------------

    def _exit(self, verdict: bytes) -> None:
        self.state = State.EXITING
        self.verdict = verdict
        self.note(f"reports {verdict!r}")
        self._leave(self.events.now + time_limits.CONFIRMATIONS_TIMEOUT_SECONDS)

    def _leave(self, at_last: float) -> None:
        """End the process; the store's host stays while another live agent needs the store."""
        others = [agent for agent in self._world.agents if agent is not self]
        busy = {State.STOPPING, State.ELECTING, State.BLOCKED}
        is_needed = any(agent.is_live and agent.state in busy for agent in others)
        is_host = self.rank == self._world.host
        if is_host and self._world.lingers and is_needed and self.events.now < at_last:
            self.after(0.2, lambda: self._leave(at_last))
            return
        self.after(0.05 + self._draw.expovariate(5), self._end)

    def _end(self) -> None:
        self.state = State.EXITED
        self.end()


def build_verdict(rank: int, covers: Sequence[int], lost: Sequence[int]) -> bytes:
    """Return a verdict: who concluded it, from whose reports, and who counts as lost."""
    return json.dumps({"by": rank, "covers": list(covers), "lost": list(lost)}).encode()


def get_turn(rank: int, draw: random.Random) -> float:
    """Return after how many seconds a node may conclude alone; see `get_conclusion_delay`."""
    position = max(rank - 1, 0)
    if position == 0:
        return 0.0
    second, more = time_limits.SECOND_NODE_DELAY_SECONDS, time_limits.NEXT_NODE_DELAY_SECONDS
    separate = 4
    if position < separate:
        return float(second + more * (position - 1))
    group = (position // separate).bit_length()
    later = time_limits.LATER_NODES_DELAY_SECONDS * (group - 1 + draw.random())
    return float(second + more * (separate - 1) + later)
