"""What a job's lines state about its processes, its size, and which rank is where."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.framing.first_ranks import FirstRanks
from firstfault_logs.framing.labels import parse_time_ns
from firstfault_logs.launchers import (
    MAYBE_CODE_BELOW,
    LauncherReport,
    ReportKind,
    code_below,
    parse_report,
)

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Attempt
    from firstfault_logs.attempts import AttemptMarks, Where
    from firstfault_logs.framing.labels import LogRecord

_MAX_REPORTS = 20_000
"""Launcher reports of one attempt; further ones are dropped."""
_MAX_DESCRIPTION_LINES = 200
"""Lines of the description of a pod below its name."""

# How many processes the job has, as each of them prints it.
_WORLD_SIZE = LazyPattern(r"""
  (?:\b|_)(?i:world(?:[_ ]?size)?)\W{1,3}(?P<world>\d{1,6})\b
| \bnranks[ =:]{1,2}(?P<nranks>\d{1,6})\b
| MEMBER:[ ]\d+/(?P<member>\d{1,6})
| Starting[ ]with[ ](?P<starting>\d{1,6})[ ]processes
| \b[Rr]ank[ :=]{1,2}\d{1,6}(?:/|[ ]of[ ])(?P<of>\d{1,6})\b
| process_count(?:\(\))?[=: ]{1,2}(?P<count>\d{1,6})\b
""")

# Found, in less time, in each line that has a world size.
_MAYBE_WORLD_SIZE = LazyPattern(
    r"(?i:orld)|nranks|MEMBER|Starting[ ]with|ank.{1,8}(?:/|[ ]of[ ])|process_count"
)

# A number of ranks among the options of a program: 1 is a default, and may be multiplied by the
# GPUs of the node.
_DEFAULT_WORLD_SIZE = LazyPattern(r"""\bworld_?size["']?[=:][ ]?(?:1|-1)\b(?=[,)}])""")

# A row of a table of pods.
_POD_ROW = LazyPattern(
    r"(?P<pod>[a-z0-9][a-z0-9.-]{1,250})\s+\d+/\d+\s+(?P<status>[A-Z][\w:]{1,40})"
)

# The name of a pod in its description.
_DESCRIBED_POD = LazyPattern(r"(?:Name:\s{2,20}|[ ]{2}name:[ ])(?P<pod>[a-z0-9][a-z0-9.-]{1,250})$")

# A line in which a program or its launcher prints both numbers of a process.
_RANK_AND_PID = LazyPattern(r"""
  \b(?:world_|global_)?rank[ =:]{1,2}(?P<rank>\d{1,6})\b[^\n]{0,60}?\bpid[ =:]{1,2}(?P<pid>\d{2,10})\b
| \bpid[ =:]{1,2}(?P<pid2>\d{2,10})\)?,?[ ](?:world_|global_)?rank[ =:]{1,2}(?P<rank2>\d{1,6})\b
""")

# When a scheduler or a launcher ended something, anywhere in its report.
_REPORT_TIME = LazyPattern(r"\b(?P<time>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?=\s|$)")


class JobStatements:
    """Takes what lines state about processes, the job's size, and which rank is where."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._described_pods: dict[str, tuple[str, int]] = {}
        """For each file, the pod described last and the number of the line with its name."""

    def take(self, record: LogRecord, where: Where, marks: AttemptMarks) -> bool:
        """Take a line's statements; return whether it is a report on processes."""
        text = record.text
        attempt = self._attempt
        report = parse_report(record.number, record.text)
        if attempt.reports and MAYBE_CODE_BELOW.search(text):
            attempt.reports[-1] = (
                *attempt.reports[-1][:2],
                code_below(attempt.reports[-1][2], text),
            )
        if report is not None and len(attempt.reports) < _MAX_REPORTS:
            marks.take_report(record, report)
            report = self._add_described_pod(report, record, where)
            # its prefix may name it
            if not (report.ranks or report.tasks or report.local_rank is not None):
                ranks, tasks = (
                    (one,) if one is not None else ()
                    for one in (record.label.rank, record.label.task)
                )
                report = replace(report, ranks=ranks, tasks=() if ranks else tasks)
            if report_time := _REPORT_TIME.search(text):
                report = replace(report, time_ns=parse_time_ns(report_time["time"]))
            report = replace(report, time_ns=report.time_ns or record.time_ns)
            attempt.reports.append((*where, report))
        self._take_size(record.number, text, where)
        return report is not None

    def _add_described_pod(
        self,
        report: LauncherReport,
        record: LogRecord,
        where: Where,
    ) -> LauncherReport:
        """Return a report with the name of a pod,
        if it's an indented line of the description of that pod.
        """
        pod, number = self._described_pods.get(where[0], ("", 0))
        is_end = report.kind in {ReportKind.ENDED, ReportKind.OOM} and not (where[1] or report.node)
        is_described = (
            record.text[:1].isspace() and record.number - number <= _MAX_DESCRIPTION_LINES
        )
        return replace(report, node=pod) if pod and is_end and is_described else report

    def _take_size(self, number: int, text: str, where: Where) -> None:
        """Take a line's statements about the job's size, and about which rank is where."""
        attempt = self._attempt
        if "ame:" in text[:8] and (described := _DESCRIBED_POD.match(text)):
            self._described_pods[where[0]] = described["pod"], number
        if "/" in text[:300] and (row := _POD_ROW.match(text)):
            attempt.listed_pods[row["pod"]] = row["status"]
        if "Namespace(" in text:
            text = _DEFAULT_WORLD_SIZE.sub("", text)
        attempt.size.take(text)
        if _MAYBE_WORLD_SIZE.search(text):
            for size in _WORLD_SIZE.finditer(text):
                attempt.world_size = max(attempt.world_size, int(next(filter(None, size.groups()))))
        if "ank" in text or "nproc" in text or "nodes" in text or "--num" in text:
            attempt.first_ranks.setdefault(where, FirstRanks()).take(text)
        if "ank" in text and "pid" in text and (numbers := _RANK_AND_PID.search(text)):
            attempt.rank_by_pid[int(numbers["pid"] or numbers["pid2"])] = int(
                numbers["rank"] or numbers["rank2"]
            )
