"""All time limits of the node's recorder and its clients, in seconds. `firstfault_torch.time_limits` has the rest."""

# a client of the recorder
REQUEST_RECEIPT_TIMEOUT_SECONDS = 3.0
"""A client, for the recorder to take its request; at most half of its time. Then it does without."""
FULL_BACKLOG_RETRY_SECONDS = 0.01
"""A client, while the recorder's backlog is full. Then it connects again."""
MIN_SOCKET_TIMEOUT_SECONDS = 0.001
"""A client without time left, for its socket. Then a timeout; 0 would mean a non-blocking socket."""
ROSTER_LISTING_TIMEOUT_SECONDS = 10.0
"""The agent's roster poll, for a listing. Then it polls again later."""
RECORDER_EXIT_GRACE_SECONDS = 2.0
"""The agent, for its recorder to end. Then it kills the recorder."""
KILLED_PROCESS_TIMEOUT_SECONDS = 1.0
"""The agent, for a process that it has killed. Then it leaves a process that hangs in the kernel."""
ORPHANS_GRACE_SECONDS = 2.0
"""The recorder of a dead agent, for processes of its workers; torchrun: 30. Then it sends SIGKILL."""
ORPHANS_POLL_SECONDS = 0.02
"""Who ends what workers left; longer each time. Then it looks for the processes again."""
MAX_ORPHANS_POLL_SECONDS = 0.5
"""The longest of these pauses. Then it looks again."""
STDERR_READER_START_TIMEOUT_SECONDS = 10.0
"""The agent or the recorder, for the process that reads stderr on. Then SIGPIPE ends writers."""

# the recorder
SLOW_UPLOAD_SECONDS = 1.0
"""A second request for an upload in progress. Then it begins another upload: one may hang."""
MEMORY_SAMPLE_INTERVAL_SECONDS = 0.5
"""The recorder, between two looks at memory and folder. Then it looks again."""
FOLDER_TOUCH_INTERVAL_SECONDS = 600.0
"""The recorder, between two touches of the folder's files. Then it touches them, so that no cleaner removes them."""
# earlier would slow down the job's start; if the agent dies before, its document comes 0.3 s later
IMPORT_DELAY_SECONDS = 30.0
"""The recorder, before it imports what an agent's death needs. Then it imports."""
UPLOADS_DRAIN_TIMEOUT_SECONDS = 2.0
"""The recorder, for uploads when the job ends. Then it names the lost documents, and exits."""
QUIET_PERIOD_SECONDS = 0.3
"""The recorder of a dead agent, without a request. Then it exits: its workers have reported."""
OPEN_REQUESTS_POLL_SECONDS = 0.02
"""The recorder of a dead agent, for requests to end. Then it looks again."""
AGENT_POLL_SECONDS = 0.1
"""The recorder without pidfd_open(2), for its agent's end. Then it looks again."""
