"""Every time limit of a pod, in seconds: who waits so long, and what happens then.

``python -m firstfault_torch.budgets`` prints them as the table of docs/budgets.md. Those of the recorder are in
`firstfault.recorder.budgets`, which does not import torch.
"""

from __future__ import annotations

from firstfault.recorder import budgets as recorder
from firstfault.recorder.budgets import Limit, limits_in

# what a task may set
UPLOAD_DEADLINE_S = Limit(5.0, "a failing worker, for its document to be durable", "it raises; the agent uploads it")
SETTLE_S = Limit(10.0, "a node that failed, for the other nodes' reports", "one node concludes without them")
STOP_S = Limit(2.0, "the agent, for its workers to end after SIGTERM", "it sends SIGKILL")
TORCHRUN_STOP_S = Limit(30.0, "the same under torchrun, after a signal to the launcher", "it sends SIGKILL")

# the guard around firstfault's own code
HURRIED_S = Limit(0.3, "any call that has a limit, once the pod is to end", "it is given up")
GIVE_UP_POLL_S = Limit(0.05, "any call that has a limit", "it looks whether the pod is to end")
ANSWER_S = Limit(0.5, "the agent's loop, for an answer that is usually there", "it continues with the default")

# a worker
SIBLINGS_S = Limit(10.0, "a forked worker, for its siblings to be forked", "it starts; a fork takes milliseconds")
SIBLINGS_POLL_S = Limit(0.005, "the same worker", "it looks again")
FOLDER_S = Limit(5.0, "torchrun's agent, for the folder of its run", "its documents go to a temporary folder")
FOLDER_TAKEN_S = Limit(15.0, "torchrun's agent, for the nodes to agree on the run's name", "it has a name of its own")
DOCTOR_STORAGE_S = Limit(15.0, "`firstfault doctor`, for the storage to be written, listed and read", "it says so")
DOCTOR_RECORDER_S = Limit(15.0, "`firstfault doctor`, for a collective of one rank to be recorded", "it says so")
DOCTOR_PYTHON_S = Limit(15.0, "`firstfault doctor`, for the workers' Python to start", "it says so")
SPOOL_S = Limit(0.5, "a process that writes into the spool, at least", "it uploads without the spool")
RECEIPT_S = Limit(0.5, "a process that writes a receipt", "the agent uploads the document again")
READING_SETUP_S = Limit(0.25, "the agent, for files about GPUs and sources", "the report does without them")
FLIGHT_RECORDER_S = Limit(0.25, "a worker, for torch's flight recorders", "its document has no collectives")
GPU_S = Limit(0.5, "a failing worker, for its GPU's UUID", "its document has none")
FILE_SYSTEMS_S = Limit(0.25, "a failing worker, for the space of file systems", "those that did answer count")
CONTAINER_S = Limit(0.25, "a failing worker, for the recorder's data on memory", "its document has none")
PARENT_DEATH_S = Limit(0.3, "a worker that a signal ends, to see whether its agent is dying", "the agent lives")
PARENT_POLL_S = Limit(0.01, "the same worker", "it looks at its parent again")
EXITED_S = Limit(3.0, "a worker that called sys.exit(0), for the others to exit", "it shuts down gloo's connections")
SENDING_S = Limit(0.5, "a sender of a message, for the receiver's queue", "the message is lost")
WATCHDOG_BLOCKED_S = Limit(1.0, "a worker, for an agent that reads no deadlines", "it sends them with the next call")
STACK_SETTLED_S = Limit(0.02, "the agent, while a file of stacks does not grow", "it reads the file")
STACK_POLL_S = Limit(0.005, "the agent, for stacks", "it looks again")
GLOO_POLL_S = Limit(0.005, "a worker, for the epoll object of gloo's thread", "it looks again, 20 times")
ANNOUNCING_S = Limit(60.0, "a thread of a rank without an agent, for its roster entry", "it logs a warning")
LAST_DECKS_S = Limit(0.1, "a worker that is to be stopped, for rank 0's decks", "the decks are a second old")

# the agent and its workers
RELAY_CLOSING_S = Limit(2.0, "the agent, for the rest of stderr", "its exit waits for that, unless a signal ends it")
ASKING_S = Limit(0.3, "the agent, for its workers' stacks, then for their state", "it stops them without")
RAISED_S = Limit(1.0, "the agent, for an exception on its way out of a worker", "it stops the worker")
EXIT_S = Limit(8.0, "the agent, for exit handlers of a failed worker", "it sends SIGKILL")
STOP_POLL_S = Limit(0.01, "the agent that stops workers", "it looks again")
WAKE_S = Limit(0.5, "the thread that waits for deaths", "it looks whether it has to stop")
SOURCE_LINES_S = Limit(0.5, "the agent, for the source lines of stacks", "the stacks have none")
MEMORY_S = Limit(1.0, "the agent, for the recorder's data on memory", "the document has none")
TIMERS_IDLE_S = Limit(10.0, "the watchdog without a deadline", "it looks at the clock")
TIMERS_LOOK_S = Limit(1.0, "the watchdog with a deadline", "it looks at the clock, so that it notices a stall")
TIMERS_STALL_S = Limit(1.0, "the watchdog, longer than it wanted to sleep", "deadlines move: the pod was frozen")
TIMERS_JOIN_S = Limit(2.0, "the agent, for the watchdog's thread", "it continues")
HANG_LOOK_S = Limit(5.0, "the agent, between two looks for its workers' progress", "it looks again")
HANG_ANSWER_S = Limit(2.0, "the same agent, for workers that stand still to tell where", "it tells without")
HANG_RECORDER_S = Limit(
    1.5, "a worker that stands still, for torch's flight recorders", "its answer has no collectives"
)
HANG_OTHERS_S = Limit(12.0, "an agent whose workers stand still, for the others", "it tells what it knows")
SURVIVORS_STORE_S = Limit(2.0, "an agent without workers, for the store", "it ends without an answer")
GIVING_UP_S = Limit(2.0, "the agent, for its other workers when one has given up", "it stops them")
SURVIVORS_POLL_S = Limit(0.05, "the same agent", "it looks again")
SURVIVORS_LOOK_S = Limit(1.0, "an agent without workers, between two looks for others", "it looks again")

# a signal to the agent
MAIN_THREAD_S = Limit(1.0, "the signal thread, for the main thread to react", "it seals and ends the pod by itself")
REPEAT_S = Limit(0.25, "the signal thread", "it raises in the main thread again: the code may have swallowed it")
TERMINATED_UPLOADS_S = Limit(3.0, "a terminated agent, for all uploads of its node", "the recorder continues them")
LATER_UPLOAD_S = Limit(0.3, "the same agent, for an upload that begins later", "the recorder continues it")
TERMINATED_SETTLE_S = Limit(1.5, "a terminated agent, for the other nodes' reports", "one node concludes without them")
TERMINATED_READING_S = Limit(1.5, "a terminated agent, for the storage", "it concludes from what it has")
TERMINATED_CONCLUDING_S = Limit(3.0, "a terminated agent, for strategy and policy", "firstfault's defaults decide")
TERMINATED_PREVIOUS_S = Limit(0.3, "a terminated agent, for the verdict before", "it decides without")
TERMINATED_VERDICT_S = Limit(5.0, "a terminated agent, for another node's verdict", "it concludes alone")
TERMINATED_PUBLISHED_S = Limit(2.0, "the same agent, if that verdict is being published", "it concludes alone")
TERMINATED_PUBLISH_S = Limit(2.0, "a terminated agent, for the upload of its verdict", "the entrypoint tries again")
NOW_S = Limit(1.0, "a signal thread that ends the pod, at each step", "it takes the next step")
ENDING_RECORDER_S = Limit(1.0, "a signal thread that ends the pod, for the recorder", "it exits")

# the nodes of a round
NUMBERING_S = Limit(5.0, "an agent, for the number of the round", "it counts by itself")
STORE_S = Limit(2.0, "an agent, for the store to take or give a value", "the store counts as lost")
HOST_CLOSING_S = Limit(0.2, "an agent that lost the store, for its host to stop listening", "the host lives")
FATAL_LOOK_S = Limit(0.5, "an agent, while a peer restarts its workers", "it looks for a fatal failure")
BARRIER_LOOK_S = Limit(1.0, "the exit barrier", "it looks again")
BARRIER_S = Limit(300.0, "the exit barrier, beside nodes without firstfault", "it counts as passed, as in torch")
LEAVING_S = Limit(2.0, "the exit barrier, for all agents to know that all have finished", "it ends")
BARRIER_LOG_S = Limit(60.0, "the exit barrier", "it logs that it waits")
CLOSING_S = Limit(2.0, "an agent, for listeners to end and the rendezvous to close", "it continues")
COMING_BACK_S = Limit(60.0, "an agent that sees a failure in the roster, for a restart", "the failure counts")
RECONNECT_S = Limit(1.5, "an agent, for a peer to connect again", "the peer counts as dead")
CONNECTING_S = Limit(5.0, "an agent, for one connection to the first agent", "it tries again")
CONNECT_PAUSE_S = Limit(0.1, "an agent, between two tries; doubled each time", "it tries again")
LONGEST_CONNECT_PAUSE_S = Limit(2.0, "the longest of these pauses", "it tries again")
FIRST_AGENT_S = Limit(300.0, "an agent, for the first agent's port", "it does without: that one has no firstfault")
ROSTER_POLL_S = Limit(5.0, "the roster poll, at least", "it lists the roster")
ROSTER_JOIN_S = Limit(1.0, "the agent, for the roster poll's thread", "it continues")

# one verdict for all
TURN_S = Limit(2.0, "the next node in the order, for a verdict", "it concludes itself")
TURN_FOR_NODE_S = Limit(0.002, "the same, more for each node", "it concludes itself")
NO_ANSWER_S = Limit(3.0, "a node that reported, for an agent that acknowledged nothing", "that agent counts as dead")
LOOK_S = Limit(0.5, "a node that reported; doubled each time", "it looks who lives")
LONGEST_LOOK_S = Limit(2.0, "the longest of these pauses", "it looks who lives")
STEP_S = Limit(5.0, "a node, for the store to take or give reports", "it concludes alone")
STEP_FOR_NODE_S = Limit(0.01, "the same, more for each node", "it concludes alone")
PUBLISHING_S = Limit(11.0, "the next node, for one that has begun to publish", "it concludes itself")
FIRST_TURN_S = Limit(5.0, "the second node without a store, for the first one's verdict", "it concludes")
NEXT_TURN_S = Limit(2.0, "the third and the fourth node, longer each", "it concludes")
LATER_TURN_S = Limit(3.0, "each later group of nodes, longer", "it concludes")
TURN_LOOK_S = Limit(3.0, "a node without a store, for one look at the storage", "it looks again")
TURN_PAUSE_S = Limit(0.5, "the same node; longer each time", "it looks again")
LONGEST_TURN_PAUSE_S = Limit(2.0, "the longest of these pauses", "it looks again")
NAME_SERVICE_S = Limit(1.0, "the agent, for its own address", "documents have no address")
READING_S = Limit(10.0, "the node that concludes, for the storage", "it concludes from what it has")
CONCLUDING_S = Limit(30.0, "the node that concludes, for strategy and policy", "firstfault's defaults decide")
PREVIOUS_S = Limit(2.0, "the node that concludes, for the verdict before", "it decides without")
PUBLISH_S = Limit(5.0, "the node that concludes, for the upload of its verdict", "the entrypoint tries again")
LEAVING_FILES_S = Limit(2.0, "the node that concluded, for copies and the next attempt's file", "it does without")
LEAVING_SLACK_S = Limit(0.5, "the same, longer: each upload has its own limit", "it does without")
NOTIFIERS_S = Limit(3.0, "the node that concluded, for all notifiers", "they are not waited for")
WEBHOOK_S = Limit(3.0, "a webhook's thread, for its connection and its answer", "it logs a warning")
OTEL_S = Limit(3.0, "the thread of OpenTelemetry's exporter", "it logs a warning")

# Flyte
OUTPUTS_S = Limit(1800.0, "a pod without rank 0, for outputs or an error", "it exits with 0")
OUTPUTS_REFUSED_S = Limit(60.0, "the same, if it may not look", "it exits with 0")
OUTPUTS_LOOK_S = Limit(2.0, "a pod, for one look at another pod's verdict", "it concludes itself")
OUTPUTS_HURRIED_LOOK_S = Limit(1.0, "the same, once the pod is to end", "it concludes itself")
OUTPUTS_POLL_S = Limit(0.05, "a pod without rank 0; longer each time", "it looks again")
LONGEST_OUTPUTS_POLL_S = Limit(2.0, "the longest of these pauses", "it looks again")
DECKS_INTERVAL_S = Limit(1.0, "rank 0's process, between two looks at its decks", "it saves changed ones")
DECKS_LAST_S = Limit(1.0, "rank 0's process, for its last look", "the decks are a second old")
DECK_S = Limit(3.0, "the pod that writes the deck, and the others for it", "the deck stays as it is")
DECK_BEFORE_S = Limit(1.0, "the pod that writes the deck, for earlier attempts", "the deck has none")

# restarts inside the processes
OUTCOME_LOOK_S = Limit(0.2, "a rank's main thread, between two chances for signal handlers", "it waits on")
JOINING_S = Limit(5.0, "a rank, for its threads to end", "it continues")
MEETING_S = Limit(300.0, "a rank, for the store's operations, as in torch", "the function fails")
MEETING_END_S = Limit(5.0, "a rank, for a store that may be about to end", "it does without")
MONITOR_START_S = Limit(60.0, "a rank, for its monitor process", "the function fails")
MONITOR_STORE_S = Limit(5.0, "a monitor process, for the store", "the store counts as lost")
MONITOR_PATIENCE_S = Limit(20.0, "a monitor process that reports a death, for a slow store", "it gives up")
MONITOR_LINGER_S = Limit(30.0, "the monitor process that hosts the store, for its clients", "it ends")
MONITOR_CLOSING_S = Limit(1.0, "a rank, for its monitor thread", "it continues")
NCCL_ABORT_S = Limit(30.0, "a rank, for NCCL's communicators to abort", "it continues")


# --- sums -----------------------------------------------------------------------------------------------------------

KUBERNETES_GRACE_S = 30.0
"""From SIGTERM to SIGKILL, unless the pod says otherwise."""
UNTIL_STOPPED = (MAIN_THREAD_S, ASKING_S, ASKING_S, STOP_S, TERMINATED_UPLOADS_S)
"""What a terminated agent waits for, one after the other, until its workers are stopped and reported."""
UNTIL_PUBLISHED = (
    TERMINATED_READING_S,
    TERMINATED_PREVIOUS_S,
    TERMINATED_CONCLUDING_S,
    TERMINATED_PUBLISH_S,
    HURRIED_S,
)
"""Then, in the node that concludes, until the verdict is published; the last one is the deck."""
AFTER_PUBLISHING = (
    LEAVING_FILES_S,
    LEAVING_SLACK_S,
    NOTIFIERS_S,
    NOW_S,
    recorder.KILLED_S,
    recorder.RECORDER_END_S,
    recorder.KILLED_S,
)
"""Then until the process exits."""
CONCLUDES_FOR_ALL = (*UNTIL_STOPPED, TERMINATED_SETTLE_S, *UNTIL_PUBLISHED, *AFTER_PUBLISHING)
"""All waits of a terminated node that concludes for all, from SIGTERM to its exit."""
CONCLUDES_ALONE = (*UNTIL_STOPPED, TERMINATED_SETTLE_S, TERMINATED_VERDICT_S, TERMINATED_PUBLISHED_S, *UNTIL_PUBLISHED)
"""All waits of a terminated node that gets no verdict from another one, from SIGTERM until it has published its own."""


def table() -> str:
    """Return all limits as a Markdown table."""
    rows = [*limits_in(globals()), *limits_in(vars(recorder))]
    lines = [f"| `{name}` | {limit:g} | {limit.waits} | {limit.end} |" for name, limit in rows]
    return "\n".join(["| Limit | s | Who waits | Then |", "|---|---|---|---|", *lines])


if __name__ == "__main__":
    print(table())  # noqa: T201 - for docs/budgets.md
