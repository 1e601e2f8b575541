"""Find the processes of tracebacks, lines and ends without a rank: by the number of a GPU, or
because only one process is left. Ends that another process already has are left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.causes.survival import shows_failure
from firstfault_logs.launchers import ReportKind
from firstfault_logs.own_reports import OwnReport, find_last_error
from firstfault_logs.processes import POD_NUMBER, Process, Processes
from firstfault_logs.tracebacks import LAUNCHER_FILE

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt, Stream
    from firstfault_logs.tracebacks import Traceback


_MAX_GPUS_PER_NODE = 16


@cache
def _own_device() -> re.Pattern[str]:
    """Match the number of the GPU of the process that raised an exception."""
    return re.compile(
        r"\bthread for device (?P<thread>\d{1,2})\b"
        r"|\bGPU (?P<gpu>\d{1,2})(?:;| has a total capacity)"
        r"|\bdevice='?cuda:(?P<tensor>\d{1,2})\b"
    )


def find_ranks_by_device(
    attempt: Attempt,
    processes: Processes,
    tracebacks: Sequence[Traceback],
) -> dict[int, Traceback]:
    """Return the last traceback of each rank that a GPU's number identifies.

    By convention, the process with local rank 3 uses GPU 3. If each process sees only its own GPU,
    all numbers are 0, so several numbers, or one above 0, show that the convention holds.
    """
    by_device: dict[int, Traceback] = {}
    for traceback in tracebacks:
        if (device := _find_device(traceback)) is None:
            return {}
        by_device[device] = _trim_message(traceback, tracebacks)
    world = max(attempt.world_size, 1 + max((one.rank or 0 for one in processes.all), default=0))
    if not by_device or by_device.keys() == {0} or max(by_device) >= min(world, _MAX_GPUS_PER_NODE):
        return {}
    ranks: dict[int, Traceback] = {}
    for device, traceback in by_device.items():
        first = processes.find_first_rank((traceback.stream.file, traceback.stream.label.node))
        if first is None and (world > _MAX_GPUS_PER_NODE or attempt.size.nodes > 1):
            return {}
        ranks[(first or 0) + device] = traceback
    return ranks


def _trim_message(traceback: Traceback, tracebacks: Sequence[Traceback]) -> Traceback:
    """Return a traceback without lines of other processes below it,
    which the same exception of a peer doesn't have.
    """
    message, frames = traceback.exception.message, traceback.exception.frames
    shorter = [
        other.exception.message
        for other in tracebacks
        if other.exception.frames == frames and message.startswith(f"{other.exception.message}\n")
    ]
    if not shorter:
        return traceback
    return replace(traceback, exception=replace(traceback.exception, message=min(shorter, key=len)))


def _find_device(traceback: Traceback) -> int | None:
    devices = {
        int(number)
        for match in _own_device().finditer(traceback.text)
        for number in match.groups()
        if number is not None
    }
    return devices.pop() if len(devices) == 1 else None


def assign_unlabeled_lines(
    attempt: Attempt, processes: Processes, stream: Stream, last_number: int
) -> None:
    """Give the lines above the first launcher report to the only process
    of the node that failed.

    Args:
        attempt: of the job.
        processes: of the attempt.
        stream: of lines without a process.
        last_number: the number of the last line in the stream's file.
    """
    node, everything = stream.label.node, processes.all
    ended = [one for one in everything if one.has_ended and (not node or one.node in {node, ""})]
    reports = (report.number for file, _, report in attempt.reports if file == stream.file)
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
        blamed = find_ranks_in_errors(record.text for record in above)
        for process in [one for one in ended if len(blamed) == 1 and one.rank in blamed] or ended:
            process.text = "\n".join(filter(str.strip, (process.text, text)))
    # if torch's agent had the chance to report an exit, its report isn't just cut off
    elif (not everything or _is_another_pod(node, everything)) and not (
        attempt.is_torchrun and (attempt.reports or attempt.entries)
    ):
        own_report = find_last_error(above, last_number)
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


def find_ranks_in_errors(lines: Iterable[str]) -> set[int]:
    """Return the ranks that logged errors name."""
    return {int(match["rank"]) for match in map(_ERROR_ON_RANK.search, lines) if match is not None}


_MIN_RANKS = 2


def name_remaining_rank(attempt: Attempt, processes: Processes) -> None:
    """Give the SIGKILL or the exception of a process that nothing names to the only rank of its
    node that raised nothing.

    DeepSpeed reports "exits with return code = -9" for the process that it saw first, without its
    rank. Python exits with a code after an exception, so ranks that raised one weren't killed. If
    all others lost a peer, the exception without a rank is that peer's.
    """
    for unnamed in [one for one in processes.all if not one.is_known]:
        # after an exception, the teardown of a rank may abort or crash, but nothing kills it
        is_killed = unnamed.signal == "SIGKILL"
        if not is_killed and not (unnamed.raised and _has_exit_code(attempt)):
            continue
        ranks = set(_list_ranks(processes, unnamed))
        others = [one for one in processes.all if one.rank in ranks and one.raised is not None]
        remaining = ranks - {one.rank for one in others}
        if len(ranks) < _MIN_RANKS or len(remaining) != 1:
            continue
        if unnamed.raised and not all(map(_has_lost_peer, others)):
            continue
        remaining_process = processes.find(rank=min(remaining), node=unnamed.node)
        if remaining_process.has_ended or remaining_process.has_failed or remaining_process.stopped:
            continue
        remaining_process.signal, remaining_process.is_oom = unnamed.signal, unnamed.is_oom
        remaining_process.raised, remaining_process.raised_text = (
            unnamed.raised,
            unnamed.raised_text,
        )
        remaining_process.time_ns = remaining_process.time_ns or unnamed.time_ns
        remaining_process.launcher_text = unnamed.launcher_text
        remaining_process.launcher_time_ns = unnamed.launcher_time_ns
        remaining_process.lines |= unnamed.lines
        processes.all = [one for one in processes.all if one is not unnamed]


def _has_lost_peer(process: Process) -> bool:
    return classify(process.raised_text).role is Role.SECONDARY


def _has_exit_code(attempt: Attempt) -> bool:
    """Whether a launcher reports that a process, which it doesn't name, exited with an error."""
    return any(
        report.kind is ReportKind.ENDED and bool(report.exit_code) and not report.ranks
        for _, _, report in attempt.reports
    )


def _list_ranks(processes: Processes, process: Process) -> Iterator[int]:
    """Yield the ranks of a process's node, as far as its launcher printed where they begin."""
    for file, _, _ in process.lines:
        first_ranks = processes.attempt.first_ranks.get((file, process.node))
        first = processes.find_first_rank((file, process.node))
        if first_ranks is not None and first is not None:
            yield from range(first, first + first_ranks.workers)


def merge_local_ranks(processes: Processes) -> None:
    """Merge ends that torch's agent reported by local rank with exceptions
    that were printed by rank.

    `failed (exitcode: 1) local_rank: 3 (pid: 88123)` is about one of the ranks that raised, not
    a further failure.
    """
    everything = processes.all
    ended = [one for one in everything if one.rank is None and one.has_ended and not one.streams]
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
    processes.all = [one for one in everything if all(one is not other for other in ended)]


def drop_repeated_deaths(attempt: Attempt, processes: Processes) -> None:
    """Drop deaths of unknown processes that another failure explains.

    A launcher may exit with the code of one of its workers, and it kills the rest. No exception
    explains a kill.
    """
    processes.all = [one for one in processes.all if not _has_been_restarted(attempt, one)]
    everything = processes.all
    ends = {one.signal for one in everything if one.is_known and one.has_ended}
    is_explained = bool(ends) or any(one.raised is not None for one in everything)
    explained = {"", "SIGABRT", "SIGTERM", *ends} if is_explained else set()
    processes.all = [
        one
        for one in everything
        if not (one.has_ended or (one.launcher_text and one.raised is None))
        or one.is_known
        or one.is_oom
        or not (one.signal in explained or _is_of_cleanup(attempt, one))
    ]


def _has_been_restarted(attempt: Attempt, process: Process) -> bool:
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
    streams = attempt.streams.values()
    return all(
        any(one.has_steps_after(last) for one in streams if one.file == file)
        for file, _, last in process.lines
    )


def _is_of_cleanup(attempt: Attempt, process: Process) -> bool:
    """Whether a kill follows the report of another failure, or a node is lost anyway."""
    if process.signal != "SIGKILL":
        return False
    begins = {file: first for file, first, _ in process.lines}
    failed = [
        (file, report) for file, _, report in attempt.reports if report.kind is ReportKind.ENDED
    ]
    is_later = any(
        report.number < begins.get(file, 0)
        and report.exit_code
        and report.text != process.launcher_text
        for file, report in failed
    )
    return is_later or any(report.kind is ReportKind.LOST for _, _, report in attempt.reports)


def drop_kills_below_exceptions(processes: Processes) -> None:
    """Drop kills of unknown processes below the faults that ended others:
    a launcher or a person cleaned up.
    """
    if not any(one.signal == "SIGKILL" and not one.is_known for one in processes.all):
        return
    faults = [one for one in processes.all if one.raised is not None]
    faults = [one for one in faults if classify(one.raised_text).role is not Role.SECONDARY]
    raised = {file: last for one in faults for file, _, last in one.lines}
    processes.all = [
        one
        for one in processes.all
        if one.signal != "SIGKILL" or one.is_known or one.is_oom or not _is_below(one, raised)
    ]


def _is_below(process: Process, lines: Mapping[str, int]) -> bool:
    return any(first > lines.get(file, first) for file, first, _ in process.lines)
