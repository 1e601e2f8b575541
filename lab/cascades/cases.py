"""The cases of the cascade lab, and the right verdict on each."""

import itertools
from dataclasses import dataclass, field, replace

from lab.cascades.nccl_words import ABORTS, RAISES, SECOND, VERSIONS

NCCL = "nccl-"
"""How the names of faults under NCCL begin."""


@dataclass(frozen=True, slots=True)
class Way:
    """How torchrun starts a job of programs."""

    door: str = "firstfault"
    """"firstfault": ``firstfault torchrun``; "variable": torchrun with ``FIRSTFAULT=1``; "forked":
    the first, but in processes that have loaded torch, which saves seconds.
    """
    rendezvous: str = "c10d"
    """"c10d", "static", or "file": c10d over a store of files."""
    folder: str = "own"
    """"own": each node has a working folder, and nothing in common with the others; "common":
    they share a folder.
    """

    def __str__(self) -> str:
        return f"{self.door}-{self.rendezvous}-{self.folder}"


@dataclass(frozen=True, slots=True)
class Case:
    """One fault on one rank or node."""

    fault: str
    culprit: int
    nodes: int = 2
    scope: str = "rank"
    """What the verdict has to name.

    "rank", "ranks", "node": those that wrote the truth; "one": one of those ranks; "external": one
    of those nodes, terminated; "somewhere": one of those nodes, or one of its ranks;
    "undetermined": no rank; "none": no failure.
    """
    task: str = ""
    inputs: dict[str, object] = field(default_factory=dict)
    clock: tuple[int, float] | None = None
    """Index of a pod, and the error of its wall clock, seconds."""
    store: str = "folder"
    """"folder" or "s3"."""
    per_node: int = 2
    """Ranks of a node."""
    way: Way | None = None
    """None: the training is a task of Flyte's; else a program."""

    @property
    def is_nccl(self) -> bool:
        """Whether its training runs on the lab's process group that fails as NCCL's does."""
        return self.fault.startswith(NCCL)

    @property
    def name(self) -> str:
        """A unique name, also of the recording's file."""
        clock = f"-clock{self.clock[1]:+g}" if self.clock is not None else ""
        extra = "".join(f"-{key}{value}" for key, value in sorted(self.inputs.items()))
        extra += "-s3" if self.store == "s3" else ""
        way = f"-{self.way}" if self.way is not None else ""
        return f"{self.fault}{clock}{extra}{way}-rank{self.culprit}-of{self.per_node * self.nodes}"


_OF_A_RANK = (
    *("raise", "recoverable", "chained", "loader", "backward", "future", "thread", "finally"),
    *(
        "finally-destroy",
        "SIGKILL",
        "SIGSEGV",
        "SIGABRT",
        "SIGTERM",
        "terminate",
        "exit-1",
        "exit-0",
    ),
    *("sys.exit-0", "sys.exit-3", "hang", "hang-c", "skip", "mismatch", "memory", "disk", "cuda"),
)
_MORE_OF_A_RANK = (
    *("recoverable-subclass", "recoverable-from", "recoverable-finally", "recoverable-future"),
    *("plain-from-recoverable", "frozen"),
)
_OF_A_NODE = ("agent-killed", "store-killed", "node-killed")
_EVERYWHERE = {
    "all-told": "external",
    "all-ranks": "ranks",
    "all-killed": "ranks",
    "two-ranks": "one",
    "deadlock": "undetermined",
}
_BEFORE_THE_FIRST_COLLECTIVE = ("raise", "SIGKILL", "exit-1", "hang")
_CULPRITS = (3, 0, 2)
"""Culprits on two nodes with two ranks each: the last rank, the first one,
and the first of the second node.
"""


def _of_two_nodes(culprit: int) -> list[Case]:
    """Return a case for every fault of one culprit."""
    found = [Case(fault, culprit) for fault in _OF_A_RANK + _MORE_OF_A_RANK]
    found += [Case(fault, culprit, scope="node") for fault in _OF_A_NODE]
    found += [Case("agent-told", culprit, scope="external")]
    found += [
        Case(fault, culprit, inputs={"early": True}) for fault in _BEFORE_THE_FIRST_COLLECTIVE
    ]
    slow = (culprit + 1) % 4
    found += [Case(fault, culprit, inputs={"slow": slow}) for fault in ("raise", "SIGKILL")]
    # longer than the victims take to fail, and than the failing worker waits for its document
    found += [
        Case("SIGKILL", culprit, inputs={"held": 3.0}),
        Case("raise", culprit, inputs={"held": 7.0}),
    ]
    return found + _restarted(culprit)


def _restarted(culprit: int) -> list[Case]:
    """Return cases with one restart: a fault that passes, and one that does not."""
    return [
        Case(
            fault,
            culprit,
            task="restarted",
            inputs={"rounds": rounds},
            scope="rank" if rounds > 1 else "none",
        )
        for fault in ("raise", "SIGKILL")
        for rounds in (1, 2)
    ]


def _with_wrong_clocks() -> list[Case]:
    """Return cases in which the clock of the culprit's node, or of the other one, is wrong."""
    found = []
    for seconds in (-5, 5, -600, 600):
        for store in ("folder", "s3"):
            found += [
                Case("raise", 3, clock=(1, seconds), store=store),
                Case("SIGKILL", 0, clock=(1, seconds), store=store),
                Case("SIGKILL", 2, clock=(1, seconds), store=store),
            ]
    # S3 refuses requests with such a clock
    found += [
        Case(fault, culprit, clock=(1, seconds))
        for seconds in (-3600, 3600)
        for fault, culprit in (("raise", 3), ("SIGKILL", 0), ("SIGKILL", 2))
    ]
    # the clock is set while the job runs, and S3 refuses all later requests
    return found + [
        Case("clock-jump", culprit, scope="somewhere", clock=(culprit // 2, 0), store="s3")
        for culprit in _CULPRITS
    ]


def _cases() -> list[Case]:
    two = [case for culprit in _CULPRITS for case in _of_two_nodes(culprit)]
    two += [
        Case(fault, culprit, scope=scope)
        for fault, scope in _EVERYWHERE.items()
        for culprit in (0, 1, 3)
    ]
    four = [Case(fault, 5, nodes=4) for fault in _OF_A_RANK + _MORE_OF_A_RANK]
    four += [Case(fault, 2, nodes=4, scope="node") for fault in _OF_A_NODE]
    four += [
        Case("agent-told", 6, nodes=4, scope="external"),
        Case("deadlock", 0, nodes=4, scope="undetermined"),
    ]
    return two + _with_wrong_clocks() + four + _under_nccl() + _under_nccl2()


_OF_A_RANK_UNDER_NCCL = (
    *(
        "raise",
        "exits",
        "oom",
        "SIGKILL",
        "SIGSEGV",
        "assert",
        "late-assert",
        "illegal",
        "ecc",
        "xid",
    ),
    *("hang-loader", "hang-checkpoint", "hang-python", "hang-c", "straggler", "rubbish", "skip"),
    *("mismatch-operation", "mismatch-size", "tensor-hang", "watchdog-stuck", "destroy"),
)
_UNDER_NCCL = dict.fromkeys(_OF_A_RANK_UNDER_NCCL, "rank") | {
    "node-killed": "node",
    "network": "undetermined",
}
_WIDE = (
    "hang-python",
    "late-assert",
    "oom",
    "skip",
    "tensor-hang",
    "SIGKILL",
    "node-killed",
    "mismatch-size",
)
"""Faults that are also recorded on more nodes and with more ranks."""


def _under_nccl() -> list[Case]:
    """Return the cases under NCCL; each version of torch's words has faults of every kind."""
    shapes = [(fault, culprit, 2, 2) for culprit in _CULPRITS for fault in _UNDER_NCCL]
    shapes += [(fault, 5, 4, 2) for fault in _WIDE] + [(fault, 11, 2, 8) for fault in _WIDE]
    versions = [
        VERSIONS[(place + 2 * (place // len(_UNDER_NCCL))) % len(VERSIONS)]
        for place in range(len(shapes))
    ]
    return [_case(*shape, version) for shape, version in zip(shapes, versions, strict=True)]


def _under_nccl2() -> list[Case]:
    """Return the cases under ProcessGroupNCCL2: half of the processes abort, and half raise."""
    shapes = [(fault, _CULPRITS[place % 3], 2, 2) for place, fault in enumerate(_UNDER_NCCL)]
    cases = [_case(*shape, SECOND[place % 2]) for place, shape in enumerate(shapes)]
    both = ("SIGKILL", "hang-python", "skip", "mismatch-size", "tensor-hang", "network")
    turned = [case for case in cases if case.fault.removeprefix(NCCL) in both]
    cases += [
        replace(case, inputs={"version": SECOND[case.inputs["version"] == ABORTS]})
        for case in turned
    ]
    return [*cases, _case("skip", 5, 4, 2, RAISES), _case("hang-python", 11, 2, 8, ABORTS)]


def _case(fault: str, culprit: int, nodes: int, per_node: int, version: str) -> Case:
    """Return a case under NCCL."""
    return Case(
        NCCL + fault,
        culprit,
        nodes=nodes,
        scope=_UNDER_NCCL[fault],
        task={(2, 2): "nccl_two_by_two", (4, 2): "nccl_four_by_two", (2, 8): "nccl_two_by_eight"}[
            nodes, per_node
        ],
        inputs={"version": version},
        per_node=per_node,
    )


_WAYS = [
    Way(*way)
    for way in itertools.product(("firstfault", "variable"), ("c10d", "static"), ("own", "common"))
]
_RESTARTS = Way("variable"), Way("firstfault"), Way("firstfault", folder="common")
"""torch's static rendezvous cannot restart workers."""


def _of_programs() -> list[Case]:
    """Return the cases of programs under torchrun: each fault once, in the ways in turn."""
    cases = [case for case in _of_two_nodes(3) if not case.task]
    cases += [Case(fault, 1, scope=scope) for fault, scope in _EVERYWHERE.items()]
    cases += [
        Case("raise", 5, nodes=4),
        Case("SIGKILL", 2, nodes=4),
        Case("node-killed", 2, nodes=4, scope="node"),
    ]
    cases += [
        Case("raise", 3, clock=(1, 5)),
        Case("SIGKILL", 0, clock=(1, -5)),
        Case("SIGKILL", 2, clock=(1, 600)),
    ]
    cases += [
        case for case in _under_nccl() if case.nodes * case.per_node == 4 and case.culprit == 3
    ]
    cases = [
        replace(case, way=way) for case, way in zip(cases, itertools.cycle(_WAYS), strict=False)
    ]
    restarts = [("recoverable", 1, "none"), ("recoverable", 2, "rank"), ("SIGKILL", 1, "rank")]
    cases += [
        Case(fault, 3, task="restarted", inputs={"rounds": rounds}, scope=scope, way=way)
        for (fault, rounds, scope), way in zip(restarts, _RESTARTS, strict=True)
    ]
    common = Way(folder="common")
    return [
        *cases,
        Case("raise", 3, store="s3", way=common),
        Case("SIGKILL", 0, store="s3", way=common),
    ]


CASES = {case.name: case for case in _cases()}
"""All cases whose training is a task of Flyte's, by name."""
PROGRAMS = {case.name: case for case in _of_programs()}
"""All cases whose training is a program under torchrun, by name."""
NOT_KNOWN = {
    # all processes aborted, without a flight recorder and without counters in the words of the
    # nccl2 backend
    "nccl-mismatch-operation-versionnccl2-rank2-of4",
    "nccl-mismatch-size-versionnccl2-rank0-of4",
    "nccl-skip-versionnccl2-rank11-of16",
}
"""Cascades that left too little; the verdict says so."""
