"""How far a rank came in the collectives of its groups: by torch's flight recorder, or by what its watchdog printed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from firstfault.evidence.re2_patterns import Pattern
from firstfault.model import Collective, CollectiveProgress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.model import WorkerError

_COUNTS = Pattern(
    r"\[PG (?:ID \d+ PG GUID )?(?P<guid>[^\s(\]]+) ?(?:\((?P<description>[^)\n]*)\))? ?Rank \d+\]"
    r"[^\n]*?(?:work(?: sequence id)?: (?P<number>\d{1,18})[, ][^\n]*?)?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)
"""What torch's watchdogs and monitors print since 2.2."""
_WORK = Pattern(
    r"Work\w*\(\s*SeqNum=(?P<number>\d{1,18}), OpType=(?P<operation>\w+)"
    r"(?:,\s+NumelIn=(?P<input>\d+), NumelOut=(?P<output>\d+))?"
)
"""The collective that has timed out."""
_RAN = Pattern(r"ran for (?P<ms>\d{1,12}) milliseconds before timing out")
_DEFAULT_GROUP = "default_pg"
_UNNAMED = ""
"""The group of a text that names none."""

Progress = dict[str, dict[int, CollectiveProgress]]
"""By group and global rank."""


def progress_in_text(text: str) -> tuple[CollectiveProgress, ...]:
    """Return each group's progress as torch's watchdog or monitor printed it last."""
    counted: dict[str, CollectiveProgress] = {}
    numbers: dict[str, str] = {}
    for found in _COUNTS.find_all(text):
        name = _name_of(found["guid"], found.get("description", ""))
        counted[name] = CollectiveProgress(name, "", max(int(found["enqueued"]), 0), max(int(found["completed"]), 0))
        numbers[found.get("number", "")] = name
    for found in _WORK.find_all(text)[:1]:
        number, operation = int(found["number"]), found["operation"]
        sizes = f"{found['input']} -> {found['output']} elements" if "input" in found else ""
        work = Collective(number, operation, sizes, state="started")
        name = numbers.get(found["number"], next(iter(counted), _UNNAMED) if len(counted) <= 1 else _UNNAMED)
        known = counted.get(name, CollectiveProgress(name, "", number, number - 1))
        counted[name] = replace(known, last=(work,))
    return tuple(counted.values())


def printed_by(failure: WorkerError) -> str:
    """Return the texts in which a watchdog's lines may be: the end of the log, then the message."""
    return f"{failure.log_tail}\n{failure.message}"


def waited_ns(failure: WorkerError) -> int:
    """Return how long a rank had waited in a collective when its watchdog gave up, nanoseconds; 0: not known."""
    found = _RAN.search(printed_by(failure))
    return int(found["ms"]) * 1_000_000 if found is not None else 0


def progress_by_group(workers: Sequence[WorkerError]) -> tuple[Progress, Progress]:
    """Return the progress that the flight recorders tell, and the one that texts tell, by group and rank.

    In the first, a member that has called none of its group's collectives has a count of 0.
    """
    recorded: Progress = defaultdict(dict)
    printed: Progress = defaultdict(dict)
    for failure in workers:
        if failure.rank is not None:
            for progress in failure.collectives:
                recorded[progress.group][failure.rank] = without_messages(progress)
            for progress in progress_in_text(printed_by(failure)):
                printed[progress.group][failure.rank] = progress
    known = {rank for members in recorded.values() for rank in members}
    for group, members in recorded.items():
        expected = next((progress.members for progress in members.values() if progress.members), ())
        for rank in known.intersection(expected) - members.keys():
            members[rank] = CollectiveProgress(group, "", 0, 0)
    return dict(recorded), _with_names(printed, recorded)


def without_messages(progress: CollectiveProgress) -> CollectiveProgress:
    """Return a group's progress by its collectives alone: gloo counts sends and receives with them.

    Each rank of a pipeline sends and receives another number of messages.
    """
    called = max((work.sequence for work in progress.last if not work.is_p2p), default=progress.enqueued)
    if called >= progress.enqueued or progress.completed is None:
        return progress
    return replace(progress, enqueued=called, completed=called - progress.is_outstanding)


def merged(recorded: Progress, printed: Progress) -> Progress:
    """Return both together: the recorder's, if both know a rank in a group."""
    groups = recorded.keys() | printed.keys()
    return {group: {**printed.get(group, {}), **recorded.get(group, {})} for group in sorted(groups)}


def _with_names(printed: Progress, recorded: Iterable[str]) -> Progress:
    """Give the unnamed group its name, if the job has only one group."""
    names = {*recorded, *printed} - {_UNNAMED}
    if _UNNAMED not in printed or len(names) > 1:
        return dict(printed)
    name = next(iter(names), _DEFAULT_GROUP)
    return {name: {**printed[_UNNAMED], **printed.get(name, {})}}


def _name_of(guid: str, description: str) -> str:
    """Return a group's name as `CollectiveProgress.group` has it."""
    if description == _DEFAULT_GROUP or (not description and guid == "0"):
        return _DEFAULT_GROUP
    return f"{description} ({guid})" if description else guid
