"""Find the failed tasks of Spark. Its driver may print the exception of a task several times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault_logs.tracebacks import SPARK_TASK_ERROR

if TYPE_CHECKING:
    from firstfault_logs.processes import Processes
    from firstfault_logs.tracebacks import Traceback

_DRIVER_EXCEPTIONS = (
    "Py4JJavaError",
    "SparkException",
)
"""Exceptions in which a driver reports that a task failed."""


def take_spark_tasks(processes: Processes, tracebacks: Sequence[Traceback]) -> list[Traceback]:
    """Give each task's last exception to a process on its node; return the remaining tracebacks.

    Spark starts a failed task again, perhaps on another node, and its driver raises the last
    exception once more.
    """
    tasks: dict[tuple[str, str], tuple[str, Traceback]] = {}
    remaining = []
    for traceback in tracebacks:
        if (heading := _find_heading(traceback)) is None:
            remaining.append(traceback)
        else:
            tasks[heading["stage"], heading["task"]] = heading["node"], traceback
    tasks = {name: task for name, task in tasks.items() if not _has_finished(*name, task[1])}
    for node, traceback in tasks.values():
        process = processes.find_by_node(node)
        process.set_exception(traceback)
        process.stopped = ""
    return [
        traceback
        for traceback in remaining
        if not tasks or get_short_name(traceback.exception) not in _DRIVER_EXCEPTIONS
    ]


def _has_finished(stage: str, task: str, traceback: Traceback) -> bool:
    """Whether a task that was started again has finished."""
    finished = re.compile(rf"\bFinished task {task}\.\d+ in stage {re.escape(stage)}\s")
    later = (record for record in traceback.stream.tail if record.number > traceback.lines[1])
    return any(finished.search(record.text) for record in later)


def _find_heading(traceback: Traceback) -> re.Match[str] | None:
    first = traceback.text.partition("\n")[0]
    return SPARK_TASK_ERROR.search(first) or SPARK_TASK_ERROR.search(traceback.heading)
