"""The agent's thread that watches for stalls, and with its peers names the straggler.

While a worker of the node makes progress, nothing is sent to other nodes. After a long enough
stall, the nodes share their observations through the round's store, with an election as for a
verdict: the leader compares, all nodes print.
"""

from __future__ import annotations

import json
import linecache
import math
import os
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from firstfault.exceptions.stack_dumps import add_source_lines
from firstfault.layout import ROSTER, restart_record_name
from firstfault.model import ExpiredDeadline, RestartKind, RestartRecord, StackDump, Writer
from firstfault.model.job import STALLS_OF_ROUND
from firstfault.utils.text import one_line
from firstfault.wire.json_schemas import restart_to_json
from firstfault_torch.conclusion.notifications import notify
from firstfault_torch.failures.failure_records import ErrorClass, failure_record
from firstfault_torch.guard import BackgroundCall, call_with_timeout, logger, start_daemon, try_call
from firstfault_torch.hang.live import LiveProgress
from firstfault_torch.hang.procfs import Usage, describe_wait, measure_usage, read_kernel_state
from firstfault_torch.hang.progress import FIRST_STEPS_FACTOR, ProgressTracker
from firstfault_torch.hang.ras import add_ras_line
from firstfault_torch.hang.stall_report import (
    StallReport,
    WorkerObservation,
    build_stall_report,
    to_files,
)
from firstfault_torch.node.channel import PULSE, SNAPSHOT, from_message
from firstfault_torch.rounds.election import CollectedReports, VerdictElection
from firstfault_torch.rounds.report_packing import ElectedVerdict
from firstfault_torch.time_limits import (
    PROGRESS_POLL_SECONDS,
    SNAPSHOT_TIMEOUT_SECONDS,
    SOURCE_LINES_TIMEOUT_SECONDS,
    STALL_REPORTS_TIMEOUT_SECONDS,
    STORE_TIMEOUT_SECONDS,
    THREAD_START_TIMEOUT_SECONDS,
    WORKER_QUERY_TIMEOUT_SECONDS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault.model import Collective, CollectiveProgress, Progress, WorkerError
    from firstfault_torch.agent.local_workers import LocalWorkers
    from firstfault_torch.agent.place_factory import PlaceFactory
    from firstfault_torch.agent.reporter import Reporter
    from firstfault_torch.options import Hang
    from firstfault_torch.rounds.peers import Peers

T = TypeVar("T")

POLLS_PER_WARNING = 6
"""Polls in the shortest time until a warning or an end."""
FROZEN_AGENT_FACTOR = 3
"""If two polls are this many intervals apart, the agent was frozen in between."""
REPEATED_STALLS_PRINTED = 3
"""Stalls at one position that are printed although the job resumed;
later ones only if they are long.
"""
LONG_STALL_FACTOR = 4
"""A stall is long after this many times the warning's time."""
MAX_INCOMPLETE_COLLECTIVES = 3
"""Incomplete collectives per group in a node's observations."""
SETTLED_STALLS_KEPT = 2
"""Stalls of which the round's store keeps what the nodes shared."""
SETTLED_STALLS_DELETED = 3
"""Number of older stalls for which the observations are deleted each time."""
NEXT_LIMIT_FACTOR = 1.5
"""How much longer than at the last check a stall has to be, at least, for the next check."""
MAX_REMEMBERED_STALLS = 1000
"""Stalls of different ranks or positions that are remembered; then the first is forgotten,
on all nodes alike.
"""
MAX_UNPRINTED_STALLS = 100
"""Unprinted stalls recorded per round: each record adds a name to the roster's listing."""
BUSY_CPU_SHARE = 0.1
BUSY_IO_BYTES = 1 << 20
"""Between two polls; a waiting process stays below."""
STALL_COUNT_KEY = "firstfault/stalls"
NOTIFY_STALLS_VARIABLE = "FIRSTFAULT_NOTIFY_STALLS"
"""Environment variable. With the value 0, notifiers get verdicts only."""
PROCESS_GROUPS_FILE = "torch/distributed/distributed_c10d.py"


def _get_topic(number: int) -> str:
    return f"stall-{number}"


def _get_next_limit(first: float, seconds: float) -> float:
    """Return when to check next after `seconds`: at the first limit times 2, 4, 8 and so on.

    The nominal time is doubled. The measured time is longer by part of a poll, a different part on
    each node, and doubling would make the nodes drift apart.
    """
    limit = 2 * first
    while limit < NEXT_LIMIT_FACTOR * seconds:
        limit *= 2
    return limit


class _Stall(NamedTuple):
    report: StallReport
    number: int
    began: float
    """Seconds of the monotonic clock."""
    is_mine: bool
    """Whether this agent was the leader, and stores the record."""
    is_shown: bool = True


class StallWatch:
    """Watches the workers of one node for stalls; create it after forking the workers,
    because it starts a thread.

        progress    a worker of this node advances: nothing is sent to other nodes, a printed stall
                    is completed
        stall       no worker advances for long enough: snapshots of all workers, kernel states,
                    stacks
        election    the nodes share their observations; the leader concludes, all nodes print the
                    same report
        kill        with `end_seconds`: the straggler's agent kills it as at a missed deadline, and
                    the attempt ends

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
        self._reporter = reporter
        self._places = places
        self._peers = peers
        given = [
            seconds for seconds in (hang.warn_seconds, hang.end_seconds) if seconds is not None
        ]
        self._every_s = min(
            [PROGRESS_POLL_SECONDS, *(seconds / POLLS_PER_WARNING for seconds in given)]
        )
        self._wait_s = (
            STALL_REPORTS_TIMEOUT_SECONDS * self._every_s / PROGRESS_POLL_SECONDS
            + STORE_TIMEOUT_SECONDS
        )
        self._stopped = threading.Event()
        self._polled = time.monotonic()
        """When the last poll ended."""
        self._tracker = ProgressTracker(self._polled)
        self._live = LiveProgress(reporter, places, peers, self._tracker)
        self._next_s = hang.warn_seconds or 0.0
        """Seconds without progress until the next warning: the option's, and then twice,
        four times... as many.
        """
        self._resumed_stalls: Counter[tuple[tuple[int, ...], str]] = Counter()
        """Number of stalls after which the job resumed, by ranks and position:
        the same on all nodes.
        """
        self._forgotten_stalls = 0
        """Number of those that aren't among them any more."""
        self._end_s = 0.0
        """Like `_next_s` for ending the attempt: the reason that spared it may be gone by then."""
        self._stall: _Stall | None = None
        """The current stall, or None while the workers make progress."""
        self._used: dict[int, Usage] = {}
        self._connections: tuple[Any, Any] | None = None
        """The store, and a second connection on which an election waits. None before connecting and
        after the connection broke.
        """
        self._connect = BackgroundCall[tuple[Any, Any] | None](
            self._open_connections, None, STORE_TIMEOUT_SECONDS
        )
        """At most one attempt at a time: a frozen host would keep a thread for each."""
        self._compared = -1
        """Number of the last election in which this agent took part."""
        self._settlement: VerdictElection | None = None
        self._thread: threading.Thread | None = None
        if given:
            self._thread = start_daemon(
                self._watch, "firstfault-hang", THREAD_START_TIMEOUT_SECONDS
            )

    def end(self) -> None:
        """Stop watching and join the thread: the next round may fork."""
        self._stopped.set()
        # Copies: the watching thread may unset both at the same time.
        settlement, connections = self._settlement, self._connections
        if settlement is not None:
            # The thread may be waiting for peers' observations: `interrupt` wakes it, `cancel` lets
            # the peers continue without this node.
            settlement.interrupt()
            if connections is not None:
                cancel = partial(settlement.cancel, connections[0])
                call_with_timeout(cancel, STORE_TIMEOUT_SECONDS, "ending the comparison of a stall")
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
        while not self._stopped.wait(self._every_s):
            _, error = try_call(self._poll, Exception)
            # once until the next success: an error may last for days
            if error is not None and not is_reported:
                logger.warning(
                    "failed to watch the workers' progress (%s: %s)", type(error).__name__, error
                )
            is_reported = error is not None

    def _poll(self) -> None:
        """Ask the workers for their progress."""
        now = time.monotonic()
        # CLOCK_MONOTONIC advances while a cgroup is frozen or the agent is stopped. The workers may
        # not have run either: that time isn't a stall.
        if now - self._polled > FROZEN_AGENT_FACTOR * self._every_s + WORKER_QUERY_TIMEOUT_SECONDS:
            self._tracker.skip_frozen_time(now - self._polled)
        self._polled = now
        if not (alive := self._workers.alive):
            return
        try:
            self._tracker.look(now, self._workers.ask(PULSE, alive, WORKER_QUERY_TIMEOUT_SECONDS))
            _, error = try_call(partial(self._live.publish, now), Exception)
            if self._tracker.has_moved:
                self._handle_progress(now)
            # Checked again: the workers had up to WORKER_QUERY_TIMEOUT_SECONDS to answer, and the
            # round may have ended.
            elif not self._stopped.is_set():
                self._handle_stall(alive, now)
            if error is not None:
                raise error  # only now: a stall is worth more than the live view
        finally:
            # Not `now`: an investigation takes seconds, in which the agent wasn't frozen.
            self._polled = time.monotonic()

    # --- stalls -----------------------------------------------------------------------------------

    def _handle_stall(self, alive: dict[int, int], now: float) -> None:
        seconds = self._tracker.seconds(now)
        warn_at, end_at, busy_at = (
            self._hang.warn_seconds,
            self._hang.end_seconds,
            self._hang.busy_seconds,
        )
        # The first steps may compile for minutes. A warning can be taken back, so only the end has
        # to wait for longer.
        steady_seconds = seconds / FIRST_STEPS_FACTOR if self._tracker.is_starting else seconds
        ends_attempt = end_at is not None and steady_seconds >= end_at
        warns = warn_at is not None and seconds >= self._next_s
        is_end_due = ends_attempt and steady_seconds >= self._end_s
        nearest = min(filter(None, (warn_at, end_at)))
        # The nodes' times of the last progress differ, by up to minutes if their last collectives
        # did. So each would look at moments of its own, find no peer, and report that none
        # responds. All nodes look at the same moments instead: when the first of them does. A node
        # that may end the attempt in a moment joins then: the peers wait for it, and compare once.
        is_end_near = end_at is not None and end_at - 2 * self._every_s <= steady_seconds < end_at
        may_join = seconds >= nearest and not is_end_near
        if warns or is_end_due or (may_join and self._is_compared_by_peers()):
            if end_at is not None and ends_attempt:
                # A busy straggler is spared only until `busy_seconds`, so look again by then at the
                # latest.
                again = _get_next_limit(end_at, steady_seconds)
                self._end_s = (
                    again if busy_at is None or steady_seconds >= busy_at else min(again, busy_at)
                )
            # Before the look, which may fail: it isn't repeated at each poll.
            next_s = self._next_s
            self._next_s = _get_next_limit(warn_at or math.inf, seconds)
            self._investigate(alive, now, ends_attempt=ends_attempt)
            if warn_at is not None and self._tracker.is_starting and self._stall is None:
                # After ranks that were busy loading or compiling: they may hang by the next time.
                self._next_s = seconds + warn_at if warns else next_s
        # The baseline for the next poll's investigation, which compares the use of CPU and disk
        # with it. It isn't needed earlier in a stall.
        if seconds >= nearest / 2:
            self._used = {rank: measure_usage(pid) for rank, pid in alive.items()}

    def _handle_progress(self, now: float) -> None:
        """Log that the workers make progress again, and complete the record."""
        stall, self._stall = self._stall, None
        self._next_s = self._hang.warn_seconds or 0.0
        self._end_s = 0.0
        if stall is not None:
            # Ranks and position come from the shared report, so all nodes count alike and print the
            # same stalls.
            self._resumed_stalls[stall.report.ranks, stall.report.place] += 1
            if len(self._resumed_stalls) > MAX_REMEMBERED_STALLS:
                self._forgotten_stalls += self._resumed_stalls.pop(next(iter(self._resumed_stalls)))
            record = self._store_record(stall, now - stall.began)
            if stall.is_shown:
                logger.warning("progress resumed after %.0f s", now - stall.began)
                self._notify(record)

    def _investigate(self, alive: dict[int, int], now: float, *, ends_attempt: bool) -> None:
        """Observe the workers, compare with other nodes, print the report,
        and end the attempt if it has to.
        """
        began = self._tracker.since
        group_rank = self._places.of().group_rank or 0
        seen = self._observe_workers(alive, now, ends_attempt=ends_attempt)
        stacks = [dump.text for failure, _ in seen for dump in failure.stack_dumps]
        if not any(self._tracker.enqueued.values()) and not any(
            PROCESS_GROUPS_FILE in text for text in stacks
        ):
            # A program without collectives never makes progress here. Only one that is forming its
            # process group, or waits for NCCL's set-up, counts as stalled before its first
            # collective.
            return
        files = to_files(seen)
        busy_at, is_starting = self._hang.busy_seconds, self._tracker.is_starting
        steady_seconds = (now - began) / (FIRST_STEPS_FACTOR if is_starting else 1)
        conclude = partial(
            build_stall_report,
            seconds=now - began,
            ends_attempt=ends_attempt,
            spare_busy_ranks=busy_at is None or steady_seconds < busy_at,
            is_starting=is_starting,
            ignores_busy_ranks=is_starting
            and not ends_attempt
            and steady_seconds < (self._hang.warn_seconds or 0.0),
            own=group_rank,
            end_seconds=self._hang.end_seconds,
        )
        groups = (progress for failure, _ in seen for progress in failure.collectives)
        if any(
            entry.operation.startswith("nccl") for progress in groups for entry in progress.last
        ):
            conclude = partial(add_ras_line, conclude, alive.values())
        number = self._get_stall_number()
        if number is None:
            others = sorted(set(range(self._places.nodes)) - {group_rank})
            # With nodes missing no worker is killed: the straggler may be theirs.
            report = conclude(files, missing=others)
            stall: _Stall | None = _Stall(
                report,
                self._resumed_stalls.total() + self._forgotten_stalls,
                began,
                is_mine=True,
            )
        else:
            stall = self._share_report(number, files, conclude)
        # Checked again: the round may have ended during the election.
        if stall is None or not stall.report.lines or self._stopped.is_set():
            return
        report, before = stall.report, self._stall
        is_long = now - began >= LONG_STALL_FACTOR * (self._hang.warn_seconds or 0.0)
        is_repeated = self._resumed_stalls[report.ranks, report.place] >= REPEATED_STALLS_PRINTED
        is_shown = is_long or bool(report.workers_to_kill) or not is_repeated
        if before is not None and before.report.ranks and not report.ranks:
            stall = before  # a node didn't report, because its ranks had just resumed
        # A stall keeps the number of its first warning, so it has one record.
        self._stall = stall = stall._replace(is_shown=is_shown, number=(before or stall).number)
        for line in report.lines if is_shown else ():
            logger.warning("%s", line)
        record = self._store_record(stall)
        # All agents get the same report; each kills only its own workers.
        if mine := [
            local
            for its_group_rank, local in report.workers_to_kill
            if its_group_rank == group_rank
        ]:
            # the election took seconds, and the job may have resumed since
            self._tracker.look(
                time.monotonic(), self._workers.ask(PULSE, alive, WORKER_QUERY_TIMEOUT_SECONDS)
            )
            if not self._tracker.has_moved:
                self._workers.kill_hung_workers(mine, round(now - began))
        if is_shown and not (before is not None and before.is_shown):
            self._notify(record)

    # --- the store --------------------------------------------------------------------------------

    def _open_connections(self) -> tuple[Any, Any] | None:
        peers = self._peers
        opened, error = (
            try_call(lambda: (peers.connect(), peers.connect()), Exception)
            if peers is not None
            else (None, None)
        )
        if error is not None:
            logger.info("can't connect to compare a stall: %s", error)
        return opened

    def _call_store(self, call: Callable[[Any], T], doing: str) -> T | None:
        """Return the result of a store operation, or None for a single node or a lost store."""
        if self._connections is None and self._peers is not None:
            self._connections = self._connect()
        if (connections := self._connections) is None:
            return None
        results = call_with_timeout(lambda: [call(connections[0])], STORE_TIMEOUT_SECONDS, doing)
        if results is None:
            # Broken, or its host is frozen, and then a thread may hold the connection for long: the
            # next call opens another one.
            self._connections = None
            return None
        return results[0]

    def _get_stall_number(self) -> int | None:
        """Return the number of the next stall. Return None if there is only one node, or if the
        store's host is frozen.
        """
        # Adding 0 reads the counter. The number names the election: nodes that notice the stall at
        # different times meet under the same keys, until the election is over and the number is
        # counted up.
        return self._call_store(
            lambda store: int(store.add(STALL_COUNT_KEY, 0)), "asking for the number of a stall"
        )

    def _is_compared_by_peers(self) -> bool:
        """Whether other nodes have begun to compare a stall, and this one hasn't taken part yet."""
        number = self._get_stall_number()
        if number is None or number <= self._compared:
            return False
        begun = VerdictElection(0, self._places.nodes, _get_topic(number)).has_begun
        return bool(self._call_store(begun, "asking whether peers compare a stall"))

    def _delete_settled_stalls(self, store: Any, number: int) -> None:
        """Delete what the stalls before the last few have left in the store."""
        # A round may last for weeks, with a stall at each checkpoint. The last ones stay: a slow
        # peer may still read them. Each is deleted several times: a node that was frozen may have
        # written to it since.
        last = number - SETTLED_STALLS_KEPT
        for old in range(max(last - SETTLED_STALLS_DELETED, 0), max(last, 0)):
            VerdictElection.forget(store, _get_topic(old))

    def _share_report(
        self,
        number: int,
        files: dict[str, bytes],
        conclude: partial[StallReport],
    ) -> _Stall | None:
        """Share the observations, and return the leader's report, or None without a leader."""
        connections, places = self._connections, self._places
        if connections is None:
            return None
        store = connections[0]
        self._compared = number
        # A node with progress takes no part: the arrivals are closed without it, after `_wait_s` at
        # the latest.
        self._settlement = settlement = VerdictElection(
            places.of().group_rank or 0, places.nodes, _get_topic(number)
        )
        found: _Stall | None = None
        for step in settlement.settle(connections, files, self._wait_s, self._stopped):
            document = step.document if isinstance(step, ElectedVerdict) else b""
            own = b""
            # first: of thousands of ranks it may take seconds
            if isinstance(step, CollectedReports) and settlement.announce_publishing():
                own = json.dumps(asdict(self._conclude(conclude, step))).encode()
                # If this leader took too long, another one may have published: that document counts
                # on all nodes.
                document = settlement.publish(own, durable=True).document
            if document:
                found = _Stall(
                    _parse_report(document),
                    number,
                    self._tracker.since,
                    is_mine=document == own,
                )
                break
        # No verdict in time. If a leader has published just now, `cancel` returns its document.
        # Otherwise the election is closed, so that no node waits, and the next one needs a new
        # number.
        # it also ends the thread that waits
        settled = settlement.cancel(store) if found is None else None
        if settled is not None and settled.document:
            found = _Stall(
                _parse_report(settled.document),
                number,
                self._tracker.since,
                is_mine=False,
            )
        self._settlement = None
        # All nodes count, because the leader may die before it does, and the number goes up by one.
        values = STALL_COUNT_KEY, str(number), str(number + 1)
        self._call_store(lambda store: store.compare_set(*values), "counting a stall")
        if found is None:
            # One connection may be broken, or still be kept by a thread that waits: the next
            # election opens others.
            self._connections = None
        elif found.is_mine:
            self._call_store(
                partial(self._delete_settled_stalls, number=number), "deleting earlier stalls"
            )
        return found

    def _conclude(self, conclude: partial[StallReport], reports: CollectedReports) -> StallReport:
        """Return the report on all nodes' observations; no lines: most nodes make progress,
        or their ranks are busy.
        """
        # A node without observations makes progress, or its agent is down. With most nodes missing,
        # no common report is possible.
        there = {
            json.loads(data)["group_rank"]
            for name, data in reports.copies.items()
            if name.endswith(".json")
        }
        missing = sorted(set(range(self._places.nodes)) - there)
        return (
            conclude(reports.copies, missing=missing)
            if len(missing) <= len(there)
            else StallReport(())
        )

    # --- what this node sees ----------------------------------------------------------------------

    def _observe_workers(
        self,
        alive: dict[int, int],
        now: float,
        *,
        ends_attempt: bool,
    ) -> list[tuple[WorkerError, WorkerObservation]]:
        workers, places = self._workers, self._places
        answers = workers.ask(SNAPSHOT, alive, SNAPSHOT_TIMEOUT_SECONDS)
        # One that hasn't answered for long: a thread holds Python's lock, or the process doesn't
        # run. It gets no signal that would make it write its stacks: that ends a wait in the kernel
        # with EINTR, which a library that holds the lock may take for an error. Its stacks are read
        # when it is about to be ended.
        half, get_wait = (now - self._tracker.since) / 2, self._tracker.seconds_without_answer
        silent = {rank for rank in alive if rank not in answers and get_wait(rank, now) > half}
        found = []
        for rank, pid in alive.items():
            answer = answers.get(rank, {})
            place = places.of(rank)
            collectives, threads, _ = from_message(answer)
            # The source may be on a file system that doesn't answer: then the stack is reported
            # without its lines.
            add_lines = partial(add_source_lines, str(answer.get("stack", "")), linecache.getline)
            stack = call_with_timeout(
                add_lines, SOURCE_LINES_TIMEOUT_SECONDS, "reading source lines"
            )
            failure = failure_record(
                ErrorClass.WORKER_FAILURE,
                place,
                code="USER:Hang",
                category="hang",
                message="the job makes no progress",
                writer=Writer.AGENT,
                collectives=tuple(
                    replace(item, last=_keep_incomplete(item)) for item in collectives
                ),
                thread_failures=threads,
                stack_dumps=(StackDump(pid, place.rank, stack),) if stack else (),
                expired=ExpiredDeadline("", round(now - self._tracker.since)),
            )
            block = str(answer.get("block", ""))
            facts = self._observe_worker(rank, pid, block, now, answers=rank not in silent)
            found.append(
                (
                    failure,
                    replace(
                        facts, stalled_seconds=now - self._tracker.since, ends_attempt=ends_attempt
                    ),
                )
            )
        return found

    def _observe_worker(
        self,
        local_rank: int,
        pid: int,
        block: str,
        now: float,
        *,
        answers: bool,
    ) -> WorkerObservation:
        kernel = read_kernel_state(pid)
        uses = measure_usage(pid)
        seconds_at_position = (
            self._tracker.seconds_at_position(local_rank, now) if answers else None
        )
        # Without a baseline the worker doesn't count as busy.
        before = self._used.get(local_rank, uses)
        computes = uses.cpu_seconds - before.cpu_seconds > BUSY_CPU_SHARE * self._every_s
        reads = uses.io_bytes - before.io_bytes > BUSY_IO_BYTES
        moves = seconds_at_position is not None and seconds_at_position < 2 * self._every_s
        is_silent = not answers and not kernel
        wait = describe_wait(pid) if is_silent else ""
        report = {
            f"is in {block}": bool(block),
            "unresponsive: one call holds Python's lock": (
                is_silent and self._tracker.has_answered(local_rank)
            ),
            "unresponsive": is_silent and not self._tracker.has_answered(local_rank),
            f"its main thread {wait}": bool(wait),
            "its main thread is moving": moves,
            "it uses the CPU": computes,
            "it reads or writes": reads,
        }
        is_paused_on_purpose = bool(block) or any(
            "SIGSTOP" in one or "debugger" in one for one in kernel
        )
        findings = (*kernel, *(text for text, is_so in report.items() if is_so))
        group_rank = self._places.of().group_rank or 0
        is_busy = moves or computes or reads
        return WorkerObservation(
            group_rank,
            local_rank,
            seconds_at_position,
            findings,
            is_busy,
            is_paused_on_purpose,
        )

    # --- records ----------------------------------------------------------------------------------

    def _notify(self, record: RestartRecord | None) -> None:
        if record is not None and os.environ.get(NOTIFY_STALLS_VARIABLE) != "0":
            over, uri = record.lost_seconds, self._reporter.node_context.output_prefix
            line = (
                record.reason
                if over is None
                else f"progress resumed after {over:.0f} s: {record.headline}"
            )
            report = {"uri": uri, "first_line": line, **json.loads(restart_to_json(record))}
            notify(report)

    def _store_record(self, stall: _Stall, lost: float | None = None) -> RestartRecord | None:
        """Write the record of a stall, or add to it how long the stall took. Return the record, or
        None if the stall has none.
        """
        # Only the leader writes: an election leaves one record.
        if not stall.is_mine or stall.number >= (
            STALLS_OF_ROUND if stall.is_shown else MAX_UNPRINTED_STALLS
        ):
            return None
        node_context = self._reporter.node_context
        place = self._places.of(0)
        report = stall.report
        record = RestartRecord(
            RestartKind.STALL,
            node_context.round * STALLS_OF_ROUND + stall.number,
            one_line(report.straggler),
            restart=False,
            reason=report.lines[0],
            rank=report.ranks[0] if report.ranks else None,
            node=report.node,
            timestamp_ns=time.time_ns() - int((time.monotonic() - stall.began) * 1e9),
            lost_seconds=lost,
            world_size_before=place.world_size or None,
        )
        name = restart_record_name(record.kind.value, record.number, place.group_rank or 0)
        self._reporter.put(f"{ROSTER}/{name}", restart_to_json(record))
        return record


def _keep_incomplete(progress: CollectiveProgress) -> tuple[Collective, ...]:
    """Return only the first unfinished collectives of a group, because one agent may have to
    process those of 10,000 ranks.
    """
    last = [entry for entry in progress.last if entry.sequence > (progress.completed or 0)]
    return tuple(last[:MAX_INCOMPLETE_COLLECTIVES] or progress.last[-1:])


def _parse_report(document: bytes) -> StallReport:
    fields = json.loads(document)
    ends_attempt = tuple(
        (int(group_rank), int(local)) for group_rank, local in fields.pop("workers_to_kill")
    )
    return StallReport(
        tuple(fields["lines"]),
        tuple(fields["ranks"]),
        fields["node"],
        fields["position"],
        fields["exit_stage"],
        ends_attempt,
    )
