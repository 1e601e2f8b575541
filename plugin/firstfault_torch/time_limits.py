"""All time limits of a node, in seconds. Below each: who waits, and for what. Then what happens when the time is up.

The recorder's own are in `firstfault.recorder.time_limits`, which doesn't import torch. ``python
tools/describe_limits.py`` prints the table of both, and adds up consecutive waits.
"""

# what a task may set
UPLOAD_DEADLINE_SECONDS = 5.0
"""A failing worker, for its document to be durable. Then it raises; the agent uploads it."""
SETTLE_SECONDS = 10.0
"""A node that failed, for the remaining nodes' reports. Then one node concludes without them."""
STOP_GRACE_SECONDS = 2.0
"""The agent, for its workers to end after SIGTERM. Then it sends SIGKILL."""
TORCHRUN_STOP_GRACE_SECONDS = 30.0
"""The same under torchrun, after a signal to the launcher. Then it sends SIGKILL."""

# the guard around firstfault's own code
SHUTDOWN_CALL_TIMEOUT_SECONDS = 0.3
"""Any call that has a limit, once the pod is to end. Then it is given up."""
SHUTDOWN_POLL_SECONDS = 0.05
"""Any call that has a limit. Then it looks whether the pod is to end."""
BACKGROUND_RESULT_TIMEOUT_SECONDS = 0.5
"""The agent's loop, for an answer that is usually there. Then it continues with the default."""

# a worker
SIBLING_FORK_TIMEOUT_SECONDS = 10.0
"""A forked worker, for its siblings to be forked. Then it starts; a fork takes milliseconds."""
RUN_FOLDER_TIMEOUT_SECONDS = 5.0
"""Torchrun's agent, for the folder of its run. Then its documents go to a temporary folder."""
RUN_NAME_TIMEOUT_SECONDS = 15.0
"""Torchrun's agent, for the nodes to agree on the run's name. Then it uses a generated name."""
DOCTOR_TIMEOUT_SECONDS = 15.0
"""`firstfault doctor`, for the storage, a recorded collective, and the workers' Python. Then it reports that."""
MIN_SPOOL_TIMEOUT_SECONDS = 0.5
"""A process that writes into the spool, at least. Then it uploads without the spool."""
RECEIPT_TIMEOUT_SECONDS = 0.5
"""A process that writes a receipt. Then the agent uploads the document again."""
NODE_SETUP_TIMEOUT_SECONDS = 0.25
"""The agent, for files about GPUs and sources. Then the report does without them."""
FLIGHT_RECORDER_TIMEOUT_SECONDS = 0.25
"""A worker, for torch's flight recorders. Then its document has no collectives."""
GPU_UUID_TIMEOUT_SECONDS = 0.5
"""A failing worker, for its GPU's UUID. Then its document has none."""
HANDLED_EXCEPTIONS_TIMEOUT_SECONDS = 0.15
"""A worker, for the exceptions that its program handled. Then its document or its answer has none."""
FILE_SYSTEMS_TIMEOUT_SECONDS = 0.25
"""A failing worker, for the space of file systems. Then those that did answer count."""
CONTAINER_MEMORY_TIMEOUT_SECONDS = 0.25
"""A failing worker, for the recorder's data on memory. Then its document has none."""
PARENT_DEATH_TIMEOUT_SECONDS = 0.3
"""A worker that a signal ends, to see whether its agent is dying. Then the agent lives."""
PARENT_DEATH_POLL_SECONDS = 0.01
"""The same worker. Then it looks at its parent again."""
CLEAN_EXIT_GRACE_SECONDS = 3.0
"""A worker that called sys.exit(0), for its siblings to exit. Then it shuts down gloo's connections."""
SEND_TIMEOUT_SECONDS = 0.5
"""A sender of a message, for the receiver's queue. Then the message is lost."""
FINISHED_REPORTS_TIMEOUT_SECONDS = 0.5
"""The agent of a failed node, for the thread that reads messages. Then it counts the workers as unfinished."""
RESULTS_TIMEOUT_SECONDS = 1.0
"""The agent of a failed node, for results of finished workers. Then it counts those workers as unfinished."""
CHANNEL_RETRY_SECONDS = 1.0
"""A receiver of messages that failed to read one, for memory or descriptors. Then it reads again."""
CHANNEL_CHECK_SECONDS = 60.0
"""A receiver of messages, for one. Then it looks whether its socket's file is still there."""
THREAD_START_TIMEOUT_SECONDS = 0.5
"""An agent or a worker, for a thread that reads messages or watches progress. Then it does without."""
DEADLINE_SEND_TIMEOUT_SECONDS = 1.0
"""A worker, for an agent that reads no deadlines. Then it sends them with the next call."""
STACK_SETTLE_SECONDS = 0.02
"""The agent, while a file of stacks does not grow. Then it reads the file."""
SHORT_POLL_SECONDS = 0.005
"""A worker, for its siblings' forks or gloo's epoll object; the agent, for stacks. Then it looks again."""
ANNOUNCE_TIMEOUT_SECONDS = 60.0
"""A thread of a rank without an agent, for its roster entry. Then it logs a warning."""
LAST_DECKS_TIMEOUT_SECONDS = 0.1
"""A worker that is to be stopped, for rank 0's decks. Then the decks are a second old."""

# the agent and its workers
RELAY_CLOSE_TIMEOUT_SECONDS = 2.0
"""The agent, for the rest of stderr. Then its exit waits for that, unless a signal ends it."""
WORKER_QUERY_TIMEOUT_SECONDS = 0.3
"""The agent, for its workers' stacks, then for their state. Then it stops them without."""
ANSWER_DELIVERY_SECONDS = 0.05
"""A worker's answer, of that time, to reach the agent. Then it comes too late."""
IN_FLIGHT_GRACE_SECONDS = 1.0
"""The agent, for an exception on its way out of a worker. Then it stops the worker."""
FAILED_WORKER_EXIT_GRACE_SECONDS = 8.0
"""The agent, for exit handlers of a failed worker. Then it sends SIGKILL."""
STOP_POLL_SECONDS = 0.01
"""The agent that stops workers. Then it looks again."""
EXIT_WATCH_POLL_SECONDS = 0.5
"""The thread that waits for deaths. Then it looks whether it has to stop."""
SOURCE_LINES_TIMEOUT_SECONDS = 0.5
"""The agent, for the source lines of stacks. Then the stacks have none."""
MEMORY_REPORT_TIMEOUT_SECONDS = 1.0
"""The agent, for the recorder's data on memory. Then the document has none."""
IDLE_WATCHDOG_POLL_SECONDS = 10.0
"""The watchdog without a deadline. Then it looks at the clock."""
WATCHDOG_POLL_SECONDS = 1.0
"""The watchdog with a deadline. Then it looks at the clock, so that it notices a stall."""
FROZEN_WATCHDOG_SECONDS = 1.0
"""The watchdog, longer than it wanted to sleep. Then deadlines move: the pod was frozen."""
WATCHDOG_JOIN_TIMEOUT_SECONDS = 2.0
"""The agent, for the watchdog's thread. Then it continues."""
PROGRESS_POLL_SECONDS = 5.0
"""The agent, between two looks for its workers' progress. Then it looks again."""
SNAPSHOT_TIMEOUT_SECONDS = 2.0
"""The same agent, for stacks of workers without progress. Then it reports without."""
SNAPSHOT_FLIGHT_RECORDER_TIMEOUT_SECONDS = 1.5
"""A worker without progress, for torch's flight recorders. Then its answer has no collectives."""
KERNEL_STATE_POLL_SECONDS = 0.02
"""An agent that sees a process blocked in the kernel. Then it looks again."""
RAS_TIMEOUT_SECONDS = 2.0
"""The agent that concludes on a stall, for NCCL's RAS. Then its report leaves it out."""
RAS_PEER_TIMEOUT_SECONDS = 0.5
"""The same agent, for one process that answers for RAS. Then it asks again."""
RAS_RETRY_SECONDS = 0.05
"""The same agent, if a process of another job answers. Then it asks again."""
STALL_REPORTS_TIMEOUT_SECONDS = 12.0
"""An agent of workers without progress, for its peers. Then it reports what it knows."""
SURVIVORS_EXIT_GRACE_SECONDS = 2.0
"""The agent, for its other workers when one has given up. Then it stops them."""
SURVIVORS_POLL_SECONDS = 0.05
"""The same agent. Then it looks again."""
SURVIVORS_CHECK_INTERVAL_SECONDS = 1.0
"""An agent without workers, between two looks for others. Then it looks again."""

# a signal to the agent
MAIN_THREAD_TIMEOUT_SECONDS = 1.0
"""The signal thread, for the main thread to react. Then it seals the verdict and ends the pod."""
POSTPONED_SIGNAL_TIMEOUT_SECONDS = 5.0
"""The signal thread, for the main thread to connect to its peers. Then the limits above and below count."""
SIGNAL_RAISE_INTERVAL_SECONDS = 0.25
"""The signal thread. Then it raises in the main thread again: the code may have swallowed it."""
TERMINATED_UPLOADS_TIMEOUT_SECONDS = 3.0
"""A terminated agent, for all uploads of its node. Then the recorder continues them."""
TERMINATED_LATE_UPLOAD_TIMEOUT_SECONDS = 0.3
"""The same agent, for an upload that begins later. Then the recorder continues it."""
TERMINATED_SETTLE_SECONDS = 1.5
"""A terminated agent, for the remaining nodes' reports. Then one node concludes without them."""
TERMINATED_READ_TIMEOUT_SECONDS = 1.5
"""A terminated agent, for the storage. Then it concludes from what it has."""
TERMINATED_CONCLUDE_TIMEOUT_SECONDS = 3.0
"""A terminated agent, for strategy and policy. Then firstfault's defaults decide."""
TERMINATED_PREVIOUS_VERDICT_TIMEOUT_SECONDS = 0.3
"""A terminated agent, for the verdict before. Then it decides without."""
TERMINATED_PEER_VERDICT_TIMEOUT_SECONDS = 5.0
"""A terminated agent, for another node's verdict. Then it concludes alone."""
TERMINATED_PEER_PUBLISH_TIMEOUT_SECONDS = 2.0
"""The same agent, if that verdict is being published. Then it concludes alone."""
TERMINATED_PUBLISH_TIMEOUT_SECONDS = 2.0
"""A terminated agent, for the upload of its verdict. Then the entrypoint tries again."""
EXIT_STEP_TIMEOUT_SECONDS = 1.0
"""A signal thread that ends the pod, at each step. Then it takes the next step."""
EXIT_RECORDER_TIMEOUT_SECONDS = 1.0
"""A signal thread that ends the pod, for the recorder. Then it exits."""

# the nodes of a round
ROUND_NUMBER_TIMEOUT_SECONDS = 5.0
"""An agent, for the number of the round. Then it uses its own count."""
STORE_TIMEOUT_SECONDS = 2.0
"""An agent, for the store to take or give a value. Then the store counts as lost; without workers, the agent ends."""
LOST_STORE_GRACE_SECONDS = 0.2
"""An agent that lost the store, for its host to stop listening. Then the host lives."""
FATAL_FAILURE_POLL_SECONDS = 0.5
"""An agent, while a peer restarts its workers. Then it looks for a fatal failure."""
EXIT_BARRIER_POLL_SECONDS = 1.0
"""The exit barrier. Then it looks again."""
EXIT_BARRIER_TIMEOUT_SECONDS = 300.0
"""The exit barrier, in a job with nodes that don't run firstfault. Then it counts as passed, as in torch."""
FINISH_ACKS_TIMEOUT_SECONDS = 2.0
"""The exit barrier, for all agents to know that all have finished. Then it ends."""
EXIT_BARRIER_LOG_INTERVAL_SECONDS = 60.0
"""The exit barrier. Then it logs that it waits."""
RENDEZVOUS_CLOSE_TIMEOUT_SECONDS = 2.0
"""An agent, for listeners to end and the rendezvous to close. Then it continues."""
STORE_THREADS_JOIN_TIMEOUT_SECONDS = 0.5
"""An agent that exits, for its threads to leave the store. Then it breaks their connections."""
LATE_CALLS_TIMEOUT_SECONDS = 0.5
"""An agent that exits, for calls that it has given up. Then they are left behind."""
ROSTER_FAILURE_GRACE_SECONDS = 60.0
"""An agent that sees a failure in the roster, for a restart. Then the failure counts."""
RECONNECT_TIMEOUT_SECONDS = 1.5
"""An agent, for a peer to connect again. Then the peer counts as dead."""
PEER_CONNECT_TIMEOUT_SECONDS = 5.0
"""An agent, for one connection to the first agent. Then it tries again."""
CONNECT_BACKOFF_SECONDS = 0.1
"""An agent, between two tries; doubled each time. Then it tries again."""
MAX_POLL_SECONDS = 2.0
"""The longest of these pauses, also between looks for live agents or a verdict. Then it tries again."""
FIRST_AGENT_PORT_TIMEOUT_SECONDS = 300.0
"""An agent, for the first agent's port. Then it does without: that one has no firstfault."""
ROSTER_POLL_SECONDS = 5.0
"""The roster poll, at least. Then it lists the roster."""
ROSTER_JOIN_TIMEOUT_SECONDS = 1.0
"""The agent, for the roster poll's thread. Then it continues."""

# one verdict for all
LEADER_TIMEOUT_SECONDS = 2.0
"""The next node in the order, for a verdict. Then it concludes itself."""
LEADER_TIMEOUT_SECONDS_PER_NODE = 0.002
"""The same, more for each node. Then it concludes itself."""
ACKNOWLEDGMENT_TIMEOUT_SECONDS = 3.0
"""A node that reported, for an agent that acknowledged nothing. Then that agent counts as dead."""
ARRIVALS_POLL_SECONDS = 0.5
"""A node that reported; doubled each time. Then it looks who lives."""
ELECTION_STEP_TIMEOUT_SECONDS = 5.0
"""A node, for the store to take or give reports. Then it concludes alone."""
ELECTION_STEP_TIMEOUT_SECONDS_PER_NODE = 0.01
"""The same, more for each node. Then it concludes alone."""
LEADER_PUBLISH_TIMEOUT_SECONDS = 11.0
"""The next node, for one that has begun to publish. Then it concludes itself."""
SECOND_NODE_DELAY_SECONDS = 5.0
"""The second node without a store, for the first one's verdict. Then it concludes."""
NEXT_NODE_DELAY_SECONDS = 2.0
"""The third and the fourth node, longer each. Then it concludes."""
LATER_NODES_DELAY_SECONDS = 3.0
"""Each later group of nodes, longer. Then it concludes."""
VERDICT_READ_TIMEOUT_SECONDS = 3.0
"""A node without a store, for one look at the storage. Then it looks again."""
VERDICT_POLL_SECONDS = 0.5
"""The same node; longer each time. Then it looks again."""
RAY_SETTLE_SECONDS = 3.0
"""Ray Train's controller, for the reports of ranks that have not failed yet. Then it concludes without them."""
RAY_CONCLUDE_TIMEOUT_SECONDS = 20.0
"""The same controller, for the storage and the verdict. Then Ray decides."""
NAME_SERVICE_TIMEOUT_SECONDS = 1.0
"""The agent, for its own address. Then documents have no address."""
READ_TIMEOUT_SECONDS = 10.0
"""The node that concludes, for the storage. Then it concludes from what it has."""
CONCLUDE_TIMEOUT_SECONDS = 30.0
"""The node that concludes, for strategy and policy. Then firstfault's defaults decide."""
PREVIOUS_VERDICT_TIMEOUT_SECONDS = 2.0
"""The node that concludes, for the verdict before. Then it decides without."""
PUBLISH_TIMEOUT_SECONDS = 5.0
"""The node that concludes, for the upload of its verdict. Then the entrypoint tries again."""
HANDOVER_TIMEOUT_SECONDS = 2.0
"""The node that concluded, for copies and the next attempt's file. Then it does without."""
HANDOVER_SLACK_SECONDS = 0.5
"""The same, longer: each upload has its own limit. Then it does without."""
NOTIFIERS_TIMEOUT_SECONDS = 3.0
"""The node that concluded, for all notifiers. Then they are not waited for."""
WEBHOOK_TIMEOUT_SECONDS = 3.0
"""A webhook's thread, for its connection and its answer. Then it logs a warning."""
OTEL_TIMEOUT_SECONDS = 3.0
"""The thread of OpenTelemetry's exporter. Then it logs a warning."""

# Flyte
OUTPUTS_TIMEOUT_SECONDS = 1800.0
"""A pod without rank 0, for outputs or an error. Then it exits with 0."""
UNREADABLE_OUTPUTS_TIMEOUT_SECONDS = 60.0
"""The same, if it may not look. Then it exits with 0."""
POD_VERDICT_READ_TIMEOUT_SECONDS = 2.0
"""A pod, for one look at another pod's verdict. Then it concludes itself."""
SHUTDOWN_POD_VERDICT_READ_TIMEOUT_SECONDS = 1.0
"""The same, once the pod is to end. Then it concludes itself."""
OUTPUTS_POLL_SECONDS = 0.05
"""A pod without rank 0; longer each time. Then it looks again."""
MAX_OUTPUTS_POLL_SECONDS = 2.0
"""The longest of these pauses. Then it looks again."""
DECKS_POLL_SECONDS = 1.0
"""Rank 0's process, between two looks at its decks. Then it saves changed ones."""
FINAL_DECKS_TIMEOUT_SECONDS = 1.0
"""Rank 0's process, for its last look. Then the decks are a second old."""
DECK_TIMEOUT_SECONDS = 3.0
"""The pod that writes the deck, and all others for it. Then the deck stays as it is."""
EARLIER_ATTEMPTS_TIMEOUT_SECONDS = 1.0
"""The pod that writes the deck, for earlier attempts. Then the deck has none."""

# restarts inside the processes
SIGNAL_HANDLER_INTERVAL_SECONDS = 0.2
"""A rank's main thread, between two chances for signal handlers. Then it waits on."""
THREAD_JOIN_TIMEOUT_SECONDS = 5.0
"""A rank, for its threads to end. Then it continues."""
STORE_OPERATION_TIMEOUT_SECONDS = 300.0
"""A rank, for the store's operations, as in torch. Then the function fails."""
ENDING_STORE_TIMEOUT_SECONDS = 5.0
"""A rank, for a store that may be about to end. Then it does without."""
MONITOR_START_TIMEOUT_SECONDS = 60.0
"""A rank, for its monitor process. Then the function fails."""
RESOURCE_SHORTAGE_TIMEOUT_SECONDS = 30.0
"""A rank, for a thread or process while the system allows none. Then the function fails."""
SHORTAGE_RETRY_SECONDS = 0.1
"""What the system has no thread, process or memory for. Then it tries again."""
LOOP_SHORTAGE_PAUSE_SECONDS = 1.0
"""A loop, after such a shortage. Then it continues."""
DETACHED_POLL_SECONDS = 0.5
"""A monitor process without pidfd_open(2), for its worker's end. Then it looks again."""
MONITOR_STORE_TIMEOUT_SECONDS = 5.0
"""A monitor process, for the store. Then the store counts as lost."""
MONITOR_REPORT_TIMEOUT_SECONDS = 20.0
"""A monitor process that reports a death, for a slow store. Then it gives up."""
MONITOR_LINGER_SECONDS = 30.0
"""The monitor process that hosts the store, for its clients. Then it ends."""
MONITOR_CLOSE_TIMEOUT_SECONDS = 1.0
"""A rank, for its monitor thread. Then it continues."""
NCCL_ABORT_TIMEOUT_SECONDS = 30.0
"""A rank, for NCCL's communicators to abort. Then it continues."""
