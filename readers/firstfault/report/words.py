"""The words that all forms of a report share: states, whose fault, the engine's, units, and its first line."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from firstfault.evidence.texts import message_of
from firstfault.exceptions.stack_position import where_it_stood
from firstfault.model import Decision, JobErrors, Resources, Scope, Subject, Verdict, WorkerError
from firstfault.model.failure import ABOUT_CATEGORIES, OF_LOGS
from firstfault.retry import ASKING
from firstfault.strategies import sentence_about
from firstfault.utils.text import one_line, printable, size
from firstfault.wire.json_schemas import format_timestamp


class State(str, enum.Enum):
    """What happened to a rank or a node; reports show the value."""

    ROOT = "root cause"
    SUSPECT = "suspect"
    VICTIM = "victim"
    STOPPED = "stopped by its agent"
    UNCLEAR = "failed, cause or victim"
    UNREPORTED = "sent no report"
    FINISHED = "finished"

    @property
    def mark(self) -> str:
        """One ASCII character: reports never tell states apart by colour alone."""
        return _MARKS[self]

    @property
    def slug(self) -> str:
        """The name in style sheets and filters."""
        return self.name.lower()


_MARKS = dict(zip(State, "X!vs~?+", strict=True))


class FaultOwner(str, enum.Enum):
    """Whose fault it is: the code's, which its author fixes, or the platform's."""

    CODE = "failed (your code)"
    INFRASTRUCTURE = "crashed (infrastructure)"
    EITHER = "your code or infrastructure"
    """Memory, disk, native code, waiting and a lost pod depend on the code and on what the platform gives it."""
    TRANSIENT = "recoverable, as your code raised it"
    NONE = "no fault: it was interrupted"
    UNKNOWN = "not known whose fault"


def words_on(category: str, engine: EngineWords) -> tuple[FaultOwner, str]:
    """Return whose fault a root cause is, and what to do first; an unknown category gets the words of "unknown"."""
    about = ABOUT_CATEGORIES.get(category, ABOUT_CATEGORIES["unknown"])
    advice = about["advice"].format(log=engine.log, events=engine.events, nodes=engine.nodes)
    return FaultOwner[about["owner"].upper()], advice


# --- the engine -----------------------------------------------------------------------------------------------------

_POD = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
"""A name that Kubernetes accepts, and that needs no quotes in a shell."""
_CITED = 3
_NO_RETRIES = "nothing retries this job by itself"


@dataclass(frozen=True, slots=True)
class EngineWords:
    """What a report says about one kind of engine, which ran the job."""

    log: str
    """What to call the log of the root cause's node."""
    events: str
    """What to call the place where the platform says why a node is gone."""
    node: str
    """What a node of it is: "pod"."""
    enforcer: str = ""
    """The part that carries out decisions; empty: there is none."""
    has_kubectl: bool = False
    reporter: str = ""
    """What reports for itself, if that is not a node."""
    cites: bool = False
    """Whether facts are followed by the files and lines that tell them."""

    @property
    def nodes(self) -> str:
        """What its nodes are, or whatever reports, plural."""
        return f"{self.reporter or self.node}s"

    def enforced(self, decision: Decision) -> tuple[str, str]:
        """Return a label and a value: whether the decision will be carried out."""
        if not self.enforcer:
            return "enforced", f"no, {_NO_RETRIES}"
        return f"enforced by {self.enforcer}", "yes" if decision.enforced else "no, this is advice"

    def fate(self, decision: Decision) -> str:
        """Return what will happen to the job, after "it"."""
        if self.enforcer and decision.is_spent:
            return "will not be retried: no retries are left"
        if self.enforcer and decision.enforced:
            return "will be retried" if decision.retry else "will not be retried"
        advice = "should be" if decision.retry else "should not be"
        why = f"{self.enforcer} decides by itself, this is advice" if self.enforcer else _NO_RETRIES
        return f"{advice} retried; {why}"

    def cited(self, text: str, names: Iterable[str]) -> str:
        """Return a text with the lines of logs that tell it, if the engine's facts have such: "... [nohup.out:3-9]"."""
        found = ", ".join(few(list(names), _CITED, "and {} more")) if self.cites else ""
        return f"{text} [{found}]" if found else text

    def kubectl(self, command: str, name: str, namespace: str = "") -> str:
        """Return a shell command with the name in place of `{}`; empty if the cluster has no such name."""
        if not self.has_kubectl or not _POD.fullmatch(name):
            return ""
        return f"kubectl {command.format(name)}" + (f" -n {namespace}" if _POD.fullmatch(namespace) else "")


FLYTE = EngineWords("its pod's log", "its pod's events", "pod", enforcer="Flyte", has_kubectl=True)
PLAIN = EngineWords("its node's log", "its node's system log", "node")
ALONE = EngineWords("its process's log", "its node's system log", "node", reporter="rank")
"""Ranks that no agent started: each reports for itself."""
LOG = EngineWords("the log around these lines", "its node's system log", "node", cites=True)
"""A job without firstfault, of which only its logs are known."""
_ENGINES = {"": FLYTE, "flyte": FLYTE, "plain": PLAIN, "alone": ALONE, OF_LOGS: LOG}


def engine_of(job: JobErrors, verdict: Verdict) -> EngineWords:
    """Return the engine that the documents name; `FLYTE` if none does, `PLAIN` for a name that is not known."""
    return _ENGINES.get(job.engine or (verdict.root.place.engine if verdict.root is not None else ""), PLAIN)


# --- lists ----------------------------------------------------------------------------------------------------------


def ranks_text(ranks: Sequence[int], limit: int = 0) -> str:
    """Return ascending ranks as ranges, "0-2, 5, 8-63"; those that do not fit in `limit` characters are counted."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    text = ", ".join(parts)
    if not limit or len(text) <= limit:
        return text
    shown = 0
    while shown < len(parts) and len(", ".join(parts[: shown + 1])) <= limit - len(" and 99999 more"):
        shown += 1
    left = len(ranks) - sum(high - low + 1 for low, high in runs[:shown])
    return f"{', '.join(parts[:shown])} and {left} more" if shown else f"{len(ranks)} ranks"


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return short names without the parts that all share: "worker-2" for "job-worker-2.cluster.local"."""
    known = [name for name in dict.fromkeys(names) if name]
    if len(known) <= 1:
        return {name: name for name in known}
    if len({name.partition(".")[2] for name in known}) == 1:  # a domain that all hosts share
        parts = [name.partition(".")[0].split("-") for name in known]
    else:
        parts = [name.split("-") for name in known]
    alike = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    # the part that tells them apart is often a number, which says nothing alone
    shared = max(min(sum(1 for _ in alike), *(len(part) - 2 for part in parts)), 0)
    return {name: "-".join(part[shared:]) for name, part in zip(known, parts, strict=True)}


def few(lines: Sequence[str], limit: int, more: str = "and {} more") -> list[str]:
    """Return the first `limit` lines, and a count of the others; if it is one other, the line itself."""
    left = len(lines) - limit
    return [*lines[:limit], more.format(left)] if left > 1 else list(lines)


def is_retried(decision: Decision) -> bool:
    """Whether the decision makes another attempt: it wants one, and the retry budget is not used up."""
    return decision.retry and not decision.is_spent


# --- numbers --------------------------------------------------------------------------------------------------------


def shown_time(nanoseconds: int) -> str:
    """Return a moment since the Unix epoch as people write it, to the millisecond: "2026-11-14 22:13:20.000 UTC"."""
    text = format_timestamp(nanoseconds) or ""
    return f"{text[:10]} {text[11:23]} UTC"


# --- one line about a verdict or a failure ----------------------------------------------------------------------------

_LINE = 200
_LONG = 400
_NEAR_THE_LIMIT = 0.9
_NOT_IN_PARENTHESES = re.compile(r",(?![^(]*\))")
_LOST = "the agent died and "
"""The beginning of the text about an agent that left no report: the name of the fault tells it already."""


def headline_parts(verdict: Verdict) -> tuple[str, str]:
    """Return a verdict's headline in two parts: the fault in one or two words, and a sentence about it."""
    root, headline = verdict.root, verdict.headline
    begin, cut, _ = headline.rpartition("...")
    whole = one_line(verdict.message, _LONG)
    if cut and headline.endswith("...") and whole.startswith(begin):
        headline = whole  # before it was cut
    what = message_of(root).what if root is not None else ""
    if what and headline.startswith(f"{what},"):
        return what, headline[len(what) :].partition(": ")[2]
    name, _, text = headline.partition(": ")
    return _NOT_IN_PARENTHESES.split(name, maxsplit=1)[0], text


def fault_of(verdict: Verdict) -> tuple[str, str]:
    """Return the fault in one or two words, and all that is known about it: the whole message, not only its line."""
    root = verdict.root
    name, text = headline_parts(verdict)
    if root is None or verdict.scope is Scope.UNDETERMINED:
        return name, text
    if verdict.category == "host_oom" and root.signal == "SIGKILL":
        return "OOM-killed", _memory_text(root.resources)
    if verdict.category == "node_lost" and text.startswith(_LOST):
        return "agent lost", f"it {text.removeprefix(_LOST)}"
    said = message_of(root)
    return name, said.whole if name == said.what and (said.text or said.exception is not None) else text


def line_of(failure: WorkerError) -> str:
    """Return what happened to a process in one line, without its name."""
    if failure.stopped_by_agent and not failure.crashed_while_stopped:
        sent = failure.sent_signals[0]
        return one_line(f"{failure.signal or sent.signal}: {sent.reason}", _LINE)
    what, text = message_of(failure).what, sentence_about(failure)
    if failure.subject is Subject.AGENT and failure.exception is None:
        what, text = text or failure.code, ""  # its text tells what it is
    return one_line(f"{what}: {text}" if text and text != what else what, _LINE)


def _memory_text(found: Resources) -> str:
    """Return what the kernel's OOM killer was after: "15.9 of 16.0 GiB"."""
    peak, limit = found.memory_peak_bytes or found.memory_used_bytes, found.memory_limit_bytes
    if peak is None or limit is None:
        return "by the kernel's OOM killer"
    used, most = size(peak), size(limit)
    number, _, unit = used.partition(" ")
    text = f"{number} of {most}" if most.endswith(f" {unit}") else f"{used} of {most}"
    return text if peak >= _NEAR_THE_LIMIT * limit else f"its machine had no memory left; it used {text}"


# --- the first line -------------------------------------------------------------------------------------------------

_ANSWER = 51
"""Characters. A list in Flyte's console shows 100, after ``[10/10] currentAttempt done. Last Error: SYSTEM::``."""
_LENGTH = 89
_NODE_TAIL = 10
"""Characters of a long name that there is always room for."""
_FEW = 3
_RANKS = 10
"""Characters."""
_POD_OF_FLYTE = re.compile(r".*-\d{1,3}-(?P<pod>(?:master|worker|chief|ps|launcher)-\d{1,7})", re.DOTALL)
"""Names of Flyte's pods for Kubeflow: execution, node, attempt, the kind of the replica, its number."""
_GENERIC = {"Exception", "RuntimeError", "OSError", "ClientError", "HTTPError", "error", "gaierror"}
"""Names of exceptions that say nothing by themselves."""
_NAMES = {
    "AgentLost": "agent lost",
    "NoErrorFile": "no error file",
    "Silent": "no last words",
}
"""Plainer words for some names."""
_CUDA = re.compile(r"^(?:CUDA error: |(?:CUDA|HIP) out of memory\. )(?=.)")
"""What the first words of the line say already."""


def first_line(verdict: Verdict, decision: Decision) -> str:
    """Return a line of less than 90 characters; the first 51 say what, which rank, which pod, and retry or not."""
    fate = "retry" if is_retried(decision) else "retry spent" if decision.is_spent else "no retry"
    subject = _subject(verdict)
    node = _spaced(short_pod(verdict.node or "")) if not subject.startswith("all ") else ""
    name, text = fault_of(verdict)
    what = one_line(_spaced(_what(verdict, name)), _ANSWER - len(subject) - min(len(node), _NODE_TAIL) - len(fate) - 3)
    answer = " ".join(part for part in (what if what != subject else "", subject) if part)
    room = _ANSWER - len(answer) - len(fate) - 2
    if len(node) > room:  # the end is kept, because pods' names differ there
        node = ".." + node[-(room - 2) :] if room > 4 else ""  # noqa: PLR2004 - less would not identify it
    answer = " ".join(part for part in (answer, node, fate) if part)
    detail = one_line(_spaced(_detail(verdict, name, text)), max(_LENGTH - len(answer) - 2, 0))
    return f"{answer}: {detail}" if detail else answer


def short_pod(name: str) -> str:
    """Return the end of a pod's name, behind execution, node and attempt: "worker-1"; any other name as it is."""
    match = _POD_OF_FLYTE.fullmatch(name)
    return match["pod"] if match is not None else name


def _subject(verdict: Verdict) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        return "undetermined"
    count = len(verdict.ranks)
    if count > 1 and verdict.root is not None and verdict.root.place.world_size == count:
        return f"all {count} ranks"
    if count > 1:
        text = ranks_text(verdict.ranks, _RANKS)
        return f"ranks {text}" if count <= _FEW and len(text) <= _RANKS else f"{count} ranks"
    return f"rank {verdict.ranks[0]}" if verdict.ranks else ""


def _what(verdict: Verdict, name: str) -> str:
    """Return what happened, in the words of the field."""
    if verdict.scope is Scope.UNDETERMINED or verdict.is_at_time_limit or (verdict.root and name == "OOM-killed"):
        return name
    about = ABOUT_CATEGORIES.get(verdict.category, {})
    if name in _GENERIC:
        name = about.get("short_of_generic", name)
    if verdict.category == "recoverable" and name in ASKING:
        return verdict.category
    return about.get("short") or _NAMES.get(name, name)


def _detail(verdict: Verdict, name: str, text: str) -> str:
    """Return what there is room for behind the answer, without the words that it has already."""
    root = verdict.root
    if root is None or verdict.scope is Scope.UNDETERMINED or name == "OOM-killed":
        return text
    if root.expired is not None and root.exception is None:
        return headline_parts(verdict)[1].rpartition(" in ")[0] or text  # a line has no room for the function
    if verdict.category == "hang" and (stood := where_it_stood(root).frame):
        return f"at {stood}"
    if "short" in ABOUT_CATEGORIES.get(verdict.category, {}):
        text = _CUDA.sub("", text)
    text = text.removeprefix(f"{verdict.node} was ").removeprefix(f"{verdict.node} ")
    if root.signal == "SIGKILL":
        text = text.removeprefix("killed, ")
    return text.removeprefix("terminated ").strip("()") if verdict.category == "preemption" else text


def _spaced(text: str) -> str:
    """Return one line of printable ASCII, its words one space apart."""
    return " ".join(printable(text.encode("ascii", "backslashreplace").decode("ascii")).split())
