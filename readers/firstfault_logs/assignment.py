"""Decide which process each traceback, error message and unlabeled line is about."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from firstfault.credentials import redact
from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.causes.cluster_tasks import take_spark_tasks
from firstfault_logs.causes.device_ranks import find_ranks_by_device
from firstfault_logs.causes.elimination import name_remaining_rank
from firstfault_logs.causes.survival import (
    choose_ending,
    drop_survived_tracebacks,
    find_thread_fault,
    shows_failure,
)
from firstfault_logs.completion.words import FAILURE_REPORT, is_below_error
from firstfault_logs.framing.lines import TRACEBACK
from firstfault_logs.launchers import ReportKind
from firstfault_logs.own_reports import OwnReport, find_last_error, find_uncaught_exception
from firstfault_logs.processes import LAUNCHER_STOPPED, POD_NUMBER, Process, Processes, exception_in
from firstfault_logs.tracebacks import (
    LAUNCHER_FILE,
    MAX_LINES_AFTER_END,
    Traceback,
    find_fault,
    find_shared_tracebacks,
    find_tracebacks,
)

if TYPE_CHECKING:
    from firstfault_logs.collector import Attempt, Excerpt, Stream
    from firstfault_logs.framing.labels import LogRecord

_MAX_LINES_RERAISED = 40
"""Lines of an exception of another process at the end of a driver's."""
_MAX_LINES_OF_FAILURE = 40
"""Lines of a message in which a failure is reported."""
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

# torch.multiprocessing.spawn's report of an exception.
_SPAWN_PROCESS_ERROR = LazyPattern(
    r"--[ ]Process[ ](?P<rank>\d{1,6})[ ]terminated[ ]with[ ]the[ ]following[ ]error"
)

# A heading with the rank that the traceback below is about.
_RANK_HEADING = LazyPattern(
    r"(?i)^\W{0,3}(?:global[ _])?rank[ =:]{1,2}(?P<rank>\d{1,6})\W{0,3}(?:error|exception|traceback|failure)\b"
)


class Assignment:
    """Assigns what an attempt's logs contain to its processes, surest evidence first.

    Each step only completes processes about which the steps before left a question open:

    1. each process's own labeled lines
    2. Ray's driver, which prints a process id above the exception of that process
    3. reports of the same failure by two names (a rank and a local rank, a nameless launcher) are
       merged
    4. unlabeled tracebacks, then other unlabeled lines, if only one process can have printed them
    """

    def __init__(self, attempt: Attempt, processes: Processes) -> None:
        self.attempt, self.processes = attempt, processes
        self._ends: dict[str, int] = {}
        """Number of the last line of each file."""
        for stream in attempt.streams.values():
            if stream.tail:
                self._ends[stream.file] = max(
                    self._ends.get(stream.file, 0), stream.tail[-1].number
                )
        self.notes: list[str] = []
        """What could not be read."""
        self.launcher_failures: list[Traceback] = []
        """Exceptions of launchers that failed themselves."""

    def run(self) -> None:
        """Run all steps; they change the processes."""
        for process in list(self.processes.all):
            for stream in process.streams:
                self._read_ray_driver(stream, process)
            self._read_own_lines(process)
        for stream in self.processes.shared:
            self._read_ray_driver(stream)
        self._merge_local_ranks()
        self._drop_repeated_deaths()
        self._mark_ray_actors()
        tracebacks = []
        for stream in self.processes.shared:
            found, note = find_shared_tracebacks(stream)
            self.notes += [note] if note else []
            tracebacks += [one for one in found if not self._take_launcher_exception(one)]
        tracebacks = take_spark_tasks(self.processes, tracebacks)
        self._assign_tracebacks(self._take_reported_exceptions(tracebacks))
        for stream in self.processes.shared:
            self._assign_unlabeled_lines(stream)
        self._drop_kills_below_exceptions()
        name_remaining_rank(self.attempt, self.processes)
        for process in self.processes.all:
            process.cite_last_line()

    # --- what a process printed itself ------------------------------------------------------------

    def _read_own_lines(self, process: Process) -> None:
        lines = sorted(
            (record for one in process.streams for record in one.tail),
            key=lambda record: record.number,
        )
        lines = _drop_lines_below_failure(lines)
        process.text = "\n".join(record.text for record in lines)
        if process.is_driver or self._take_headed_tracebacks(process):
            return
        if process.raised is None:
            by_torch = [record for stream in process.streams for record in stream.by_torch]
            process.set_own_report(find_uncaught_exception(by_torch, process.text))
        tracebacks = [found for stream in process.streams for found in find_tracebacks(stream)]
        last = tracebacks[-1] if tracebacks else None
        # Ray's driver prints the exception of a failed task again
        is_rays = (
            last is not None
            and last.stream.label.pid is not None
            and self._has_continued(tracebacks)
        )
        if not process.has_ended and process.raised is None and not is_rays:
            if last is not None and not self._is_survived(process, last):
                process.set_exception(last)
            if process.raised is None and not process.stopped and lines:
                process.set_own_report(find_last_error(lines, self._ends[process.streams[0].file]))
        if process.raised is not None and (fault := find_thread_fault(tracebacks, process.raised)):
            process.set_exception(fault)

    def _take_headed_tracebacks(self, driver: Process) -> bool:
        """Take the exceptions of other ranks that a process printed below their numbers;
        return whether it did.
        """
        for stream in driver.streams:
            above = (excerpt.lines[0].text for excerpt in stream.excerpts)
            is_headed = driver.rank is None and any(map(_RANK_HEADING.match, above))
            for found in find_tracebacks(stream) if is_headed else ():
                if heading := _RANK_HEADING.match(found.heading):
                    self.processes.find(rank=int(heading["rank"])).set_exception(found)
                    driver.is_driver = True
        return driver.is_driver

    @staticmethod
    def _is_survived(process: Process, last: Traceback) -> bool:
        """Whether a process continued after its last traceback,
        or lines of others make that unclear.
        """
        steps = (stream.progress for stream in process.streams if stream.file == last.stream.file)
        has_progress = any(step is not None and step.number > last.lines[1] for step in steps)
        is_over = (
            last.is_handled or last.is_before_success or last.later_lines > MAX_LINES_AFTER_END
        )
        return has_progress or is_over or last.is_mixed

    def _read_ray_driver(self, stream: Stream, driver: Process | None = None) -> None:
        """Take what Ray's driver raised for a process of another one.

        Args:
            stream: of the driver.
            driver: the process of the stream, if it's one that Ray started; it then raised nothing
                itself.
        """
        last = stream.excerpts[-1] if stream.excerpts else None
        if driver is not None and last is None:
            self._read_reraised_line(stream, driver)
        for excerpt in list(stream.excerpts):
            if driver is not None and (excerpt is not last or _has_later_steps(stream, excerpt)):
                continue  # it continued
            text = redact("\n".join(record.text for record in excerpt.lines))
            # in a chain of tasks, the last one's exception is the cause
            if (task := next(reversed(list(_RAY_TASK_ERROR.finditer(text))), None)) is not None:
                if driver is not None and driver.pid in {int(task["pid"]), None}:
                    continue
                process = self.processes.find(pid=int(task["pid"]), node=task["ip"] or "")
                process.raised = process.raised or exception_in(text[task.start() :], whole=True)
                process.raised_text = process.raised_text or text[task.start() :]
            elif driver is None and (died := _RAY_ACTOR_DIED.search(text)) is not None:
                process = self.processes.find(pid=int(died["pid"]), node=died["ip"])
                process.launcher_text = text[died.start() :].strip()
            else:
                continue
            process.lines.add(
                (stream.file, excerpt.lines[excerpt.at].number, excerpt.lines[-1].number)
            )
            process.time_ns = process.time_ns or excerpt.lines[excerpt.at].time_ns
            stream.excerpts.remove(excerpt)
            if driver is not None:
                driver.is_driver = True

    def _read_reraised_line(self, stream: Stream, driver: Process) -> None:
        """Take the exception of another process that one printed again without its own frames."""
        lines = [
            record
            for record in stream.tail
            if "ray::" in record.text or not record.text[:1].isspace()
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
        process = self.processes.find(pid=int(task["pid"]), node=task["ip"] or "")
        if process.raised is None:
            process.raised, process.raised_text = raised, text
            process.lines.add((stream.file, below[0].number, below[-1].number))
        driver.is_driver = True

    # --- one failure, reported twice --------------------------------------------------------------

    def _merge_local_ranks(self) -> None:
        """Merge ends that torch's agent reported by local rank with exceptions
        that were printed by rank.

        `failed (exitcode: 1) local_rank: 3 (pid: 88123)` is about one of the ranks that raised, not
        a further failure.
        """
        everything = self.processes.all
        ended = [
            one for one in everything if one.rank is None and one.has_ended and not one.streams
        ]
        ended = [one for one in ended if one.raised is None and one.local_rank is not None]
        raised = [
            one
            for one in everything
            if one.raised is not None and not one.has_ended and one.rank is not None
        ]
        if len(ended) > len(raised):
            return
        if len(ended) == len(raised) == 1:
            raised[0].exit_code, raised[0].signal = ended[0].exit_code, ended[0].signal
            raised[0].pid, raised[0].local_rank = ended[0].pid, ended[0].local_rank
            raised[0].lines |= ended[0].lines
        self.processes.all = [one for one in everything if all(one is not other for other in ended)]

    def _drop_repeated_deaths(self) -> None:
        """Drop deaths of unknown processes that another failure explains.

        A launcher may exit with the code of one of its workers, and it kills the rest. No exception
        explains a kill.
        """
        self.processes.all = [
            one for one in self.processes.all if not self._has_been_restarted(one)
        ]
        everything = self.processes.all
        ends = {one.signal for one in everything if one.is_known and one.has_ended}
        is_explained = bool(ends) or any(one.raised is not None for one in everything)
        explained = {"", "SIGABRT", "SIGTERM", *ends} if is_explained else set()
        self.processes.all = [
            one
            for one in everything
            if not (one.has_ended or (one.launcher_text and one.raised is None))
            or one.is_known
            or one.is_oom
            or not (one.signal in explained or self._is_of_cleanup(one))
        ]

    def _has_been_restarted(self, process: Process) -> bool:
        """Whether the training went on below a report, without an exit code,
        that a container had ended.
        """
        if (
            process.is_known
            or process.has_ended
            or process.raised is not None
            or not process.launcher_text
        ):
            return False
        streams = self.attempt.streams.values()
        return all(
            any(one.has_steps_after(last) for one in streams if one.file == file)
            for file, _, last in process.lines
        )

    def _mark_ray_actors(self) -> None:
        """Mark actors that died without a reason from Ray, below the report of a process's end."""
        for process in self.processes.all:
            is_unexplained = (
                process.launcher_text and not process.has_ended and process.raised is None
            )
            begins = {file: first for file, first, _ in process.lines}
            ends = (
                (file, report)
                for file, _, report in self.attempt.reports
                if report.kind is ReportKind.ENDED
            )
            if is_unexplained and any(
                report.exit_code and report.number < begins.get(file, 0) for file, report in ends
            ):
                process.stopped = LAUNCHER_STOPPED

    def _is_of_cleanup(self, process: Process) -> bool:
        """Whether a kill follows the report of another failure, or a node is lost anyway."""
        if process.signal != "SIGKILL":
            return False
        begins = {file: first for file, first, _ in process.lines}
        failed = [
            (file, report)
            for file, _, report in self.attempt.reports
            if report.kind is ReportKind.ENDED
        ]
        is_later = any(
            report.number < begins.get(file, 0)
            and report.exit_code
            and report.text != process.launcher_text
            for file, report in failed
        )
        return is_later or any(
            report.kind is ReportKind.LOST for _, _, report in self.attempt.reports
        )

    # --- unlabeled tracebacks ---------------------------------------------------------------------

    def _take_launcher_exception(self, found: Traceback) -> bool:
        """Take a traceback that a launcher printed, or that names its rank;
        return whether it is one.
        """
        spawned = _SPAWN_PROCESS_ERROR.search("\n".join((*found.lines_around, found.text)))
        # the last error above a launcher's own traceback is a worker's
        is_launchers = found.is_of_launcher or found.is_summary
        logged = set() if is_launchers else _ranks_in_errors(found.lines_around)
        if heading := _RANK_HEADING.match(found.heading):
            self.processes.find(rank=int(heading["rank"])).set_exception(found)
            return True
        if spawned is not None or (
            len(logged) == 1 and not found.is_handled and not found.is_before_success
        ):
            process = self.processes.find(
                rank=int(spawned["rank"]) if spawned is not None else min(logged)
            )
            if spawned is not None or not self._is_survived(process, found):
                process.set_exception(found)
                return True
        if found.is_of_launcher and not found.is_summary:
            self.launcher_failures.append(found)
        return is_launchers

    def _take_reported_exceptions(self, tracebacks: Sequence[Traceback]) -> list[Traceback]:
        """Take the exceptions that Ray prints in its reports on processes that died;
        return all other tracebacks.

        The same traceback elsewhere is what that process printed itself.
        """
        reported: set[tuple[str, str, str]] = set()
        numbers = sorted(report.number for _, _, report in self.attempt.reports)
        for file, node, report in self.attempt.reports:
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
            if (found := next(below, None)) is not None:
                process = self.processes.find(pid=report.pid, node=report.node or report.ip or node)
                if process.raised is None:
                    process.set_exception(found)
                    first = next(one for one in tracebacks if one.fault == found.fault)
                    process.lines.add((first.stream.file, *first.lines))
                reported.add(found.fault)
        return [found for found in tracebacks if found.fault not in reported]

    def _assign_tracebacks(self, tracebacks: Sequence[Traceback]) -> None:
        everything = self.processes.all
        for node in {found.stream.label.node for found in tracebacks}:
            here = [
                found
                for found in tracebacks
                if found.stream.label.node == node and not found.is_mixed
            ]
            is_any_failing = any(process.exit_code for process in everything)
            own = [found for found in here if not found.is_handled] or (
                here if is_any_failing else []
            )
            if any(process.uncaught for process in everything):
                # torch puts the rank before the traceback of each exception that ends a process of
                # a group
                counts = Counter(found.fault for found in own)
                # such an exception may be printed without a rank, too
                counts -= Counter(
                    find_fault(one.raised) for one in everything if one.uncaught and one.raised
                )
                own = [found for found in own if found.fault in counts]
                failing = sum(
                    one.exit_code is not None and one.raised is None for one in everything
                )
                own = [found for found in own if counts[found.fault] <= failing]
            processes = [one for one in everything if not node or one.node in {node, ""}]
            own = [found for found in own if not self._is_outlived(found, processes)]
            own = drop_survived_tracebacks(self.attempt, processes, own)
            if not own or self._has_continued(own):
                continue
            by_rank = find_ranks_by_device(self.attempt, self.processes, own)
            for rank, found in by_rank.items():
                self.processes.find(rank=rank, node=node).set_exception(found)
            if not by_rank:
                self._assign_on_node(own, processes)

    @staticmethod
    def _is_outlived(found: Traceback, processes: Sequence[Process]) -> bool:
        """Whether each process of the node printed a later step, so none of them had raised."""
        steps = [
            max(
                (one.progress.number for one in process.streams if one.progress is not None),
                default=0,
            )
            for process in processes
            if process.rank is not None
        ]
        return bool(steps) and min(steps) > found.lines[1]

    def _assign_on_node(
        self, tracebacks: Sequence[Traceback], processes: Sequence[Process]
    ) -> None:
        ended = (
            one for one in processes if one.exit_code or (one.launcher_text and not one.has_ended)
        )
        failing = [one for one in ended if one.raised is None and TRACEBACK not in one.text]
        by_fault = {found.fault: found for found in tracebacks}
        is_alike = len(by_fault) == 1 and len({one.exit_code for one in failing}) == 1
        if failing and (len(failing) == 1 or is_alike):
            for process in failing:
                process.set_exception(choose_ending(tracebacks))
            return
        if not self.processes.all and not self.attempt.is_torchrun:
            last = tracebacks[-1]  # one process: its last exception ended it
            if last.later_lines > MAX_LINES_AFTER_END or last.is_before_success or last.is_handled:
                return
            by_fault = {last.fault: choose_ending(tracebacks)}
        for fault, found in by_fault.items():
            process = Process(node=found.stream.label.node)
            process.set_exception(found)
            repeated = [one for one in tracebacks if one.fault == fault]
            process.lines |= {
                (one.stream.file, *one.lines) for one in (*repeated[:1], *repeated[-1:])
            }
            self.processes.all.append(process)

    def _has_continued(self, tracebacks: Sequence[Traceback]) -> bool:
        """Whether the job continued after these tracebacks,
        and no line reports a process that ended.
        """
        if self.attempt.entries or any(
            report.kind is ReportKind.ENDED for _, _, report in self.attempt.reports
        ):
            return False
        if self.attempt.is_torchrun and all(found.later_lines for found in tracebacks):
            return True  # its agent would have reported the end
        last = max((found.lines[1] for found in tracebacks), default=0)
        streams = self.attempt.streams.values()
        return any(
            stream.progress is not None and stream.progress.number > last for stream in streams
        )

    def _drop_kills_below_exceptions(self) -> None:
        """Drop kills of unknown processes below the faults that ended others:
        a launcher or a person cleaned up.
        """
        if not any(one.signal == "SIGKILL" and not one.is_known for one in self.processes.all):
            return
        faults = [one for one in self.processes.all if one.raised is not None]
        faults = [one for one in faults if classify(one.raised_text).role is not Role.SECONDARY]
        raised = {file: last for one in faults for file, _, last in one.lines}
        self.processes.all = [
            one
            for one in self.processes.all
            if one.signal != "SIGKILL"
            or one.is_known
            or one.is_oom
            or not self._is_below(one, raised)
        ]

    @staticmethod
    def _is_below(process: Process, lines: Mapping[str, int]) -> bool:
        return any(first > lines.get(file, first) for file, first, _ in process.lines)

    # --- other unlabeled lines --------------------------------------------------------------------

    def _assign_unlabeled_lines(self, stream: Stream) -> None:
        """Give the lines above the first launcher report to the only process
        of the node that failed.
        """
        node, everything = stream.label.node, self.processes.all
        ended = [
            one for one in everything if one.has_ended and (not node or one.node in {node, ""})
        ]
        reports = (report.number for file, _, report in self.attempt.reports if file == stream.file)
        first_report = min(reports, default=1 << 62)
        above = [record for record in stream.tail if record.number < first_report]
        above = list(itertools.takewhile(lambda record: not _is_of_launcher(record.text), above))
        text = "\n".join(record.text for record in above)
        silent = [one for one in ended if one.raised is None and not shows_failure(one.text)]
        # an unlabeled traceback that fits none of these processes would be given to each of them
        is_ambiguous = any(one.raised is not None and not one.is_known for one in everything)
        if (
            not is_ambiguous
            and silent == ended
            and len({(one.exit_code, one.signal) for one in ended}) == 1
        ):
            blamed = _ranks_in_errors(record.text for record in above)
            for process in [
                one for one in ended if len(blamed) == 1 and one.rank in blamed
            ] or ended:
                process.text = "\n".join(filter(str.strip, (process.text, text)))
        # if torch's agent had the chance to report an exit, its report isn't just cut off
        elif (not everything or _is_another_pod(node, everything)) and not (
            self.attempt.is_torchrun and (self.attempt.reports or self.attempt.entries)
        ):
            own_report = find_last_error(above, self._ends.get(stream.file, 0))
            if own_report != OwnReport():
                process = Process(node=node, text=text, streams=[stream])
                process.set_own_report(own_report)
                everything.append(process)


def _is_another_pod(node: str, processes: Sequence[Process]) -> bool:
    """Whether a node is one of several pods with a process each,
    and none of its own processes is known.
    """
    if not node or any(one.is_known or one.node in {node, ""} for one in processes):
        return False
    names = {POD_NUMBER.sub("", one.node) for one in processes}
    return names == {POD_NUMBER.sub("", node)} != {node}


def _drop_lines_below_failure(lines: list[LogRecord]) -> list[LogRecord]:
    """Return lines without what a library printed below a failure while the process ended,
    which would hide it.
    """
    end = len(lines)
    while end > 1 and is_below_error(lines[end - 1].text):
        end -= 1
    above = lines[max(end - _MAX_LINES_OF_FAILURE, 0) : end]
    has_failed = any(FAILURE_REPORT.search(record.text) for record in above)
    return lines[:end] if has_failed else lines


def _has_later_steps(stream: Stream, excerpt: Excerpt) -> bool:
    """Whether a process printed a step of a training below a traceback."""
    return stream.progress is not None and stream.progress.number > excerpt.lines[excerpt.at].number


# Begins the description of a pod.
_POD_DESCRIPTION = LazyPattern(
    r"(?:Name:\s{2,20}[a-z0-9][a-z0-9.-]{1,250}|apiVersion:[ ]\S+|status:)$"
)


def _is_of_launcher(text: str) -> bool:
    """Whether a line is of a launcher's traceback, or begins the description of a pod."""
    return any(map(bool, (LAUNCHER_FILE.search(text), _POD_DESCRIPTION.match(text))))


# A logged error that names one rank.
_ERROR_ON_RANK = LazyPattern(
    r"\b(?:ERROR|CRITICAL|FATAL)\b[^\n]{0,200}?\b[Rr]ank[ =:]{1,2}(?P<rank>\d{1,6})\b"
)


def _ranks_in_errors(lines: Iterable[str]) -> set[int]:
    """Return the ranks that logged errors name."""
    return {int(found["rank"]) for found in map(_ERROR_ON_RANK.search, lines) if found is not None}
