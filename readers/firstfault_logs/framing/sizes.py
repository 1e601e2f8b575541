"""Find what the lines of a log state about the size of their job,
and which of its ranks and machines they name.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache

from firstfault.model import JobSize

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
