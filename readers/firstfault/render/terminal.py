"""A report for a terminal: one screen, folded to its width; for pipes and files plain lines, one fact each."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.exceptions.first_cause import own_frames
from firstfault.exceptions.stack_position import readable_stack
from firstfault.exceptions.tracebacks import chain, place_of, runs
from firstfault.layout.paths import Layout
from firstfault.model import Scope
from firstfault.render.first_line import first_line
from firstfault.render.flyte_message import (
    MESSAGE_TITLE,
    fact_lines,
    indented,
    log_lines,
    recovered_lines,
    said,
    stack_lines,
)
from firstfault.render.printer import Printer, encodable, one_row
from firstfault.report.words import State, counted, duration, ranks_text
from firstfault.text import elide, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from firstfault.model import ExceptionInfo, FrameInfo, WorkerError
    from firstfault.report.attempt_changes import AttemptSummary
    from firstfault.report.cascade import NodeState
    from firstfault.report.data import Report
    from firstfault.report.groups import Group

__all__ = ["encodable", "print_report", "terminal_text"]

_ROWS = 23
"""Rows of one screen, without the shell's prompt."""
_LOG_LINES = 3
_RANKS = 40
"""Characters."""
_CHANGES = 3
_PLAIN_GROUPS = 20
_PLAIN_STACK = 30
_PLAIN_LOG = 20
_PLAIN_FACT = 300
_SUSPECTS = 5
_TEXT_LINES = 400
"""Lines of one text that are shown."""
_TEXT_LINE = 2_000
"""Characters of one of them."""
_ALL = "a pipe (| less) shows all"
_SHOW = "firstfault show "
_FOLDERS = re.compile(r"(?:/[\w.+-]+){2,}/")
_STYLES = {State.ROOT: "bold red", State.SUSPECT: "yellow", State.UNCLEAR: "yellow"}
_WITH_WHERE = ("host", "exit code", "time")
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _Room:
    """How much of each list is shown."""

    why: int
    """Evidence sentences."""
    frames: int
    groups: int
    unknown: int = 3
    is_least: bool = False
    """Long answers are cut too."""


_ROOMS = (
    _Room(2, 3, 4),
    _Room(1, 3, 4),
    _Room(1, 2, 3),
    _Room(0, 2, 3),
    _Room(0, 1, 2),
    _Room(0, 1, 2, 1, is_least=True),
)
"""Tried in this order until the report fits one screen."""


def terminal_text(report: Report, *, verbose: bool = False) -> str:
    """Return the report for a pipe or a file: one fact a line, not folded, without colours."""
    return "\n".join(_plain(report, verbose=verbose))


def print_report(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print the report on a terminal, folded to its width.

    Args:
        report: the report.
        console: where to print; quoted texts cannot steer it and are not markup.
        verbose: everything that is known, instead of one screen.
    """
    printer = Printer(console)
    _print(printer, report, _ROOMS[0], verbose=verbose)
    for room in _ROOMS[1:] if not verbose else ():
        if len(printer.rows) <= _ROWS:
            break
        printer = Printer(console)
        _print(printer, report, room, verbose=verbose)
    printer.flush()


def _print(printer: Printer, report: Report, room: _Room, *, verbose: bool) -> None:
    printer.line(first_line(report.verdict, report.decision), style="bold")
    printer.gap()
    _print_answers(printer, report, room, verbose=verbose)
    job = "; ".join(report.identity.parts(report.engine)) if verbose else _short_job(report)
    printer.labelled("Job", [job] if job and not (room.is_least and not verbose) else [])
    printer.labelled("Attempts", _few(report.changes, _CHANGES, verbose=verbose, last=True))
    printer.gap()
    if verbose:
        _print_quoted(printer, report)
        printer.gap()
    else:
        _print_code(printer, report, room)
    _print_groups(printer, report, room, verbose=verbose)
    printer.labelled("Victims", [report.followers] if report.followers else [])
    if not verbose:
        printer.labelled("Why", report.verdict.why[: room.why])
    nodes = report.engine.nodes
    coverage = f"{report.coverage} {nodes}" if "," not in report.coverage else f"{nodes}: {report.coverage}"
    more = "-v shows more" if not verbose and not printer.fits(_more(report)) else ""
    printer.labelled("Reported", ["; ".join(filter(None, [coverage, report.clocks, more]))])
    if verbose:
        _print_more(printer, report)


# --- plain lines ----------------------------------------------------------------------------------------------------


def _plain(report: Report, *, verbose: bool) -> Iterator[str]:
    verdict, answers = report.verdict, report.answers
    yield first_line(verdict, report.decision)
    yield ""
    yield _fact("what", answers.what)
    yield _fact("where", answers.where)
    yield _fact("fate", answers.fate)
    yield from fact_lines(report)
    yield from (f"next: {one_row(step.command)}" for step in answers.steps if step.command)
    if len(report.attempts) > 1:
        yield from (_fact("attempt", _attempt_text(attempt)) for attempt in report.attempts)
        yield from (_fact("changed", change) for change in report.changes)
    quoted = list(_quoted(report, verbose=verbose))
    for failure in quoted:
        yield from _plain_block("where it stood:", stack_lines(failure), None if verbose else _PLAIN_STACK)
    if text := said(verdict):
        yield from ("", MESSAGE_TITLE, indented(printable(text)))
    for failure in quoted:
        log = log_lines(failure)
        yield from _plain_block("last lines of its log:", log if verbose else log[-_PLAIN_LOG:], None)
    yield ""
    yield from _plain_ranks(report, verbose=verbose)
    if verbose:
        yield from (_fact("recovered", line) for line in recovered_lines(report.job))
    yield from _plain_evidence(report, verbose=verbose)
    if verbose:
        yield from (_fact(f"raw {fact.name}", fact.value) for fact in report.raw)
    if report.uri:
        yield from ("", f"documents: {one_row(Layout.of(report.uri).errors_uri())}")


def _plain_ranks(report: Report, *, verbose: bool) -> Iterator[str]:
    groups = report.cascade.groups if verbose else report.cascade.groups[:_PLAIN_GROUPS]
    yield from (
        _fact("group", f"{_group_head(group, verbose=verbose)}: {group.line or group.what}") for group in groups
    )
    if len(report.cascade.groups) > len(groups):
        yield f"group: and {len(report.cascade.groups) - len(groups)} more"
    if verbose:
        yield from (_fact(report.engine.node, _node_text(node)) for node in report.cascade.nodes)
        by_node = _ranks_by_node(report)
        yield from (_fact("ranks", f"{name or 'node not known'}: {text}") for name, text in by_node.items())


def _plain_evidence(report: Report, *, verbose: bool) -> Iterator[str]:
    for sentence, names in report.verdict.reasons:
        yield _fact("why", sentence)
        if verbose:
            yield from (_fact("source", name) for name in names)
    for suspect in report.verdict.suspects:
        yield _fact("suspect", f"{suspect.name}, {suspect.why}")


def _fact(name: str, value: str) -> str:
    line = one_row(f"{name}: {value}").replace("\t", " ")
    return elide(line, _PLAIN_FACT).replace("\n", " ")


def _plain_block(title: str, lines: Sequence[str], limit: int | None) -> Iterator[str]:
    if not lines:
        return
    yield from ("", title)
    yield from (f"  {line}" for line in lines[:limit])
    if limit is not None and len(lines) > limit:
        yield f"  ... {counted(len(lines) - limit, 'more line')}"


# --- one screen -----------------------------------------------------------------------------------------------------


def _print_answers(printer: Printer, report: Report, room: _Room, *, verbose: bool) -> None:
    answers = report.answers
    category = answers.category if verbose else report.verdict.category
    fault = f"{answers.fault_owner.value}, {category}"
    what = printer.short(answers.what, rows=2) if room.is_least else answers.what
    both = f"{what}; {fault}"
    printer.labelled("What", [both] if printer.fits(both) else [what, fault])
    place = f"{answers.where}, {answers.code}" if answers.code else answers.where
    printer.labelled("Where", [place, *_known(report)])
    # the category's meaning is shown elsewhere too
    reason = answers.fate_reason if verbose else answers.fate_reason.replace(f" ({answers.category})", "")
    printer.labelled("Retry", [f"{answers.fate}; {reason}"])
    texts = [step.text for step in answers.steps if not step.command]
    printer.labelled("Next", texts if verbose else [text.removesuffix(f": {answers.code}") for text in texts])
    for step in answers.steps:
        if step.command and not step.command.startswith(_SHOW):
            printer.command(step.command)
    if report.uri and not verbose and printer.fits(_more(report)):
        printer.beside(_more(report))
    printer.labelled("Unknown", _few(answers.unknown, room.unknown, verbose=verbose))


def _short_job(report: Report) -> str:
    """Return what ran in few words; the rest is the same for every attempt of it."""
    job = report.identity
    after = f"failed after {duration(int(job.seconds * _NS))}" if job.seconds is not None else ""
    nodes = f"{counted(job.ranks, 'rank')} on {counted(job.nodes, report.engine.node)}" if job.nodes else ""
    gpus = f"{job.gpus} {job.gpu_model}" if job.gpus else ""
    return ", ".join(filter(None, [job.task or job.execution, nodes, gpus, after]))


def _more(report: Report) -> str:
    return f"{_SHOW}-v {report.uri}" if report.uri else ""


def _known(report: Report) -> Iterator[str]:
    """Yield host, exit code and time in one line; the machine stands beside the rank."""
    values = {fact.name: fact.value for fact in report.facts if fact.name in _WITH_WHERE}
    if values:
        yield ", ".join(f"{name} {value}" for name, value in values.items())


def _few(sentences: Sequence[str], limit: int, *, verbose: bool, last: bool = False) -> list[str]:
    if verbose or len(sentences) <= limit + 1:
        return list(sentences)
    shown = sentences[-limit:] if last else sentences[:limit]
    return [*shown, f"and {len(sentences) - limit} more (-v)"]


def _print_code(printer: Printer, report: Report, room: _Room) -> None:
    """Print the program's own frames; if the process raised nothing, its last log lines."""
    root = report.verdict.root
    if root is None:
        return
    frames = own_frames(root.exception) if root.exception is not None else ()
    if frames:
        lines = [f"{place_of(frame)}: {frame.code}" if frame.code else place_of(frame) for frame in frames]
        printer.labelled("Code", [printer.short(line) for line in lines[-room.frames :]])
    elif root.exception is None:
        printer.labelled("Log", [printer.short(line) for line in log_lines(root)[-_LOG_LINES:]])


def _print_groups(printer: Printer, report: Report, room: _Room, *, verbose: bool) -> None:
    groups = report.cascade.groups
    shown = groups if verbose or len(groups) <= room.groups + 1 else groups[: room.groups]
    lines, styles = [], []
    for group in shown:
        head, said = _group_head(group, verbose=verbose), group.line or group.what
        if verbose:
            later = group.first.later if group.first is not None and group.state is not State.ROOT else ""
            lines.append(f"{head}: {said}" + (f" ({later})" if later else ""))
        else:
            # paths of build machines, as in gloo's messages, say least
            lines.append(printer.short(f"{head}: {_FOLDERS.sub('.../', said)}"))
        styles.append(_STYLES.get(group.state, ""))
    if len(groups) > len(shown):
        left = groups[len(shown) :]
        lines.append(f"and {len(left)} more groups, {sum(group.count for group in left)} failures (-v)")
    printer.labelled("Failed", lines or ["no readable error document"], styles)


def _group_head(group: Group, *, verbose: bool) -> str:
    ranks = ranks_text(group.ranks, 0 if verbose else _RANKS)
    who = f"rank{'s' if len(group.ranks) > 1 else ''} {ranks}" if group.ranks else ", ".join(group.nodes[:1])
    head = f"{group.state.mark} {group.count} {group.state.value}"
    return f"{head}, {who}" if who else head


# --- everything -----------------------------------------------------------------------------------------------------


def _print_quoted(printer: Printer, report: Report) -> None:
    """Print the traceback, or first the stack of a process that raised nothing, and its log."""
    failures = list(_quoted(report, verbose=True))
    root = report.verdict.root
    if root is None or root.exception is None:
        for failure in failures:
            _print_stacks(printer, failure)
    _print_traceback(printer, report)
    for failure in failures:
        if root is not None and root.exception is not None:
            _print_stacks(printer, failure)
        name = f"rank {failure.rank}" if failure.rank is not None else failure.node or "the root cause"
        printer.section(f"Last lines of the log of {name}", _bounded(log_lines(failure)))


def _print_more(printer: Printer, report: Report) -> None:
    _print_nodes(printer, report)
    # what is not known stands above
    printer.section("Facts", [line for line in fact_lines(report) if not line.startswith("unknown: ")])
    numbers = {name: number for number, name in enumerate(dict.fromkeys(_sources(report)), 1)}
    printer.section(
        "Evidence",
        [" ".join([sentence, *(f"[{numbers[name]}]" for name in names)]) for sentence, names in report.verdict.reasons],
    )
    if len(report.attempts) > 1:
        printer.section("Attempts side by side", [f"attempt {_attempt_text(attempt)}" for attempt in report.attempts])
    printer.section("Recovered from, by restarts within this attempt", recovered_lines(report.job))
    printer.section("Documents", [Layout.of(report.uri).errors_uri()] if report.uri else [])
    raw = [f"{fact.name}: {fact.value}" for fact in report.raw]
    printer.section("Raw values", [*raw, *(f"[{number}] {name}" for name, number in numbers.items())])


def _sources(report: Report) -> Iterator[str]:
    """Yield the names of the documents that the evidence refers to."""
    return itertools.chain.from_iterable(names for _, names in report.verdict.reasons)


def _print_nodes(printer: Printer, report: Report) -> None:
    by_node = _ranks_by_node(report)
    lines = []
    for node in report.cascade.nodes:
        lines += [_node_text(node), *([f"  {by_node.pop(node.name)}"] if node.name in by_node else [])]
    lines += [f"{name or 'node not known'}: {text}" for name, text in by_node.items()]
    printer.section(f"Ranks by {report.engine.node}", lines)
    printer.line(", ".join(f"{state.mark} {state.value}" for state in State), indent=2)


def _print_traceback(printer: Printer, report: Report) -> None:
    root, message = report.verdict.root, said(report.verdict)
    if root is not None and root.exception is not None and root.exception.frames:
        printer.section("Traceback", _bounded("\n".join(_folded(root.exception)).split("\n")))
    elif message:
        printer.section("What it said", _bounded(message.split("\n")))


def _print_stacks(printer: Printer, failure: WorkerError) -> None:
    for dump in failure.stack_dumps:
        of = f"rank {dump.rank}" if dump.rank is not None else f"process {dump.pid}"
        printer.section(f"Where it stood: {of}", _bounded(readable_stack(dump.text).strip("\n").split("\n")))


def _bounded(lines: Sequence[str]) -> list[str]:
    """Return the head and the tail of a text, and how many lines are not shown."""
    half = _TEXT_LINES // 2
    left = len(lines) - 2 * half
    shown = [*lines[:half], f"... {left} lines left out ...", *lines[-half:]] if left > 1 else lines
    found = [elide(line, _TEXT_LINE).replace("\n", " ") for line in shown]
    return found if left <= 1 and found == list(lines) else [*found, f"({_ALL})"]


def _quoted(report: Report, *, verbose: bool) -> Iterator[WorkerError]:
    """Yield the failures whose stack and log are shown: the root cause, else with `verbose` the suspects."""
    if report.verdict.root is not None:
        yield report.verdict.root
    elif verbose and report.verdict.scope is Scope.UNDETERMINED:
        suspects = (event.failure for event in report.cascade.events if event.state in {State.SUSPECT, State.UNCLEAR})
        yield from itertools.islice(suspects, _SUSPECTS)


def _node_text(node: NodeState) -> str:
    number = f" (group rank {node.group_rank})" if node.group_rank is not None else ""
    said = [f"{node.state.mark} {node.state.value}"] if node.state is not None else []
    said += [node.note] if node.note else []
    return f"{node.name}{number}" + (f": {'; '.join(said)}" if said else "")


def _ranks_by_node(report: Report) -> dict[str, str]:
    """Return the states of each node's ranks: "X 3 root cause; v 2 victim"."""
    found: dict[str, dict[State, list[int]]] = defaultdict(lambda: defaultdict(list))
    for item in report.cascade.ranks:
        found[item.node][item.state].append(item.rank)
    return {
        node: "; ".join(f"{state.mark} {ranks_text(ranks)} {state.value}" for state, ranks in states.items())
        for node, states in found.items()
    }


def _attempt_text(attempt: AttemptSummary) -> str:
    text = f"{attempt.number}: {attempt.outcome}"
    if attempt.decision is not None:
        text += ", retry" if attempt.decision.retry else ", no retry"
    return f"{text}, {attempt.seconds:.1f} s" if attempt.seconds is not None else text


def _folded(exception: ExceptionInfo) -> Iterator[str]:
    """Yield a traceback with consecutive frames of a library in one line; unfolded if no frame is the program's own."""
    fold = bool(own_frames(exception))
    for link in chain(exception):
        if link.follows:
            yield from ("", link.follows, "")
        yield from _folded_link(link.exception, fold=fold)


def _folded_link(exception: ExceptionInfo, *, fold: bool) -> Iterator[str]:
    frames = exception.frames
    if frames:
        yield "Traceback (most recent call last):"
    half = len(frames) // 2 if exception.frames_omitted else 0
    yield from _folded_frames(frames[:half], fold=fold, innermost=False)
    if exception.frames_omitted:
        yield f"  ... {exception.frames_omitted} frames left out"
    yield from _folded_frames(frames[half:], fold=fold, innermost=True)
    yield f"{exception.type}: {exception.message}" if exception.message else exception.type
    yield from exception.notes
    for number, member in enumerate(exception.members, 1):
        yield f"  ---- member {number} ----"
        yield from (f"  {line}" for line in _folded(member))


def _folded_frames(frames: Sequence[FrameInfo], *, fold: bool, innermost: bool) -> Iterator[str]:
    found = runs(frames)
    for run in found:
        if run.library and fold:
            count = f"{len(run.frames)} frame{'s' if len(run.frames) > 1 else ''}"
            where = f", the last is {place_of(run.frames[-1])}" if innermost and run is found[-1] else ""
            yield f"  ... {count} of {run.library}{where}"
            continue
        for frame in run.frames:
            yield f'  File "{frame.file}", line {frame.line}, in {frame.function}'
            if frame.code:
                yield f"    {frame.code}"
