"""The inputs and outputs of a stall watch: events, instructions, and the report of all nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class StallReport:
    """The conclusion of one agent for all nodes. Its fields are keys of JSON in the store."""

    lines: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    """The stragglers; empty if no rank differs from the rest."""
    node: str = ""
    position: str = ""
    """The first straggler's: "loader.py:88 in read_shard"."""
    exit_stage: str = ""
    """What the first straggler had finished, if it is at no line of the program: "its function had
    returned while its peers waited for it".
    """
    workers_to_kill: tuple[tuple[int, int], ...] = ()
    """(group rank, local rank) of the workers to kill to end the attempt; empty to continue it."""
    is_shown: bool | None = None
    """Whether all nodes print the report, or its leader only records it. None if each node decides:
    the leader is of an earlier version.
    """

    @property
    def place(self) -> str:
        """The first straggler's position. Without a straggler, the end of the first line: "no
        single rank is behind".
        """
        return self.position or self.exit_stage or "".join(self.lines[:1]).rpartition(", ")[2]

    @property
    def straggler(self) -> str:
        """The first straggler and where it is: "rank 3 at loader.py:88 in read_shard"."""
        if not self.ranks:
            return "no single rank"
        at = f" at {self.position}" if self.position else ""
        return f"rank {self.ranks[0]}" + (f": {self.exit_stage}" if self.exit_stage else at)


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall with a report."""

    report: StallReport
    number: int
    """Of its first report: a stall has one record."""
    began: float
    """Seconds of the monotonic clock."""
    is_mine: bool
    """Whether this agent was the leader, and stores the record."""
    is_shown: bool = True


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PollDue:
    """It's time to poll the workers."""

    has_workers: bool
    """Whether any worker of this node runs."""


@dataclass(frozen=True, slots=True)
class ProgressPolled:
    """The workers have answered, or not in time."""

    has_moved: bool
    """Whether a worker has made progress since the last poll."""
    since: float
    """Time of the last progress."""
    is_starting: bool
    """Whether the training is in its first steps."""


@dataclass(frozen=True, slots=True)
class PollEnded:
    """All instructions of a poll are carried out, or one has failed."""


@dataclass(frozen=True, slots=True)
class ObservationsTaken:
    """This node's workers are observed: snapshots, kernel states, use of CPU and disk."""

    calls_collectives: bool
    """Whether a worker has called a collective, or forms its process group."""


@dataclass(frozen=True, slots=True)
class NumberRead:
    """The number of the next stall; None if the store doesn't answer."""

    number: int | None


@dataclass(frozen=True, slots=True)
class PeersLookedUp:
    """Whether a peer takes part in the comparison with that number."""

    have_begun: bool


@dataclass(frozen=True, slots=True)
class ReportsCollected:
    """This agent leads the comparison, and has the nodes' observations."""

    group_ranks: frozenset[int]
    """The nodes that have observations."""


@dataclass(frozen=True, slots=True)
class StallConcluded:
    """This agent has concluded, for all nodes or without a comparison."""

    report: StallReport


@dataclass(frozen=True, slots=True)
class ReportElected:
    """The comparison is over: this report counts on all nodes."""

    report: StallReport
    is_mine: bool
    """Whether this agent has concluded."""


@dataclass(frozen=True, slots=True)
class NoReportElected:
    """No agent has published a report in time."""


@dataclass(frozen=True, slots=True)
class ComparisonClosed:
    """No agent can publish a report any more; None if none was published just before."""

    report: StallReport | None


@dataclass(frozen=True, slots=True)
class StallCounted:
    """The number of the next stall after this one was counted;
    None if the store doesn't answer.
    """

    next_number: int | None


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """The round has ended on this node, or is about to."""


StallEvent: TypeAlias = (
    PollDue
    | ProgressPolled
    | PollEnded
    | ObservationsTaken
    | NumberRead
    | PeersLookedUp
    | ReportsCollected
    | StallConcluded
    | ReportElected
    | NoReportElected
    | ComparisonClosed
    | StallCounted
    | RoundEnded
)


# --- instructions that an event answers -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskWorkers:
    """Ask the workers for their progress; answer with `ProgressPolled`."""


@dataclass(frozen=True, slots=True)
class ConfirmStall:
    """Ask the workers once more before one is killed; answer with `ProgressPolled`."""


@dataclass(frozen=True, slots=True)
class Observe:
    """Observe the workers, and answer with `ObservationsTaken`."""

    ends_attempt: bool
    """Whether this node has been without progress for long enough to end the attempt."""


@dataclass(frozen=True, slots=True)
class ReadNumber:
    """Read the number of the next stall, and answer with `NumberRead`."""


@dataclass(frozen=True, slots=True)
class LookUpPeers:
    """Look whether a peer compares the stall with this number; answer with `PeersLookedUp`."""

    number: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Share this node's observations in an election; answer with `ReportElected` or
    `NoReportElected`, and before, as the leader, with `ReportsCollected`.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Conclude:
    """Conclude on the observations of all nodes, or without a comparison on this node's; answer
    with `StallConcluded`.
    """

    missing: tuple[int, ...]
    """Group ranks of nodes without observations."""
    seconds: float
    """Time without progress."""
    ends_attempt: bool
    continues_if_busy: bool
    """Whether a busy straggler isn't killed."""
    is_starting: bool
    is_silent_if_busy: bool
    """Whether nothing is reported if a straggler is busy."""


@dataclass(frozen=True, slots=True)
class CloseComparison:
    """See to it that no agent waits for a report; answer with `ComparisonClosed`."""


@dataclass(frozen=True, slots=True)
class CountStall:
    """Count up the number of the next stall unless a peer has; answer with `StallCounted`."""

    number: int


StallQuestion: TypeAlias = (
    AskWorkers
    | ConfirmStall
    | Observe
    | ReadNumber
    | LookUpPeers
    | Compare
    | Conclude
    | CloseComparison
    | CountStall
)

# --- other instructions ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SkipFrozenTime:
    """Count these seconds as no time: this agent didn't run, and perhaps its workers didn't."""

    seconds: float


@dataclass(frozen=True, slots=True)
class MeasureUsage:
    """Measure the workers' use of CPU and disk: the next observation compares with it."""


@dataclass(frozen=True, slots=True)
class ShareReport:
    """Publish this report for all nodes, as the leader."""

    report: StallReport


@dataclass(frozen=True, slots=True)
class ReplaceConnections:
    """Use other connections to the store for the next comparison: one may be broken, or be kept by
    a thread that waits.
    """


@dataclass(frozen=True, slots=True)
class DeleteStalls:
    """Delete what the comparisons with these numbers have left in the store."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrintLines:
    """Print lines to this node's stderr."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write the record of a stall."""

    stall: Stall
    lost_seconds: float | None = None
    """How long the stall took; None while it lasts."""


@dataclass(frozen=True, slots=True)
class NotifyOfStall:
    """Send the record that was written last to notifiers."""


@dataclass(frozen=True, slots=True)
class KillWorkers:
    """Kill workers of this node as at a missed deadline."""

    local_ranks: tuple[int, ...]
    seconds: float
    """Time without progress."""


StallAction: TypeAlias = (
    SkipFrozenTime
    | MeasureUsage
    | ShareReport
    | ReplaceConnections
    | DeleteStalls
    | PrintLines
    | WriteRecord
    | NotifyOfStall
    | KillWorkers
)

StallInstruction: TypeAlias = StallQuestion | StallAction
