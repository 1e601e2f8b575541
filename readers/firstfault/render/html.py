"""A report as one HTML file that needs nothing else, and as a tab of Flyte's deck.

The texts come from untrusted documents: the template escapes all of them, and the file's content security policy
allows only its own script and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from firstfault.exceptions.stack_position import readable_stack, where_it_stood
from firstfault.exceptions.tracebacks import format_exception
from firstfault.render.json_report import json_report
from firstfault.render.markdown import markdown
from firstfault.render.node_map import node_map
from firstfault.render.timeline import timeline_of
from firstfault.render.traceback_view import folded_traceback
from firstfault.report.headline import line_of, short_pod
from firstfault.report.sections import log_lines, message_text, recovered_lines
from firstfault.report.words import State, is_retried, ranks_text, short_names, shown_time
from firstfault.strategies import who
from firstfault.text import elide, printable

if TYPE_CHECKING:
    import jinja2

    from firstfault.model import DocumentRef, WorkerError
    from firstfault.render.traceback_view import FoldedException
    from firstfault.report.cascade import Group, NodeState, RankState
    from firstfault.report.data import AttemptSummary, Report

PAGE_SIZE = 100
"""Ranks on one page of the grid."""
_ROWS = 50
"""Groups, events and documents on one page of their table."""
_EXAMPLES = 8
"""Groups whose first failure is quoted."""
_OTHERS = 16
"""Processes whose stacks or logs are shown."""
_CHANGED = 12
"""Attempts with a tab of their own; the newest."""
_TEXT = 64_000
_LOG_LINES = 200
_RANKS = 120
"""Characters of an error's ranks in the table."""
_LINE = 300
_SHORTEST_LINE = 48
_LINES = 2_000_000
"""Bytes of all lines together in the script's data."""
_JSON_TEXT = 200_000


def page(report: Report) -> str:
    """Return the report as one HTML file that needs no network, and no scripts for its answers."""
    return _rendered("page.html.j2", report, is_deck=False)


def deck_html(report: Report) -> str:
    """Return the report as the body of a tab of Flyte's deck, with styles that apply to nothing else.

    It is always light, as Flyte's page is.
    """
    return _rendered("report.html.j2", report, is_deck=True)


def _rendered(template: str, report: Report, *, is_deck: bool) -> str:
    style, script = _asset("report.css"), _asset("report.js")
    text = (
        _environment()
        .get_template(template)
        .render(
            report=report,
            verdict=report.verdict,
            decision=report.decision,
            answers=report.answers,
            cascade=report.cascade,
            view=_View(report),
            is_deck=is_deck,
            page_size=PAGE_SIZE,
            ranks_width=_RANKS,
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
    )
    # lone surrogates in quoted texts cannot be encoded
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2  # noqa: PLC0415 - a verdict's other forms need none of it

    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.PackageLoader("firstfault.render", "page"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters.update(ranks=ranks_text, shown_time=_moment, who=who, sentence=_sentence, is_retried=is_retried)
    return environment


def _shown(value: Any) -> Any:
    """Remove control characters and direction marks from a text; the template's own markup stays."""
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _moment(timestamp_ns: int | None) -> str:
    return shown_time(timestamp_ns) if timestamp_ns is not None else ""


def _sentence(text: str) -> str:
    """Return a text with a capital letter, unless it begins with an identifier like "node_lost"."""
    return text if "_" in text.partition(" ")[0] else text[:1].upper() + text[1:]


@lru_cache(maxsize=4)
def _asset(name: str) -> str:
    return (resources.files("firstfault.render") / "page" / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


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
    line: str
    reason: int
    """Number of the first evidence sentence that refers to it, from 1; 0: none does."""


class _View:
    """What the template needs beyond the report: shortened lists, and the script's data."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.title = report.first_line
        self.identity = report.identity.parts(report.engine)
        name = report.verdict.node or ""
        short = short_pod(name)
        self.where = report.answers.where.replace(name, short) if name else report.answers.where
        self.full_name = name if short != name and name in report.answers.where else ""
        self.timeline = timeline_of(report.cascade)
        self.map = node_map(report.cascade)
        self.states = tuple(State)
        self.documents = _documents(report)
        self._short = short_names(node.name for node in report.cascade.nodes)
        self._by_name = {document.ref.name: document for document in self.documents}

    @property
    def markdown(self) -> str:
        return markdown(self._report)

    @property
    def json(self) -> str:
        """The report as JSON, without the middle of a very long message."""
        return _in_script(json_report(self._report, _JSON_TEXT))

    @property
    def counts(self) -> list[tuple[State, int]]:
        """The number of ranks in each state that occurs."""
        counted = [(state, self._report.cascade.count(state)) for state in State]
        return [(state, count) for state, count in counted if count]

    def evidence(self) -> list[tuple[str, list[_Document]]]:
        """Return each evidence sentence with its documents."""
        return [
            (sentence, [self._by_name[name] for name in names if name in self._by_name])
            for sentence, names in self._report.verdict.reasons
        ]

    # --- ranks ---------------------------------------------------------------------------------------------------

    @property
    def root_nodes(self) -> list[str]:
        """Names of nodes that are themselves the root cause."""
        return [node.name for node in self._report.cascade.nodes if node.state is State.ROOT and node.name]

    @property
    def foremost(self) -> int:
        """Index of the rank to look at first: the root cause, else a rank of its node, else a suspect."""
        cascade = self._report.cascade
        of_node = {node.name: node.state for node in cascade.nodes if node.name}
        states = [(item.state, of_node.get(item.node)) for item in cascade.ranks]  # its own, its node's
        wanted = ((0, State.ROOT), (1, State.ROOT), (1, State.SUSPECT), (0, State.SUSPECT))
        found = (index for whose, state in wanted for index, pair in enumerate(states) if pair[whose] is state)
        return next(found, 0)

    @property
    def first_rank(self) -> int:
        """Index of the first rank of the initial page."""
        return self.foremost // PAGE_SIZE * PAGE_SIZE

    def rows(self) -> list[tuple[NodeState | None, str, list[RankState]]]:
        """Return the ranks of the initial page by node: (the node, its name, its ranks)."""
        nodes = {node.name: node for node in self._report.cascade.nodes}
        found: dict[str, list[RankState]] = {}
        for item in self._report.cascade.ranks[self.first_rank : self.first_rank + PAGE_SIZE]:
            found.setdefault(item.node, []).append(item)
        return [(nodes.get(name), name, ranks) for name, ranks in found.items()]

    def data(self) -> str:
        """Return the data that the script pages through and filters, as JSON."""
        return _in_script(json.dumps(self._data(), ensure_ascii=False, separators=(",", ":")))

    def _data(self) -> dict[str, Any]:
        """Return ranks, groups, states and nodes, as lists that refer to each other by index."""
        cascade = self._report.cascade
        states = list(State)
        names = list(dict.fromkeys([*(node.name for node in cascade.nodes), *(item.node for item in cascade.ranks)]))
        index = {name: number for number, name in enumerate(names)}
        lines = {group.number: group.line for group in cascade.groups}
        own = sum(item.line != lines.get(item.group or 0) for item in cascade.ranks)
        room = min(_LINE, max(_SHORTEST_LINE, _LINES // max(own + 2 * len(cascade.groups), 1)))
        return {
            "size": PAGE_SIZE,
            "foremost": self.foremost,
            "rows": _ROWS,
            "states": [[state.slug, state.value, state.mark] for state in states],
            "nodes": [
                [printable(name), printable(self.short(name)), *_marked(node, states)]
                for name, node in self._by_node(names)
            ],
            "groups": [
                [
                    group.number,
                    states.index(group.state),
                    _within(printable(group.what), room),
                    _within(printable(group.line), room),
                    group.count,
                    ranks_text(group.ranks, _RANKS),
                    group.first.later if group.first is not None else "",
                ]
                for group in cascade.groups
            ],
            "ranks": [
                [
                    item.rank,
                    states.index(item.state),
                    index[item.node],
                    item.local_rank,
                    item.group,
                    item.later,
                    # empty: the same as its group's
                    "" if item.line == lines.get(item.group or 0) else _within(printable(item.line), room),
                ]
                for item in cascade.ranks
            ],
        }

    def _by_node(self, names: list[str]) -> list[tuple[str, NodeState | None]]:
        nodes = {node.name: node for node in self._report.cascade.nodes}
        return [(name, nodes.get(name)) for name in names]

    # --- what is quoted ------------------------------------------------------------------------------------------

    @property
    def folded(self) -> list[FoldedException]:
        """The root cause's exception with its causes, the deepest first."""
        root = self._report.verdict.root
        if root is None or root.exception is None:
            return []
        return folded_traceback(root.exception, self._report.identity)

    @property
    def message(self) -> str:
        """The verdict's own text, of limited length."""
        return elide(message_text(self._report.verdict), _TEXT)

    def examples(self) -> list[tuple[int, _Quoted]]:
        """Return the number and the first failure of each of the largest groups, without the root cause's."""
        found = []
        for group in self._report.cascade.groups:
            if group.first is None or group.state is State.ROOT:
                continue
            failure = group.first.failure
            text = format_exception(failure.exception) if failure.exception is not None else failure.message
            if not text.strip():
                continue
            found.append((group.number, _Quoted(who(failure), elide(text.strip(), _TEXT // 4))))
        return found[:_EXAMPLES]

    def stacks(self) -> list[_Quoted]:
        """Return the stacks of processes, the root cause first, then the suspects."""
        dumps: dict[tuple[int, int | None], _Quoted] = {}
        for failure in self._in_order():
            stood = where_it_stood(failure)
            for dump in failure.stack_dumps:
                key = (dump.pid, dump.rank)
                is_own = dump.rank == failure.rank
                if key in dumps and not is_own:
                    continue
                name = f"rank {dump.rank}" if dump.rank is not None else f"process {dump.pid}"
                note = f"{stood.stood.value}: {stood.frame}" if is_own and stood.frame else ""
                is_root = is_own and failure is self._report.verdict.root
                text = elide(readable_stack(dump.text).strip(), _TEXT // 4)
                dumps[key] = _Quoted(name, text, note, is_root)
            if len(dumps) >= _OTHERS:
                break
        return list(dumps.values())[:_OTHERS]

    def dumps(self) -> list[_Quoted]:
        """Return the root cause's dump with all threads and frames."""
        root = self._report.verdict.root
        dumps = root.stack_dumps if root is not None else ()
        own = [dump for dump in dumps if root is not None and dump.rank == root.rank]
        return [_Quoted(f"rank {dump.rank}", elide(dump.text.strip(), _TEXT)) for dump in own[:1]]

    def logs(self) -> list[_Quoted]:
        """Return the last log lines of processes, the root cause first, then the suspects."""
        root = self._report.verdict.root
        found = (
            _Quoted(who(failure), "\n".join(log_lines(failure)[-_LOG_LINES:]), is_root=failure is root)
            for failure in self._in_order()
            if failure.log_tail.strip()
        )
        return list(itertools.islice((quoted for quoted in found if quoted.text), _OTHERS))

    def _in_order(self) -> list[WorkerError]:
        root = self._report.verdict.root
        failures = [event.failure for event in self._report.cascade.events]
        suspects = [event.failure for event in self._report.cascade.events if event.state is State.SUSPECT]
        ordered = [*([root] if root is not None else []), *suspects, *failures]
        return list({id(failure): failure for failure in ordered}.values())

    # --- attempts ------------------------------------------------------------------------------------------------

    def attempts(self) -> list[tuple[AttemptSummary, str]]:
        """Return the newest attempts, each with what changed since the one before it."""
        shown = [*self._report.attempts[-_CHANGED:]]
        own = [attempt for attempt in self._report.attempts if attempt.number == self._report.number]
        shown = [*(attempt for attempt in own if attempt not in shown), *shown]
        changes = dict(
            zip((attempt.number for attempt in self._report.attempts[1:]), self._report.changes, strict=False)
        )
        return [(attempt, changes.get(attempt.number, "")) for attempt in shown]

    # --- lists ---------------------------------------------------------------------------------------------------

    @property
    def events(self) -> list[Any]:
        """The first failures in time."""
        return list(self._report.cascade.events[:_ROWS])

    @property
    def groups(self) -> list[Any]:
        """The groups of the initial page."""
        return list(self._report.cascade.groups[:_ROWS])

    @property
    def shortened(self) -> list[Group]:
        """Groups with more ranks than the table shows."""
        return [group for group in self.groups if len(ranks_text(group.ranks)) > _RANKS]

    @property
    def nodes(self) -> list[NodeState]:
        """The first nodes, those with a problem before the others."""
        order = {State.ROOT: 0, State.SUSPECT: 1, State.UNREPORTED: 2, None: 3, State.FINISHED: 4}
        return sorted(self._report.cascade.nodes, key=lambda node: order.get(node.state, 3))[:_ROWS]

    @property
    def history(self) -> list[str]:
        """Failures that the job recovered from."""
        return recovered_lines(self._report.job, _ROWS)

    def short(self, name: str) -> str:
        """Return a node's name without the parts that all nodes share."""
        return self._short.get(name, name)

    def line(self, failure: WorkerError) -> str:
        """Return what happened to a process, in a line."""
        return line_of(failure)


def _in_script(text: str) -> str:
    """Return JSON that cannot end a script element; these characters occur only in its strings."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _within(text: str, room: int) -> str:
    """Return a line that takes at most so many bytes in the page's data."""
    while (size := len(_in_script(text).encode("utf-8", "backslashreplace"))) > room:
        text = text[: min(len(text) - 1, len(text) * room // size)]
    return text


def _marked(node: NodeState | None, states: list[State]) -> list[Any]:
    """Return the index of a node's own state, if it has one."""
    if node is None or node.state is None:
        return []
    return [states.index(node.state)]


def _documents(report: Report) -> tuple[_Document, ...]:
    """Return the documents that the page refers to: those of the evidence first, then by time."""
    named = [name for names in report.verdict.sources for name in names]
    by_name = {ref.name: (ref, event.failure) for event in report.cascade.events for ref in event.failure.documents}
    names = dict.fromkeys([*(name for name in named if name in by_name), *by_name])
    reasons: dict[str, int] = {}
    for number, (_, sources) in enumerate(report.verdict.reasons, 1):
        for name in sources:
            reasons.setdefault(name, number)
    return tuple(
        _Document(number, *by_name[name], line=line_of(by_name[name][1]), reason=reasons.get(name, 0))
        for number, name in enumerate(list(names)[: max(_ROWS, len(set(named)))], 1)
    )
