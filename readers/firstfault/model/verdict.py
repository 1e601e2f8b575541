"""The verdict of a strategy, and the decision whether to run the task again."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from firstfault.model.failure import Kind, Origin, WorkerError
from firstfault.model.job import Coverage


class Scope(str, enum.Enum):
    """The kind of root cause."""

    RANK = "rank"
    RANKS = "ranks"
    NODE = "node"
    EXTERNAL = "external"
    UNDETERMINED = "undetermined"


@dataclass(frozen=True, slots=True)
class Reason:
    """A sentence of a verdict, and the failures that support it."""

    text: str
    failures: tuple[WorkerError, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A possible root cause, if none is certain."""

    why: str
    rank: int | None = None
    node: str | None = None

    @property
    def name(self) -> str:
        """The suspect: "rank 3", or the node's name."""
        return f"rank {self.rank}" if self.rank is not None else str(self.node)


@dataclass(frozen=True, slots=True)
class Victims:
    """Processes that failed or were stopped as a consequence."""

    count: int = 0
    by_rank: tuple[tuple[int, str], ...] = ()
    """(rank, one line) of at most 100 victims, by rank."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A strategy's result: the root cause, the confidence, the reasons and the coverage."""

    scope: Scope
    code: str
    category: str
    headline: str
    message: str
    strategy: str
    ranks: tuple[int, ...] = ()
    node: str | None = None
    fingerprint: str = ""
    timestamp_ns: int | None = None
    confidence: str = "low"
    """"high", "medium" or "low"."""
    rule: str = ""
    """The strategy's rule that found the root cause, such as "own-fault"; empty: the strategy names none."""
    why: tuple[str, ...] = ()
    sources: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    """For each sentence of `why` the names of its documents, if the strategy gives any. Not in JSON, like `root`."""
    suspects: tuple[Suspect, ...] = ()
    victims: Victims = field(default_factory=Victims)
    coverage: Coverage = field(default_factory=lambda: Coverage(None, 0))
    settled: bool = True
    digest: str = ""
    document_count: int = 0
    root: WorkerError | None = None
    """The root cause; None if no single failure is it."""

    @property
    def reasons(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each sentence of `why` with the names of its documents."""
        sources = (*self.sources, *(() for _ in self.why))
        return tuple(zip(self.why, sources, strict=False))


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to run the task again, and on whose retry budget."""

    retry: bool
    kind: Kind
    origin: Origin
    enforced: bool
    """True: stock Flyte carries it out. False: it is advice."""
    reason: str
    retries_left: int | None = None
    """Of the task's `retries`, before this decision; None: not known."""

    @property
    def is_spent(self) -> bool:
        """Whether it is to retry although the retry budget is used up: the task does not run again."""
        return self.retry and self.origin is not Origin.SYSTEM and self.retries_left == 0
