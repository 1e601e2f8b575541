"""All time limits of a node, in seconds: who waits, for what, and what happens when the time is up.

The recorder's own are in `firstfault.recorder.time_limits`, which doesn't import torch. ``python
tools/describe_limits.py`` prints the table of both, and adds up consecutive waits.
"""

from __future__ import annotations

from firstfault.recorder.time_limits import Limit

# what a task may set
UPLOAD_DEADLINE_SECONDS = Limit(
    5.0, "a failing worker, for its document to be durable", "it raises; the agent uploads it"
)
SETTLE_SECONDS = Limit(10.0, "a node that failed, for the remaining nodes' reports", "one node concludes without them")
STOP_GRACE_SECONDS = Limit(2.0, "the agent, for its workers to end after SIGTERM", "it sends SIGKILL")
TORCHRUN_STOP_GRACE_SECONDS = Limit(30.0, "the same under torchrun, after a signal to the launcher", "it sends SIGKILL")

# the guard around firstfault's own code
SHUTDOWN_CALL_TIMEOUT_SECONDS = Limit(0.3, "any call that has a limit, once the pod is to end", "it is given up")
SHUTDOWN_POLL_SECONDS = Limit(0.05, "any call that has a limit", "it looks whether the pod is to end")
BACKGROUND_RESULT_TIMEOUT_SECONDS = Limit(
    0.5, "the agent's loop, for an answer that is usually there", "it continues with the default"
)

# a worker
SIBLING_FORK_TIMEOUT_SECONDS = Limit(
    10.0, "a forked worker, for its siblings to be forked", "it starts; a fork takes milliseconds"
)
SIBLING_FORK_POLL_SECONDS = Limit(0.005, "the same worker", "it looks again")
RUN_FOLDER_TIMEOUT_SECONDS = Limit(
    5.0, "torchrun's agent, for the folder of its run", "its documents go to a temporary folder"
)
RUN_NAME_TIMEOUT_SECONDS = Limit(
    15.0, "torchrun's agent, for the nodes to agree on the run's name", "it uses a generated name"
)
DOCTOR_STORAGE_TIMEOUT_SECONDS = Limit(
    15.0, "`firstfault doctor`, for the storage to be written, listed and read", "it reports that"
)
DOCTOR_RECORDER_TIMEOUT_SECONDS = Limit(
    15.0, "`firstfault doctor`, for a collective of one rank to be recorded", "it reports that"
)
DOCTOR_PYTHON_TIMEOUT_SECONDS = Limit(15.0, "`firstfault doctor`, for the workers' Python to start", "it reports that")
MIN_SPOOL_TIMEOUT_SECONDS = Limit(0.5, "a process that writes into the spool, at least", "it uploads without the spool")
RECEIPT_TIMEOUT_SECONDS = Limit(0.5, "a process that writes a receipt", "the agent uploads the document again")
NODE_SETUP_TIMEOUT_SECONDS = Limit(0.25, "the agent, for files about GPUs and sources", "the report does without them")
FLIGHT_RECORDER_TIMEOUT_SECONDS = Limit(
    0.25, "a worker, for torch's flight recorders", "its document has no collectives"
)
GPU_UUID_TIMEOUT_SECONDS = Limit(0.5, "a failing worker, for its GPU's UUID", "its document has none")
FILE_SYSTEMS_TIMEOUT_SECONDS = Limit(
    0.25, "a failing worker, for the space of file systems", "those that did answer count"
)
CONTAINER_MEMORY_TIMEOUT_SECONDS = Limit(
    0.25, "a failing worker, for the recorder's data on memory", "its document has none"
)
PARENT_DEATH_TIMEOUT_SECONDS = Limit(
    0.3, "a worker that a signal ends, to see whether its agent is dying", "the agent lives"
)
PARENT_DEATH_POLL_SECONDS = Limit(0.01, "the same worker", "it looks at its parent again")
CLEAN_EXIT_GRACE_SECONDS = Limit(
    3.0, "a worker that called sys.exit(0), for its siblings to exit", "it shuts down gloo's connections"
)
SEND_TIMEOUT_SECONDS = Limit(0.5, "a sender of a message, for the receiver's queue", "the message is lost")
DEADLINE_SEND_TIMEOUT_SECONDS = Limit(
    1.0, "a worker, for an agent that reads no deadlines", "it sends them with the next call"
)
STACK_SETTLE_SECONDS = Limit(0.02, "the agent, while a file of stacks does not grow", "it reads the file")
STACK_POLL_SECONDS = Limit(0.005, "the agent, for stacks", "it looks again")
GLOO_POLL_SECONDS = Limit(0.005, "a worker, for the epoll object of gloo's thread", "it looks again, 20 times")
ANNOUNCE_TIMEOUT_SECONDS = Limit(60.0, "a thread of a rank without an agent, for its roster entry", "it logs a warning")
LAST_DECKS_TIMEOUT_SECONDS = Limit(
    0.1, "a worker that is to be stopped, for rank 0's decks", "the decks are a second old"
)

# the agent and its workers
RELAY_CLOSE_TIMEOUT_SECONDS = Limit(
    2.0, "the agent, for the rest of stderr", "its exit waits for that, unless a signal ends it"
)
WORKER_QUERY_TIMEOUT_SECONDS = Limit(
    0.3, "the agent, for its workers' stacks, then for their state", "it stops them without"
)
IN_FLIGHT_GRACE_SECONDS = Limit(1.0, "the agent, for an exception on its way out of a worker", "it stops the worker")
FAILED_WORKER_EXIT_GRACE_SECONDS = Limit(8.0, "the agent, for exit handlers of a failed worker", "it sends SIGKILL")
STOP_POLL_SECONDS = Limit(0.01, "the agent that stops workers", "it looks again")
EXIT_WATCH_POLL_SECONDS = Limit(0.5, "the thread that waits for deaths", "it looks whether it has to stop")
SOURCE_LINES_TIMEOUT_SECONDS = Limit(0.5, "the agent, for the source lines of stacks", "the stacks have none")
MEMORY_REPORT_TIMEOUT_SECONDS = Limit(1.0, "the agent, for the recorder's data on memory", "the document has none")
IDLE_WATCHDOG_POLL_SECONDS = Limit(10.0, "the watchdog without a deadline", "it looks at the clock")
WATCHDOG_POLL_SECONDS = Limit(1.0, "the watchdog with a deadline", "it looks at the clock, so that it notices a stall")
FROZEN_WATCHDOG_SECONDS = Limit(
    1.0, "the watchdog, longer than it wanted to sleep", "deadlines move: the pod was frozen"
)
WATCHDOG_JOIN_TIMEOUT_SECONDS = Limit(2.0, "the agent, for the watchdog's thread", "it continues")
PROGRESS_POLL_SECONDS = Limit(5.0, "the agent, between two looks for its workers' progress", "it looks again")
SNAPSHOT_TIMEOUT_SECONDS = Limit(2.0, "the same agent, for stacks of workers without progress", "it reports without")
SNAPSHOT_FLIGHT_RECORDER_TIMEOUT_SECONDS = Limit(
    1.5, "a worker without progress, for torch's flight recorders", "its answer has no collectives"
)
KERNEL_STATE_POLL_SECONDS = Limit(0.02, "an agent that sees a process blocked in the kernel", "it looks again")
RAS_TIMEOUT_SECONDS = Limit(2.0, "the agent that concludes on a stall, for NCCL's RAS", "its report leaves it out")
RAS_PEER_TIMEOUT_SECONDS = Limit(0.5, "the same agent, for one process that answers for RAS", "it asks again")
STALL_REPORTS_TIMEOUT_SECONDS = Limit(
    12.0, "an agent of workers without progress, for its peers", "it reports what it knows"
)
SURVIVORS_STORE_TIMEOUT_SECONDS = Limit(2.0, "an agent without workers, for the store", "it ends without an answer")
SURVIVORS_EXIT_GRACE_SECONDS = Limit(2.0, "the agent, for its other workers when one has given up", "it stops them")
SURVIVORS_POLL_SECONDS = Limit(0.05, "the same agent", "it looks again")
SURVIVORS_CHECK_INTERVAL_SECONDS = Limit(
    1.0, "an agent without workers, between two looks for others", "it looks again"
)

# a signal to the agent
MAIN_THREAD_TIMEOUT_SECONDS = Limit(
    1.0, "the signal thread, for the main thread to react", "it seals the verdict and ends the pod"
)
SIGNAL_RAISE_INTERVAL_SECONDS = Limit(
    0.25, "the signal thread", "it raises in the main thread again: the code may have swallowed it"
)
TERMINATED_UPLOADS_TIMEOUT_SECONDS = Limit(
    3.0, "a terminated agent, for all uploads of its node", "the recorder continues them"
)
TERMINATED_LATE_UPLOAD_TIMEOUT_SECONDS = Limit(
    0.3, "the same agent, for an upload that begins later", "the recorder continues it"
)
TERMINATED_SETTLE_SECONDS = Limit(
    1.5, "a terminated agent, for the remaining nodes' reports", "one node concludes without them"
)
TERMINATED_READ_TIMEOUT_SECONDS = Limit(1.5, "a terminated agent, for the storage", "it concludes from what it has")
TERMINATED_CONCLUDE_TIMEOUT_SECONDS = Limit(
    3.0, "a terminated agent, for strategy and policy", "firstfault's defaults decide"
)
TERMINATED_PREVIOUS_VERDICT_TIMEOUT_SECONDS = Limit(
    0.3, "a terminated agent, for the verdict before", "it decides without"
)
TERMINATED_PEER_VERDICT_TIMEOUT_SECONDS = Limit(
    5.0, "a terminated agent, for another node's verdict", "it concludes alone"
)
TERMINATED_PEER_PUBLISH_TIMEOUT_SECONDS = Limit(
    2.0, "the same agent, if that verdict is being published", "it concludes alone"
)
TERMINATED_PUBLISH_TIMEOUT_SECONDS = Limit(
    2.0, "a terminated agent, for the upload of its verdict", "the entrypoint tries again"
)
EXIT_STEP_TIMEOUT_SECONDS = Limit(1.0, "a signal thread that ends the pod, at each step", "it takes the next step")
EXIT_RECORDER_TIMEOUT_SECONDS = Limit(1.0, "a signal thread that ends the pod, for the recorder", "it exits")

# the nodes of a round
ROUND_NUMBER_TIMEOUT_SECONDS = Limit(5.0, "an agent, for the number of the round", "it uses its own count")
STORE_TIMEOUT_SECONDS = Limit(2.0, "an agent, for the store to take or give a value", "the store counts as lost")
LOST_STORE_GRACE_SECONDS = Limit(0.2, "an agent that lost the store, for its host to stop listening", "the host lives")
FATAL_FAILURE_POLL_SECONDS = Limit(0.5, "an agent, while a peer restarts its workers", "it looks for a fatal failure")
EXIT_BARRIER_POLL_SECONDS = Limit(1.0, "the exit barrier", "it looks again")
EXIT_BARRIER_TIMEOUT_SECONDS = Limit(
    300.0, "the exit barrier, in a job with nodes that don't run firstfault", "it counts as passed, as in torch"
)
FINISH_ACKS_TIMEOUT_SECONDS = Limit(2.0, "the exit barrier, for all agents to know that all have finished", "it ends")
EXIT_BARRIER_LOG_INTERVAL_SECONDS = Limit(60.0, "the exit barrier", "it logs that it waits")
RENDEZVOUS_CLOSE_TIMEOUT_SECONDS = Limit(
    2.0, "an agent, for listeners to end and the rendezvous to close", "it continues"
)
ROSTER_FAILURE_GRACE_SECONDS = Limit(
    60.0, "an agent that sees a failure in the roster, for a restart", "the failure counts"
)
RECONNECT_TIMEOUT_SECONDS = Limit(1.5, "an agent, for a peer to connect again", "the peer counts as dead")
PEER_CONNECT_TIMEOUT_SECONDS = Limit(5.0, "an agent, for one connection to the first agent", "it tries again")
CONNECT_BACKOFF_SECONDS = Limit(0.1, "an agent, between two tries; doubled each time", "it tries again")
MAX_CONNECT_BACKOFF_SECONDS = Limit(2.0, "the longest of these pauses", "it tries again")
FIRST_AGENT_PORT_TIMEOUT_SECONDS = Limit(
    300.0, "an agent, for the first agent's port", "it does without: that one has no firstfault"
)
ROSTER_POLL_SECONDS = Limit(5.0, "the roster poll, at least", "it lists the roster")
ROSTER_JOIN_TIMEOUT_SECONDS = Limit(1.0, "the agent, for the roster poll's thread", "it continues")

# one verdict for all
LEADER_TIMEOUT_SECONDS = Limit(2.0, "the next node in the order, for a verdict", "it concludes itself")
LEADER_TIMEOUT_SECONDS_PER_NODE = Limit(0.002, "the same, more for each node", "it concludes itself")
ACKNOWLEDGMENT_TIMEOUT_SECONDS = Limit(
    3.0, "a node that reported, for an agent that acknowledged nothing", "that agent counts as dead"
)
ARRIVALS_POLL_SECONDS = Limit(0.5, "a node that reported; doubled each time", "it looks who lives")
MAX_ARRIVALS_POLL_SECONDS = Limit(2.0, "the longest of these pauses", "it looks who lives")
ELECTION_STEP_TIMEOUT_SECONDS = Limit(5.0, "a node, for the store to take or give reports", "it concludes alone")
ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE = Limit(0.01, "the same, more for each node", "it concludes alone")
LEADER_PUBLISH_TIMEOUT_SECONDS = Limit(11.0, "the next node, for one that has begun to publish", "it concludes itself")
SECOND_NODE_DELAY_SECONDS = Limit(5.0, "the second node without a store, for the first one's verdict", "it concludes")
NEXT_NODE_DELAY_SECONDS = Limit(2.0, "the third and the fourth node, longer each", "it concludes")
LATER_NODES_DELAY_SECONDS = Limit(3.0, "each later group of nodes, longer", "it concludes")
VERDICT_READ_TIMEOUT_SECONDS = Limit(3.0, "a node without a store, for one look at the storage", "it looks again")
VERDICT_POLL_SECONDS = Limit(0.5, "the same node; longer each time", "it looks again")
MAX_VERDICT_POLL_SECONDS = Limit(2.0, "the longest of these pauses", "it looks again")
NAME_SERVICE_TIMEOUT_SECONDS = Limit(1.0, "the agent, for its own address", "documents have no address")
READ_TIMEOUT_SECONDS = Limit(10.0, "the node that concludes, for the storage", "it concludes from what it has")
CONCLUDE_TIMEOUT_SECONDS = Limit(
    30.0, "the node that concludes, for strategy and policy", "firstfault's defaults decide"
)
PREVIOUS_VERDICT_TIMEOUT_SECONDS = Limit(2.0, "the node that concludes, for the verdict before", "it decides without")
PUBLISH_TIMEOUT_SECONDS = Limit(
    5.0, "the node that concludes, for the upload of its verdict", "the entrypoint tries again"
)
HANDOVER_TIMEOUT_SECONDS = Limit(
    2.0, "the node that concluded, for copies and the next attempt's file", "it does without"
)
HANDOVER_SLACK_SECONDS = Limit(0.5, "the same, longer: each upload has its own limit", "it does without")
NOTIFIERS_TIMEOUT_SECONDS = Limit(3.0, "the node that concluded, for all notifiers", "they are not waited for")
WEBHOOK_TIMEOUT_SECONDS = Limit(3.0, "a webhook's thread, for its connection and its answer", "it logs a warning")
OTEL_TIMEOUT_SECONDS = Limit(3.0, "the thread of OpenTelemetry's exporter", "it logs a warning")

# Flyte
OUTPUTS_TIMEOUT_SECONDS = Limit(1800.0, "a pod without rank 0, for outputs or an error", "it exits with 0")
UNREADABLE_OUTPUTS_TIMEOUT_SECONDS = Limit(60.0, "the same, if it may not look", "it exits with 0")
POD_VERDICT_READ_TIMEOUT_SECONDS = Limit(2.0, "a pod, for one look at another pod's verdict", "it concludes itself")
SHUTDOWN_POD_VERDICT_READ_TIMEOUT_SECONDS = Limit(1.0, "the same, once the pod is to end", "it concludes itself")
OUTPUTS_POLL_SECONDS = Limit(0.05, "a pod without rank 0; longer each time", "it looks again")
MAX_OUTPUTS_POLL_SECONDS = Limit(2.0, "the longest of these pauses", "it looks again")
DECKS_POLL_SECONDS = Limit(1.0, "rank 0's process, between two looks at its decks", "it saves changed ones")
FINAL_DECKS_TIMEOUT_SECONDS = Limit(1.0, "rank 0's process, for its last look", "the decks are a second old")
DECK_TIMEOUT_SECONDS = Limit(3.0, "the pod that writes the deck, and all others for it", "the deck stays as it is")
EARLIER_ATTEMPTS_TIMEOUT_SECONDS = Limit(1.0, "the pod that writes the deck, for earlier attempts", "the deck has none")

# restarts inside the processes
SIGNAL_HANDLER_INTERVAL_SECONDS = Limit(
    0.2, "a rank's main thread, between two chances for signal handlers", "it waits on"
)
THREAD_JOIN_TIMEOUT_SECONDS = Limit(5.0, "a rank, for its threads to end", "it continues")
STORE_OPERATION_TIMEOUT_SECONDS = Limit(300.0, "a rank, for the store's operations, as in torch", "the function fails")
ENDING_STORE_TIMEOUT_SECONDS = Limit(5.0, "a rank, for a store that may be about to end", "it does without")
MONITOR_START_TIMEOUT_SECONDS = Limit(60.0, "a rank, for its monitor process", "the function fails")
MONITOR_STORE_TIMEOUT_SECONDS = Limit(5.0, "a monitor process, for the store", "the store counts as lost")
MONITOR_REPORT_TIMEOUT_SECONDS = Limit(20.0, "a monitor process that reports a death, for a slow store", "it gives up")
MONITOR_LINGER_SECONDS = Limit(30.0, "the monitor process that hosts the store, for its clients", "it ends")
MONITOR_CLOSE_TIMEOUT_SECONDS = Limit(1.0, "a rank, for its monitor thread", "it continues")
NCCL_ABORT_TIMEOUT_SECONDS = Limit(30.0, "a rank, for NCCL's communicators to abort", "it continues")
