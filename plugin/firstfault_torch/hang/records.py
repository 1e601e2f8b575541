"""Writes the record of each stall, and sends it to notifiers."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from firstfault.layout import ROSTER, restart_record_name
from firstfault.model import RestartKind, RestartRecord
from firstfault.model.job import STALLS_OF_ROUND
from firstfault.utils.text import one_line
from firstfault.wire.json_schemas import restart_to_json
from firstfault_torch.conclusion.notifications import notify

if TYPE_CHECKING:
    from firstfault_torch.agent.place_factory import PlaceFactory
    from firstfault_torch.agent.reporter import Reporter
    from firstfault_torch.protocol.stall_messages import Stall

NOTIFY_STALLS_VARIABLE = "FIRSTFAULT_NOTIFY_STALLS"
"""Environment variable. With the value 0, notifiers get verdicts only."""


class StallRecords:
    """The records of one node's stalls."""

    def __init__(self, reporter: Reporter, places: PlaceFactory) -> None:
        self._reporter = reporter
        self._places = places
        self._last: RestartRecord | None = None

    def write(self, stall: Stall, lost_seconds: float | None) -> None:
        """Write the record of a stall, or add to it how long the stall took."""
        node_context = self._reporter.node_context
        place = self._places.of(0)
        report = stall.report
        self._last = record = RestartRecord(
            RestartKind.STALL,
            node_context.round * STALLS_OF_ROUND + stall.number,
            one_line(report.straggler),
            restart=False,
            reason=report.lines[0],
            rank=report.ranks[0] if report.ranks else None,
            node=report.node,
            timestamp_ns=time.time_ns() - int((time.monotonic() - stall.began) * 1e9),
            lost_seconds=lost_seconds,
            world_size_before=place.world_size or None,
        )
        name = restart_record_name(record.kind.value, record.number, place.group_rank or 0)
        self._reporter.put(f"{ROSTER}/{name}", restart_to_json(record))

    def notify(self) -> None:
        """Send the last record to notifiers."""
        record = self._last
        if record is not None and os.environ.get(NOTIFY_STALLS_VARIABLE) != "0":
            over, uri = record.lost_seconds, self._reporter.node_context.output_prefix
            line = (
                record.reason
                if over is None
                else f"progress resumed after {over:.0f} s: {record.headline}"
            )
            report = {"uri": uri, "first_line": line, **json.loads(restart_to_json(record))}
            notify(report)
