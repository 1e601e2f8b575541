"""A report as text: Flyte's message, plain lines for a pipe or a file, Markdown for a bug report, and JSON."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from firstfault.exceptions.stderr import exception_of
from firstfault.exceptions.tracebacks import first_cause, own_frames
from firstfault.model import WorkerError
from firstfault.report.answers import Fact
from firstfault.report.data import Report, Section, Sections, log_lines, quoted_failures, sections_of, stack_lines
from firstfault.report.words import PLAIN, State, few, ranks_text
from firstfault.utils.text import counted, elide, one_line, printable
from firstfault.wire.codecs import FieldTable
from firstfault.wire.fields import EXPIRED, FRAME, PLACE, PROGRESS, RESOURCES
from firstfault.wire.json_schemas import DECISION, SCHEMA, format_timestamp, verdict_to_dict

_MESSAGE_TITLE = "message:"
"""Stands above the root cause's text, whose lines are indented."""
_FACT = 300
_STACK = 30
_LOG = 20
_GROUPS = 20
"""Groups, and lines of a list in Markdown."""


def encodable(text: str, encoding: str) -> str:
    """Return `text` with escapes for what cannot be written in `encoding`."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def one_row(text: str) -> str:
    """Return a text without control characters and line breaks."""
    return printable(text).replace("\n", " ")


def _row(text: str, limit: int = _FACT) -> str:
    """Return one line without tabs, and without the middle of a long text."""
    return elide(one_row(text).replace("\t", " "), limit).replace("\n", " ")


def _indented(text: str) -> str:
    """Return a quoted text with every line indented, so that none of them looks like an answer of the report."""
    return "\n".join(f"  {line}" if line.strip() else "" for line in text.split("\n"))


# --- Flyte's message --------------------------------------------------------------------------------------------------

_MESSAGE = 16_000
"""Characters; Flyte keeps the first and last 50 KB of a text."""
_SENTENCES = 8
_FRAMES = 12
_FRAME = 200
_COMMAND = 2_000
_LEAST = 200
"""Characters that a quoted text has room for in any case."""


def flyte_message(report: Report) -> str:
    """Return the text that Flyte shows for a failed attempt: below 16 KB, with its first line repeated at the end.

    It is ASCII, one fact a line, without columns: Flyte's panel is about 40 characters wide, its lists show the
    beginning of the first line, and Flyte cuts a long text in its middle.
    """
    parts, line = sections_of(report), report.first_line
    facts = [line, "", *_message_facts(parts.answers), *_message_code(parts.code)]
    details = ["", *_message_facts(parts.details)]
    tail = ["", *_message_end(parts), "", line]
    room = _MESSAGE - sum(len(part) + 1 for part in [*facts, *details, *tail]) - 2
    stack = "\n".join(few(parts.stack.lines, _STACK, "... {} more lines"))
    quoted = ((parts.stack.title, stack), (parts.log.title, "\n".join(parts.log.lines[-_LOG:])))
    blocks = [_message_block(f"{title.lower()}:", text, max(room // 3, _LEAST)) for title, text in quoted if text]
    room -= sum(len(block) + 2 for block in blocks)
    if parts.message.lines:
        blocks.insert(0, _message_block(_MESSAGE_TITLE, parts.message.text, max(room, _LEAST)))
    apart = itertools.chain.from_iterable(("", block) for block in blocks)
    text = "\n".join([*facts, *apart, *details, *tail])
    if len(text) <= _MESSAGE:
        return text
    half = _MESSAGE // 2 - 50
    head, end = text[:half].rpartition("\n")[0], text[-half:].partition("\n")[2]  # whole lines of both ends
    return f"{head}\n... {len(text) - len(head) - len(end)} characters left out ...\n{end}"


def _message_facts(facts: Iterable[Fact]) -> Iterator[str]:
    """Yield the facts, one a line; of the sentences on what is not known only the first ones."""
    for name, of_name in itertools.groupby(facts, lambda fact: fact.name):
        shown = list(of_name)
        yield from map(_ascii_row, few([fact.line for fact in shown], _SENTENCES, f"{name}: and {{}} more"))
        yield from (f"  {_ascii_row(line)}" for fact in shown for line in fact.lines)


def _message_code(code: Section) -> Iterator[str]:
    if code.lines:
        yield from ("", f"{code.title.lower()}:")
    if len(code.lines) > _FRAMES:
        yield f"  ... {len(code.lines) - _FRAMES} more frames"
    yield from (f"  {_ascii_row(line, _FRAME)}" for line in code.lines[-_FRAMES:])


def _message_end(parts: Sections) -> Iterator[str]:
    """Yield what stands at the end, which Flyte keeps: the evidence, and commands to copy."""
    yield from map(_ascii_row, few([f"why: {line}" for line in parts.evidence.lines], _SENTENCES, "why: and {} more"))
    if parts.commands.lines:
        yield from ("", f"{parts.commands.title.lower()}:")
        yield from (one_line(encodable(command, "ascii"), _COMMAND) for command in parts.commands.lines)


def _message_block(title: str, text: str, limit: int) -> str:
    """Return a quoted text below its title, at most `limit` characters."""
    # first cut, then indented: a cut begins a line too
    text = printable(encodable(text, "ascii"))
    room = limit - len(title)
    while len(shown := _indented(elide(text, room))) + len(title) + 1 > limit and room:
        room = max(room - max(len(shown) + len(title) + 1 - limit, 1), 0)
    return f"{title}\n{shown}"


def _ascii_row(text: str, limit: int = _FACT) -> str:
    return _row(encodable(text, "ascii"), limit)


# --- plain lines ------------------------------------------------------------------------------------------------------


def terminal_text(report: Report, *, verbose: bool = False) -> str:
    """Return the report for a pipe or a file: one fact a line, not folded, without colours, for grep and programs."""
    return "\n".join(_lines(report, verbose=verbose))


def _lines(report: Report, *, verbose: bool) -> Iterator[str]:
    parts, answers = sections_of(report), report.answers
    yield from (report.first_line, "")
    for name, value in (("what", answers.what), ("where", answers.where), ("fate", answers.fate)):
        yield from _named(name, [value])
    for fact in (*parts.answers, *parts.details):
        yield from (one_row(line).replace("\t", " ") for line in (fact.line, *(f"  {line}" for line in fact.lines)))
    yield from (f"next: {one_row(command)}" for command in parts.commands.lines)
    yield from (_row(line.replace(" ", ": ", 1)) for line in parts.attempts.lines)
    yield from _named("changed", parts.changes.lines if parts.attempts.lines else ())
    yield from _quoted_lines(report, parts, verbose=verbose)
    yield ""
    groups = [f"{group.head()}: {group.said}" for group in report.cascade.groups]
    yield from _named("group", groups if verbose else few(groups, _GROUPS))
    if verbose:
        yield from _named(report.engine.node, (node.line for node in report.cascade.nodes))
        yield from _named("ranks", (f"{name}: {text}" for name, text in report.cascade.ranks_by_node().items()))
        yield from _named("recovered", parts.recovered.lines)
    for line, (_, names) in zip(parts.evidence.lines, report.verdict.reasons, strict=True):
        yield from _named("why", [line])
        yield from _named("source", names if verbose and not report.engine.cites else ())
    yield from _named("suspect", parts.suspects.lines)
    yield from (_row(f"raw {line}") for line in parts.raw.lines if verbose)
    if parts.documents.lines:
        yield from ("", *(f"documents: {one_row(line)}" for line in parts.documents.lines))


def _quoted_lines(report: Report, parts: Sections, *, verbose: bool) -> Iterator[str]:
    root = report.verdict.root
    failures = quoted_failures(report) if verbose else [root] if root is not None else []
    for failure in failures:
        stack = stack_lines(failure)
        title = f"{parts.stack.title}: rank {failure.rank}" if len(failures) > 1 else parts.stack.title
        yield from _block(title, stack if verbose else few(stack, _STACK, "... {} more lines"))
    if parts.message.lines:
        yield from ("", _MESSAGE_TITLE, _indented(printable(parts.message.text)))
    for failure in failures:
        yield from _block(parts.log.title, log_lines(failure) if verbose else log_lines(failure)[-_LOG:])


def _named(name: str, values: Iterable[str]) -> Iterator[str]:
    yield from (_row(f"{name}: {value}") for value in values)


def _block(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", f"{title.lower()}:", *(f"  {line}" for line in lines))


# --- Markdown ---------------------------------------------------------------------------------------------------------

_DETAILS = {"clocks", "confidence"}
_TEXT = 20_000
_QUOTED = 40
"""Lines of a stack or a log."""
_HOME = re.compile(r"/(?:home|Users)/[\w.-]+(?=/)|/root(?=/)")
"""A home folder, which tells a person's name."""
_CELL = 160
_LINE = 500
_ESCAPED = str.maketrans(
    {
        **{character: f"\\{character}" for character in "\\`*_{}[]<>()|!~&"},
        # a space of no width: where Markdown is pasted, "@team" calls people and "#7" links an issue, escaped or not
        "@": "@\u200b",
        "#": "\\#\u200b",
    }
)


def markdown(report: Report) -> str:
    """Return the report as Markdown, in the order of the page: answers, the job, traceback, log, failures, evidence.

    Quoted texts are escaped, or in code blocks that they cannot end.
    """
    text = "\n".join(_markdown_lines(report)) + "\n"
    return _HOME.sub("~", text) if report.engine.cites else text


def _markdown_lines(report: Report) -> Iterator[str]:
    parts = sections_of(report)
    yield from (f"## {_escaped(report.answers.what)}", "", *_markdown_answers(report))
    if parts.commands.lines:
        yield from ("", *_fenced("\n".join(map(printable, parts.commands.lines)), "console"))
    if job := report.identity.parts(report.engine):
        yield from ("", _escaped("; ".join(job)))
    yield from _listed(parts.changes, parts.changes.lines)
    stack, log = "\n".join(parts.stack.lines[:_QUOTED]), "\n".join(parts.log.lines[-_QUOTED:])
    quoted = ((parts.stack, stack), (parts.message, elide(parts.message.text, _TEXT)), (parts.log, log))
    for part, text in quoted:
        if text:
            yield from ("", f"### {part.title}", "", *_fenced(text))
    yield from _markdown_groups(report)
    if report.followers:
        yield from ("", f"Victims: {_escaped(report.followers)}")
    yield from _listed(parts.evidence, few(parts.evidence.lines, _GROUPS))
    yield from _listed(parts.recovered, parts.recovered.lines)
    besides = [fact for fact in parts.details if fact.name in {f"{report.engine.nodes} reported", *_DETAILS}]
    facts = [*report.facts, *besides, *([Fact("read from", report.uri)] if report.uri else [])]
    yield from ("", "### Facts", "", *(f"- {_escaped(fact.name)}: {_escaped(fact.value)}" for fact in facts))


def _markdown_answers(report: Report) -> Iterator[str]:
    answers = report.answers
    yield f"- **Where:** {_escaped(answers.where)}" + (f", {_escaped(answers.code)}" if answers.code else "")
    yield f"- **Retried:** it {_escaped(answers.fate)}. {_escaped(answers.fate_reason)}"
    yield f"- **Kind:** {answers.fault_owner.value}; {_escaped(answers.category)}"
    yield from (f"- **Look at next:** {_escaped(step.text)}" for step in answers.steps[:1])
    if answers.unknown:
        yield f"- **Not known:** {_escaped('; '.join(answers.unknown[:_GROUPS]))}"


def _markdown_groups(report: Report) -> Iterator[str]:
    groups = report.cascade.groups
    if groups:
        yield from ("", "### Who failed", "", "| State | Processes | Ranks | What it said |", "|---|---|---|---|")
    for group in groups[:_GROUPS]:
        ranks = ranks_text(group.ranks, 60)
        yield f"| {group.state.value} | {group.count} | {ranks} | {_escaped(group.said[:_CELL])} |"
    if len(groups) > _GROUPS:
        yield f"| | | | and {counted(len(groups) - _GROUPS, 'more group')} |"


def _listed(part: Section, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", f"### {part.title}", "", *(f"- {_escaped(line)}" for line in lines))


def _fenced(text: str, language: str = "text") -> Iterator[str]:
    """Yield a code block with a fence longer than any run of backquotes in it."""
    text, fence = printable(text), "```"
    while fence in text:
        fence += "`"
    yield from (f"{fence}{language}", text, fence)


def _escaped(text: str) -> str:
    """Return one line in which nothing is Markdown or HTML."""
    return " ".join(elide(printable(text), _LINE).split()).translate(_ESCAPED)


# --- JSON -------------------------------------------------------------------------------------------------------------

_JSON_FRAMES = 50
_JSON_LINES = 200
_TEXTS = {"file", "function", "group"}
"""Fields that are never null."""


def json_report(report: Report, longest: int | None = None, *, decided: bool = True) -> str:
    """Return a report as one line, an object of the schema ``firstfault.verdict/v1`` (docs/schemas).

    Of each message at most `longest` characters are kept. If it is not `decided`, it says that it is preliminary.
    """
    answers, identity, root = report.answers, report.identity, report.verdict.root
    by_state: dict[str, list[int]] = {}
    for item in report.cascade.ranks:
        if item.state is not State.ROOT:
            by_state.setdefault(item.state.slug, []).append(item.rank)
    document = {
        "schema": SCHEMA,
        **({} if decided else {"decided": False}),
        "verdict": verdict_to_dict(replace(report.verdict, message=_kept(report.verdict.message, longest))),
        "decision": DECISION.write(report.decision),
        "first_line": report.first_line,
        "root": _root(report, root, longest) if root is not None else None,
        "what": answers.what,
        "fault": answers.fault_owner.value,
        "where": answers.where,
        "retry": f"{answers.fate}; {answers.fate_reason}",
        "next": [{"text": step.text, "command": step.command or None} for step in answers.steps],
        "unknown": list(answers.unknown),
        "victims_by_state": by_state,
        "sources": [list(names) for _, names in report.verdict.reasons] if report.engine.cites else None,
        "followers": report.followers or None,
        "clocks": report.clocks or None,
        "attempt": report.number,
        "attempts": [
            {
                "number": attempt.number,
                "outcome": attempt.outcome,
                "failed": attempt.verdict is not None,
                "retry": attempt.decision.retry if attempt.decision is not None else None,
                "seconds": attempt.seconds,
            }
            for attempt in report.attempts
        ],
        "changes": list(report.changes),
        "uri": report.uri or None,
        "execution": identity.execution or None,
        "versions": dict(identity.versions),
        "job": {
            "task": identity.task or None,
            "image": identity.image or None,
            "started": format_timestamp(identity.started_ns),
            "seconds": identity.seconds,
            "collectives": identity.progress.collectives or None,
            "training_seconds": identity.progress.seconds or None,
            "ranks": identity.ranks,
            "nodes": identity.nodes,
            "gpu_model": identity.gpu_model or None,
            "gpus": identity.gpus,
            "source": identity.source_url or None,
            "commit": identity.commit or None,
        },
    }
    return json.dumps(document, ensure_ascii=True, separators=(",", ":"))


def _root(report: Report, root: WorkerError, longest: int | None) -> dict[str, Any]:
    raised = exception_of(root)
    exception = first_cause(raised) if raised is not None else None
    frames = own_frames(raised) if raised is not None else ()
    innermost = _fields(FRAME, frames[-1]) if frames else {}
    place = {**_fields(PLACE, root.place), "pod": root.node or None, "pid": root.place.pid or None}
    if report.engine is PLAIN:
        place |= {"pod": None, "machine": place["machine"] or place["host"]}
    return {
        "type": exception.type if exception is not None else None,
        "message": _kept(exception.message, longest) if exception is not None else None,
        **{name: innermost.get(name) for name in ("file", "line", "function", "source")},
        "frames": [
            {
                **_fields(FRAME, frame),
                "context_line": frame.context_line or None,
                "marked": frame.marked if frame.marked[1] else None,
            }
            for frame in frames[-_JSON_FRAMES:]
        ],
        "stack": stack_lines(root)[:_JSON_LINES],
        "log": log_lines(root)[-_JSON_LINES:],
        "exit_code": root.exit_code,
        "signal": root.signal or None,
        **place,
        "time": format_timestamp(root.timestamp_ns),
        "memory": _fields(RESOURCES, root.resources),
        "deadline": _fields(EXPIRED, root.expired) if root.expired is not None else None,
        "last_collective": _fields(PROGRESS, root.collectives[0]) if root.collectives else None,
        "threads": [
            {"name": thread.thread, "type": thread.exception.type, "message": _kept(thread.exception.message, longest)}
            for thread in root.thread_failures
        ],
    }


def _fields(table: FieldTable, part: Any) -> dict[str, Any]:
    """Return the fields of a part by their names in JSON; null for an empty text that may be missing."""
    found = {field.json: getattr(part, field.name) for field in table.fields if field.json}
    return {name: None if value == "" and name not in _TEXTS else value for name, value in found.items()}


def _kept(text: str, longest: int | None) -> str:
    return text if longest is None else elide(text, longest)
