"""All time limits of a node. The columns: seconds, who waits, for what,
and what happens when the time is up.

The recorder's own are in `firstfault.recorder.time_limits`, which doesn't import torch. ``python
tools/describe_limits.py`` prints the table of both, and adds up consecutive waits.
"""

from __future__ import annotations

from firstfault.utils.time_limit import TimeLimit

# what a task may set
UPLOAD_DEADLINE_SECONDS = TimeLimit(
    5.0,
    "a failing worker",
    "its document to be durable",
    "it raises; the agent uploads it",
)
SETTLE_SECONDS = TimeLimit(
    10.0,
    "a node that failed",
    "the remaining nodes' reports",
    "one node concludes without them",
)
STOP_GRACE_SECONDS = TimeLimit(
    2.0,
    "the agent",
    "its workers to end after SIGTERM",
    "it sends SIGKILL",
)
TORCHRUN_STOP_GRACE_SECONDS = TimeLimit(
    30.0,
    "the agent under torchrun, after a signal to the launcher",
    "its workers to end after SIGTERM",
    "it sends SIGKILL",
)

# the guard around firstfault's own code
SHUTDOWN_CALL_TIMEOUT_SECONDS = TimeLimit(
    0.3,
    "any call with a time limit, once the pod is to end",
    "its result",
    "it is given up",
)
SHUTDOWN_POLL_SECONDS = TimeLimit(
    0.05,
    "any call with a time limit",
    "its result",
    "it checks whether the pod is to end",
)
BACKGROUND_RESULT_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "the agent's loop",
    "an answer that is usually there",
    "it continues with the default",
)

# a worker
SIBLING_FORK_TIMEOUT_SECONDS = TimeLimit(
    10.0,
    "a forked worker",
    "its siblings to be forked",
    "it starts; a fork takes milliseconds",
)
SIBLING_FORK_POLL_SECONDS = TimeLimit(
    0.005,
    "a forked worker",
    "its siblings to be forked",
    "it polls again",
)
RUN_FOLDER_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "torchrun's agent",
    "the folder of its run",
    "its documents go to a temporary folder",
)
RUN_NAME_TIMEOUT_SECONDS = TimeLimit(
    15.0,
    "torchrun's agent",
    "the nodes to agree on the run's name",
    "it uses a generated name",
)
DOCTOR_TIMEOUT_SECONDS = TimeLimit(
    15.0,
    "`firstfault doctor`",
    "the storage, a recorded collective, and the workers' Python",
    "it reports that",
)
MIN_SPOOL_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "a process that writes into the spool, at least",
    "the spool",
    "it uploads without the spool",
)
RECEIPT_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "a process that uploaded a document",
    "its receipt to be written",
    "the agent uploads the document again",
)
NODE_SETUP_TIMEOUT_SECONDS = TimeLimit(
    0.25,
    "the agent",
    "files about GPUs and sources",
    "the report does without them",
)
FLIGHT_RECORDER_TIMEOUT_SECONDS = TimeLimit(
    0.25,
    "a worker",
    "torch's flight recorders",
    "its document has no collectives",
)
GPU_UUID_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "a failing worker",
    "its GPU's UUID",
    "its document has none",
)
HANDLED_EXCEPTIONS_TIMEOUT_SECONDS = TimeLimit(
    0.15,
    "a worker",
    "the exceptions that its program handled",
    "its document or its answer has none",
)
FILE_SYSTEMS_TIMEOUT_SECONDS = TimeLimit(
    0.25,
    "a failing worker",
    "the space of file systems",
    "those that did answer count",
)
CONTAINER_MEMORY_TIMEOUT_SECONDS = TimeLimit(
    0.25,
    "a failing worker",
    "the recorder's data on memory",
    "its document has none",
)
PARENT_DEATH_TIMEOUT_SECONDS = TimeLimit(
    0.3,
    "a worker that a signal ends",
    "its agent to die as well",
    "the agent lives",
)
PARENT_DEATH_POLL_SECONDS = TimeLimit(
    0.01,
    "a worker that a signal ends",
    "its agent to die as well",
    "it checks its parent again",
)
CLEAN_EXIT_GRACE_SECONDS = TimeLimit(
    3.0,
    "a worker that called sys.exit(0)",
    "its siblings to exit",
    "it shuts down gloo's connections",
)
SEND_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "a sender of a message",
    "the receiver's queue",
    "the message is lost",
)
FINISHED_REPORTS_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "the agent of a failed node",
    "the thread that reads messages",
    "it counts the workers as unfinished",
)
RESULTS_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "the agent of a failed node",
    "results of finished workers",
    "it counts those workers as unfinished",
)
CHANNEL_RETRY_SECONDS = TimeLimit(
    1.0,
    "a receiver of messages that failed to read one",
    "memory or descriptors",
    "it reads again",
)
CHANNEL_CHECK_SECONDS = TimeLimit(
    60.0,
    "a receiver of messages",
    "one",
    "it checks whether its socket's file is still there",
)
THREAD_START_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "an agent or a worker",
    "a thread that reads messages or watches progress",
    "it does without",
)
DEADLINE_SEND_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "a worker",
    "an agent that reads no deadlines",
    "it sends them with the next call",
)
STACK_SETTLE_SECONDS = TimeLimit(0.02, "the agent", "a file of stacks to grow", "it reads the file")
STACK_POLL_SECONDS = TimeLimit(0.005, "the agent", "stacks", "it polls again")
GLOO_POLL_SECONDS = TimeLimit(
    0.005,
    "a worker",
    "the epoll object of gloo's thread",
    "it checks again, 20 times",
)
ANNOUNCE_TIMEOUT_SECONDS = TimeLimit(
    60.0,
    "a thread of a rank without an agent",
    "its roster entry",
    "it logs a warning",
)
LAST_DECKS_TIMEOUT_SECONDS = TimeLimit(
    0.1,
    "a worker that is to be stopped",
    "rank 0's decks",
    "the decks are a second old",
)

# the agent and its workers
RELAY_CLOSE_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "the agent",
    "the rest of stderr",
    "its exit waits for that, unless a signal ends it",
)
WORKER_QUERY_TIMEOUT_SECONDS = TimeLimit(
    0.3,
    "the agent",
    "its workers' stacks, then for their state",
    "it stops them without",
)
ANSWER_DELIVERY_SECONDS = TimeLimit(
    0.05,
    "the agent, at the end of a time limit",
    "answers that workers gave in time",
    "they come too late",
)
IN_FLIGHT_GRACE_SECONDS = TimeLimit(
    1.0,
    "the agent",
    "an exception on its way out of a worker",
    "it stops the worker",
)
FAILED_WORKER_EXIT_GRACE_SECONDS = TimeLimit(
    8.0,
    "the agent",
    "exit handlers of a failed worker",
    "it sends SIGKILL",
)
STOP_POLL_SECONDS = TimeLimit(0.01, "the agent that stops workers", "them to end", "it polls again")
EXIT_WATCH_POLL_SECONDS = TimeLimit(
    0.5,
    "the thread that waits for deaths",
    "a death",
    "it checks whether it has to stop",
)
SOURCE_LINES_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "the agent",
    "the source lines of stacks",
    "the stacks have none",
)
MEMORY_REPORT_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "the agent",
    "the recorder's data on memory",
    "the document has none",
)
IDLE_WATCHDOG_POLL_SECONDS = TimeLimit(
    10.0,
    "the watchdog without a deadline",
    "a deadline",
    "it reads the clock",
)
WATCHDOG_POLL_SECONDS = TimeLimit(
    1.0,
    "the watchdog with a deadline",
    "the deadline",
    "it reads the clock, so that it notices a stall",
)
FROZEN_WATCHDOG_SECONDS = TimeLimit(
    1.0,
    "the watchdog, after its sleep",
    "its turn",
    "deadlines move: the pod was frozen",
)
WATCHDOG_JOIN_TIMEOUT_SECONDS = TimeLimit(2.0, "the agent", "the watchdog's thread", "it continues")
PROGRESS_POLL_SECONDS = TimeLimit(
    5.0,
    "the agent",
    "the next check of its workers' progress",
    "it polls again",
)
SNAPSHOT_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "the agent of workers without progress",
    "their stacks",
    "it reports without",
)
SNAPSHOT_FLIGHT_RECORDER_TIMEOUT_SECONDS = TimeLimit(
    1.5,
    "a worker without progress",
    "torch's flight recorders",
    "its answer has no collectives",
)
KERNEL_STATE_POLL_SECONDS = TimeLimit(
    0.02,
    "an agent that sees a process blocked in the kernel",
    "its state to change",
    "it polls again",
)
RAS_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "the agent that concludes on a stall",
    "NCCL's RAS",
    "its report leaves it out",
)
RAS_PEER_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "the agent that concludes on a stall",
    "one process that answers for RAS",
    "it asks again",
)
RAS_RETRY_SECONDS = TimeLimit(
    0.05,
    "the agent that concludes on a stall, if a process of another job answers",
    "the next question",
    "it asks again",
)
STALL_REPORTS_TIMEOUT_SECONDS = TimeLimit(
    12.0,
    "an agent of workers without progress",
    "its peers",
    "it reports what it knows",
)
SURVIVORS_STORE_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "an agent without workers",
    "the store",
    "it ends without an answer",
)
SURVIVORS_EXIT_GRACE_SECONDS = TimeLimit(
    2.0,
    "the agent",
    "its remaining workers when one has given up",
    "it stops them",
)
SURVIVORS_POLL_SECONDS = TimeLimit(
    0.05,
    "the agent, when one of its workers has given up",
    "the remaining workers",
    "it polls again",
)
SURVIVORS_CHECK_INTERVAL_SECONDS = TimeLimit(
    1.0,
    "an agent without workers",
    "the next count of nodes with workers",
    "it counts again",
)

# a signal to the agent
MAIN_THREAD_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "the signal thread",
    "the main thread to react",
    "it seals the verdict and ends the pod",
)
POSTPONED_SIGNAL_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "the signal thread",
    "the main thread to connect to its peers",
    "the remaining limits of a signal count",
)
SIGNAL_RAISE_INTERVAL_SECONDS = TimeLimit(
    0.25,
    "the signal thread",
    "the main thread to react",
    "it raises there again: the code may have swallowed it",
)
TERMINATED_UPLOADS_TIMEOUT_SECONDS = TimeLimit(
    3.0,
    "a terminated agent",
    "all uploads of its node",
    "the recorder continues them",
)
TERMINATED_LATE_UPLOAD_TIMEOUT_SECONDS = TimeLimit(
    0.3,
    "a terminated agent",
    "an upload that begins later",
    "the recorder continues it",
)
TERMINATED_SETTLE_SECONDS = TimeLimit(
    1.5,
    "a terminated agent",
    "the remaining nodes' reports",
    "one node concludes without them",
)
TERMINATED_READ_TIMEOUT_SECONDS = TimeLimit(
    1.5,
    "a terminated agent",
    "the storage",
    "it concludes from what it has",
)
TERMINATED_CONCLUDE_TIMEOUT_SECONDS = TimeLimit(
    3.0,
    "a terminated agent",
    "strategy and policy",
    "firstfault's defaults decide",
)
TERMINATED_PREVIOUS_VERDICT_TIMEOUT_SECONDS = TimeLimit(
    0.3,
    "a terminated agent",
    "the verdict before",
    "it decides without",
)
TERMINATED_PEER_VERDICT_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "a terminated agent",
    "another node's verdict",
    "it concludes alone",
)
TERMINATED_PEER_PUBLISH_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "a terminated agent",
    "another node's verdict that is being published",
    "it concludes alone",
)
TERMINATED_PUBLISH_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "a terminated agent",
    "the upload of its verdict",
    "the entrypoint tries again",
)
EXIT_STEP_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "a signal thread that ends the pod",
    "at each step",
    "it takes the next step",
)
EXIT_RECORDER_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "a signal thread that ends the pod",
    "the recorder",
    "it exits",
)

# the nodes of a round
ROUND_NUMBER_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "an agent",
    "the number of the round",
    "it uses its own count",
)
STORE_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "an agent",
    "the store to take or give a value",
    "the store counts as lost",
)
LOST_STORE_GRACE_SECONDS = TimeLimit(
    0.2,
    "an agent that lost the store",
    "its host to stop listening",
    "the host lives",
)
FATAL_FAILURE_POLL_SECONDS = TimeLimit(
    0.5,
    "an agent with a peer that restarts its workers",
    "a fatal failure",
    "it polls again",
)
EXIT_BARRIER_POLL_SECONDS = TimeLimit(1.0, "the exit barrier", "all nodes", "it polls again")
EXIT_BARRIER_TIMEOUT_SECONDS = TimeLimit(
    300.0,
    "the exit barrier",
    "in a job with nodes that don't run firstfault",
    "it counts as passed, as in torch",
)
FINISH_ACKS_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "the exit barrier",
    "all agents to know that all have finished",
    "it ends",
)
EXIT_BARRIER_LOG_INTERVAL_SECONDS = TimeLimit(
    60.0,
    "the exit barrier",
    "all nodes",
    "it logs that it waits, and checks over a new connection which nodes wait",
)
EXIT_ROSTER_TIMEOUT_SECONDS = TimeLimit(
    10.0,
    "the exit barrier without a store",
    "the roster entries of all nodes",
    "the missing nodes count as failed",
)
RENDEZVOUS_CLOSE_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "an agent",
    "listeners to end and the rendezvous to close",
    "it continues",
)
STORE_THREADS_JOIN_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "an agent that exits",
    "its threads to leave the store",
    "it breaks their connections",
)
LATE_CALLS_TIMEOUT_SECONDS = TimeLimit(
    0.5,
    "an agent that exits",
    "calls that it has given up",
    "they are left behind",
)
ROSTER_FAILURE_GRACE_SECONDS = TimeLimit(
    60.0,
    "an agent that sees a failure in the roster",
    "a restart",
    "the failure counts",
)
RECONNECT_TIMEOUT_SECONDS = TimeLimit(
    1.5,
    "an agent",
    "a peer to connect again",
    "the peer counts as dead",
)
PEER_CONNECT_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "an agent",
    "one connection to the first agent",
    "it tries again",
)
CONNECT_BACKOFF_SECONDS = TimeLimit(
    0.1,
    "an agent, doubled each time",
    "its next try to connect",
    "it tries again",
)
MAX_CONNECT_BACKOFF_SECONDS = TimeLimit(
    2.0,
    "an agent, at most",
    "its next try to connect",
    "it tries again",
)
FIRST_AGENT_PORT_TIMEOUT_SECONDS = TimeLimit(
    300.0,
    "an agent",
    "the first agent's port",
    "it does without: that one has no firstfault",
)
ROSTER_POLL_SECONDS = TimeLimit(
    5.0,
    "the roster poll, at least",
    "its next turn",
    "it lists the roster",
)
ROSTER_JOIN_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "the agent",
    "the roster poll's thread",
    "it continues",
)

# one verdict for all
LEADER_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "the next node in the order",
    "a verdict",
    "it concludes itself",
)
LEADER_TIMEOUT_SECONDS_PER_NODE = TimeLimit(
    0.002,
    "the next node in the order, more for each node",
    "a verdict",
    "it concludes itself",
)
ACKNOWLEDGMENT_TIMEOUT_SECONDS = TimeLimit(
    3.0,
    "a node that reported",
    "an agent that acknowledged nothing",
    "that agent counts as dead",
)
ARRIVALS_POLL_SECONDS = TimeLimit(
    0.5,
    "a node that reported, doubled each time",
    "its peers' reports",
    "it checks which peers are alive",
)
MAX_ARRIVALS_POLL_SECONDS = TimeLimit(
    2.0,
    "a node that reported, at most",
    "its peers' reports",
    "it checks which peers are alive",
)
ELECTION_STEP_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "a node",
    "the store to take or give reports",
    "it concludes alone",
)
ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE = TimeLimit(
    0.01,
    "a node, more for each node",
    "the store to take or give reports",
    "it concludes alone",
)
LEADER_PUBLISH_TIMEOUT_SECONDS = TimeLimit(
    11.0,
    "the next node",
    "one that has begun to publish",
    "it concludes itself",
)
CONFIRMATIONS_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "the agent that hosts the store",
    "its peers to have the verdict",
    "it exits, and the store with it",
)
CONFIRMATIONS_POLL_SECONDS = TimeLimit(
    0.05,
    "the agent that hosts the store",
    "its peers to have the verdict",
    "it polls again",
)
SECOND_NODE_DELAY_SECONDS = TimeLimit(
    5.0,
    "the second node without a store",
    "the first one's verdict",
    "it concludes",
)
NEXT_NODE_DELAY_SECONDS = TimeLimit(
    2.0,
    "the third and the fourth node without a store, longer each",
    "an earlier one's verdict",
    "it concludes",
)
LATER_NODES_DELAY_SECONDS = TimeLimit(
    3.0,
    "each later group of nodes without a store, longer",
    "an earlier one's verdict",
    "it concludes",
)
VERDICT_READ_TIMEOUT_SECONDS = TimeLimit(
    3.0,
    "a node without a store",
    "one request to the storage",
    "it polls again",
)
VERDICT_POLL_SECONDS = TimeLimit(
    0.5,
    "a node without a store, longer each time",
    "another one's verdict in the storage",
    "it polls again",
)
MAX_VERDICT_POLL_SECONDS = TimeLimit(
    2.0,
    "a node without a store, at most",
    "another one's verdict in the storage",
    "it polls again",
)
CONTROLLER_SETTLE_SECONDS = TimeLimit(
    3.0,
    "the controller of a launcher, such as Ray Train's",
    "the reports of ranks that have not failed yet",
    "it concludes without them",
)
CONTROLLER_CONCLUDE_TIMEOUT_SECONDS = TimeLimit(
    20.0,
    "the controller of a launcher, such as Ray Train's",
    "the storage and the verdict",
    "the launcher decides",
)
NAME_SERVICE_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "the agent",
    "its own address",
    "documents have no address",
)
READ_TIMEOUT_SECONDS = TimeLimit(
    10.0,
    "the node that concludes",
    "the storage",
    "it concludes from what it has",
)
CONCLUDE_TIMEOUT_SECONDS = TimeLimit(
    30.0,
    "the node that concludes",
    "strategy and policy",
    "firstfault's defaults decide",
)
PREVIOUS_VERDICT_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "the node that concludes",
    "the verdict before",
    "it decides without",
)
PUBLISH_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "the node that concludes",
    "the upload of its verdict",
    "the entrypoint tries again",
)
HANDOVER_TIMEOUT_SECONDS = TimeLimit(
    2.0,
    "the node that concluded",
    "copies and the next attempt's file",
    "it does without",
)
HANDOVER_SLACK_SECONDS = TimeLimit(
    0.5,
    "the node that concluded, longer: each upload has its own limit",
    "copies and the next attempt's file",
    "it does without",
)
NOTIFIERS_TIMEOUT_SECONDS = TimeLimit(
    3.0,
    "the node that concluded",
    "all notifiers",
    "they are not waited for",
)
WEBHOOK_TIMEOUT_SECONDS = TimeLimit(
    3.0,
    "a webhook's thread",
    "its connection and its answer",
    "it logs a warning",
)
OTEL_TIMEOUT_SECONDS = TimeLimit(
    3.0,
    "the thread of OpenTelemetry's exporter",
    "the exporter",
    "it logs a warning",
)

# Flyte
OUTPUTS_TIMEOUT_SECONDS = TimeLimit(
    1800.0,
    "a pod without rank 0",
    "outputs or an error",
    "it exits with 0",
)
UNREADABLE_OUTPUTS_TIMEOUT_SECONDS = TimeLimit(
    60.0,
    "a pod without rank 0 that may not read",
    "outputs or an error",
    "it exits with 0",
)
OUTPUTS_POLL_SECONDS = TimeLimit(
    0.05,
    "a pod without rank 0, longer each time",
    "outputs or an error",
    "it polls again",
)
MAX_OUTPUTS_POLL_SECONDS = TimeLimit(
    2.0,
    "a pod without rank 0, at most",
    "outputs or an error",
    "it polls again",
)
DECKS_POLL_SECONDS = TimeLimit(
    1.0,
    "rank 0's process",
    "the next check of its decks",
    "it saves changed ones",
)
FINAL_DECKS_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "rank 0's process",
    "its last check",
    "the decks are a second old",
)
DECK_TIMEOUT_SECONDS = TimeLimit(
    3.0,
    "the pod that writes the deck",
    "and all others for it",
    "the deck stays as it is",
)
EARLIER_ATTEMPTS_TIMEOUT_SECONDS = TimeLimit(
    1.0,
    "the pod that writes the deck",
    "earlier attempts",
    "the deck has none",
)

# restarts inside the processes
SIGNAL_HANDLER_INTERVAL_SECONDS = TimeLimit(
    0.2,
    "a rank's main thread",
    "the next chance for signal handlers",
    "it waits on",
)
THREAD_JOIN_TIMEOUT_SECONDS = TimeLimit(5.0, "a rank", "its threads to end", "it continues")
STORE_OPERATION_TIMEOUT_SECONDS = TimeLimit(
    300.0,
    "a rank",
    "the store's operations, as in torch",
    "the function fails",
)
ENDING_STORE_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "a rank",
    "a store that may be about to end",
    "it does without",
)
MONITOR_START_TIMEOUT_SECONDS = TimeLimit(
    60.0,
    "a rank",
    "its monitor process",
    "the function fails",
)
RESOURCE_SHORTAGE_TIMEOUT_SECONDS = TimeLimit(
    30.0,
    "a rank",
    "a thread or process while the system allows none",
    "the function fails",
)
SHORTAGE_RETRY_SECONDS = TimeLimit(
    0.1,
    "what the system has no thread, process or memory for",
    "its next try",
    "it tries again",
)
LOOP_SHORTAGE_PAUSE_SECONDS = TimeLimit(
    1.0,
    "a loop for which the system had no thread or memory",
    "its next turn",
    "it continues",
)
DETACHED_POLL_SECONDS = TimeLimit(
    0.5,
    "a monitor process without pidfd_open(2)",
    "its worker's end",
    "it polls again",
)
MONITOR_STORE_TIMEOUT_SECONDS = TimeLimit(
    5.0,
    "a monitor process",
    "the store",
    "the store counts as lost",
)
MONITOR_REPORT_TIMEOUT_SECONDS = TimeLimit(
    20.0,
    "a monitor process that reports a death",
    "a slow store",
    "it gives up",
)
MONITOR_LINGER_SECONDS = TimeLimit(
    30.0,
    "the monitor process that hosts the store",
    "its clients",
    "it ends",
)
MONITOR_CLOSE_TIMEOUT_SECONDS = TimeLimit(1.0, "a rank", "its monitor thread", "it continues")
NCCL_ABORT_TIMEOUT_SECONDS = TimeLimit(
    30.0,
    "a rank",
    "NCCL's communicators to abort",
    "it continues",
)
