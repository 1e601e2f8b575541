"""Print the table of all time limits, and add up those that a terminated node waits
for one after the other.

tests/torch_agent/test_budgets.py fails if the sum exceeds what Kubernetes grants.
"""

from __future__ import annotations

from firstfault.recorder import time_limits as recorder
from firstfault.utils.time_limit import TimeLimit
from firstfault_torch import time_limits as pod

KUBERNETES_GRACE_S = 30.0
"""From SIGTERM to SIGKILL, unless the pod says otherwise."""
UNTIL_STOPPED = (
    pod.MAIN_THREAD_TIMEOUT_SECONDS,
    pod.WORKER_QUERY_TIMEOUT_SECONDS,
    pod.WORKER_QUERY_TIMEOUT_SECONDS,
    pod.STOP_GRACE_SECONDS,
    pod.TERMINATED_UPLOADS_TIMEOUT_SECONDS,
)
"""What a terminated agent waits for, one after the other,
until its workers are stopped and reported.
"""
UNTIL_PUBLISHED = (
    pod.TERMINATED_READ_TIMEOUT_SECONDS,
    pod.TERMINATED_PREVIOUS_VERDICT_TIMEOUT_SECONDS,
    pod.TERMINATED_CONCLUDE_TIMEOUT_SECONDS,
    pod.TERMINATED_PUBLISH_TIMEOUT_SECONDS,
    pod.SHUTDOWN_CALL_TIMEOUT_SECONDS,
)
"""Then, in the node that concludes, until the verdict is published; the last one is the deck."""
AFTER_PUBLISHING = (
    pod.HANDOVER_TIMEOUT_SECONDS,
    pod.HANDOVER_SLACK_SECONDS,
    pod.NOTIFIERS_TIMEOUT_SECONDS,
    pod.EXIT_STEP_TIMEOUT_SECONDS,
    pod.STORE_THREADS_JOIN_TIMEOUT_SECONDS,
    pod.STORE_THREADS_JOIN_TIMEOUT_SECONDS,
    pod.LATE_CALLS_TIMEOUT_SECONDS,
    recorder.KILLED_PROCESS_TIMEOUT_SECONDS,
    recorder.RECORDER_EXIT_GRACE_SECONDS,
    recorder.KILLED_PROCESS_TIMEOUT_SECONDS,
)
"""Then until the process exits."""
CONCLUDES_FOR_ALL = (
    *UNTIL_STOPPED,
    pod.TERMINATED_SETTLE_SECONDS,
    *UNTIL_PUBLISHED,
    *AFTER_PUBLISHING,
)
"""All waits of a terminated node that concludes for all, from SIGTERM to its exit."""
CONCLUDES_ALONE = (
    *UNTIL_STOPPED,
    pod.TERMINATED_SETTLE_SECONDS,
    pod.TERMINATED_PEER_VERDICT_TIMEOUT_SECONDS,
    pod.TERMINATED_PEER_PUBLISH_TIMEOUT_SECONDS,
    pod.SHUTDOWN_CALL_TIMEOUT_SECONDS,
    *UNTIL_PUBLISHED,
)
"""All waits of a terminated node that gets no verdict from another one,
from SIGTERM until it has published its own.
"""


def limits() -> dict[str, TimeLimit]:
    """Return all limits by name: the pod's, then the recorder's."""
    modules = (pod, recorder)
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, TimeLimit)
    }


def table() -> str:
    """Return all limits as a Markdown table."""
    heading = ["| Limit | s | Who waits | For what | Then |", "|---|---|---|---|---|"]
    rows = [
        f"| `{name}` | {limit:g} | {limit.who} | {limit.waits_for} | {limit.then} |"
        for name, limit in limits().items()
    ]
    return "\n".join([*heading, *rows])


if __name__ == "__main__":
    print(table())
