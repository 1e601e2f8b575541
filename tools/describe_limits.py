"""Print the table of all time limits, and add up those that a terminated node waits for one after the other.

tests/torch_agent/test_budgets.py fails if the sum exceeds what Kubernetes grants.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from firstfault.recorder import time_limits as recorder
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
"""What a terminated agent waits for, one after the other, until its workers are stopped and reported."""
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
CONCLUDES_FOR_ALL = (*UNTIL_STOPPED, pod.TERMINATED_SETTLE_SECONDS, *UNTIL_PUBLISHED, *AFTER_PUBLISHING)
"""All waits of a terminated node that concludes for all, from SIGTERM to its exit."""
CONCLUDES_ALONE = (
    *UNTIL_STOPPED,
    pod.TERMINATED_SETTLE_SECONDS,
    pod.TERMINATED_PEER_VERDICT_TIMEOUT_SECONDS,
    pod.TERMINATED_PEER_PUBLISH_TIMEOUT_SECONDS,
    pod.SHUTDOWN_CALL_TIMEOUT_SECONDS,
    *UNTIL_PUBLISHED,
)
"""All waits of a terminated node that gets no verdict from another one, from SIGTERM until it has published its own."""


class Limit(NamedTuple):
    """A time limit, with the text below it in the module."""

    name: str
    seconds: float
    waits: str
    """Who waits so long, and for what."""
    end: str
    """What happens at the end."""


def limits() -> list[Limit]:
    """Return all limits: the pod's, then the recorder's."""
    return [*_read_limits(pod), *_read_limits(recorder)]


def _read_limits(module: ModuleType) -> Iterator[Limit]:
    for assignment, below in itertools.pairwise(ast.parse(inspect.getsource(module)).body):
        if isinstance(assignment, ast.Assign):
            name = ast.unparse(assignment.targets[0])
            assert isinstance(below, ast.Expr), f"{name} has no text"
            waits, _, end = ast.literal_eval(below.value).removesuffix(".").partition(". Then ")
            yield Limit(name, getattr(module, name), waits[0].lower() + waits[1:], end)


def table() -> str:
    """Return all limits as a Markdown table."""
    lines = [f"| `{limit.name}` | {limit.seconds:g} | {limit.waits} | {limit.end} |" for limit in limits()]
    return "\n".join(["| Limit | s | Who waits | Then |", "|---|---|---|---|", *lines])


if __name__ == "__main__":
    print(table())
