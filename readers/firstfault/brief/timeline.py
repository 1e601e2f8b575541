"""The merged time line of a brief, and what each process printed last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from firstfault.brief.conclusion import Subject
from firstfault.brief.digest import FoldedLine, LogDigest, ProcessOutput, QuotedLine, Weight
from firstfault.brief.folding import describe_differences, make_template
from firstfault.brief.quotes import cut, format_clock, format_date, format_numbered, hide_secrets
from firstfault.report.data import Report
from firstfault.report.formatting import format_ranks
from firstfault.report.headline import summarize_failure
from firstfault.report.parts.quoted_output import log_lines
from firstfault.strategies.headlines import name_process
from firstfault.utils.text import duration

_MAX_NAMES = 3
_LINE_CHARS, _DIFFERENCES_CHARS = 170, 80
_LAST_LINES = 3
_ALIKE_CHARS, _MAX_KINDS = 70, 3
"""More kinds of lines than this with the same first characters are shown as one."""
_SUCCEEDED, _QUIET = "no failure found", "no failure in its lines"
WeightedLine = tuple[int, str]

_Entry = tuple[QuotedLine, int, str]
"""A line, its weight, and its text in the time line."""


def build_timeline(subject: Subject, digest: LogDigest) -> list[WeightedLine]:
    """Return noteworthy lines with their weights, in the order of time. Only the first line of each
    kind is returned, with a count.

    Files are merged by time if all lines of the time line have one; otherwise they follow each
    other.
    """
    entries = _merge_entries(_list_entries(digest))
    if not entries:
        return list(_list_events(subject))
    times: dict[str, int] = {}
    keys = {}
    for at, (line, _, _) in enumerate(entries):
        # a line without a time follows the previous line of its file
        times[line.file] = max(line.time_ns or 0, times.get(line.file, 0))
        keys[at] = (times[line.file], line.file, line.number)
    is_timed = all(file.first_time_ns is not None for file in digest.files.values())
    order = sorted(keys, key=lambda at: keys[at] if is_timed else keys[at][1:])
    return list(_format_entries([entries[at] for at in order], is_merged=len(digest.files) > 1))


def _list_entries(digest: LogDigest) -> Iterator[_Entry]:
    folded = _merge_kinds(digest.folded)
    for at, line in enumerate(folded):
        # the first and the last kinds of lines matter most, and rare ones more than frequent ones
        distance = min(at, len(folded) - 1 - at) + min(line.count, 50) // 5
        yield line.first, 1000 * line.weight + distance, f"{_describe_count(line)}{line.first.text}"
    for file in digest.files.values():
        if file.first_step is not None and file.last_step is not None:
            yield file.first_step, 1, f"(first step) {file.first_step.text}"
            yield file.last_step, 0, f"(last step) {file.last_step.text}"
    for silence in digest.silences:
        yield (
            silence.before,
            2,
            f"(then {duration(int(silence.seconds * 1e9))} without a line) {silence.before.text}",
        )


def _merge_kinds(folded: Mapping[str, FoldedLine]) -> list[FoldedLine]:
    """Return noteworthy lines with similar kinds merged, such as lines that differ only in names,
    into one with all counts.
    """
    alike: dict[str, list[FoldedLine]] = defaultdict(list)
    for template, line in folded.items():
        alike[template[:_ALIKE_CHARS]].append(line)
    merged: list[FoldedLine] = []
    for lines in alike.values():
        if len(lines) <= _MAX_KINDS:
            merged += lines
            continue
        first, processes = lines[0], {name for line in lines for name in line.processes}
        count = sum(line.count for line in lines)
        last = max(line.last_number for line in lines)
        merged.append(
            replace(
                first,
                weight=min(line.weight for line in lines),
                count=count,
                last_number=last,
                processes=processes,
            )
        )
    return sorted(merged, key=lambda line: line.first.number)


def _merge_entries(entries: Iterable[_Entry]) -> list[_Entry]:
    """Return entries ordered by line number. Of several about one line, keep the most important."""
    best: dict[tuple[str, int], _Entry] = {}
    for entry in entries:
        key = (entry[0].file, entry[0].number)
        if key not in best or entry[1] < best[key][1]:
            best[key] = entry
    return sorted(best.values(), key=lambda entry: entry[0].number)


def _describe_count(line: FoldedLine) -> str:
    if line.count == 1:
        return ""
    who = f" by {len(line.processes)} processes" if len(line.processes) > 1 else ""
    differences = describe_differences(line.texts) if line.weight <= Weight.FAILURE_WORD else ""
    with_values = f", with {cut(differences, _DIFFERENCES_CHARS)}" if differences else ""
    return f"(x{line.count} up to line {line.last_number}{who}{with_values}) "


def _format_entries(entries: Sequence[_Entry], *, is_merged: bool) -> Iterator[WeightedLine]:
    safe = hide_secrets([line._replace(text=text) for line, _, text in entries])
    date = ""
    for line, (_, weight, _) in zip(safe, entries, strict=True):
        today = format_date(line.time_ns)
        if today and today != date:
            yield -1, f"--- {today}"
            date = today
        clock = format_clock(line.time_ns)
        file = f"{line.file}:" if is_merged else ""
        clock = "" if clock[:8] in line.text else clock  # the line has it already
        limit = _LINE_CHARS + (_DIFFERENCES_CHARS if ", with " in line.text[:_LINE_CHARS] else 0)
        yield weight, " ".join(filter(None, (clock, f"{file}{format_numbered(line, limit)}")))


def _list_events(subject: Subject) -> Iterator[WeightedLine]:
    """Yield the failures of a recorded job."""
    for at, event in enumerate(subject.cascade.events if isinstance(subject, Report) else ()):
        what = (
            f"{event.state.value}: {name_process(event.failure)}:"
            f" {summarize_failure(event.failure)}"
        )
        yield (
            at,
            cut(
                " ".join(
                    filter(
                        None, (format_clock(event.failure.timestamp_ns), event.short_delay, what)
                    )
                ),
                _LINE_CHARS,
            ),
        )


# --- processes ------------------------------------------------------------------------------------


def list_processes(subject: Subject, digest: LogDigest) -> list[WeightedLine]:
    """Return, for each group of processes that are in the same state and ended with similar lines,
    its last lines.
    """
    outputs = list(digest.processes.values()) if digest.files else _read_recorded(subject)
    states = (
        {item.rank: item.state.value for item in subject.cascade.ranks}
        if isinstance(subject, Report)
        else {}
    )
    usual = _QUIET if isinstance(subject, Report) else _SUCCEEDED
    groups: dict[tuple[str, ...], list[ProcessOutput]] = defaultdict(list)
    for one in outputs:
        state = states.get(one.rank, usual) if one.rank is not None else ""
        last = (make_template(line.text) for line in list(one.tail)[-_LAST_LINES:])
        key = (state, *last)
        groups[key].append(one)
    weighted: list[WeightedLine] = []
    # the root cause, then rare ends
    ordered = sorted(
        groups.items(), key=lambda item: (not item[0][0].startswith("root"), len(item[1]))
    )
    for at, ((state, *_), group) in enumerate(ordered):
        weighted += _describe_group(at, state, group)
    return weighted


def _describe_group(at: int, state: str, group: Sequence[ProcessOutput]) -> Iterator[WeightedLine]:
    first = group[0]
    lines = sum(one.lines for one in group)
    ranks = sorted({one.rank for one in group if one.rank is not None})
    names = sorted({one.name for one in group})
    who = f"ranks {format_ranks(ranks, 80)}" if len(ranks) > 1 else ", ".join(names[:_MAX_NAMES])
    who += (
        f" and {len(names) - _MAX_NAMES} more"
        if len(names) > _MAX_NAMES and len(ranks) <= 1
        else ""
    )
    step = f"; last step line {first.last_step.number}" if first.last_step is not None else ""
    printed = (
        f"{lines} lines"
        if len(group) == 1
        else f"{len(group)} processes, {lines} lines; the last lines of {first.name}"
    )
    yield 10 * at, cut(f"{who}: {f'{state}; ' if state else ''}{printed}{step}")
    tail = hide_secrets(list(first.tail)[-_LAST_LINES:])
    shown = (f"  {format_numbered(line._replace(process=''), _LINE_CHARS)}" for line in tail)
    yield from ((10 * at + len(tail) - number, text) for number, text in enumerate(shown))


def _read_recorded(subject: Subject) -> list[ProcessOutput]:
    """Return the last lines in the documents of a recorded job."""
    outputs = []
    for failure in subject.job.failures if isinstance(subject, Report) else ():
        lines = log_lines(failure)
        output = ProcessOutput(name_process(failure), failure.rank, failure.node, lines=len(lines))
        output.tail.extend(QuotedLine("", 0, line, failure.timestamp_ns) for line in lines)
        outputs.append(output)
    return outputs
