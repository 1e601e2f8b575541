"""The agent's thread that watches for stalls, and with its peers names the straggler: the driver of
`firstfault_torch.protocol.stalls.StallProtocol`, which decides what it does.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from firstfault_torch.guard import logger, start_daemon, try_call
from firstfault_torch.hang.compare import StallComparison
from firstfault_torch.hang.live import LiveProgress
from firstfault_torch.hang.observe import Observations, WorkerObserver
from firstfault_torch.hang.ras import add_ras_line
from firstfault_torch.hang.records import StallRecords
from firstfault_torch.hang.stall_report import OBSERVATION_SUFFIX, build_stall_report
from firstfault_torch.node.channel import PULSE
from firstfault_torch.protocol.stall_limits import build_stall_limits
from firstfault_torch.protocol.stall_messages import (
    AskWorkers,
    CloseComparison,
    Compare,
    Conclude,
    ConfirmStall,
    CountStall,
    DeleteStalls,
    KillWorkers,
    LookUpPeers,
    MeasureUsage,
    NotifyOfStall,
    ObservationsTaken,
    Observe,
    PollDue,
    PollEnded,
    PrintLines,
    ProgressPolled,
    ReadNumber,
    ReplaceConnections,
    ReportsCollected,
    RoundEnded,
    ShareReport,
    SkipFrozenTime,
    StallAction,
    StallConcluded,
    StallEvent,
    StallQuestion,
    StallReport,
    WriteRecord,
)
from firstfault_torch.protocol.stall_progress import ProgressTracker
from firstfault_torch.protocol.stalls import StallProtocol
from firstfault_torch.time_limits import (
    STORE_TIMEOUT_SECONDS,
    THREAD_START_TIMEOUT_SECONDS,
    WORKER_QUERY_TIMEOUT_SECONDS,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from firstfault.model import Progress
    from firstfault_torch.agent.local_workers import LocalWorkers
    from firstfault_torch.agent.place_factory import PlaceFactory
    from firstfault_torch.agent.reporter import Reporter
    from firstfault_torch.options import Hang
    from firstfault_torch.rounds.election import CollectedReports
    from firstfault_torch.rounds.peers import Peers


class StallWatch:
    """Watches the workers of one node for stalls; create it after forking the workers,
    because it starts a thread.

    Args:
        hang: the user's option.
        workers: the round's workers on this node; the watch asks them for their state, and may kill
            the straggler.
        reporter: stores the record of each stall, and the live view.
        places: this node's ranks, and the number of nodes.
        peers: the agents of all other nodes, or None for a single node.
    """

    def __init__(
        self,
        hang: Hang,
        workers: LocalWorkers,
        reporter: Reporter,
        places: PlaceFactory,
        peers: Peers | None,
    ) -> None:
        self._hang = hang
        self._workers = workers
        self._limits = build_stall_limits(hang.warn_seconds, hang.end_seconds, hang.busy_seconds)
        self._group_rank = places.of().group_rank or 0
        self._polled = now = time.monotonic()
        """When the present poll began."""
        self._alive: dict[int, int] = {}
        """Process ids of the workers at this poll, by local rank."""
        self._observations = Observations({}, calls_collectives=False, uses_nccl=False)
        self._live_error: BaseException | None = None
        self._stopped = threading.Event()
        self._protocol = StallProtocol(
            self._group_rank, places.nodes, self._limits, now, has_peers=peers is not None
        )
        self._tracker = ProgressTracker(now)
        self._live = LiveProgress(reporter, places, peers, self._tracker)
        self._observer = WorkerObserver(workers, places, self._tracker, self._limits.poll)
        self._comparison = StallComparison(self._group_rank, places.nodes, peers)
        self._records = StallRecords(reporter, places)
        self._thread: threading.Thread | None = None
        if hang.warn_seconds is not None or hang.end_seconds is not None:
            self._thread = start_daemon(
                self._watch, "firstfault-hang", THREAD_START_TIMEOUT_SECONDS
            )

    def end(self) -> None:
        """Stop watching and join the thread: the next round may fork."""
        self._stopped.set()
        self._comparison.end()
        # With a limit: the thread may be in a call to the store, and the host of the store may be
        # frozen.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STORE_TIMEOUT_SECONDS)

    def progress(self) -> Progress:
        """Return the workers' progress as of the last poll."""
        return self._tracker.progress(time.monotonic())

    def _watch(self) -> None:
        """Poll until the end of the round; an error, such as a lack of descriptors or memory,
        ends a poll at most.
        """
        is_reported = False
        while not self._stopped.wait(self._limits.poll):
            _, error = try_call(self._poll, Exception)
            # once until the next success: an error may last for days
            if error is not None and not is_reported:
                logger.warning(
                    "failed to watch the workers' progress (%s: %s)", type(error).__name__, error
                )
            is_reported = error is not None

    def _poll(self) -> None:
        """Ask the workers for their progress, and do what follows from it."""
        self._polled = time.monotonic()
        self._live_error = None
        try:
            self._alive = self._workers.alive
            self._handle(PollDue(bool(self._alive)), self._polled)
        finally:
            self._handle(PollEnded(), time.monotonic())
        if self._live_error is not None:
            raise self._live_error  # only now: a stall is worth more than the live view

    def _handle(self, event: StallEvent, now: float) -> None:
        """Pass an event to the protocol, and carry out what follows from it."""
        events = deque([event])
        while events:
            if self._stopped.is_set():
                self._protocol.handle(RoundEnded(), now)
            for instruction in self._protocol.handle(events.popleft(), now):
                if isinstance(instruction, StallQuestion):
                    events.append(self._ask(instruction))
                else:
                    self._act(instruction)

    def _ask(self, question: StallQuestion) -> StallEvent:
        match question:
            case AskWorkers():
                answer = self._ask_workers()
                publish = partial(self._live.publish, self._polled)
                _, self._live_error = try_call(publish, Exception)
                return answer
            case ConfirmStall():
                return self._ask_workers()
            case Observe(ends_attempt):
                return self._observe(ends_attempt=ends_attempt)
            case ReadNumber():
                return self._comparison.read_number()
            case LookUpPeers(number):
                return self._comparison.look_up_peers(number)
            case Compare(number):
                files, seconds = self._observations.files, self._limits.reports
                return self._comparison.compare(
                    number, files, self._conclude_as_leader, seconds, self._stopped
                )
            case Conclude():
                return StallConcluded(self._conclude(question, self._observations.files))
            case CloseComparison():
                return self._comparison.close()
            case CountStall(number):
                return self._comparison.count(number)

    def _act(self, action: StallAction) -> None:
        match action:
            case SkipFrozenTime(seconds):
                self._tracker.skip_frozen_time(seconds)
            case MeasureUsage():
                self._observer.measure(self._alive)
            case ReplaceConnections():
                self._comparison.replace_connections()
            case DeleteStalls(numbers):
                self._comparison.delete(numbers)
            case PrintLines(lines):
                for line in lines:
                    logger.warning("%s", line)
            case WriteRecord(stall, lost_seconds):
                self._records.write(stall, lost_seconds)
            case NotifyOfStall():
                self._records.notify()
            case KillWorkers(local_ranks, seconds):
                self._workers.kill_hung_workers(local_ranks, seconds)

    def _ask_workers(self) -> ProgressPolled:
        now, tracker = time.monotonic(), self._tracker
        tracker.look(now, self._workers.ask(PULSE, self._alive, WORKER_QUERY_TIMEOUT_SECONDS))
        return ProgressPolled(tracker.has_moved, tracker.since, tracker.is_starting)

    def _observe(self, *, ends_attempt: bool) -> ObservationsTaken:
        self._observations = self._observer.observe(
            self._alive, self._polled, ends_attempt=ends_attempt
        )
        return ObservationsTaken(self._observations.calls_collectives)

    def _conclude_as_leader(self, reports: CollectedReports) -> StallReport:
        """Return the conclusion for all nodes."""
        copies = reports.copies.items()
        there = (json.loads(data) for name, data in copies if name.endswith(OBSERVATION_SUFFIX))
        collected = ReportsCollected(frozenset(each["group_rank"] for each in there))
        found = self._protocol.handle(collected, time.monotonic())
        for instruction in found:
            if isinstance(instruction, Conclude):
                report = StallConcluded(self._conclude(instruction, reports.copies))
                found = self._protocol.handle(report, time.monotonic())
        shared = [each.report for each in found if isinstance(each, ShareReport)]
        return shared[0] if shared else StallReport(())

    def _conclude(self, how: Conclude, files: Mapping[str, bytes]) -> StallReport:
        build = partial(
            build_stall_report,
            missing=how.missing,
            ends_attempt=how.ends_attempt,
            continues_if_busy=how.continues_if_busy,
            is_starting=how.is_starting,
            is_silent_if_busy=how.is_silent_if_busy,
            own=self._group_rank,
            end_seconds=self._hang.end_seconds,
        )
        if self._observations.uses_nccl:
            return add_ras_line(build, self._alive.values(), files, how.seconds)
        return build(files, how.seconds)
