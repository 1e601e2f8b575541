"""Which reports on stalls a node prints, records and sends to notifiers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from firstfault.model.job import STALLS_OF_ROUND
from firstfault_torch.protocol.stall_messages import (
    NotifyOfStall,
    PrintLines,
    Stall,
    StallAction,
    StallReport,
    WriteRecord,
)

REPEATED_STALLS_PRINTED = 3
"""Stalls at one position that are printed although the job resumed;
later ones only if they are long.
"""
MAX_REMEMBERED_STALLS = 1000
"""Stalls of different ranks or positions that are remembered; then the first is forgotten."""
MAX_UNPRINTED_STALLS = 100
"""Unprinted stalls recorded per round: each record adds a name to the roster's listing."""


class StallReports:
    """The present stall of a node with its report, and the stalls after which the job resumed."""

    def __init__(self) -> None:
        self.stall: Stall | None = None
        """The present one, or None while it has no report or the workers make progress."""
        self.resumed: Counter[tuple[tuple[int, ...], str]] = Counter()
        """Number of stalls after which the job resumed, by ranks and position."""
        self.notifies = False
        """Whether the report is sent to notifiers."""
        self._forgotten = 0
        """Number of resumed stalls that aren't counted by ranks and position any more."""

    @property
    def next_number(self) -> int:
        """The number of a stall on which this node reports by itself."""
        return self.resumed.total() + self._forgotten

    def decide_to_print(self, report: StallReport, *, is_long: bool) -> bool:
        """Whether a report is printed, and not only recorded: the job doesn't often resume from
        there.
        """
        is_repeated = self.resumed[report.ranks, report.place] >= REPEATED_STALLS_PRINTED
        return is_long or bool(report.workers_to_kill) or not is_repeated

    def show(self, stall: Stall, *, is_long: bool) -> list[StallAction]:
        """Print and record a report on the present stall."""
        report, before = stall.report, self.stall
        is_shown = report.is_shown
        if is_shown is None:
            is_shown = self.decide_to_print(report, is_long=is_long)
        if before is not None and before.report.ranks and not report.ranks:
            stall = before  # a node didn't report, because its ranks had just resumed
        # A stall keeps the number of its first warning, so it has one record.
        self.stall = stall = replace(stall, is_shown=is_shown, number=(before or stall).number)
        record = self._record(stall)
        was_shown = before is not None and before.is_shown
        self.notifies = bool(record) and is_shown and not was_shown
        return [*([PrintLines(report.lines)] if is_shown else []), *record]

    def complete(self, now: float) -> list[StallAction]:
        """The workers make progress again: complete the record, and print that."""
        stall, self.stall = self.stall, None
        if stall is None:
            return []
        self.resumed[stall.report.ranks, stall.report.place] += 1
        if len(self.resumed) > MAX_REMEMBERED_STALLS:
            self._forgotten += self.resumed.pop(next(iter(self.resumed)))
        seconds = now - stall.began
        record = self._record(stall, seconds)
        if not stall.is_shown:
            return record
        line = f"progress resumed after {seconds:.0f} s"
        return [*record, PrintLines((line,)), *([NotifyOfStall()] if record else [])]

    def _record(self, stall: Stall, lost_seconds: float | None = None) -> list[StallAction]:
        # Only the leader writes: an election leaves one record.
        most = STALLS_OF_ROUND if stall.is_shown else MAX_UNPRINTED_STALLS
        return [WriteRecord(stall, lost_seconds)] if stall.is_mine and stall.number < most else []
