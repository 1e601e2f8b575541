"""Observes the workers of a node in a stall: stacks, collectives, kernel states, CPU and disk."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from firstfault.exceptions.stack_position import add_source_lines
from firstfault.model import ExpiredDeadline, StackDump, Writer
from firstfault_torch.failures.failure_records import ErrorClass, failure_record
from firstfault_torch.guard import call_with_timeout
from firstfault_torch.hang.procfs import Usage, describe_wait, measure_usage, read_kernel_state
from firstfault_torch.hang.stall_report import WorkerObservation, to_files
from firstfault_torch.node.channel import SNAPSHOT, from_message
from firstfault_torch.time_limits import SNAPSHOT_TIMEOUT_SECONDS, SOURCE_LINES_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from firstfault.model import Collective, CollectiveProgress, WorkerError
    from firstfault_torch.agent.local_workers import LocalWorkers
    from firstfault_torch.agent.place_factory import PlaceFactory
    from firstfault_torch.protocol.stall_progress import ProgressTracker

MAX_INCOMPLETE_COLLECTIVES = 3
"""Incomplete collectives per group in a node's observations."""
BUSY_CPU_SHARE = 0.1
BUSY_IO_BYTES = 1 << 20
"""Between two polls; a waiting process stays below."""
PROCESS_GROUPS_FILE = "torch/distributed/distributed_c10d.py"


@dataclass(frozen=True, slots=True)
class Observations:
    """What an agent has observed of its workers."""

    files: dict[str, bytes]
    """For `build_stall_report`."""
    calls_collectives: bool
    """Whether a worker has called a collective, or forms its process group."""
    uses_nccl: bool


class WorkerObserver:
    """Observes the workers of one node.

    Args:
        workers: the round's workers, which are asked for their state.
        places: this node's ranks.
        tracker: their progress, updated at each poll.
        poll_seconds: time between two polls.
    """

    def __init__(
        self,
        workers: LocalWorkers,
        places: PlaceFactory,
        tracker: ProgressTracker,
        poll_seconds: float,
    ) -> None:
        self._workers = workers
        self._places = places
        self._tracker = tracker
        self._poll_seconds = poll_seconds
        self._used: dict[int, Usage] = {}

    def measure(self, alive: dict[int, int]) -> None:
        """Measure the use of CPU and disk, with which the next observation compares."""
        self._used = {rank: measure_usage(pid) for rank, pid in alive.items()}

    def observe(self, alive: dict[int, int], now: float, *, ends_attempt: bool) -> Observations:
        """Return what is observed of the workers, by local rank and process id."""
        seen = self._observe_workers(alive, now, ends_attempt=ends_attempt)
        failures = [failure for failure, _ in seen]
        stacks = [dump.text for failure in failures for dump in failure.stack_dumps]
        groups = [progress for failure in failures for progress in failure.collectives]
        return Observations(
            to_files(seen),
            calls_collectives=any(self._tracker.enqueued.values())
            or any(PROCESS_GROUPS_FILE in text for text in stacks),
            uses_nccl=any(
                entry.operation.startswith("nccl") for progress in groups for entry in progress.last
            ),
        )

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
        computes = uses.cpu_seconds - before.cpu_seconds > BUSY_CPU_SHARE * self._poll_seconds
        reads = uses.io_bytes - before.io_bytes > BUSY_IO_BYTES
        moves = seconds_at_position is not None and seconds_at_position < 2 * self._poll_seconds
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


def _keep_incomplete(progress: CollectiveProgress) -> tuple[Collective, ...]:
    """Return only the first unfinished collectives of a group, because one agent may have to
    process those of 10,000 ranks.
    """
    last = [entry for entry in progress.last if entry.sequence > (progress.completed or 0)]
    return tuple(last[:MAX_INCOMPLETE_COLLECTIVES] or progress.last[-1:])
