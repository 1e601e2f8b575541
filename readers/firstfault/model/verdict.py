"""What a strategy concludes, and whether the task is run again."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from firstfault.model.failure import Kind, Origin, WorkerError
from firstfault.model.job import Coverage

__all__ = ["Decision", "Reason", "Scope", "Suspect", "Verdict", "Victims"]


class Scope(str, enum.Enum):
    """What the root cause is."""

    RANK = "rank"
    RANKS = "ranks"
    NODE = "node"
    EXTERNAL = "external"
    UNDETERMINED = "undetermined"


@dataclass(frozen=True, slots=True)
class Reason:
    """A sentence of a verdict, and what it rests on."""

    text: str
    failures: tuple[WorkerError, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspect:
    """Somebody who may be the root cause when nobody certainly is."""

    why: str
    rank: int | None = None
    node: str | None = None

    @property
    def name(self) -> str:
        """Whom it names: "rank 3", or the node's name."""
        return f"rank {self.rank}" if self.rank is not None else str(self.node)


@dataclass(frozen=True, slots=True)
class Victims:
    """Who failed, or was stopped, as a consequence."""

    count: int = 0
    by_rank: tuple[tuple[int, str], ...] = ()
    """At most 100 of (rank, one line), by rank."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a strategy returns: the root cause, how sure it is and why, and what it did not see."""

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
    why: tuple[str, ...] = ()
    sources: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    """For each sentence of `why` the names of the documents it rests on; empty where the strategy does not say.

    Like `root` it is not in JSON: it leads to documents, and who has none has no use for it.
    """
    suspects: tuple[Suspect, ...] = ()
    victims: Victims = field(default_factory=Victims)
    coverage: Coverage = field(default_factory=lambda: Coverage(None, 0))
    settled: bool = True
    digest: str = ""
    document_count: int = 0
    root: WorkerError | None = None
    """The failure the verdict rests on, None if there is no single one."""

    @property
    def reasons(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Each sentence of `why` with the names of the documents it rests on."""
        sources = (*self.sources, *(() for _ in self.why))
        return tuple(zip(self.why, sources, strict=False))


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to run the task again, and who pays."""

    retry: bool
    kind: Kind
    origin: Origin
    enforced: bool
    """True: stock Flyte will do this. False: it is advice."""
    reason: str
    retries_left: int | None = None
    """Of the task's `retries`, before this decision; None: not known."""

    @property
    def is_spent(self) -> bool:
        """Whether it says retry, and the budget that would pay for it is used up: the task is not run again."""
        return self.retry and self.origin is not Origin.SYSTEM and self.retries_left == 0
