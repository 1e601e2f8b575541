"""A simulated agent that watches for stalls: the product's decisions, and around them what the
driver does with workers and the store.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from firstfault_torch import time_limits
from firstfault_torch.protocol.messages import (
    Operation,
    Read,
    SetOnce,
    Swap,
)
from firstfault_torch.protocol.stall_limits import StallLimits
from firstfault_torch.protocol.stall_messages import (
    AskWorkers,
    CloseComparison,
    Compare,
    ComparisonClosed,
    Conclude,
    ConfirmStall,
    CountStall,
    DeleteStalls,
    KillWorkers,
    LookUpPeers,
    NoReportElected,
    NumberRead,
    ObservationsTaken,
    Observe,
    PeersLookedUp,
    PollDue,
    PollEnded,
    PrintLines,
    ProgressPolled,
    ReadNumber,
    ReplaceConnections,
    ReportElected,
    ReportsCollected,
    RoundEnded,
    ShareReport,
    SkipFrozenTime,
    StallConcluded,
    StallCounted,
    StallEvent,
    StallInstruction,
    StallReport,
)
from firstfault_torch.protocol.stall_progress import ProgressTracker
from firstfault_torch.protocol.stalls import (
    STALL_COUNT_KEY,
    StallPhase,
    StallProtocol,
    get_stall_topic,
)
from lab.simulated_jobs.events import Events
from lab.simulated_jobs.stall_election import StallElection
from lab.simulated_jobs.store import Connection, Link, Server

REPORT_BYTES = 2000
"""Of a node: about what one rank hands in."""
_KEYS = ("heard", "reports", "arrived", "order", "leader", "verdict", "confirmed")
_TOPIC_PREFIX = f"firstfault/{get_stall_topic(0)[:-1]}"


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key; the answer is empty."""

    key: str


@dataclass
class StallServer(Server):
    """A store that also deletes keys, and measures how much comparisons leave in it."""

    size: int = 0
    """Bytes of the values now."""
    largest: int = 0
    """The most bytes so far."""
    most_comparisons: int = 0
    """The most comparisons that had keys at one time."""
    _keys: dict[str, int] = field(default_factory=dict)
    """Number of keys by comparison."""

    def _apply(self, operation: Operation | Delete) -> bytes:
        key = operation.key
        before = self.values.get(key)
        if isinstance(operation, Delete):
            self.values.pop(key, None)
            answer = b""
        else:
            answer = super()._apply(operation)
        after = self.values.get(key)
        if before is not after:
            self.size += len(after or b"") - len(before or b"")
            self.largest = max(self.largest, self.size)
            self._count(key, (after is not None) - (before is not None))
        return answer

    def _count(self, key: str, more: int) -> None:
        if more and key.startswith(_TOPIC_PREFIX):
            topic = key.split("/")[1]
            self._keys[topic] = self._keys.get(topic, 0) + more
            if not self._keys[topic]:
                del self._keys[topic]
            self.most_comparisons = max(self.most_comparisons, len(self._keys))


@dataclass
class StallWorld:
    """What the agents of a job share, and what they did."""

    events: Events
    server: StallServer
    nodes: int
    limits: StallLimits
    make_protocol: Callable[..., StallProtocol]
    times: Sequence[float]
    """When something happens to a node, in order: no poll in between matters."""
    agents: list[StallingAgent] = field(default_factory=list)
    begun: dict[int, float] = field(default_factory=dict)
    """When the first node took part in a comparison, by number."""
    printed: dict[int, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    """What the nodes printed of a comparison, by number and group rank; () for nothing."""
    unfounded: dict[str, list[str]] = field(default_factory=dict)
    """By first line of a report: nodes that hang, and that don't respond according to it."""
    accused: list[str] = field(default_factory=list)
    """Those of the reports that were printed."""
    is_over: bool = False
    """Whether a worker was killed."""
    find_straggler: Callable[[float], tuple[int, str]] = lambda _: (0, "nowhere")
    """Returns the straggler and its line at a time."""

    def end_round(self) -> None:
        """A worker was killed: all nodes stop watching."""
        self.is_over = True
        for agent in self.agents:
            agent.do(agent.stop)


class StallingAgent:
    """One node: its workers' progress, and its agent's watch."""

    def __init__(
        self,
        rank: int,
        world: StallWorld,
        seed: str,
        hangs: Sequence[tuple[float, float]],
        *,
        is_host: bool,
    ) -> None:
        self.rank = rank
        self.nodes = world.nodes
        self._world = world
        self.events = world.events
        self.is_host = is_host
        self.link = Link(is_local=is_host)
        self.frozen_until = 0.0
        self.froze_at: list[tuple[float, float]] = []
        """Begin and end of each time in which this agent didn't run."""
        self.longest_poll = 0.0
        self.tracker = ProgressTracker(0.0, looks=3)
        self.protocol = world.make_protocol(rank, world.nodes, world.limits, 0.0, has_peers=True)
        self.draw = random.Random(f"{seed}/agent/{rank}")
        self._hangs = hangs
        """When its workers make no progress: begin and end, in order."""
        self._begins = [begin for begin, _ in hangs]
        self._using: Connection | None = None
        self._waiting: Connection | None = None
        self._todo: deque[StallInstruction] = deque()
        self._answers: deque[StallEvent] = deque()
        self._began_poll: float | None = None
        self._election: StallElection | None = None
        self._number = 0
        """Of the last comparison; below 0 for a report without one."""

    @property
    def is_watching(self) -> bool:
        """Whether it polls a job that makes progress, or has ended."""
        pause = self.events.now - self.protocol.times.polled_until
        is_polling = pause <= self._world.limits.frozen
        phase = self.protocol.phase
        return phase is StallPhase.ENDED or (phase is StallPhase.ADVANCING and is_polling)

    @property
    def connections(self) -> list[Connection]:
        """Those that are in use."""
        electing = self._election.connection if self._election is not None else None
        return [each for each in (self._using, self._waiting, electing) if each is not None]

    def freeze(self, seconds: float) -> None:
        """Don't run for some time."""
        now = self.events.now
        self.frozen_until = max(self.frozen_until, now + seconds)
        self.froze_at.append((now, self.frozen_until))

    def was_frozen(self, since: float, until: float = math.inf) -> bool:
        """Whether this agent didn't run at some time."""
        return any(end > since and begin < until for begin, end in self.froze_at)

    def do(self, action: Callable[[], None]) -> None:
        """Do something in this process, later if it is frozen."""
        if self.frozen_until > self.events.now:
            self.events.at(self.frozen_until, lambda: self.do(action))
            return
        action()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in this process after a time."""
        self.events.after(seconds, lambda: self.do(action))

    # --- polls --------------------------------------------------------------------------------

    def start(self) -> None:
        """Poll from now on."""
        self.after(self.draw.uniform(0, self._world.limits.poll), self._poll)

    def stop(self) -> None:
        """The round has ended."""
        if self._election is not None:
            self._election.interrupt()

    def hangs(self, now: float) -> bool:
        """Whether the workers make no progress."""
        return self._find_hang(now) is not None

    def _find_hang(self, now: float) -> float | None:
        """Return since when the workers make no progress, or None if they do."""
        index = bisect_right(self._begins, now) - 1
        return self._begins[index] if index >= 0 and now < self._hangs[index][1] else None

    def _poll(self) -> None:
        self._began_poll = self.events.now
        self._answers.append(PollDue(has_workers=True))
        self._advance()

    def _handle(self, event: StallEvent) -> Sequence[StallInstruction]:
        if self._world.is_over:
            self.protocol.handle(RoundEnded(), self.events.now)
        before = self.protocol.phase
        found = self.protocol.handle(event, self.events.now)
        after = self.protocol.phase
        if after is not before:
            self.events.log(
                f"agent {self.rank} {before.value} -> {after.value}: {type(event).__name__}"
            )
        return found

    def _advance(self) -> None:
        """Carry out one instruction after the other, as the driver's thread does."""
        while self._todo or self._answers:
            if not self._todo:
                self._todo.extend(self._handle(self._answers.popleft()))
            elif self._begin(self._todo.popleft()):
                return
        self._end_poll()

    def _done(self, event: StallEvent | None = None) -> None:
        if event is not None:
            self._answers.append(event)
        self._advance()

    def _end_poll(self) -> None:
        now = self.events.now
        self.longest_poll = max(self.longest_poll, now - (self._began_poll or now))
        self._began_poll = None
        self._handle(PollEnded())
        if self.protocol.phase is StallPhase.ENDED:
            return
        wait = self._world.limits.poll + self.draw.random() / 50
        if self.protocol.phase is StallPhase.ADVANCING:
            wait += self._skip_polls(now + wait)
        self.after(wait, self._poll)

    def _skip_polls(self, until: float) -> float:
        """Return the seconds of polls that would see progress, and nothing else."""
        poll, times = self._world.limits.poll, self._world.times
        index = bisect_right(times, until - 3 * poll)
        if index == len(times) or self._find_hang(self.events.now) is not None:
            return 0.0
        skipped = max((times[index] - until) // poll - 1, 0) * poll
        if skipped:
            self.events.at(until + skipped - poll, lambda: self.do(self._note_poll))
        return skipped

    def _note_poll(self) -> None:
        self.protocol.handle(PollEnded(), self.events.now)

    # --- instructions -------------------------------------------------------------------------

    def _begin(self, instruction: StallInstruction) -> bool:
        """Carry out an instruction; return whether `_done` is called later."""
        match instruction:
            case AskWorkers() | ConfirmStall():
                self.after(self.draw.random() * 0.3, self._look)
            case Observe():
                seconds = self.draw.choice([0.05, 0.3, 2.0])
                self.after(seconds, lambda: self._done(ObservationsTaken(calls_collectives=True)))
            case ReadNumber():
                self._call(SetOnce(STALL_COUNT_KEY, b"0"), lambda value: NumberRead(_parse(value)))
            case LookUpPeers(number):
                key = f"firstfault/{get_stall_topic(number)}/arrived"
                self._call(Read(key), lambda value: PeersLookedUp(bool(value)))
            case Compare(number):
                self._compare(number)
            case Conclude():
                report = self._conclude(instruction, [self._observe()], "alone")
                self._number = -1 - self.rank
                self.after(0.1, lambda: self._done(StallConcluded(report)))
            case CloseComparison():
                self._close()
            case CountStall(number):
                values = b"%d" % number, b"%d" % (number + 1)
                swap = Swap(STALL_COUNT_KEY, *values)
                self._call(swap, lambda value: StallCounted(_parse(value)))
            case DeleteStalls(numbers):
                topics = map(get_stall_topic, numbers)
                self._delete([f"firstfault/{topic}/{key}" for topic in topics for key in _KEYS])
            case _:
                self._act(instruction)
                return False
        return True

    def _act(self, instruction: StallInstruction) -> None:
        match instruction:
            case SkipFrozenTime(seconds):
                self.tracker.skip_frozen_time(seconds)
            case ReplaceConnections():
                self._using = self._waiting = None
            case PrintLines(lines):
                self.events.log(f"agent {self.rank} prints: {lines[0]}")
                if not lines[0].startswith("progress"):
                    self._world.printed.setdefault(self._number, {})[self.rank] = lines
                    self._world.accused += self._world.unfounded.get(lines[0], [])
            case KillWorkers():
                self._world.end_round()
            case _:
                pass

    def _look(self) -> None:
        now = self.events.now
        hangs_since = self._find_hang(now)
        count = int(10 * (now if hangs_since is None else hangs_since))
        self.tracker.look(now, {0: {"begun": count, "ended": count, "at": count}})
        tracker = self.tracker
        self._done(ProgressPolled(tracker.has_moved, tracker.since, tracker.is_starting))

    def _observe(self) -> bytes:
        times = self.protocol.times
        seen = {"rank": self.rank, "seconds": times.seconds, "ends": times.ends_attempt}
        return json.dumps(seen).encode().ljust(REPORT_BYTES) + b"\n"

    def _conclude(self, how: Conclude, frames: Sequence[bytes], title: str) -> StallReport:
        seen = [json.loads(frame) for frame in frames]
        seconds = min((each["seconds"] for each in seen), default=how.seconds)
        straggler, place = self._world.find_straggler(self.events.now)
        begun = self._world.begun.get(self._number, self.events.now)
        missing = f", no response from {list(how.missing)}" if how.missing else ""
        line = f"{title}: no progress for {seconds:.0f} s, rank {straggler}{missing}"
        since = begun if title != "alone" else self.events.now
        self._world.unfounded[line] = list(self._find_unfounded(how.missing, since, title))
        ends = how.ends_attempt and all(each["ends"] for each in seen) and not how.missing
        return StallReport(
            (line,),
            (straggler,),
            position=place,
            workers_to_kill=((straggler, 0),) if ends else (),
        )

    def _find_unfounded(self, missing: Sequence[int], since: float, title: str) -> Iterator[str]:
        """Yield which of the nodes that don't respond hang, and live."""
        world = self._world
        for rank in missing:
            agent = world.agents[rank]
            hung = since - agent.tracker.since
            is_down = agent.was_frozen(since - world.limits.frozen)
            is_down |= max(agent.link.slow_until, self.link.slow_until) > since
            if title == "alone":  # without the store nobody can be asked
                silent_until = max(world.server.frozen_until, self.link.slow_until)
                is_down |= silent_until > since - world.limits.reports
            if agent.hangs(since) and hung >= world.limits.nearest and not is_down:
                yield f"node {rank}, which hung for {hung:.0f} s at {since:.0f} s: {title}"

    # --- the store ----------------------------------------------------------------------------

    def connect(self) -> Connection:
        """Return a new connection to the store."""
        return Connection(self.events, self._world.server, self.link, self.draw)

    def _call(
        self,
        operation: Operation,
        answer: Callable[[bytes | None], StallEvent],
    ) -> None:
        """Carry out an operation within the time for one; without an answer the connections are
        replaced.
        """
        if self._using is None:
            self._using, self._waiting = self.connect(), self.connect()
        is_over = False

        def take(value: bytes | None) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            if value is None:
                self._using = self._waiting = None
            self._done(answer(value))

        self._using.ask(operation, lambda value: self.do(lambda: take(value)))
        self.after(float(time_limits.STORE_TIMEOUT_SECONDS), lambda: take(None))

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete keys one after the other; the thread that does so goes on after its time."""
        if self._using is None:
            self._using, self._waiting = self.connect(), self.connect()
        connection, left = self._using, deque(keys)
        is_over = False

        def end() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                if left:
                    self._using = self._waiting = None
                self._done()

        def delete_next(value: bytes | None) -> None:
            if value is None or not left:
                end()
            else:
                key = Delete(left.popleft())
                connection.ask(key, lambda value: self.do(lambda: delete_next(value)))  # type: ignore[arg-type]

        delete_next(b"")
        self.after(float(time_limits.STORE_TIMEOUT_SECONDS), end)

    def _close(self) -> None:
        """Let no agent wait for a report any more."""
        election, self._election = self._election, None
        if election is None:
            self._done(ComparisonClosed(None))
        else:
            election.close(lambda report: self._done(ComparisonClosed(report)))

    # --- the election -------------------------------------------------------------------------

    def _compare(self, number: int) -> None:
        if self._using is None or self._waiting is None:
            self._done(NoReportElected())
            return
        self._number = number
        self._world.begun.setdefault(number, self.events.now)
        self._election = StallElection(self, number, (self._using, self._waiting), self._take_end)
        self._election.start(self._observe(), self._world.limits.reports)

    def _take_end(self, report: StallReport | None, *, is_mine: bool) -> None:
        if report is not None:
            self._world.printed.setdefault(self._number, {})[self.rank] = ()
            self._election = None
        event = NoReportElected() if report is None else ReportElected(report, is_mine)
        self.after(0.0, lambda: self._done(event))

    def lead(self, frames: Sequence[bytes]) -> StallReport:
        """Return the report for all nodes, as the leader of a comparison."""
        ranks = frozenset(json.loads(frame)["rank"] for frame in frames)
        found = self._handle(ReportsCollected(ranks))
        for instruction in found:
            if isinstance(instruction, Conclude):
                report = self._conclude(instruction, frames, f"stall {self._number}")
                found = self._handle(StallConcluded(report))
        shared = [each.report for each in found if isinstance(each, ShareReport)]
        return shared[0] if shared else StallReport(())


def _parse(value: bytes | None) -> int | None:
    return int(value or b"0") if value is not None else None
