"""The cases of the cascade lab, and what is right in each."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, slots=True)
class Case:
    """One fault, in one place."""

    fault: str
    culprit: int
    nodes: int = 2
    scope: str = "rank"
    """Whom the verdict has to name: the rank(s) or the node(s) that wrote the truth, "external", or nobody."""
    task: str = ""
    inputs: dict[str, object] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    clock: tuple[int, float] | None = None
    """Index of a pod, and by how many seconds its wall clock is wrong."""

    @property
    def name(self) -> str:
        """Unique, and a file's name."""
        clock = f"-clock{self.clock[1]:+g}" if self.clock is not None else ""
        extra = "".join(f"-{key}{value}" for key, value in sorted(self.inputs.items()))
        return f"{self.fault}{clock}{extra}-rank{self.culprit}-of{2 * self.nodes}"


_A_STORE_EACH = ("--env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
_OF_A_RANK = (
    "raise",
    "recoverable",
    "chained",
    "loader",
    "backward",
    "future",
    "thread",
    "finally",
    "finally-destroy",
    "SIGKILL",
    "SIGSEGV",
    "SIGABRT",
    "SIGTERM",
    "terminate",
    "exit-1",
    "exit-0",
    "sys.exit-0",
    "sys.exit-3",
    "hang",
    "hang-c",
    "skip",
    "mismatch",
    "memory",
    "disk",
    "cuda",
)
_OF_A_NODE = ("agent-killed", "store-killed")


def _cases() -> list[Case]:
    two = [Case(fault, culprit) for culprit in (3, 0, 2) for fault in _OF_A_RANK]
    two += [Case(fault, culprit, scope="node") for culprit in (3, 0, 2) for fault in _OF_A_NODE]
    two += [Case("agent-told", culprit, scope="external") for culprit in (3, 0, 2)]
    two += [
        Case("all-told", 0, scope="external"),
        Case("all-ranks", 0, scope="ranks"),
        Case("two-ranks", 1, scope="one"),
    ]
    two += [
        Case("two-ranks", 3, scope="one"),
        Case("raise", 3, inputs={"slow": 0}),
        Case("SIGKILL", 2, inputs={"slow": 1}),
    ]
    two += [
        Case(
            fault,
            3,
            task="restarted",
            inputs={"rounds": rounds},
            options=_A_STORE_EACH,
            scope="rank" if rounds > 1 else "none",
        )
        for fault in ("raise", "SIGKILL")
        for rounds in (1, 2)
    ]
    two += [
        Case(fault, 3, clock=(pod, seconds))
        for fault, seconds, pod in (
            ("raise", -5, 0),
            ("raise", 5, 1),
            ("raise", -600, 1),
            ("SIGKILL", 600, 0),
            ("SIGKILL", -600, 1),
            ("raise", 3600, 1),
            ("SIGKILL", -3600, 0),
        )
    ]
    four = [Case(fault, 5, nodes=4) for fault in _OF_A_RANK]
    four += [Case(fault, 2, nodes=4, scope="node") for fault in _OF_A_NODE]
    four += [Case("agent-told", 6, nodes=4, scope="external")]
    return two + four


CASES = {case.name: case for case in _cases()}
"""By name."""
