"""All time limits of the node's recorder and its clients.
`firstfault_torch.time_limits` has the rest.

The columns: seconds, who waits, for what, and what happens when the time is up.
"""

from __future__ import annotations

from firstfault.utils.time_limit import TimeLimit

# a client of the recorder
REQUEST_RECEIPT_TIMEOUT_SECONDS = TimeLimit(
    3.0,
    "a client, at most half of its time",
    "the recorder to take its request",
    "it does without",
)
FULL_BACKLOG_RETRY_SECONDS = TimeLimit(
    0.01,
    "a client of a recorder with a full backlog",
    "its next try",
    "it connects again",
)
MIN_SOCKET_TIMEOUT_SECONDS = TimeLimit(
    0.001,
    "a client without time left",
    "its socket",
    "a timeout; 0 would mean a non-blocking socket",
)
ROSTER_LISTING_TIMEOUT_SECONDS = TimeLimit(
    10.0,
    "the agent's roster poll",
    "a listing",
    "it polls again later",
)
RECORDER_EXIT_GRACE_SECONDS = TimeLimit(
    2.0,
    "the agent",
    "its recorder to end",
    "it kills the recorder",
)
KILLED_PROCESS_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "the agent",
    "a process that it has killed",
    "it leaves a process that hangs in the kernel",
)
ORPHANS_GRACE_SECONDS = TimeLimit(
    2.0,
    "the recorder of a dead agent (30 s under torchrun)",
    "processes of its workers to end",
    "it sends SIGKILL",
)
ORPHANS_POLL_SECONDS = TimeLimit(
    0.02,
    "who ends what workers left, longer each time",
    "these processes to end",
    "it polls again",
)
MAX_ORPHANS_POLL_SECONDS = TimeLimit(
    0.5,
    "who ends what workers left, at most",
    "these processes to end",
    "it polls again",
)
STDERR_READER_START_TIMEOUT_SECONDS = TimeLimit(
    10.0,
    "the agent or the recorder",
    "the process that reads stderr on",
    "SIGPIPE ends writers",
)

# the recorder
SLOW_UPLOAD_SECONDS = TimeLimit(
    1.0,
    "a second request for an upload in progress",
    "that upload",
    "it begins another one: the first may hang",
)
MEMORY_SAMPLE_INTERVAL_SECONDS = TimeLimit(
    0.5,
    "the recorder",
    "the next check of memory and folder",
    "it polls again",
)
FOLDER_TOUCH_INTERVAL_SECONDS = TimeLimit(
    600.0,
    "the recorder",
    "the next touch of the folder's files",
    "it touches them, so that no cleaner removes them",
)
# earlier would slow down the job's start; if the agent dies before, its document comes 0.3 s later
IMPORT_DELAY_SECONDS = TimeLimit(
    30.0,
    "the recorder",
    "its import of what an agent's death needs",
    "it imports",
)
UPLOADS_DRAIN_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "the recorder",
    "uploads when the job ends",
    "it names the lost documents, and exits",
)
QUIET_PERIOD_SECONDS = TimeLimit(
    0.3,
    "the recorder of a dead agent",
    "a request",
    "it exits: its workers have reported",
)
OPEN_REQUESTS_POLL_SECONDS = TimeLimit(
    0.02,
    "the recorder of a dead agent",
    "requests to end",
    "it polls again",
)
AGENT_POLL_SECONDS = TimeLimit(
    0.1,
    "the recorder without pidfd_open(2)",
    "its agent's end",
    "it polls again",
)
