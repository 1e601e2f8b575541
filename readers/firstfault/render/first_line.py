"""The first line of every report: what happened, which rank, which pod, retried or not, and a detail."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from firstfault.evidence.failure_message import message_of
from firstfault.exceptions.stack_position import where_it_stood
from firstfault.model import TIME_LIMIT, Scope
from firstfault.report.headline import headline_parts, memory_text
from firstfault.report.words import ranks_text
from firstfault.text import one_line, printable

if TYPE_CHECKING:
    from firstfault.model import Decision, Verdict

__all__ = ["first_line", "short_pod"]

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
    fate = "retry spent" if decision.is_spent else "retry" if decision.retry else "no retry"
    subject = _subject(verdict)
    node = _spaced(short_pod(verdict.node or "")) if not subject.startswith("all ") else ""
    what = one_line(_spaced(_what(verdict)), _ANSWER - len(subject) - min(len(node), _NODE_TAIL) - len(fate) - 3)
    answer = " ".join(part for part in (what if what != subject else "", subject) if part)
    node = _fit_node(node, _ANSWER - len(answer) - len(fate) - 2)
    answer = " ".join(part for part in (answer, node, fate) if part)
    detail = one_line(_spaced(_detail(verdict)), max(_LENGTH - len(answer) - 2, 0))
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


def _what(verdict: Verdict) -> str:
    """Return what happened, in the words of the field."""
    name, root = headline_parts(verdict)[0], verdict.root
    if verdict.scope is Scope.UNDETERMINED:
        return name
    if verdict.category == "host_oom" and root is not None and root.signal == "SIGKILL":
        return "OOM-killed"
    if root is not None and root.code == TIME_LIMIT:
        return name
    if name in _GENERIC:
        name = _MEANINGS_OF_GENERIC.get(verdict.category, name)
    return _MEANINGS.get(verdict.category) or _NAMES.get(name, name)


def _detail(verdict: Verdict) -> str:
    root = verdict.root
    name, text = headline_parts(verdict)
    if root is None or verdict.scope is Scope.UNDETERMINED:
        return text
    if verdict.category == "host_oom" and root.signal == "SIGKILL":
        return memory_text(root.resources)
    if root.expired is not None and root.exception is None:
        return text.rpartition(" in ")[0] or text  # a line has no room for the function
    if verdict.category == "hang" and (stood := where_it_stood(root).frame):
        return f"at {stood}"
    if name == (said := message_of(root)).what and (said.text or said.exception is not None):
        return _CUDA.sub("", said.whole) if verdict.category in _MEANINGS else said.whole
    text = text.removeprefix(f"{verdict.node} was ").removeprefix(f"{verdict.node} ")
    if root.signal == "SIGKILL":
        text = text.removeprefix("killed, ")
    return text.removeprefix("terminated ").strip("()") if verdict.category == "preemption" else text


def _fit_node(node: str, room: int) -> str:
    """Return a node's name in at most `room` characters: the end is kept, because pods' names differ there."""
    if len(node) <= room:
        return node
    return ".." + node[-(room - 2) :] if room > 4 else ""  # noqa: PLR2004 - less would not identify it


def _spaced(text: str) -> str:
    """Return one line of printable ASCII, its words one space apart."""
    return " ".join(printable(text.encode("ascii", "backslashreplace").decode("ascii")).split())
