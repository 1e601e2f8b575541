"""An agent's thread that looks whether its workers make progress, and with its peers tells for whom they wait.

As long as one worker of the node makes progress it sends nothing to other nodes. When all have stood still for long
enough, the node hands what it sees to the round's store, as for a verdict: one agent compares it, and tells all.
"""

from __future__ import annotations

import json
import linecache
import os
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from firstfault.exceptions.stack_dumps import add_source_lines
from firstfault.layout import ROSTER, restart_record_name
from firstfault.model import ExpiredDeadline, RestartKind, RestartRecord, StackDump, Writer
from firstfault.model.job import STALLS_OF_ROUND
from firstfault.utils.text import one_line
from firstfault.wire.json_schemas import restart_to_json
from firstfault_torch.conclusion.notifications import notify
from firstfault_torch.failures.failure_records import ErrorClass, failure_record
from firstfault_torch.guard import call_with_timeout, logger, suppress_internal_errors
from firstfault_torch.hang.live import LiveView
from firstfault_torch.hang.procfs import Usage, read_kernel_state, usage
from firstfault_torch.hang.progress import ProgressTracker
from firstfault_torch.hang.ras import with_ras
from firstfault_torch.hang.stall_report import StallReport, WorkerObservation, build_stall_report, to_files
from firstfault_torch.node.channel import PULSE, SNAPSHOT, from_message
from firstfault_torch.rounds.election import CollectedReports, VerdictElection
from firstfault_torch.rounds.report_packing import ElectedVerdict
from firstfault_torch.time_limits import (
    PROGRESS_POLL_SECONDS,
    SNAPSHOT_TIMEOUT_SECONDS,
    SOURCE_LINES_TIMEOUT_SECONDS,
    STALL_REPORTS_TIMEOUT_SECONDS,
    STORE_TIMEOUT_SECONDS,
    WORKER_QUERY_TIMEOUT_SECONDS,
)

if TYPE_CHECKING:
    from firstfault.model import Collective, CollectiveProgress, Progress, WorkerError
    from firstfault_torch.agent.node_round import NodeRound
    from firstfault_torch.options import Hang

_LOOKS = 6
"""In the shortest time that is told."""
_FROZEN = 3
"""So many times longer between two looks: the agent didn't run."""
_USUAL = 3
"""So often a stall at one place after which the job went on is told; later ones only if they take longer."""
_LONGER = 4
"""Times the warning's time."""
_MOST_OPEN = 3
"""Collectives of one group in what a node hands in."""
_MOST_USUAL = 100
"""Stalls of one round after which those at a usual place aren't kept: each is a name in the roster's listing."""
_CPU_SHARE = 0.1
_IO_BYTES = 1 << 20
"""Between two looks; below that, a process that waits uses the CPU and reads as well."""
_COUNT = "firstfault/stalls"
_NOTIFIES = "FIRSTFAULT_NOTIFY_STALLS"
"""The environment variable that is 0 if notifiers are told of verdicts only."""
_GROUPS = "torch/distributed/distributed_c10d.py"


class _Stall(NamedTuple):
    told: StallReport
    number: int
    began: float
    """Seconds of the monotonic clock."""
    is_mine: bool
    """Whether this agent concluded, and keeps the record."""
    is_shown: bool = True


class StallWatch:
    """Watches the workers of one node in one round. Make it after the workers were started: it begins a thread.

    Args:
        hang: the user's option.
        node: of the round.
    """

    def __init__(self, hang: Hang, node: NodeRound) -> None:
        self._hang = hang
        self._node = node
        given = [seconds for seconds in (hang.warn_seconds, hang.end_seconds) if seconds is not None]
        self._every_s = min([PROGRESS_POLL_SECONDS, *(seconds / _LOOKS for seconds in given)])
        self._wait_s = STALL_REPORTS_TIMEOUT_SECONDS * self._every_s / PROGRESS_POLL_SECONDS + STORE_TIMEOUT_SECONDS
        self._stopped = threading.Event()
        self._still = ProgressTracker(time.monotonic())
        self._live = LiveView(node, self._still)
        self._next_s = hang.warn_seconds or 0.0
        """Seconds without progress at which the next warning comes: each doubles it."""
        self._went_on: Counter[tuple[tuple[int, ...], str]] = Counter()
        """Stalls after which the job went on, by their ranks and place: the same on all nodes."""
        self._end_s = 0.0
        """As `_next_s`, once the attempt is to be ended: what spared it may be over."""
        self._stall: _Stall | None = None
        """The one that was told; None: the workers make progress."""
        self._used: dict[int, Usage] = {}
        self._connections: tuple[Any, Any] | None = None
        self._settlement: VerdictElection | None = None
        self._thread: threading.Thread | None = None
        if given:
            self._thread = threading.Thread(target=self._watch, name="firstfault-hang", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop watching, and end the thread: the next round may fork."""
        self._stopped.set()
        settlement, connections = self._settlement, self._connections
        if settlement is not None:
            settlement.interrupt("the round ends")
            if connections is not None:
                call_with_timeout(
                    partial(settlement.cancel, connections[0]),
                    STORE_TIMEOUT_SECONDS,
                    "ending the comparison of a stall",
                )
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STORE_TIMEOUT_SECONDS)

    def progress(self) -> Progress:
        """Return how far the workers came, as of the last look."""
        return self._still.progress()

    def _watch(self) -> None:
        with suppress_internal_errors("watching whether the workers make progress"):
            last = time.monotonic()
            while not self._stopped.wait(self._every_s):
                now = time.monotonic()
                if now - last > _FROZEN * self._every_s + WORKER_QUERY_TIMEOUT_SECONDS:
                    self._still.skip(now - last)
                last = now
                if not (alive := self._node.workers.alive):
                    continue
                self._still.look(now, self._node.workers.ask(PULSE, alive, WORKER_QUERY_TIMEOUT_SECONDS))
                self._live.tell(now)
                if self._still.has_moved:
                    self._goes_on(now)
                elif not self._stopped.is_set():
                    self._stands(alive, now)
                last = time.monotonic()

    # --- standing still -----------------------------------------------------------------------------------------

    def _stands(self, alive: dict[int, int], now: float) -> None:
        seconds = self._still.seconds(now)
        warn_at, end_at, busy_at = self._hang.warn_seconds, self._hang.end_seconds, self._hang.busy_seconds
        ends = end_at is not None and seconds >= end_at
        warns = warn_at is not None and seconds >= self._next_s
        if warns or (ends and seconds >= self._end_s):
            self._compare(alive, now, ends=ends)
            self._next_s = 2 * seconds if warns else self._next_s
            if ends:
                self._end_s = 2 * seconds if busy_at is None or seconds >= busy_at else min(2 * seconds, busy_at)
        nearest = min(filter(None, (warn_at, end_at)))
        if seconds >= nearest / 2:
            self._used = {rank: usage(pid) for rank, pid in alive.items()}

    def _goes_on(self, now: float) -> None:
        """Tell that the workers make progress again, and complete the record."""
        stall, self._stall = self._stall, None
        self._next_s, self._end_s = self._hang.warn_seconds or 0.0, 0.0
        if stall is not None:
            self._went_on[stall.told.ranks, stall.told.place] += 1
            record = self._keep(stall, now - stall.began)
            if stall.is_shown:
                logger.warning("progress again after %.0f s", now - stall.began)
                self._notify(record)

    def _compare(self, alive: dict[int, int], now: float, *, ends: bool) -> None:
        """Compare what this node sees with other nodes, and tell of it."""
        began, group_rank = self._still.since, self._node.places.of().group_rank or 0
        seen = self._seen(alive, now)
        stacks = [dump.text for failure, _ in seen for dump in failure.stack_dumps]
        if not any(self._still.begun.values()) and not any(_GROUPS in text for text in stacks):
            return  # it may call no collectives; one that waits to form its group, or for NCCL's set-up, has none
        files = to_files(seen)
        busy_at = self._hang.busy_seconds
        spares = busy_at is None or self._still.seconds(now) < busy_at
        conclude = partial(build_stall_report, seconds=now - began, ends=ends, spares=spares, own=group_rank)
        groups = (progress for failure, _ in seen for progress in failure.collectives)
        if any(entry.operation.startswith("nccl") for progress in groups for entry in progress.last):
            conclude = partial(with_ras, conclude, alive.values())
        number = self._number()
        if number is None:
            others = sorted(set(range(self._node.places.nodes)) - {group_rank})
            told = conclude(files, missing=others)
            stall: _Stall | None = _Stall(told, self._went_on.total(), began, is_mine=True)
        else:
            stall = self._settled(number, files, conclude)
        if stall is None or not stall.told.lines or self._stopped.is_set():
            return
        told, before = stall.told, self._stall
        is_long = now - began >= _LONGER * (self._hang.warn_seconds or 0.0)
        is_shown = is_long or bool(told.ends) or self._went_on[told.ranks, told.place] < _USUAL
        if before is not None and before.told.ranks and not told.ranks:
            stall = before  # a node told nothing, since its ranks had just gone on
        self._stall = stall = stall._replace(is_shown=is_shown, number=(before or stall).number)
        for line in told.lines if is_shown else ():
            logger.warning("%s", line)
        record = self._keep(stall)
        if mine := [local for its_group_rank, local in told.ends if its_group_rank == group_rank]:
            # the job may have gone on meanwhile
            self._still.look(time.monotonic(), self._node.workers.ask(PULSE, alive, WORKER_QUERY_TIMEOUT_SECONDS))
            if not self._still.has_moved:
                self._node.workers.kill_hung_workers(mine, round(now - began))
        if is_shown and not (before is not None and before.is_shown):
            self._notify(record)

    def _number(self) -> int | None:
        """Return the number of the next stall; None: there is one node, or that of the round's store is frozen."""
        peers = self._node.peers
        if self._connections is None and peers is not None:
            connect = partial(map, lambda _: peers.connect(), range(2))
            self._connections = call_with_timeout(
                lambda: tuple(connect()), STORE_TIMEOUT_SECONDS, "connecting to compare a stall"
            )
        if (connections := self._connections) is None:
            return None
        return call_with_timeout(
            lambda: int(connections[0].add(_COUNT, 0)), STORE_TIMEOUT_SECONDS, "asking for the number of a stall"
        )

    def _settled(self, number: int, files: dict[str, bytes], conclude: partial[StallReport]) -> _Stall | None:
        """Return what one agent told to all; None: none did."""
        connections, places = self._connections, self._node.places
        if connections is None:
            return None
        store = connections[0]
        self._settlement = settlement = VerdictElection(places.of().group_rank or 0, places.nodes, f"stall-{number}")
        found: _Stall | None = None
        for step in settlement.settle(connections, files, self._wait_s, self._stopped):
            document = step.document if isinstance(step, ElectedVerdict) else b""
            own = b""
            if (
                isinstance(step, CollectedReports) and settlement.announce_publishing()
            ):  # first: of thousands of ranks it may take seconds
                own = json.dumps(asdict(self._concluded(conclude, step))).encode()
                document = settlement.publish(own, durable=True).document
                call_with_timeout(lambda: store.add(_COUNT, 1), STORE_TIMEOUT_SECONDS, "counting a stall")
            if document:
                found = _Stall(_from_bytes(document), number, self._still.since, is_mine=document == own)
                break
        if found is None and (settled := settlement.cancel(store)) is not None:  # it also ends the thread that waits
            if settled.document:
                found = _Stall(_from_bytes(settled.document), number, self._still.since, is_mine=False)
            else:
                call_with_timeout(lambda: store.add(_COUNT, 1), STORE_TIMEOUT_SECONDS, "counting a stall")
        self._settlement = None
        return found

    def _concluded(self, conclude: partial[StallReport], reports: CollectedReports) -> StallReport:
        """Return what is told of the nodes' reports; no lines: most nodes go on, or their ranks work."""
        there = {json.loads(data)["group_rank"] for name, data in reports.copies.items() if name.endswith(".json")}
        missing = sorted(set(range(self._node.places.nodes)) - there)
        return conclude(reports.copies, missing=missing) if len(missing) <= len(there) else StallReport(())

    # --- what this node sees ------------------------------------------------------------------------------------

    def _seen(self, alive: dict[int, int], now: float) -> list[tuple[WorkerError, WorkerObservation]]:
        workers, places = self._node.workers, self._node.places
        answers = workers.ask(SNAPSHOT, alive, SNAPSHOT_TIMEOUT_SECONDS)
        # one that hasn't answered for long: a thread holds Python's lock, or the process doesn't run
        half = (now - self._still.since) / 2
        missing = {rank: pid for rank, pid in alive.items() if rank not in answers}
        silent = {rank: pid for rank, pid in missing.items() if self._still.silent(rank, now) > half}
        stacks = {rank: str(answer.get("stack", "")) for rank, answer in answers.items()} | workers.stacks(silent)
        found = []
        for rank, pid in alive.items():
            answer, place = answers.get(rank, {}), places.of(rank)
            collectives, threads, _ = from_message(answer)
            stack = call_with_timeout(
                partial(add_source_lines, stacks.get(rank, ""), linecache.getline),
                SOURCE_LINES_TIMEOUT_SECONDS,
                "reading source lines",
            )
            failure = failure_record(
                ErrorClass.WORKER_FAILURE,
                place,
                code="USER:Hang",
                category="hang",
                message="the job makes no progress",
                writer=Writer.AGENT,
                collectives=tuple(replace(item, last=_open(item)) for item in collectives),
                thread_failures=threads,
                stack_dumps=(StackDump(pid, place.rank, stack),) if stack else (),
                expired=ExpiredDeadline("", round(now - self._still.since)),
            )
            facts = self._facts(rank, pid, str(answer.get("block", "")), now, answers=rank not in silent)
            found.append((failure, facts))
        return found

    def _facts(self, local_rank: int, pid: int, block: str, now: float, *, answers: bool) -> WorkerObservation:
        kernel, stood = read_kernel_state(pid), self._still.stood(local_rank, now)
        uses = usage(pid)
        before = self._used.get(local_rank, uses)
        computes = uses.cpu_seconds - before.cpu_seconds > _CPU_SHARE * self._every_s
        reads = uses.io_bytes - before.io_bytes > _IO_BYTES
        moves = answers and stood is not None and stood < 2 * self._every_s
        told = {
            f"is in {block}": bool(block),
            "does not answer: one call holds Python's lock": not answers and not kernel,
            "its main thread moves": moves,
            "it computes": computes,
            "it reads or writes": reads,
        }
        may_stand = bool(block) or any("SIGSTOP" in one or "debugger" in one for one in kernel)
        says = (*kernel, *(text for text, is_so in told.items() if is_so))
        group_rank, works = self._node.places.of().group_rank or 0, moves or computes or reads
        return WorkerObservation(group_rank, local_rank, stood if answers else None, says, works, may_stand)

    # --- records ------------------------------------------------------------------------------------------------

    def _notify(self, record: RestartRecord | None) -> None:
        if record is not None and os.environ.get(_NOTIFIES) != "0":
            over, uri = record.lost_seconds, self._node.reporter.node_context.output_prefix
            line = record.reason if over is None else f"progress again after {over:.0f} s: {record.headline}"
            told = {"uri": uri, "first_line": line, **json.loads(restart_to_json(record))}
            notify(told)

    def _keep(self, stall: _Stall, lost: float | None = None) -> RestartRecord | None:
        """Write and return the record of a stall, or complete it with how long it took; None: it has none."""
        if not stall.is_mine or stall.number >= (STALLS_OF_ROUND if stall.is_shown else _MOST_USUAL):
            return None
        node_context, place, told = self._node.reporter.node_context, self._node.places.of(0), stall.told
        waited = f"rank {told.ranks[0]}" if told.ranks else "no rank stands out"
        record = RestartRecord(
            RestartKind.STALL,
            node_context.round * STALLS_OF_ROUND + stall.number,
            one_line(f"{waited}{f' at {told.at}' if told.at else ''}"),
            restart=False,
            reason=told.lines[0],
            rank=told.ranks[0] if told.ranks else None,
            node=told.node,
            timestamp_ns=time.time_ns() - int((time.monotonic() - stall.began) * 1e9),
            lost_seconds=lost,
            world_size_before=place.world_size or None,
        )
        name = restart_record_name(record.kind.value, record.number, place.group_rank or 0)
        self._node.reporter.put(f"{ROSTER}/{name}", restart_to_json(record))
        return record


def _open(progress: CollectiveProgress) -> tuple[Collective, ...]:
    """Return the first collectives of a group that haven't ended: with those of 10,000 ranks one agent has to deal."""
    last = [entry for entry in progress.last if entry.sequence > (progress.completed or 0)]
    return tuple(last[:_MOST_OPEN] or progress.last[-1:])


def _from_bytes(document: bytes) -> StallReport:
    fields = json.loads(document)
    ends = tuple((int(group_rank), int(local)) for group_rank, local in fields.pop("ends"))
    return StallReport(tuple(fields["lines"]), tuple(fields["ranks"]), fields["node"], fields["at"], ends)
