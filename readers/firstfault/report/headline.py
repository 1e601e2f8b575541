"""One line about a verdict or a failure, and the line with which every form of a report begins."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from firstfault.evidence.texts import message_of
from firstfault.exceptions.stack_position import where_it_stood
from firstfault.model import TIME_LIMIT, Scope, Subject
from firstfault.model.failure import explain_end
from firstfault.report.words import is_retried, ranks_text, size
from firstfault.text import one_line, printable

if TYPE_CHECKING:
    from firstfault.model import Decision, Resources, Verdict, WorkerError

_LINE = 200
_LONG = 400
_NEAR_THE_LIMIT = 0.9
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
    return name.split(",", 1)[0], text


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
    if failure.subject is Subject.AGENT and failure.exception is None:
        return one_line(failure.message, _LINE) or failure.code
    said = message_of(failure)
    if said.text or said.exception is not None:
        return one_line(f"{said.what}: {said.text}" if said.text else said.what, _LINE)
    if failure.signal or failure.exit_code is not None:
        return one_line(f"{failure.what}: {explain_end(failure)}", _LINE)
    # flytekit's texts start with ``Trace:`` and carry the sentence after ``Message:``
    _, found, tail = failure.message.rpartition("\nMessage:")
    return one_line(tail if found else failure.message, _LINE) or failure.code


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
_POD = re.compile(r".*-\d{1,3}-(?P<pod>(?:master|worker|chief|ps|launcher)-\d{1,7})", re.DOTALL)
"""Names of Flyte's pods for Kubeflow: execution, node, attempt, the kind of the replica, its number."""
_MEANINGS = {
    "cuda_oom": "GPU OOM",
    "gpu_hardware": "GPU fault",
    "gpu_kernel": "CUDA error",
    "disk_full": "disk full",
    "preemption": "terminated",
    "rendezvous": "rendezvous failed",
    "collective": "collective failed",
    "platform": "agent failed",
}
"""What happened, where the category says more than the name of an exception."""
_MEANINGS_OF_GENERIC = {
    "auth": "access denied",
    "checkpoint": "bad checkpoint",
    "storage": "storage error",
    "network": "network error",
    "external_service": "service error",
    "data": "bad data",
    "config": "bad configuration",
}
_GENERIC = {"Exception", "RuntimeError", "OSError", "ClientError", "HTTPError", "error", "gaierror"}
"""Names of exceptions that say nothing by themselves."""
_NAMES = {
    "FlyteRecoverableException": "recoverable",
    "RecoverableError": "recoverable",
    "AgentLost": "agent lost",
    "NoErrorFile": "no error file",
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
    match = _POD.fullmatch(name)
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
    root = verdict.root
    is_named = root is not None and (root.code == TIME_LIMIT or name == "OOM-killed")
    if verdict.scope is Scope.UNDETERMINED or is_named:
        return name
    if name in _GENERIC:
        name = _MEANINGS_OF_GENERIC.get(verdict.category, name)
    return _MEANINGS.get(verdict.category) or _NAMES.get(name, name)


def _detail(verdict: Verdict, name: str, text: str) -> str:
    """Return what there is room for behind the answer, without the words that it has already."""
    root = verdict.root
    if root is None or verdict.scope is Scope.UNDETERMINED or name == "OOM-killed":
        return text
    if root.expired is not None and root.exception is None:
        return headline_parts(verdict)[1].rpartition(" in ")[0] or text  # a line has no room for the function
    if verdict.category == "hang" and (stood := where_it_stood(root).frame):
        return f"at {stood}"
    if verdict.category in _MEANINGS:
        text = _CUDA.sub("", text)
    text = text.removeprefix(f"{verdict.node} was ").removeprefix(f"{verdict.node} ")
    if root.signal == "SIGKILL":
        text = text.removeprefix("killed, ")
    return text.removeprefix("terminated ").strip("()") if verdict.category == "preemption" else text


def _spaced(text: str) -> str:
    """Return one line of printable ASCII, its words one space apart."""
    return " ".join(printable(text.encode("ascii", "backslashreplace").decode("ascii")).split())
