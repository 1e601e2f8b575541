"""The failures of one attempt as `WorkerError`s, from the processes in its logs."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault import model
from firstfault.credentials import redact
from firstfault.exceptions.exceptions_in_text import get_short_name
from firstfault.exceptions.fingerprint import normalize_message
from firstfault.exceptions.printed_tracebacks import find_printed_exception
from firstfault.exceptions.source_files import is_library_file
from firstfault.exceptions.traceback_format import format_exception
from firstfault.job_logs.launchers import ReportKind
from firstfault.job_logs.lines import TRACEBACK
from firstfault.job_logs.outcome import has_final_success, is_success_report
from firstfault.job_logs.own_reports import EXCEPTION, HANDLED, OwnReport, find_last_error, find_uncaught_exception
from firstfault.job_logs.processes import (
    LAUNCHER_STOPPED,
    MAX_TEXT,
    SCHEDULER_STOPPED,
    Process,
    Processes,
    exception_in,
)
from firstfault.model.failure import CANCELLED, CTRL_C, DIED, OF_LOGS
from firstfault.utils.text import clean, clean_end

if TYPE_CHECKING:
    from firstfault.job_logs.collector import Attempt, Stream
    from firstfault.model import ExceptionInfo

_LOG_BYTES = 32 * 1024
_MAX_WORLD_SIZE = 4096
_MAX_LINES_AFTER_END = 10
"""Lines of the same process after a traceback that show that it lived on."""
_LAUNCHER_FILE = re.compile(
    r"torch/distributed/(?:launcher|run\.py|elastic/(?:agent|rendezvous|timer))|/accelerate/commands/|deepspeed/launcher"
    r"|lightning/(?:fabric/)?cli|/bin/(?:torchrun|accelerate|deepspeed)\b|torch/multiprocessing/spawn\.py"
    r"|ray/train/.*(?:controller|trainer)"
)
"""Files of launchers, in the outermost frames of what they raise themselves."""
_COMMAND_FAILED = re.compile(
    r"(?:Command|Process|Subprocess|Job|Task)\b[^\n]{0,400}\b(?:failed with|returned|exited with) (?:a )?"
    r"(?:non-?zero|return code|exit (?:code|status)|status|code)"
)
"""Messages in which a launcher's exception reports how the program that it started ended."""
_LAUNCHER_EXCEPTIONS = {"ChildFailedError", "CalledProcessError", "ProcessExitedException"}
_NO_EXIT_STATUS = "no exit status in the log, probably stopped by its launcher"
_MAX_SILENT_SUSPECTS = 3
"""More silent ranks than this are not suspects."""
_RAY_TASK_ERROR = re.compile(r"ray::[^\n]{1,200}\(pid=(?P<pid>\d{1,10})(?:, ip=(?P<ip>[\w.:]+))?[^\n]*")
_RAY_ACTOR_DIED = re.compile(
    r"(?:ActorDiedError|WorkerCrashedError|actor died unexpectedly)[^\n]*(?:\n[^\n]*){0,8}?\n\s*pid: (?P<pid>\d{1,10})"
    r"(?:\n[^\n]*){0,4}?\n\s*ip: (?P<ip>[\w.:]+)"
)
_SPAWN_PROCESS_ERROR = re.compile(r"-- Process (?P<rank>\d{1,6}) terminated with the following error")
_RECOVERABLE = "FlyteRecoverableException"
_GPU_ERROR = re.compile(r"(?:CUDA|HIP)(?: runtime)? error|CUDNN|CUBLAS")
HARDWARE_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "ECC page retirement or row remapping",
    64: "ECC page retirement or row remapper failure",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP RPC timeout",
    120: "GSP error",
    140: "unrecovered ECC error",
}
"""Errors of NVIDIA's driver that hardware causes, not the application, from NVIDIA's catalog of Xid errors."""


@dataclass(frozen=True, slots=True)
class _Traceback:
    """A traceback in a stream."""

    exception: ExceptionInfo
    text: str
    stream: Stream
    lines: tuple[int, int]
    after: int = 0
    """Lines that its label printed later."""
    is_handled: bool = False
    """Whether the lines around it show that the program continued."""
    is_before_success: bool = False
    """Whether a later line of the same stream reports success."""
    is_mixed: bool = False

    @property
    def kind(self) -> tuple[str, str, str]:
        """Equal for the same fault of several processes."""
        frame = self.exception.frames[-1] if self.exception.frames else None
        at = f"{frame.file}:{frame.line}" if frame else ""
        return self.exception.type, normalize_message(self.exception.message), at


class Documents:
    """Makes the documents of one attempt."""

    def __init__(self, attempt: Attempt, round_: int) -> None:
        self.attempt, self.round = attempt, round_
        self.processes = Processes(attempt)
        self.notes: list[str] = []
        """What could not be read."""
        self._agents: list[model.WorkerError] = []

    def all(self) -> list[model.WorkerError]:
        """Return one for each process, node and launcher that failed or was ended; none if nothing failed."""
        processes = self.processes
        for process in processes.all:
            self._read_streams(process)
        for stream in processes.shared:
            self._take_ray_errors(stream)
        self._merge_unplaced()
        ends = {item.signal for item in processes.all if item.is_known and item.has_ended}
        if ends or any(item.raised is not None for item in processes.all):
            # A launcher may exit with the code of one of these workers. No exception explains a kill.
            explained = {"", "SIGABRT", "SIGTERM", *ends}
            processes.all = [
                item
                for item in processes.all
                if not item.has_ended or item.is_known or item.is_oom or item.signal not in explained
            ]
        processes.all = [item for item in processes.all if not self._is_of_cleanup(item)]
        raised = [found for stream in processes.shared for found in self._read_shared(stream)]
        self._assign_tracebacks([found for found in raised if not self._is_of_launcher(found)])
        self._assign_unlabeled_lines()
        self._end_interrupted()
        self._end_killed()
        self._end_terminated()
        agents = [*self._report_launchers(), *self._agents]
        self._match_oom_kills()
        self._match_hardware_errors()
        failed = [process for process in processes.all if self._has_failed(process)]
        if not failed and not agents:
            return []
        if has_final_success(self.attempt, self._find_last_failures(failed)):
            return []
        self._stop_the_rest(failed)
        world = max([self.attempt.world_size, *(1 + (process.rank or 0) for process in processes.all)])
        nodes = {process.node for process in processes.all} | {agent.worker for agent in agents}
        report = [process for process in processes.all if process.rank is not None or self._has_failed(process)]
        documents = [*map(self._document, report), *agents]
        size = len(nodes - {""}) or 1
        return [replace(item, place=replace(item.place, world_size=world, group_world_size=size)) for item in documents]

    def _is_of_cleanup(self, process: Process) -> bool:
        """Whether a kill of an unknown process follows the report of another failure, so its launcher cleaned up."""
        if process.is_known or process.is_oom or process.signal != "SIGKILL":
            return False
        if any(report.kind is ReportKind.LOST for _, _, report in self.attempt.reports):
            return True
        begins = {file: first for file, first, _ in process.lines}
        failures = (
            (file, report.number)
            for file, _, report in self.attempt.reports
            if report.kind is ReportKind.ENDED
            and report.exit_code
            and (report.text, report.signal) != (process.launcher_text, process.signal)
        )
        return any(number < begins.get(file, 0) for file, number in failures)

    def _end_interrupted(self) -> None:
        """Count processes that ended after their scheduler announced the end of the job as stopped."""
        announced: dict[str, int] = {}
        for file, _, report in self.attempt.reports:
            if report.kind is ReportKind.TERMINATED and report.reason:
                announced[file] = min(announced.get(file, report.number), report.number)
        for process in self.processes.all:
            files = {file for file, _, _ in process.lines}
            is_later = all(first > announced.get(file, first) for file, first, _ in process.lines)
            if files and files <= announced.keys() and is_later and self._has_failed(process) and not process.is_oom:
                process.raised, process.exit_code, process.signal = None, None, ""
                process.own_error, process.stopped = "", SCHEDULER_STOPPED

    def _find_last_failures(self, failed: Sequence[Process]) -> dict[str, int]:
        """Return the number of the last line about a failure in each file."""
        last: dict[str, int] = {}
        places = [(file, end) for process in failed for file, _, end in process.lines]
        places += [
            (file, report.number) for file, _, report in self.attempt.reports if report.kind is not ReportKind.GPU
        ]
        for file, number in places:
            last[file] = max(last.get(file, 0), number)
        return last

    # --- what processes printed ---------------------------------------------------------------------------------------

    def _read_streams(self, process: Process) -> None:
        lines = sorted(
            (record for stream in process.streams for record in stream.tail), key=lambda record: record.number
        )
        process.text = "\n".join(record.text for record in lines)
        by_torch = [record for stream in process.streams for record in stream.by_torch]
        if process.raised is None:
            self._take_own_report(process, find_uncaught_exception(by_torch, process.text))
        excerpts = [found for stream in process.streams for found in _find_tracebacks(stream)]
        # Ray's driver reports an actor that has failed
        is_rays = bool(excerpts) and excerpts[-1].stream.label.pid is not None and self._has_later_output(excerpts)
        if not process.has_ended and process.raised is None and not is_rays:
            last = excerpts[-1] if excerpts else None
            if last is not None:
                steps = (stream.progress for stream in process.streams if stream.file == last.stream.file)
                has_later_output = any(step is not None and step.number > last.lines[1] for step in steps)
                is_over = has_later_output or last.is_handled or last.is_before_success
                if last.after <= _MAX_LINES_AFTER_END and not (is_over or last.is_mixed):
                    self._set_exception(process, last)
            if process.raised is None and not process.stopped:
                self._take_own_report(process, find_last_error(lines))
        telling = [record for record in lines if record.time_ns is not None]
        if process.time_ns is None and telling:
            process.time_ns = telling[-1].time_ns
        if not process.lines and lines:
            process.lines.add((process.streams[0].file, lines[-1].number, lines[-1].number))

    def _read_shared(self, stream: Stream) -> list[_Traceback]:
        """Return the tracebacks in a stream of several processes, whose lines may alternate."""
        raised, mixed = list(_find_tracebacks(stream)), [found for found in stream.excerpts if found.is_mixed]
        if not mixed:
            return raised
        lines = mixed[0].lines[0].number, mixed[-1].lines[-1].number
        last_lines = {
            last["type"]: last for found in mixed for record in found.lines if (last := EXCEPTION.match(record.text))
        }
        names = last_lines.keys() - _LAUNCHER_EXCEPTIONS
        same = last_lines[min(names)] if len({last_lines[name][0] for name in names}) == 1 else None
        if same is None or same["type"].rpartition(".")[2] in _LAUNCHER_EXCEPTIONS:
            where = f"lines {lines[0]} to {lines[1]}"
            self.notes.append(f"tracebacks of several processes are mixed in {where}: no prefix tells them apart")
            return raised
        exception = model.ExceptionInfo(same["type"], redact(same["message"] or ""))
        return [
            *(one for one in raised if not one.is_mixed),
            _Traceback(exception, format_exception(exception), stream, lines),
        ]

    def _merge_unplaced(self) -> None:
        """Merge ends that torch's agent reported by local rank with exceptions that were printed by rank.

        `failed (exitcode: 1) local_rank: 3 (pid: 88123)` is about one of the ranks that raised, not a further failure.
        """
        everything = self.processes.all
        ended = [item for item in everything if item.rank is None and item.has_ended and not item.streams]
        ended = [item for item in ended if item.raised is None and item.local_rank is not None]
        raised = [
            item for item in everything if item.raised is not None and not item.has_ended and item.rank is not None
        ]
        if len(ended) > len(raised):
            return
        if len(ended) == len(raised) == 1:
            raised[0].exit_code, raised[0].signal = ended[0].exit_code, ended[0].signal
            raised[0].pid, raised[0].local_rank = ended[0].pid, ended[0].local_rank
            raised[0].lines |= ended[0].lines
        self.processes.all = [item for item in everything if all(item is not one for one in ended)]

    @staticmethod
    def _take_own_report(process: Process, words: OwnReport) -> None:
        """Take a process's own report of its end."""
        if not words.text:
            return
        process.raised, process.signal = words.raised, process.signal or words.signal
        process.raised_text = words.text if words.raised is not None else ""
        process.own_error = "" if words.raised is not None or words.signal else words.text
        process.tells, process.uncaught = bool(words.signal), words.uncaught
        process.lines.add((process.streams[0].file, *words.lines))

    def _is_of_launcher(self, found: _Traceback) -> bool:
        """Whether a traceback is a launcher's; if it's about a process, take it."""
        exception = found.exception
        spawned = _SPAWN_PROCESS_ERROR.search(found.text)
        if spawned is not None:
            process = self.processes.find(rank=int(spawned["rank"]))
            process.raised, process.raised_text = exception, found.text
            process.lines.add((found.stream.file, *found.lines))
            return True
        if _COMMAND_FAILED.match(exception.message):
            return True
        own = [frame for frame in exception.frames if _LAUNCHER_FILE.search(frame.file)]
        if get_short_name(exception) in _LAUNCHER_EXCEPTIONS or (
            own and get_short_name(exception) == "SignalException"
        ):
            return True
        if not own or not all(
            _LAUNCHER_FILE.search(frame.file) or is_library_file(frame.file) for frame in exception.frames[1:]
        ):
            return False
        where, code = found.stream, f"SYSTEM:{get_short_name(exception)}"
        category = "rendezvous" if "Rendezvous" in code or "/rendezvous/" in exception.frames[-1].file else "platform"
        agent = self._agent(where.label.node, (where.file, *found.lines), category, code, found.text)
        self._agents.append(replace(agent, exception=exception))
        return True

    def _take_ray_errors(self, stream: Stream) -> None:
        """Take what Ray's driver raised for a process of another one."""
        for excerpt in list(stream.excerpts):
            text = redact("\n".join(record.text for record in excerpt.lines))
            if (task := _RAY_TASK_ERROR.search(text)) is not None:
                process = self.processes.find(pid=int(task["pid"]), node=task["ip"] or "")
                process.raised = process.raised or exception_in(text[task.start() :], whole=True)
                process.raised_text = process.raised_text or text[task.start() :]
            elif (died := _RAY_ACTOR_DIED.search(text)) is not None:
                process = self.processes.find(pid=int(died["pid"]), node=died["ip"])
                process.launcher_text = text[died.start() :].strip()
            else:
                continue
            process.lines.add((stream.file, excerpt.lines[0].number, excerpt.lines[-1].number))
            stream.excerpts.remove(excerpt)

    def _end_killed(self) -> None:
        """Count processes that were killed after another one had ended otherwise as stopped: mpirun kills the rest."""
        first = next(
            (report for _, _, report in self.attempt.reports if report.kind is ReportKind.ENDED and report.ranks), None
        )
        killed = [item for item in self.processes.all if item.signal == "SIGKILL" and not item.is_oom]
        if first is None or first.signal in {"", "SIGKILL", "SIGTERM"} or len(killed) < 2 or self.attempt.is_torchrun:  # noqa: PLR2004 - the rest
            return
        for process in killed:
            process.signal, process.stopped = "", LAUNCHER_STOPPED

    def _end_terminated(self) -> None:
        """Count processes that SIGTERM ended as stopped, if another one failed: launchers send it, too."""
        others = [item for item in self.processes.all if item.signal != "SIGTERM" and self._has_failed(item)]
        signaled = {report.pid for _, _, report in self.attempt.reports if report.kind is ReportKind.STOPPED} - {None}
        # on these nodes, torch's agent printed a line for each process that it stopped
        listed = {item.node for item in self.processes.all if item.pid in signaled}
        for process in self.processes.all if others else ():
            is_unlisted = process.pid is not None and process.pid not in signaled and process.node in listed
            if process.signal == "SIGTERM" and process.raised is None and not is_unlisted:
                process.signal, process.stopped = "", LAUNCHER_STOPPED

    def _assign_tracebacks(self, raised: Sequence[_Traceback]) -> None:
        """Give tracebacks without a prefix to the processes that failed, if it is clear to which."""
        processes = self.processes
        nodes = {found.stream.label.node for found in raised}
        for node in nodes:
            here = [found for found in raised if found.stream.label.node == node and not found.is_mixed]
            own = [found for found in here if not found.is_handled] or here
            if any(item.uncaught for item in processes.all):
                # torch puts the rank before the traceback of each exception that ends a process of a group
                counts = Counter(found.kind for found in own)
                failing = sum(item.exit_code is not None and item.raised is None for item in processes.all)
                own = [found for found in own if counts[found.kind] <= failing]
            if not self._has_later_output(own):
                self._assign_of_node(own, [item for item in processes.all if not node or item.node in {node, ""}])

    def _assign_of_node(self, own: Sequence[_Traceback], processes: Sequence[Process]) -> None:
        if not own:
            return
        failing = [item for item in processes if item.exit_code and item.raised is None and TRACEBACK not in item.text]
        kinds = {found.kind: found for found in own}
        is_alike = len(kinds) == 1 and len({item.exit_code for item in failing}) == 1
        if failing and (len(failing) == 1 or is_alike):
            for process in failing:
                self._set_exception(process, own[-1])
            return
        if not self.processes.all and not self.attempt.is_torchrun:
            own = own[-1:]  # one process: the last one ended it
            if own[0].after > _MAX_LINES_AFTER_END or own[0].is_before_success:
                return
            kinds = {own[0].kind: own[0]}
        for found in kinds.values():
            process = Process(node=found.stream.label.node)
            self.processes.all.append(process)
            self._set_exception(process, found)

    def _set_exception(self, process: Process, found: _Traceback) -> None:
        process.raised, process.raised_text = found.exception, found.text
        process.lines.add((found.stream.file, *found.lines))

    def _has_later_output(self, raised: Sequence[_Traceback]) -> bool:
        """Whether the job continued after these tracebacks, and no line reports a process that ended."""
        if self.attempt.entries or any(report.kind is ReportKind.ENDED for _, _, report in self.attempt.reports):
            return False
        if self.attempt.is_torchrun and all(found.after for found in raised):
            return True  # its agent would have reported the end
        last = max((found.lines[1] for found in raised), default=0)
        streams = self.attempt.streams.values()
        return any(stream.progress is not None and stream.progress.number > last for stream in streams)

    def _assign_unlabeled_lines(self) -> None:
        """Give lines without a prefix to the only process of their node that failed."""
        for stream in self.processes.shared:
            node = stream.label.node
            ended = [item for item in self.processes.all if item.has_ended and (not node or item.node in {node, ""})]
            first = min(
                (report.number for file, _, report in self.attempt.reports if file == stream.file), default=1 << 62
            )
            before = [record for record in stream.tail if record.number < first]
            before = list(itertools.takewhile(lambda record: not _LAUNCHER_FILE.search(record.text), before))
            text = "\n".join(record.text for record in before)
            silent = [item for item in ended if item.raised is None and not item.text.strip()]
            # tracebacks without a prefix that fit none of these processes would be given to each of them
            is_ambiguous = any(item.raised is not None and not item.is_known for item in self.processes.all)
            if not is_ambiguous and silent == ended and len({(item.exit_code, item.signal) for item in ended}) == 1:
                for process in ended:
                    process.text = text
                    process.lines |= {(stream.file, before[-1].number, before[-1].number)} if before else set()
            # torch's agent would have reported the exit, unless its report is cut off
            elif not self.processes.all and not self._has_agents_report() and (words := find_last_error(before)).text:
                process = Process(node=node, text=text, streams=[stream])
                self._take_own_report(process, words)
                self.processes.all.append(process)

    def _has_agents_report(self) -> bool:
        return self.attempt.is_torchrun and bool(self.attempt.reports or self.attempt.entries)

    # --- how processes ended ------------------------------------------------------------------------------------------

    def _has_failed(self, process: Process) -> bool:
        if process.raised is not None or process.is_oom:
            return True
        if process.stopped:
            return False
        return bool(process.signal or process.exit_code or self._get_message(process))

    def _get_message(self, process: Process) -> str:
        """Return what a process printed last about a failure, if no line reports how it ended."""
        if process.has_ended or process.raised is not None or process.stopped:
            return ""
        return process.launcher_text or process.own_error  # its launcher's words have no code, and no signal

    def _stop_the_rest(self, failed: Sequence[Process]) -> None:
        processes, report, known = self.processes, self.attempt.reports, set(map(id, failed))
        ends = any(item.kind in {ReportKind.STOPPED, ReportKind.REST_STOPPED} for _, _, item in report)
        is_known = ends or bool(self.attempt.entries)
        ranks = {process.rank for process in processes.all if process.rank is not None}
        world = max([self.attempt.world_size, *(rank + 1 for rank in ranks)], default=0)
        # If neither a second rank nor the number of ranks is in the log, it may be the log of one rank.
        is_of_all = self.attempt.world_size > 0 or len(ranks) > 1
        if is_of_all and len(ranks) * 2 >= world and world <= _MAX_WORLD_SIZE:
            silent = [Process(rank=rank) for rank in range(world) if rank not in ranks]
            processes.all += silent
            # silence explains what nothing else does
            is_explained = any(item.has_ended and item.raised is None for item in failed)
            is_suspect = not is_known and not is_explained and len(silent) <= _MAX_SILENT_SUSPECTS
            known |= set(map(id, silent)) if is_suspect else set()
        for process in processes.all:
            if id(process) not in known and not process.stopped and process.exit_code != 0:
                process.stopped = LAUNCHER_STOPPED if is_known else _NO_EXIT_STATUS

    def _match_oom_kills(self) -> None:
        killed = [process for process in self.processes.all if process.signal == "SIGKILL" and not process.stopped]
        for file, _, item in self.attempt.reports:
            for process in killed if item.kind is ReportKind.OOM and item.pid is None else ():
                if not item.node or not process.node or item.node == process.node:
                    process.is_oom = True
                    process.lines.add((file, item.number, item.number))

    def _match_hardware_errors(self) -> None:
        """Give a hardware error of a GPU to the process that it names, else to the only one that failed on its node."""
        for file, node, item in self.attempt.reports:
            if item.kind is not ReportKind.GPU or item.xid not in HARDWARE_XIDS:
                continue
            here = [one for one in self.processes.all if self._has_failed(one) and one.may_be_on(item.node or node)]
            named = [one for one in here if item.pid is not None and one.pid == item.pid]
            # a kernel's log has the name of the machine, and the program's log may have the pod's
            everywhere = here or [one for one in self.processes.all if self._has_failed(one)]
            failed_on_gpu = [one for one in everywhere if _GPU_ERROR.search(one.raised_text or one.own_error or one.text)]
            named = named or failed_on_gpu or here
            for process in named if len(named) == 1 else ():
                process.hardware_error = f"Xid {item.xid}, {HARDWARE_XIDS[item.xid]}"
                process.lines.add((file, item.number, item.number))

    # --- launchers and nodes ------------------------------------------------------------------------------------------

    def _report_launchers(self) -> Iterator[model.WorkerError]:
        """Yield a document for each node that is gone, or whose launcher was terminated."""
        done: set[str] = set()
        # a time limit is the reason of the signals that it sends
        for file, node, item in sorted(self.attempt.reports, key=lambda found: "limit" not in found[2].reason):
            name = item.node or item.ip or self.processes.resolve_node(node)
            if item.kind is ReportKind.LOST:
                category, code = "node_lost", "SYSTEM:NodeLost"
            elif (
                item.kind is ReportKind.OOM and item.pid is None and not any(map(self._has_failed, self.processes.all))
            ):
                category, code = "host_oom", "SYSTEM:OutOfMemory"
            elif item.kind is ReportKind.TERMINATED and done.isdisjoint({name, ""}) and (name or not done):
                is_limit = "limit" in item.reason
                done.add("" if is_limit else name)
                is_interrupted = "SIGINT" in f"{item.signal} {item.text} {item.reason}".upper()
                category = "interrupted" if is_interrupted else "preemption"
                category = "node_lost" if "node failure" in item.reason else category
                code = CTRL_C if "^C" in item.text else f"SYSTEM:{item.signal or 'Terminated'}"
                code = model.TIME_LIMIT if is_limit else CANCELLED if item.reason == "cancelled" else code
            else:
                continue
            yield self._agent(name, (file, item.number, item.number), category, code, item.text)

    def _agent(
        self, node: str, lines: tuple[str, int, int], category: str, code: str, message: str
    ) -> model.WorkerError:
        return model.WorkerError(
            code,
            clean(message, MAX_TEXT),
            model.Kind.NON_RECOVERABLE,
            model.Origin.SYSTEM,
            worker=node,
            place=model.Place(round=self.round, node=node, engine=OF_LOGS),
            writer=model.Writer.AGENT,
            subject=model.Subject.AGENT,
            category=category,
            documents=tuple(_references({lines})),
        )

    # --- documents ----------------------------------------------------------------------------------------------------

    def _document(self, process: Process) -> model.WorkerError:
        raised, message = process.raised, self._get_message(process)
        if raised is not None and process.hardware_error:
            raised = replace(raised, message=f"{process.hardware_error} ({raised.message.partition(chr(10))[0]})")
        what = process.signal or ("Printed" if message else "Exit" if process.has_ended else "Silent")
        what = get_short_name(raised) if raised is not None else what
        is_recoverable = raised is not None and get_short_name(raised) == _RECOVERABLE
        stopped, sent = (
            process.stopped and raised is None,
            "SIGTERM" if process.stopped != _NO_EXIT_STATUS else "unknown",
        )
        return model.WorkerError(
            DIED if message and message == process.launcher_text else f"USER:{what}",
            clean(process.raised_text or message, MAX_TEXT),
            model.Kind.RECOVERABLE if is_recoverable else model.Kind.NON_RECOVERABLE,
            model.Origin.USER if raised is not None else model.Origin.UNKNOWN,
            timestamp_ns=process.time_ns,
            worker=process.node,
            place=model.Place(
                round=self.round,
                rank=process.rank,
                local_rank=process.local_rank,
                node=process.node,
                host=process.host,
                ip=process.ip,
                pid=process.pid or 0,
                engine=OF_LOGS,
            ),
            writer=model.Writer.WORKER if raised is not None or message or process.tells else model.Writer.AGENT,
            exception=raised,
            exit_code=process.exit_code,
            signal=process.signal if raised is None else "",
            sent_signals=(model.SentSignal(sent, process.stopped),) if stopped else (),
            log_tail=clean_end(process.text, _LOG_BYTES),
            category="gpu_hardware" if process.hardware_error else "",
            resources=model.Resources(oom_kill=1) if process.is_oom else model.Resources(),
            documents=tuple(_references(process.lines)),
        )


def _references(lines: Iterable[tuple[str, int, int]]) -> Iterator[model.DocumentRef]:
    """Yield a reference for each place in a file: "slurm-4711.out:3-9"."""
    for file, first, last in sorted(lines):
        yield model.DocumentRef(f"{file}:{first}" + (f"-{last}" if last > first else ""), file)


def _find_tracebacks(stream: Stream) -> Iterator[_Traceback]:
    for excerpt in stream.excerpts:
        above, lines = excerpt.lines[: excerpt.at], excerpt.lines[excerpt.at :]
        printed = find_printed_exception(redact("\n".join(record.text for record in lines)))
        if printed is None:
            continue
        # lines without a level or a date cannot be report from the exception's message
        more = printed.exception.message.splitlines()[1:]
        more = more[next((at for at, line in enumerate(more) if line and not line[0].isspace()), len(more)) :]
        later = [line for line in (*more, *printed.after) if line.strip()]
        own = lines[: len(lines) - len(printed.after)]
        below = [record.text for record in stream.tail if record.number > lines[-1].number]
        after = len(later) + len(below)
        around = (*(record.text for record in above), *later[:1])
        yield _Traceback(
            printed.exception,
            "\n".join(record.text for record in own),
            stream,
            (lines[0].number, own[max(len(own) - len(more) - 1, 0)].number),
            after,
            is_handled=any(map(HANDLED.search, around)) and after > 0,
            is_before_success=any(map(is_success_report, (*later, *below))),
            is_mixed=excerpt.is_mixed,
        )
