"""A report as one HTML file that needs nothing else, and as a tab of Flyte's deck.

The texts come from untrusted documents: the template escapes all of them, and the file's content
security policy allows only its own script and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from firstfault.exceptions.exceptions_in_text import (
    format_exception,
    group_frames_by_library,
    list_causes_first,
)
from firstfault.exceptions.first_cause import find_own_frames
from firstfault.exceptions.stack_position import format_stack_dump, locate_main_thread
from firstfault.model import DocumentRef, ExceptionInfo, FrameInfo, WorkerError
from firstfault.render.drawings import build_timeline, node_map
from firstfault.render.json_report import json_report
from firstfault.render.markdown import markdown
from firstfault.report.cascade import Cascade, NodeState, RankState
from firstfault.report.data import Report
from firstfault.report.engine_words import is_retried
from firstfault.report.first_line import shorten_pod_name
from firstfault.report.formatting import format_ranks, format_time, shorten_names
from firstfault.report.headline import summarize_failure
from firstfault.report.job_identity import JobIdentity
from firstfault.report.parts.quoted_output import log_lines, message_text
from firstfault.report.parts.restart_lines import recovered_lines
from firstfault.report.states import State
from firstfault.strategies.headlines import name_process
from firstfault.utils.text import elide, printable

if TYPE_CHECKING:
    import jinja2

RANKS_PER_PAGE = 100
"""Ranks on one page of the grid."""
_TABLE_PAGE_ROWS = 50
"""Groups, events and documents on one page of their table."""
_MAX_QUOTED_GROUPS = 8
"""Maximum number of groups with a quoted first failure."""
_MAX_OTHER_PROCESSES = 16
"""Maximum number of processes with a stack, or with a log."""
_MAX_TEXT_CHARACTERS = 64_000
"""Characters of the root cause's message and dump."""
_MAX_QUOTE_CHARACTERS = 16_000
"""Characters of any other quoted text."""
_MAX_LOG_LINES = 200
_MAX_RANKS_CHARACTERS = 120
"""Characters of an error's ranks in the table."""
_MAX_LINE_BYTES = 300
"""Bytes of one line in the script's data, with escapes; fewer if there are many lines."""
_MIN_LINE_BYTES = 48
_MAX_ALL_LINES_BYTES = 2_000_000
"""Bytes of all lines together in the script's data."""
_MAX_JSON_TEXT_CHARACTERS = 200_000
"""Characters of each message in the page's copy of the JSON."""
# without user, query and fragment: both texts come from documents and end up in a link
_WEB_ADDRESS = re.compile(r"https?://[\w.-]+(?::\d+)?(?:/[\w.~@+-]+)+")
_PRINTABLE_PATH = re.compile(r"[^\x00-\x1f]+")


def page(report: Report) -> str:
    """Return the report as one HTML file that needs no network, and no scripts for its answers."""
    return _render("page.html.j2", report, is_deck=False)


def deck_html(report: Report) -> str:
    """Return the report as the body of a tab of Flyte's deck,
    with styles that apply to nothing else.

    It is always light, as Flyte's page is.
    """
    return _render("report.html.j2", report, is_deck=True)


def outcome_page(title: str, lines: Sequence[str], uri: str) -> str:
    """Return the page on an attempt without a failure: whether it succeeded,
    and what shows that.
    """
    return _render_template("outcome.html.j2", {"title": title, "lines": lines, "uri": uri})


def _render(template: str, report: Report, *, is_deck: bool) -> str:
    return _render_template(template, {**_build_context(report), "is_deck": is_deck})


def _render_template(template: str, context: Mapping[str, Any]) -> str:
    assets: dict[str, str] = {}
    for name in ("style", "script"):
        suffix = "css" if name == "style" else "js"
        text = (
            (resources.files("firstfault.render") / "page" / f"report.{suffix}")
            .read_text(encoding="utf-8")
            .strip()
        )
        # the page's policy allows these hashes alone: a script or style in a quoted text never runs
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assets |= {name: text, f"{name}_hash": f"sha256-{digest}"}
    text = _build_environment().get_template(template).render(**context, **assets)
    # lone surrogates in quoted texts can't be encoded
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@lru_cache(maxsize=1)
def _build_environment() -> jinja2.Environment:
    import jinja2  # noqa: PLC0415 - a verdict's other forms need none of it

    def harmless(value: Any) -> Any:
        """Remove control characters and direction marks from a text;
        the template's own markup stays.
        """
        return (
            printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
        )

    def sentence(text: str) -> str:
        """Return a text with a capital letter,
        unless it begins with an identifier like "node_lost".
        """
        return text if "_" in text.partition(" ")[0] else text[:1].upper() + text[1:]

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.PackageLoader("firstfault.render", "page"),
        # a misspelt name in a template is an error, not an empty place in the page
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=harmless,
    )
    environment.filters.update(ranks=format_ranks, who=name_process, line=summarize_failure)
    environment.filters.update(sentence=sentence, is_retried=is_retried)
    environment.filters.update(
        runs=group_frames_by_library, source_lines=source_lines, traceback=format_exception
    )
    environment.filters["quoted"] = partial(elide, limit=_MAX_QUOTE_CHARACTERS)
    environment.filters["shown_time"] = lambda time_ns: (
        format_time(time_ns) if time_ns is not None else ""
    )
    return environment


def _build_context(report: Report) -> dict[str, Any]:
    """Return what the template shows: the report, shortened lists, drawings,
    and the script's data.
    """
    verdict = report.verdict
    cascade = report.cascade
    name = report.verdict.node or ""
    short = shorten_names(node.name for node in cascade.nodes)
    pod = shorten_pod_name(name)
    where = report.answers.where.replace(name, pod) if name else report.answers.where
    raised = verdict.root.exception if verdict.root is not None else None
    # the grid opens at the page with the rank to look at, which in a large job isn't the first page
    groups, first = (
        cascade.groups[:_TABLE_PAGE_ROWS],
        _find_first_rank(cascade) // RANKS_PER_PAGE * RANKS_PER_PAGE,
    )
    documents = _list_documents(report)
    numbered = {document.ref.name: document for document in documents}
    problems = {State.ROOT: 0, State.SUSPECT: 1, State.UNREPORTED: 2, None: 3, State.FINISHED: 4}
    return {
        "report": report,
        "verdict": verdict,
        "decision": report.decision,
        "answers": report.answers,
        "cascade": cascade,
        "identity": report.identity.parts(report.engine),
        "where": where,
        "full_name": name if where != report.answers.where else "",
        "attempts": list(zip(report.attempts, ("", *report.changes), strict=False)),
        "history": recovered_lines(report.job, _TABLE_PAGE_ROWS),
        "links": list_causes_first(raised) if raised is not None else [],
        "open_at": _open_at(raised) if raised is not None else None,
        "address": partial(_build_address, report.identity),
        "message": elide(message_text(verdict), _MAX_TEXT_CHARACTERS),
        "stacks": _list_stacks(report),
        "dumps": _list_dumps(verdict.root),
        "logs": _list_logs(report),
        "counts": [(state, count) for state in State if (count := cascade.count(state))],
        "root_state": State.ROOT,
        "root_nodes": [
            node.name for node in cascade.nodes if node.state is State.ROOT and node.name
        ],
        "map": node_map(cascade),
        "page_size": RANKS_PER_PAGE,
        "ranks_width": _MAX_RANKS_CHARACTERS,
        "first_ranks": cascade.ranks[first : first + RANKS_PER_PAGE],
        "rows": _list_first_rows(cascade, first),
        "short": lambda name: short.get(name, name),
        "line": build_timeline(cascade),
        "events": cascade.events[:_TABLE_PAGE_ROWS],
        "groups": groups,
        "shortened": [
            group for group in groups if len(format_ranks(group.ranks)) > _MAX_RANKS_CHARACTERS
        ],
        "examples": list(itertools.islice(_iter_examples(cascade), _MAX_QUOTED_GROUPS)),
        "evidence": [
            (why, [numbered[name] for name in names if name in numbered])
            for why, names in verdict.reasons
        ],
        "nodes": sorted(cascade.nodes, key=lambda node: problems.get(node.state, 3))[
            :_TABLE_PAGE_ROWS
        ],
        "documents": documents,
        "markdown": markdown(report),
        "json": _in_script(json_report(report, _MAX_JSON_TEXT_CHARACTERS)),
        "data": _in_script(
            json.dumps(_build_data(cascade, short), ensure_ascii=False, separators=(",", ":"))
        ),
    }


# --- ranks ----------------------------------------------------------------------------------------


def _find_first_rank(cascade: Cascade) -> int:
    """Return the index of the first rank to show: root cause, a rank of its node, or a suspect."""
    of_node = {node.name: node.state for node in cascade.nodes if node.name}
    states = [(item.state, of_node.get(item.node)) for item in cascade.ranks]  # its own, its node's
    wanted = ((0, State.ROOT), (1, State.ROOT), (1, State.SUSPECT), (0, State.SUSPECT))
    indexes = (
        index
        for whose, state in wanted
        for index, pair in enumerate(states)
        if pair[whose] is state
    )
    return next(indexes, 0)


def _list_first_rows(
    cascade: Cascade, first: int
) -> list[tuple[NodeState | None, str, list[RankState]]]:
    """Return the ranks of the initial page by node: (the node, its name, its ranks)."""
    nodes = {node.name: node for node in cascade.nodes}
    by_node: dict[str, list[RankState]] = defaultdict(list)
    for item in cascade.ranks[first : first + RANKS_PER_PAGE]:
        by_node[item.node].append(item)
    return [(nodes.get(name), name, ranks) for name, ranks in by_node.items()]


def _build_data(cascade: Cascade, short: dict[str, str]) -> dict[str, Any]:
    """Return what the script pages through and filters: ranks, groups,
    states and nodes that refer by index.
    """
    index = {state: number for number, state in enumerate(State)}
    nodes = {
        node.name: [index[node.state]] if node.state is not None else [] for node in cascade.nodes
    }
    names = list(dict.fromkeys([*nodes, *(item.node for item in cascade.ranks)]))
    place = {name: number for number, name in enumerate(names)}
    lines = {group.number: group.line for group in cascade.groups}
    # ranks share `_MAX_ALL_LINES_BYTES` only where their line differs from their group's; a group
    # has two texts
    own = sum(item.line != lines.get(item.group or 0) for item in cascade.ranks)
    room = min(
        _MAX_LINE_BYTES,
        max(_MIN_LINE_BYTES, _MAX_ALL_LINES_BYTES // max(own + 2 * len(cascade.groups), 1)),
    )
    return {
        "size": RANKS_PER_PAGE,
        "foremost": _find_first_rank(cascade),
        "rows": _TABLE_PAGE_ROWS,
        "states": [[state.slug, state.value] for state in State],
        "nodes": [
            [printable(name), printable(short.get(name, name)), *nodes.get(name, [])]
            for name in names
        ],
        "groups": [
            [
                group.number,
                index[group.state],
                _shorten(group.what, room),
                _shorten(group.line, room),
                group.count,
                format_ranks(group.ranks, _MAX_RANKS_CHARACTERS),
                group.first.delay if group.first is not None else "",
            ]
            for group in cascade.groups
        ],
        "ranks": [
            [
                item.rank,
                index[item.state],
                place[item.node],
                item.local_rank,
                item.group,
                item.delay,
                # empty: the same as its group's
                "" if item.line == lines.get(item.group or 0) else _shorten(item.line, room),
            ]
            for item in cascade.ranks
        ],
    }


def _in_script(text: str) -> str:
    """Return JSON that can't end a script element; these characters occur only in its strings."""
    # a browser ends the element at "</script>" even inside of a JSON string, and "<!--" changes how
    # it reads on
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _shorten(text: str, room: int) -> str:
    """Return a line that takes at most this many bytes in the page's data."""
    text = printable(text)
    while (size := len(_in_script(text).encode("utf-8", "backslashreplace"))) > room:
        # an escaped character takes up to six bytes: cut in proportion, by at least one character
        text = text[: min(len(text) - 1, len(text) * room // size)]
    return text


# --- what is quoted -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Quoted:
    """A quoted text, with the name of its process."""

    name: str
    text: str
    note: str = ""
    is_root: bool = False


@dataclass(frozen=True, slots=True)
class _Document:
    """A document that the page refers to."""

    number: int
    ref: DocumentRef
    failure: WorkerError
    reason: int
    """Number of the first evidence sentence that refers to it, from 1, or 0 if none does."""


def _iter_examples(cascade: Cascade) -> Iterator[tuple[int, _Quoted]]:
    """Yield the number and the first failure of each group, without the root cause's."""
    for group in cascade.groups:
        if group.first is not None and group.state is not State.ROOT:
            failure = group.first.failure
            text = (
                format_exception(failure.exception)
                if failure.exception is not None
                else failure.message
            )
            if text.strip():
                yield (
                    group.number,
                    _Quoted(name_process(failure), elide(text.strip(), _MAX_QUOTE_CHARACTERS)),
                )


def _in_order(report: Report) -> list[WorkerError]:
    """Return the failures, the root cause first, then the suspects."""
    root = report.verdict.root
    events = sorted(report.cascade.events, key=lambda event: event.state is not State.SUSPECT)
    ordered = [*([root] if root is not None else []), *(event.failure for event in events)]
    return list({id(failure): failure for failure in ordered}.values())


def _list_stacks(report: Report) -> list[_Quoted]:
    """Return the stacks of processes, the root cause first, then the suspects."""
    dumps: dict[tuple[int, int | None], _Quoted] = {}
    for failure in _in_order(report):
        position = locate_main_thread(failure)
        for dump in failure.stack_dumps:
            key = (dump.pid, dump.rank)
            is_own = dump.rank == failure.rank
            # several documents may contain a process's dump; prefer the dump in its own document
            if key in dumps and not is_own:
                continue
            name = f"rank {dump.rank}" if dump.rank is not None else f"process {dump.pid}"
            note = f"{position.kind.value}: {position.frame}" if is_own and position.frame else ""
            is_root = is_own and failure is report.verdict.root
            dumps[key] = _Quoted(
                name,
                elide(format_stack_dump(dump.text).strip(), _MAX_QUOTE_CHARACTERS),
                note,
                is_root,
            )
        if len(dumps) >= _MAX_OTHER_PROCESSES:
            break
    return list(dumps.values())[:_MAX_OTHER_PROCESSES]


def _list_dumps(root: WorkerError | None) -> list[_Quoted]:
    """Return the root cause's dump with all threads and frames."""
    own = [dump for dump in root.stack_dumps if dump.rank == root.rank] if root is not None else []
    return [
        _Quoted(f"rank {dump.rank}", elide(dump.text.strip(), _MAX_TEXT_CHARACTERS))
        for dump in own[:1]
    ]


def _list_logs(report: Report) -> list[_Quoted]:
    """Return the last log lines of processes, the root cause first, then the suspects."""
    root = report.verdict.root
    logs = (
        (failure, "\n".join(log_lines(failure)[-_MAX_LOG_LINES:])) for failure in _in_order(report)
    )
    quoted = (
        _Quoted(name_process(failure), log, is_root=failure is root) for failure, log in logs if log
    )
    return list(itertools.islice(quoted, _MAX_OTHER_PROCESSES))


def _list_documents(report: Report) -> tuple[_Document, ...]:
    """Return the documents that the page refers to: those of the evidence first, then by time."""
    by_name = {
        ref.name: (ref, event.failure)
        for event in report.cascade.events
        for ref in event.failure.documents
    }
    reasons: dict[str, int] = {}
    for number, (_, sources) in enumerate(report.verdict.reasons, 1):
        for name in sources:
            reasons.setdefault(name, number)
    names = list(dict.fromkeys([*(name for name in reasons if name in by_name), *by_name]))
    # a document that a sentence of the evidence links to is always on the page
    shown = enumerate(names[: max(_TABLE_PAGE_ROWS, len(reasons))], 1)
    return tuple(
        _Document(number, *by_name[name], reason=reasons.get(name, 0)) for number, name in shown
    )


# --- the traceback --------------------------------------------------------------------------------


def _open_at(exception: ExceptionInfo) -> tuple[int, int, int] | None:
    """Return the program's innermost frame: the numbers of its exception in the chain, of its run,
    and in the run.
    """
    innermost = next(reversed(find_own_frames(exception)), None)
    places = (
        (link, run, number)
        for link, (_, raised) in enumerate(list_causes_first(exception))
        for run, (_, frames) in enumerate(group_frames_by_library(raised))
        for number, frame in enumerate(frames)
        if frame == innermost
    )
    return max(places, default=None)  # in a recursion many frames are equal


def source_lines(frame: FrameInfo) -> list[tuple[int, str, str, str]]:
    """Return the lines around a frame: number, and text before,
    inside and after what Python marks with carets.
    """
    lines = []
    for number, text in enumerate(frame.context, frame.context_line):
        indent = len(text) - len(text.lstrip())
        # the columns come from a document and may not fit the line: then nothing is marked
        is_marked = (
            number == frame.line and 0 <= frame.marked[0] < frame.marked[1] <= len(text) - indent
        )
        since, until = (
            (indent + column for column in frame.marked) if is_marked else (len(text), len(text))
        )
        lines.append((number, text[:since], text[since:until], text[until:]))
    return lines


def _build_address(identity: JobIdentity, frame: FrameInfo) -> str:
    """Return the URL of a frame's line in its repository, or an empty string if it is unknown."""
    root = identity.source_root.rstrip("/") + "/"
    # only an ordinary web address is ever a link
    if not (
        frame.file.startswith(root)
        and _WEB_ADDRESS.fullmatch(identity.source_url)
        and _PRINTABLE_PATH.fullmatch(frame.file)
    ):
        return ""
    # Bitbucket has different anchors; GitHub and GitLab use the same ones
    anchor = f"#lines-{frame.line}" if "bitbucket" in identity.source_url else f"#L{frame.line}"
    return f"{identity.source_url}/{quote(frame.file.removeprefix(root))}{anchor}"
