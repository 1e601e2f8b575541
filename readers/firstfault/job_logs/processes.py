"""The processes, nodes and launchers in the logs of one attempt, each with everything that is known about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from firstfault.exceptions.exceptions_in_text import parse_exceptions
from firstfault.job_logs.launchers import About, Told
from firstfault.job_logs.owners import stamp_ns
from firstfault.utils.text import clean

if TYPE_CHECKING:
    from firstfault.job_logs.book import Attempt, Stream
    from firstfault.job_logs.boxes import Entry
    from firstfault.model import ExceptionInfo

MAX_TEXT = 64 * 1024
LAUNCHER_STOPPED = "its launcher ended it because of another failure"
SCHEDULER_STOPPED = "its scheduler ended the job"
_WRAPPER = "torch/distributed/elastic/multiprocessing/errors/"
"""The frames of torch's `record` do not belong to the failure."""


@dataclass(slots=True)
class Process:
    """One training process, as the logs show it."""

    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    node: str = ""
    host: str = ""
    ip: str = ""
    exit_code: int | None = None
    signal: str = ""
    is_oom: bool = False
    stopped: str = ""
    """Why its launcher ended it; empty: according to the log, it didn't."""
    streams: list[Stream] = field(default_factory=list)
    raised: ExceptionInfo | None = None
    raised_text: str = ""
    text: str = ""
    """The end of what it printed."""
    said: str = ""
    """What its launcher printed about its end."""
    told: str = ""
    """What it printed last about a failure."""
    tells: bool = False
    """Whether it printed itself how it ended."""
    time_ns: int | None = None
    hardware_error: str = ""
    """What the kernel's log reports about its GPU."""
    uncaught: bool = False
    """Whether torch printed its exception because nothing had caught it."""
    lines: set[tuple[str, int, int]] = field(default_factory=set)
    """Files, and the first and last lines in them that are about it."""

    @property
    def has_ended(self) -> bool:
        """Whether the log shows how it ended."""
        return self.exit_code is not None or bool(self.signal)

    @property
    def is_known(self) -> bool:
        """Whether a rank, a local rank or a process id distinguishes it."""
        return not (self.rank is None and self.local_rank is None and self.pid is None)

    def may_be_on(self, node: str) -> bool:
        """Whether it may have run on a node of this name; an empty name is any node's."""
        return not node or not self.node or node in {self.node, self.host, self.ip}


class Processes:
    """Finds out which streams, statements and boxes are about the same process."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.all: list[Process] = []
        self._by_rank: dict[int, Process] = {}
        self.shared: list[Stream] = []
        """Streams of several processes, or of one that nothing names."""
        self.tasks_are_ranks = not attempt.labels_are_nodes and not attempt.is_torchrun
        owners = {(one.owner.label, one.owner.node) for one in attempt.streams.values() if one.owner.label is not None}
        # "10.0.0.1 [0]" and "10.0.0.2 [0]" are two processes
        self.labels_are_local = len({label for label, _ in owners}) < len(owners)
        self.rank_by_node = self._find_rank_by_node()
        self.task_nodes = {task: told.node for _, _, told in attempt.told for task in told.tasks if told.node}
        for file, node, entry in attempt.entries:
            self._take_entry(entry, file, node)
        kept = (stream for stream in attempt.streams.values() if stream.tail)
        for stream in sorted(kept, key=lambda one: (one.owner.rank is None, one.file, one.tail[0].number)):
            self._take_stream(stream)
        for file, node, told in attempt.told:
            self._take_told(file, node, told)

    def _find_rank_by_node(self) -> dict[str, int]:
        """Return the rank of each node's only process, if each node printed one rank, or a number, of its own."""
        ranks: dict[str, set[int]] = defaultdict(set)
        for stream in self.attempt.streams.values():
            owner = stream.owner
            if owner.node and not owner.is_process:
                own_index = {owner.node_index} if owner.node_index is not None else set()
                ranks[owner.node] |= stream.declared_ranks or own_index
        found = {node: min(numbers) for node, numbers in ranks.items() if len(numbers) == 1}
        # without a world size, nodes numbered from 0 have one process each if no process has another number
        size = self.attempt.world_size or (0 if self.attempt.is_torchrun or self._has_processes() else len(ranks))
        is_one_each = 1 < len(found) == len(ranks) == size and sorted(found.values()) == list(range(size))
        return found if is_one_each else {}

    def _has_processes(self) -> bool:
        return any(stream.owner.is_process for stream in self.attempt.streams.values())

    def find(
        self, *, rank: int | None = None, pid: int | None = None, local_rank: int | None = None, node: str = ""
    ) -> Process:
        """Return the process that is known by one of these, or a new one."""
        found = None
        if rank is None and pid is not None:
            rank = self.attempt.rank_by_pid.get(pid)
        if rank is not None:
            found = self._by_rank.get(rank)
        if found is None and pid is not None:
            found = self._only(lambda item: item.pid == pid and item.may_be_on(node))
        if found is None and local_rank is not None:
            found = self._only(lambda item: item.local_rank == local_rank and item.may_be_on(node))
        if found is not None and rank is not None and found.rank not in {None, rank}:
            found = None
        if found is None:
            found = Process()
            self.all.append(found)
        found.rank = found.rank if found.rank is not None else rank
        if found.rank is not None:
            self._by_rank[found.rank] = found
        found.pid, found.local_rank = found.pid or pid, found.local_rank if found.local_rank is not None else local_rank
        found.node = found.node or node
        return found

    def _only(self, fits: Callable[[Process], bool]) -> Process | None:
        matching = [item for item in self.all if fits(item)]
        return matching[0] if len(matching) == 1 else None

    def node_of(self, node: str) -> str:
        """Return the name of a node, also for one that is known by the number of its task."""
        if node.startswith("task "):
            return self.task_nodes.get(int(node[5:]), node)
        return node

    def _take_entry(self, entry: Entry, file: str, node: str) -> None:
        where = self.node_of(node) or entry.host
        found = self.find(rank=entry.rank, pid=entry.pid, local_rank=entry.local_rank, node=where)
        found.host = found.host or entry.host
        found.exit_code, found.signal = entry.exit_code, entry.signal
        found.time_ns = found.time_ns or stamp_ns(entry.time.replace("_", "T"))
        found.lines.add((file, entry.number, entry.last))
        text = "\n".join(entry.traceback)
        if text and (raised := exception_in(text, whole=True)):
            found.raised, found.raised_text = raised, text

    def _take_stream(self, stream: Stream) -> None:
        owner, node = stream.owner, self.node_of(stream.owner.node)
        if self.labels_are_local and owner.label is not None:
            local = owner.label if owner.local_rank is None else owner.local_rank
            owner = owner._replace(local_rank=local, label=None)
        rank = owner.rank if owner.rank is not None else owner.label if self.tasks_are_ranks else None
        rank = rank if owner.is_process else self.rank_by_node.get(node)
        if owner.label is not None and not self.tasks_are_ranks:
            node = node or self.node_of(f"task {owner.label}")
        if rank is None and owner.local_rank is None and owner.pid is None:
            self.shared.append(replace(stream, owner=owner._replace(node=node)))
            return
        if rank is not None and not node:
            node = self.task_nodes.get(rank, "") if self.tasks_are_ranks else ""
        found = self.find(rank=rank, pid=owner.pid, local_rank=owner.local_rank, node=node)
        found.ip = found.ip or owner.ip
        found.streams.append(stream)

    def _take_told(self, file: str, node: str, told: Told) -> None:
        if told.about not in {About.ENDED, About.STOPPED, About.OOM}:
            return
        node = self.node_of(told.node or told.ip or node)
        of_tasks = told.tasks if self.tasks_are_ranks else ()
        ranks = of_tasks if told.tasks else told.ranks
        if not ranks and told.local_rank is None and node in self.rank_by_node:
            ranks = (self.rank_by_node[node],)
        found = [self.find(rank=rank, pid=told.pid, node=node) for rank in ranks]
        if not ranks and not told.tasks and (told.pid is not None or told.local_rank is not None):
            found = [self.find(pid=told.pid, local_rank=told.local_rank, node=node)]
        elif not ranks and not told.tasks and told.about is About.ENDED:
            found = [Process(node=node)]
            self.all += found
        for process in found:
            process.lines.add((file, told.number, told.number))
            process.node, process.ip = process.node or node, process.ip or told.ip
            process.is_oom |= told.is_oom
            if told.about is About.STOPPED and process.signal and process.signal == told.signal:
                process.exit_code, process.signal, process.stopped = None, "", LAUNCHER_STOPPED  # its launcher's signal
            elif told.about is About.STOPPED and not process.has_ended:
                process.stopped = LAUNCHER_STOPPED
            elif told.about is not About.STOPPED and not process.has_ended:
                is_after = bool(told.tasks) and told.signal == "SIGKILL" and self._rest_stopped_before(told)
                process.stopped = LAUNCHER_STOPPED if is_after else ""
                process.exit_code = None if is_after else told.exit_code
                process.signal = "" if is_after else told.signal or ("SIGKILL" if told.is_oom else "")
                process.said = told.text

    def _rest_stopped_before(self, told: Told) -> bool:
        earlier = (other.about for _, _, other in self.attempt.told if other.number < told.number)
        return About.REST_STOPPED in earlier


def exception_in(text: str, *, whole: bool) -> ExceptionInfo | None:
    """Return the exception of the last traceback in a text; its causes are those that Python printed before it."""
    found = parse_exceptions(clean(text, MAX_TEXT), whole=whole)
    if not found:
        return None
    first, *causes = (
        replace(link, frames=tuple(frame for frame in link.frames if _WRAPPER not in frame.file)) for link in found
    )
    return replace(first, relation="", causes=tuple(causes))
