"""Find the rank of each node's first worker, from command lines and what launchers print."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

_WORKERS = r"--nproc[_-]per[_-]node[= ](?P<count>\d{1,3})\b"
_NODE = r"--(?:node|machine)[_-]rank[= ](?P<rank>\d{1,5})\b"
_NODES = r"--(?:nnodes|num[_-](?:nodes|machines))[= ](?P<count>\d{1,5})\b"
_PROCESSES = r"\baccelerate\b.*--num[_-]processes[= ](?P<count>\d{1,5})\b"
_FIELD = r"\s{0,4}(?P<name>max_nodes|nproc_per_node)\s{1,20}:\s{1,4}(?P<number>\d{1,5})$"
_RANKS = r"\s{0,4}global_ranks=\[(?P<ranks>\d[\d, ]*)\]$"
_DEEPSPEED = r"\bnnodes=\d{1,5}, num_local_procs=(?P<count>\d{1,3}), node_rank=(?P<rank>\d{1,5})\b"
_DEEPSPEED_RANKS = r"\bglobal_rank_mapping=.*?\{(?P<lists>[^}]*)\}"
_SPAWNED = r"\bprocess (?P<pid>\d{1,10}) spawned with command: .*--local[_-]rank[=', ]{1,4}(?P<rank>\d{1,3})\b"
_LOCAL_RANK = r"(?i:\blocal[_ ]?rank)\W{1,3}(?P<rank>\d{1,3})\b"
_MAX_WORKERS = 64
"""Per node."""


@dataclass(slots=True)
class FirstRanks:
    """Takes the lines of one launcher: on one node, or of the whole job."""

    first: int | None = None
    """Rank of the worker with local rank 0; None if unknown."""
    workers: int = 0
    """Number of workers of the node, or 0 if no line states it."""
    local_rank_by_pid: dict[int, int] = field(default_factory=dict)
    """Local ranks of the processes that the launcher started, by process id."""
    local_ranks: set[int] = field(default_factory=set)
    """Those that workers printed."""
    _node: int = 0
    _max_nodes: int = 0

    def take(self, text: str) -> None:
        """Take a line."""
        if "nproc" in text or "--num" in text:
            self._take_command(text)
        if ("max_nodes" in text or "nproc_per_node" in text) and (
            field := _compile(_FIELD).match(text)
        ):
            self._take_banner(field["name"], int(field["number"]))
        elif "global_rank" in text or "num_local_procs" in text:
            self._take_ranks(text)
        if "spawned" in text and (spawned := _compile(_SPAWNED).search(text)):
            self.local_rank_by_pid[int(spawned["pid"])] = int(spawned["rank"])
        if "ank" in text and "ocal" in text:
            ranks = (int(match["rank"]) for match in _compile(_LOCAL_RANK).finditer(text))
            self.local_ranks.update(rank for rank in ranks if rank < _MAX_WORKERS)

    def find_first(self, world_size: int) -> int | None:
        """Return the rank of the worker with local rank 0, or None if it isn't known.

        Args:
            world_size: the value in the log, or 0 if the log has none.
        """
        if self.first is None and world_size and self.local_ranks == set(range(world_size)):
            return 0  # as many workers as the job has are on this node
        return self.first

    def _take_command(self, text: str) -> None:
        workers = _compile(_WORKERS).search(text)
        rank = _compile(_NODE).search(text)
        nodes = _compile(_NODES).search(text)
        processes = _compile(_PROCESSES).search(text)
        count = int(nodes["count"]) if nodes is not None else 1
        if count > 1 and rank is None:
            return
        number = int(rank["rank"]) if rank is not None else 0
        if workers is not None:
            self.workers = int(workers["count"])
            self.first = self.workers * number
        elif processes is not None and nodes is not None and int(processes["count"]) % count == 0:
            self.first = int(processes["count"]) // count * number

    def _take_banner(self, name: str, number: int) -> None:
        if name == "max_nodes":
            self._max_nodes = number
        elif self._max_nodes == 1:
            self.first = 0

    def _take_ranks(self, text: str) -> None:
        if listed := _compile(_RANKS).match(text):
            ranks = [int(rank) for rank in listed["ranks"].split(",") if rank.strip()]
            is_in_order = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
            self.first = ranks[0] if is_in_order else None
        elif numbers := _compile(_DEEPSPEED).search(text):
            self._node = int(numbers["rank"])
            self.workers = int(numbers["count"])
            self.first = self.workers * self._node
        elif lists := _compile(_DEEPSPEED_RANKS).search(text):
            firsts = re.findall(r"\[(\d{1,6})", lists["lists"])
            # nodes may have different numbers of workers
            self.first = int(firsts[self._node]) if self._node < len(firsts) else None


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
