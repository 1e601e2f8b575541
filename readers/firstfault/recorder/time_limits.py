"""Every time limit of the node's recorder and its clients, in seconds: who waits so long, and what happens then."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Limit(float):
    """Seconds, and what they are for."""

    waits: str
    """Who waits so long, and for what."""
    end: str
    """What happens at the end."""

    def __new__(cls, seconds: float, waits: str, end: str) -> Self:
        """Return a number with two texts."""
        limit = super().__new__(cls, seconds)
        limit.waits, limit.end = waits, end
        return limit

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Pickle the number alone."""
        return float, (float(self),)


# a client of the recorder
REQUEST_RECEIPT_TIMEOUT_SECONDS = Limit(
    3.0, "a client, for the recorder to take its request; at most half of its time", "it does without"
)
FULL_BACKLOG_RETRY_SECONDS = Limit(0.01, "a client, while the recorder's backlog is full", "it connects again")
MIN_SOCKET_TIMEOUT_SECONDS = Limit(
    0.001, "a client whose time is up, for its socket", "a timeout; 0 would not block at all"
)
ROSTER_LISTING_TIMEOUT_SECONDS = Limit(10.0, "the agent's roster poll, for a listing", "it polls again later")
RECORDER_EXIT_GRACE_SECONDS = Limit(2.0, "the agent, for its recorder to end", "it kills the recorder")
KILLED_PROCESS_TIMEOUT_SECONDS = Limit(
    1.0, "the agent, for a process that it has killed", "it leaves a process that hangs in the kernel"
)
ORPHANS_GRACE_SECONDS = Limit(
    2.0, "the recorder of a dead agent, for processes of its workers; torchrun: 30", "it sends SIGKILL"
)
ORPHANS_POLL_SECONDS = Limit(0.02, "who ends what workers left; longer each time", "it looks for the processes again")
MAX_ORPHANS_POLL_SECONDS = Limit(0.5, "the longest of these pauses", "it looks again")
STDERR_READER_START_TIMEOUT_SECONDS = Limit(
    10.0, "the agent or the recorder, for the process that reads stderr on", "SIGPIPE ends writers"
)

# the recorder
SLOW_UPLOAD_SECONDS = Limit(1.0, "a second request for an upload in progress", "it begins another upload: one may hang")
MEMORY_SAMPLE_INTERVAL_SECONDS = Limit(0.5, "the recorder, between two looks at memory and folder", "it looks again")
IMPORT_DELAY_SECONDS = Limit(
    # earlier would slow down the job's start; if the agent dies before, its document comes 0.3 s later
    30.0,
    "the recorder, before it imports what an agent's death needs",
    "it imports",
)
UPLOADS_DRAIN_TIMEOUT_SECONDS = Limit(
    2.0, "the recorder, for uploads when the job ends", "it names the lost documents, and exits"
)
QUIET_PERIOD_SECONDS = Limit(
    0.3, "the recorder of a dead agent, without a request", "it exits: its workers have reported"
)
OPEN_REQUESTS_POLL_SECONDS = Limit(0.02, "the recorder of a dead agent, for requests to end", "it looks again")
AGENT_POLL_SECONDS = Limit(0.1, "the recorder without pidfd_open(2), for its agent's end", "it looks again")
