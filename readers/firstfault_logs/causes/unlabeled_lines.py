"""Give lines without a process to the process that failed, if only one can have printed them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.causes.survival import shows_failure
from firstfault_logs.own_reports import OwnReport, find_last_error
from firstfault_logs.processes import POD_NUMBER, Process, Processes
from firstfault_logs.tracebacks import LAUNCHER_FILE

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt, Stream


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
