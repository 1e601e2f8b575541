"""Find the exceptions and deaths of processes that the drivers of Ray and Spark report.

They print the exception of a task again, perhaps several times, and Ray's reports on dead processes
contain their tracebacks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from firstfault.credentials import redact
from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.framing.lines import TRACEBACK
from firstfault_logs.launchers import ReportKind
from firstfault_logs.processes import LAUNCHER_STOPPED, exception_in
from firstfault_logs.tracebacks import SPARK_TASK_ERROR

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt, Excerpt, Stream
    from firstfault_logs.processes import Process, Processes
    from firstfault_logs.tracebacks import Traceback


_MAX_LINES_RERAISED = 40
"""Lines of an exception of another process at the end of a driver's."""
_MAX_REPORTED_LINES = 60
"""Lines below a report on a process in which its exception begins."""


# Ray's driver prints it above the exception of a process.
_RAY_TASK_ERROR = LazyPattern(
    r"ray::[^\n]{1,200}\(pid=(?P<pid>\d{1,10})(?:,[ ]ip=(?P<ip>[\w.:]+))?[^\n]*"
)

# Ray's driver prints it about a process that died
_RAY_ACTOR_DIED = LazyPattern(r"""
(?:ActorDiedError|WorkerCrashedError|actor[ ]died[ ]unexpectedly) [^\n]*
(?:\n[^\n]*){0,8}? \n\s*pid:[ ](?P<pid>\d{1,10})
(?:\n[^\n]*){0,4}? \n\s*ip:[ ](?P<ip>[\w.:]+)
""")


def read_ray_driver(processes: Processes, stream: Stream, driver: Process | None = None) -> None:
    """Take what Ray's driver raised for a process of another one.

    Args:
        processes: of the attempt.
        stream: of the driver.
        driver: the process of the stream, if it's one that Ray started; it then raised nothing
            itself.
    """
    last = stream.excerpts[-1] if stream.excerpts else None
    if driver is not None and last is None:
        _read_reraised_line(processes, stream, driver)
    for excerpt in list(stream.excerpts):
        if driver is not None and (excerpt is not last or _has_later_steps(stream, excerpt)):
            continue  # it continued
        text = redact("\n".join(record.text for record in excerpt.lines))
        # in a chain of tasks, the last one's exception is the cause
        if (task := next(reversed(list(_RAY_TASK_ERROR.finditer(text))), None)) is not None:
            if driver is not None and driver.pid in {int(task["pid"]), None}:
                continue
            process = processes.find(pid=int(task["pid"]), node=task["ip"] or "")
            process.raised = process.raised or exception_in(text[task.start() :], whole=True)
            process.raised_text = process.raised_text or text[task.start() :]
        elif driver is None and (died := _RAY_ACTOR_DIED.search(text)) is not None:
            process = processes.find(pid=int(died["pid"]), node=died["ip"])
            process.launcher_text = text[died.start() :].strip()
        else:
            continue
        process.lines.add((stream.file, excerpt.lines[excerpt.at].number, excerpt.lines[-1].number))
        process.time_ns = process.time_ns or excerpt.lines[excerpt.at].time_ns
        stream.excerpts.remove(excerpt)
        if driver is not None:
            driver.is_driver = True


def _read_reraised_line(processes: Processes, stream: Stream, driver: Process) -> None:
    """Take the exception of another process that one printed again without its own frames."""
    lines = [
        record for record in stream.tail if "ray::" in record.text or not record.text[:1].isspace()
    ]
    begin = next((one for one in reversed(lines) if _RAY_TASK_ERROR.search(one.text)), None)
    if begin is None or (stream.progress is not None and stream.progress.number > begin.number):
        return
    below = [record for record in stream.tail if record.number >= begin.number]
    text = redact("\n".join(record.text for record in below))
    task = _RAY_TASK_ERROR.search(text)
    raised = exception_in(text[task.start() :], whole=True) if task is not None else None
    if (
        task is None
        or raised is None
        or int(task["pid"]) == driver.pid
        or len(below) > _MAX_LINES_RERAISED
    ):
        return
    process = processes.find(pid=int(task["pid"]), node=task["ip"] or "")
    if process.raised is None:
        process.raised, process.raised_text = raised, text
        process.lines.add((stream.file, below[0].number, below[-1].number))
    driver.is_driver = True


def take_reported_exceptions(
    attempt: Attempt, processes: Processes, tracebacks: Sequence[Traceback]
) -> list[Traceback]:
    """Take the exceptions that Ray prints in its reports on processes that died;
    return all other tracebacks.

    The same traceback elsewhere is what that process printed itself.
    """
    reported: set[tuple[str, str, str]] = set()
    numbers = sorted(report.number for _, _, report in attempt.reports)
    for file, node, report in attempt.reports:
        if (
            report.kind is not ReportKind.ENDED
            or report.pid is None
            or TRACEBACK not in report.text
        ):
            continue
        later = (number for number in numbers if number > report.number)
        end = min(next(later, 1 << 62), report.number + _MAX_REPORTED_LINES)
        below = (
            one
            for one in tracebacks
            if one.stream.file == file and report.number < one.lines[0] < end
        )
        if (traceback := next(below, None)) is not None:
            process = processes.find(pid=report.pid, node=report.node or report.ip or node)
            if process.raised is None:
                process.set_exception(traceback)
                first = next(one for one in tracebacks if one.fault == traceback.fault)
                process.lines.add((first.stream.file, *first.lines))
            reported.add(traceback.fault)
    return [traceback for traceback in tracebacks if traceback.fault not in reported]


def mark_ray_actors(attempt: Attempt, processes: Processes) -> None:
    """Mark actors that died without a reason from Ray, below the report of a process's end."""
    for process in processes.all:
        is_unexplained = process.launcher_text and not process.has_ended and process.raised is None
        begins = {file: first for file, first, _ in process.lines}
        ends = (
            (file, report) for file, _, report in attempt.reports if report.kind is ReportKind.ENDED
        )
        if is_unexplained and any(
            report.exit_code and report.number < begins.get(file, 0) for file, report in ends
        ):
            process.stopped = LAUNCHER_STOPPED


def _has_later_steps(stream: Stream, excerpt: Excerpt) -> bool:
    """Whether a process printed a step of a training below a traceback."""
    return stream.progress is not None and stream.progress.number > excerpt.lines[excerpt.at].number


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
