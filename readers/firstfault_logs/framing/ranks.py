"""Find which ranks and machines the lines of a log name, which rank is where, and how many ranks
there are.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from firstfault.model import JobSize
from firstfault.utils.lazy_pattern import LazyPattern

if TYPE_CHECKING:
    from firstfault_logs.framing.labels import Label


# Native code and libraries print the rank of their process.
_INLINE_RANK = LazyPattern(r"""
  ^(?:\[\d{1,5}\]:[ ]?)?(?:\[[EWIF][^\]\n]{1,120}\][ ])?
  \[(?:PG[ ][^\]\n]{0,80}\(default_pg\)[ ])?Rank[ ](?P<rank>\d{1,6})\]
| \bRankID:(?P<rank_id>\d{1,6})\b
| \[rank=(?P<rank_is>\d{1,6}),[ ]world=\d
| GLOBAL_RANK:[ ](?P<global>\d{1,6}),[ ]MEMBER
""")


# Native code and libraries print the number of their process
_INLINE_PID = LazyPattern(
    r"\(PID:[ ]?(?P<pid>\d{1,10}),|^\S{0,12}[ ]?\[PID:[ ]?(?P<pid2>\d{1,10})\]"
)

# Begins a line of NCCL.
_NCCL_LINE_START = LazyPattern(
    r"^(?P<host>[\w.-]{1,120}):(?P<pid>\d{1,10}):\d{1,10}[ ]\[\d{1,3}\][ ](?:\S+[ ]\S+[ ])?NCCL[ ]"
)


def add_inline_label(label: Label, text: str) -> Label:
    """Return a label with the rank and process id that native code prints about itself."""
    names_a_rank = label.rank is None and ("Rank" in text or "RANK" in text or "[rank=" in text)
    if names_a_rank and (rank_match := _INLINE_RANK.search(text)):
        label = label._replace(rank=int(next(filter(None, rank_match.groups()))))
    elif (
        label.pid is not None
        and label.rank is None
        and "[" in text[:30]
        and (logged_rank := LOGGED_RANK.match(text))
    ):
        label = label._replace(rank=int(logged_rank["rank"]))
    if label.pid is None and "PID" in text and (pid_match := _INLINE_PID.search(text)):
        label = label._replace(pid=int(pid_match["pid"] or pid_match["pid2"]))
    if " NCCL " in text and (line_start := _NCCL_LINE_START.match(text)):
        label = label._replace(
            pid=label.pid or int(line_start["pid"]), node=label.node or line_start["host"]
        )
    return label


# A program prints its own rank.
DECLARED_RANK = LazyPattern(r"""
^\W{0,3}(?:INFO\W+)?(?:[\w.]+\.)?
(?i:(?:global[_ ]?)?rank|process_index(?:\(\))?)\W{1,2}(?P<rank>\d{1,6})\b
""")

# A program's own logger puts the rank before a line of a process with a known number.
LOGGED_RANK = LazyPattern(r"^[\w\s:.,-]{0,30}\[(?i:worker|rank)[ :=](?P<rank>\d{1,6})\]")


_NPROC_OPTION = r"--nproc[_-]per[_-]node[= ](?P<count>\d{1,3})\b"
_NODE_RANK_OPTION = r"--(?:node|machine)[_-]rank[= ](?P<rank>\d{1,5})\b"
_NODES_OPTION = r"--(?:nnodes|num[_-](?:nodes|machines))[= ](?P<count>\d{1,5})\b"
_ACCELERATE_PROCESSES = r"\baccelerate\b.*--num[_-]processes[= ](?P<count>\d{1,5})\b"
_AGENT_SETTING = r"\s{0,4}(?P<name>max_nodes|nproc_per_node)\s{1,20}:\s{1,4}(?P<number>\d{1,5})$"
_AGENT_RANKS = r"\s{0,4}global_ranks=\[(?P<ranks>\d[\d, ]*)\]$"
_DEEPSPEED_NODE = (
    r"\bnnodes=\d{1,5}, num_local_procs=(?P<count>\d{1,3}), node_rank=(?P<rank>\d{1,5})\b"
)
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
            field := _compile(_AGENT_SETTING).match(text)
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
        workers = _compile(_NPROC_OPTION).search(text)
        rank = _compile(_NODE_RANK_OPTION).search(text)
        nodes = _compile(_NODES_OPTION).search(text)
        processes = _compile(_ACCELERATE_PROCESSES).search(text)
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
        if listed := _compile(_AGENT_RANKS).match(text):
            ranks = [int(rank) for rank in listed["ranks"].split(",") if rank.strip()]
            is_in_order = ranks == list(range(ranks[0], ranks[0] + len(ranks)))
            self.first = ranks[0] if is_in_order else None
        elif numbers := _compile(_DEEPSPEED_NODE).search(text):
            self._node = int(numbers["rank"])
            self.workers = int(numbers["count"])
            self.first = self.workers * self._node
        elif lists := _compile(_DEEPSPEED_RANKS).search(text):
            firsts = re.findall(r"\[(\d{1,6})", lists["lists"])
            # nodes may have different numbers of workers
            self.first = int(firsts[self._node]) if self._node < len(firsts) else None


_STATED_RANKS = r"""
  (?<![\w-]) ["']? (?<!parallel[ ]) (?:WORLD_SIZE|[Ww]orld[_ ][Ss]ize) ["')]{0,2} [ ]?[=: ][ ]? ["'(]{0,2} (\d{1,6}) \b
| GLOBAL_RANK:[ ]\d+,[ ]MEMBER:[ ]\d+/(\d{1,6})
| Starting[ ]with[ ](\d{1,6})[ ]processes
| \bSLURM_(?:NTASKS|NPROCS)[=: ]["']?(\d{1,6})\b
| \b(?:mpirun|mpiexec|prterun|horovodrun)\b [^\n|;]{0,300}? [ ]--?np?[ ]?(\d{1,6})\b
"""
"""How many ranks the job has, in a line that means all of them: not those of one group."""
_STATED_NODES = r"""
  --(?:nnodes|nodes|num[-_]nodes)[ =]["']?(\d{1,5})(?![\d:])
| \bnnodes=(\d{1,5}),[ ]num_local_procs=\d
| \b(?:SLURM_(?:JOB_)?(?:NUM_NODES|NNODES)|NNODES)["']?[=:][ ]?["']?(\d{1,5})(?![\d:])
"""
_WORKERS_PER_NODE = r"(?:--nproc[-_]per[-_]node[ =][\"']?|\bnum_local_procs=)(\d{1,3})\b"
_NAMED_RANK = (
    r"(?<![a-z] )(?<![a-z_-])(?:global_)?[Rr](?:ank|ANK)(?:[ =:]{1,3}|\b\W{0,2}=\W{0,2})(\d{1,6})\b"
)
"""A rank of the job in any line; "local rank 3" and "tensor rank 3" are others."""
_NAMED_AS_CURRENT = r"\b[Rr]ank of (?:this|the current|current) process(?: is|:)? (\d{1,6})\b"
_LISTED_RANKS = (
    r"(?<![a-z_-])[Rr]anks?\b[ :=]{0,3}(?:\w{1,20}\()?\[(\d{1,6}(?:, ?\d{1,6}){1,200})\]"
)
""""ranks: [0, 1, 2]"."""
_WORDS_OF_RANKS = (
    "WORLD",
    "orld",
    "NTASKS",
    "NPROCS",
    "MEMBER",
    "Starting with",
    "mpirun ",
    "mpiexec ",
    "vodrun ",
    "prterun ",
)
_NCCL_LINE = r"^\W{0,2}([A-Za-z][\w.-]{0,120}):\d{1,10}:\d{1,10} \["
_MAX_RANK = 100_000


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.VERBOSE if "\n" in pattern else 0)


@dataclass(slots=True)
class SizeMarks:
    """What the lines of a log state about the size of their job."""

    ranks: int = 0
    """Number of ranks, or 0 if no line states it; the values below are alike."""
    nodes: int = 0
    workers_per_node: int = 0
    named_ranks: set[int] = field(default_factory=set)
    """Ranks that any line names."""
    machines: set[str] = field(default_factory=set)
    """Names that NCCL puts before its lines."""
    files_of_nodes: set[str] = field(default_factory=set)
    """Names of logs that are a node's each."""
    vague_names: set[str] = field(default_factory=set)
    """Labels that may be names of processes or files: they don't count as machines."""

    def take(self, text: str) -> None:
        """Take a line."""
        if "ank" in text or "RANK" in text:
            for match in _compile(_NAMED_RANK).finditer(text):
                self._name_ranks(match[1])
            for match in _compile(_NAMED_AS_CURRENT).finditer(text):
                self._name_ranks(match[1])
            for match in _compile(_LISTED_RANKS).finditer(text):
                self._name_ranks(match[1])
        if any(word in text for word in _WORDS_OF_RANKS):
            self.ranks = max(self.ranks, _largest(_STATED_RANKS, text))
        if "nodes" in text or "NODES" in text:
            self.nodes = max(self.nodes, _largest(_STATED_NODES, text))
        if "NCCL " in text and (of_nccl := _compile(_NCCL_LINE).match(text)):
            self.machines.add(of_nccl[1])
        if "nproc" in text or "num_local_procs" in text:
            self.workers_per_node = max(self.workers_per_node, _largest(_WORKERS_PER_NODE, text))

    def _name_ranks(self, numbers: str) -> None:
        self.named_ranks |= {rank for rank in map(int, numbers.split(",")) if rank < _MAX_RANK}

    @property
    def stated_ranks(self) -> int:
        """How many ranks the job has according to its lines, or 0 if no line states it."""
        return max(self.ranks, self.workers_per_node * self.nodes)

    def build_size(self, ranks: Collection[int], machines: Collection[str]) -> JobSize:
        """Return the size of the job as its lines state it, else a lower limit from its processes.

        Args:
            ranks: the ranks that processes have.
            machines: names of machines that launchers and schedulers print.
        """
        seen = 1 + max({*ranks, *self.named_ranks}, default=-1) if ranks else 0
        # a name with and without its domain is one machine; an address has no domain
        names = {
            name.partition(".")[0] if name[:1].isalpha() else name
            for name in {*machines, *self.machines}
        }
        # a file's name of a node may be another one than its lines'
        shown = max(len(names - {""}), len(self.files_of_nodes))
        stated = self.stated_ranks
        ranks_stated = stated >= max(seen, 1)
        nodes_stated = self.nodes >= max(shown, 1)
        # that there is at least one is no news
        count = max(stated, seen) if ranks_stated or seen > 1 else 0
        nodes = max(self.nodes, shown) if nodes_stated or shown > 1 else 0
        minimums = ["ranks"] if count and not ranks_stated else []
        minimums += ["nodes"] if nodes and not nodes_stated else []
        return JobSize(count, nodes, tuple(minimums))


def _largest(pattern: str, text: str) -> int:
    numbers = (
        int(next(filter(None, match.groups()))) for match in _compile(pattern).finditer(text)
    )
    return max(numbers, default=0)
