"""The lines about stalls in a pod's log, for the terminal of ``firstfault run``."""

from __future__ import annotations

import re
import time
from pathlib import Path

_POLL_SECONDS = 1.0
_MAX_BYTES_READ = 1 << 20
"""In one poll."""
_STALL = re.compile(rb"firstfault: (?P<text>no progress for \d+ s[^\n]*)")
_MORE = re.compile(
    rb"firstfault: (?P<text>(?:rank \d+: |progress resumed after |the attempt ends after"
    rb" |ending the attempt |not ending the attempt)[^\n]*)"
)
"""What the agent prints after the first line of a stall."""


class StallLines:
    """Reads what an agent prints about stalls; every agent of a job prints the same."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._position = 0
        self._partial_line = b""
        self._has_stalled = False
        self._next_poll = 0.0

    def read(self) -> list[str]:
        """Return the lines since the last call, at most once a second."""
        now = time.monotonic()
        if now < self._next_poll:
            return []
        self._next_poll = now + _POLL_SECONDS
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                data = file.read(_MAX_BYTES_READ)
        except OSError:
            return []
        self._position += len(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self._partial_line = self._partial_line[-_MAX_BYTES_READ:]
        stall_texts = []
        for line in lines:
            match = _STALL.match(line) or (_MORE.match(line) if self._has_stalled else None)
            if match is not None:
                self._has_stalled = True
                stall_texts.append(match["text"].decode("utf-8", "replace"))
        return stall_texts
