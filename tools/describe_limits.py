"""Prints the table of docs/budgets.md, and adds up the limits that a terminated node waits for one after the other.

``python tools/describe_limits.py`` prints the table; tests/torch_agent/test_budgets.py fails if the page differs.
"""

from __future__ import annotations

from firstfault.recorder import budgets as recorder
from firstfault.recorder.budgets import Limit
from firstfault_torch import budgets as pod

KUBERNETES_GRACE_S = 30.0
"""From SIGTERM to SIGKILL, unless the pod says otherwise."""
UNTIL_STOPPED = (pod.MAIN_THREAD_S, pod.ASKING_S, pod.ASKING_S, pod.STOP_S, pod.TERMINATED_UPLOADS_S)
"""What a terminated agent waits for, one after the other, until its workers are stopped and reported."""
UNTIL_PUBLISHED = (
    pod.TERMINATED_READING_S,
    pod.TERMINATED_PREVIOUS_S,
    pod.TERMINATED_CONCLUDING_S,
    pod.TERMINATED_PUBLISH_S,
    pod.HURRIED_S,
)
"""Then, in the node that concludes, until the verdict is published; the last one is the deck."""
AFTER_PUBLISHING = (
    pod.LEAVING_FILES_S,
    pod.LEAVING_SLACK_S,
    pod.NOTIFIERS_S,
    pod.NOW_S,
    recorder.KILLED_S,
    recorder.RECORDER_END_S,
    recorder.KILLED_S,
)
"""Then until the process exits."""
CONCLUDES_FOR_ALL = (*UNTIL_STOPPED, pod.TERMINATED_SETTLE_S, *UNTIL_PUBLISHED, *AFTER_PUBLISHING)
"""All waits of a terminated node that concludes for all, from SIGTERM to its exit."""
CONCLUDES_ALONE = (
    *UNTIL_STOPPED,
    pod.TERMINATED_SETTLE_S,
    pod.TERMINATED_VERDICT_S,
    pod.TERMINATED_PUBLISHED_S,
    *UNTIL_PUBLISHED,
)
"""All waits of a terminated node that gets no verdict from another one, from SIGTERM until it has published its own."""


def limits() -> list[tuple[str, Limit]]:
    """Return all limits with their names: the pod's, then the recorder's."""
    return [(name, value) for part in (pod, recorder) for name, value in vars(part).items() if isinstance(value, Limit)]


def table() -> str:
    """Return all limits as a Markdown table."""
    lines = [f"| `{name}` | {limit:g} | {limit.waits} | {limit.end} |" for name, limit in limits()]
    return "\n".join(["| Limit | s | Who waits | Then |", "|---|---|---|---|", *lines])


if __name__ == "__main__":
    print(table())
