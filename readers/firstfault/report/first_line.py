"""The first line of a report, the most important facts within 51 characters."""

from __future__ import annotations

import re

from firstfault.evidence.certain_bugs import RETRY_REQUESTS
from firstfault.exceptions.stack_position import locate_main_thread
from firstfault.model import Decision, Scope, Verdict
from firstfault.model.failure import ABOUT_CATEGORIES, JOB_END_CODES, OF_LOGS, TEARDOWN
from firstfault.report.engine_words import EngineWords, find_words_of_root
from firstfault.report.formatting import format_ranks
from firstfault.report.headline import headline_parts, split_fault
from firstfault.utils.text import one_line, printable

_MAX_ANSWER_CHARACTERS = 51
"""A list in Flyte's console shows 100 characters: 49 of the prefix ``[10/10] currentAttempt done.
Last Error: SYSTEM::``, and these.
"""
_MAX_LINE_CHARACTERS = 78
_MIN_NODE_CHARACTERS = 10
"""There is always room for this much of a node's long name."""
_MAX_LISTED_RANKS = 3
_MAX_RANKS_CHARACTERS = 10
"""If more ranks failed, or their numbers are longer, the line only has their count."""
_FLYTE_POD_NAME = re.compile(
    r".*-\d{1,3}-(?P<pod>(?:master|worker|chief|ps|launcher)-\d{1,7})", re.DOTALL
)
"""Names of Flyte's pods for Kubeflow: execution, node, attempt, kind and number of the replica."""
_GENERIC_EXCEPTIONS = {
    "Exception",
    "RuntimeError",
    "OSError",
    "ClientError",
    "HTTPError",
    "error",
    "gaierror",
}
"""Exceptions with names that explain nothing."""
_PLAIN_NAMES = {"AgentLost": "agent lost", "NoErrorFile": "no error file", "Silent": "no output"}
"""Plainer words for some names."""
_CUDA_PREFIX = re.compile(r"^(?:CUDA error: |(?:CUDA|HIP) out of memory\. )(?=.)")
"""What the first words of the line express already."""


def first_line(verdict: Verdict, decision: Decision, engine: EngineWords | None = None) -> str:
    """Return a line of at most 78 characters; the first 51 have the fault, the rank, the pod,
    and retry or not.

    `engine` is what ran the job, or None for what ran the root cause.
    """
    fate = (engine or find_words_of_root(verdict)).summarize_retry(decision)
    subject = _describe_subject(verdict)
    # if all ranks failed, the node of the first one explains nothing
    node = (
        _to_one_line(shorten_pod_name(verdict.node or "")) if not subject.startswith("all ") else ""
    )
    name, text = split_fault(verdict)
    # subject, fate and the end of the node's name always fit; the fault gets the rest, less three
    # blanks
    room = (
        _MAX_ANSWER_CHARACTERS - len(subject) - min(len(node), _MIN_NODE_CHARACTERS) - len(fate) - 3
    )
    what = one_line(_to_one_line(_describe_fault(verdict, name)), room)
    answer = " ".join(part for part in (what if what != subject else "", subject) if part)
    room = _MAX_ANSWER_CHARACTERS - len(answer) - len(fate) - 2
    if len(node) > room:  # the end is kept, because pods' names differ there
        # less wouldn't identify it
        node = ".." + node[-(room - 2) :] if room > 4 else ""  # noqa: PLR2004
    answer = " ".join(part for part in (answer, node, fate) if part)
    room = max(_MAX_LINE_CHARACTERS - len(answer) - 2, 0)
    detail = one_line(_to_one_line(_describe_detail(verdict, name, text)), room)
    return f"{answer}: {detail}" if detail else answer


def shorten_pod_name(name: str) -> str:
    """Return the end of a pod's name, behind execution, node and attempt: "worker-1";
    any other name as it is.
    """
    match = _FLYTE_POD_NAME.fullmatch(name)
    return match["pod"] if match is not None else name


def _describe_subject(verdict: Verdict) -> str:
    if verdict.scope is Scope.UNDETERMINED:
        # with one candidate, the cause is known, and only its rank isn't
        is_log = verdict.root is not None and verdict.root.place.engine == OF_LOGS
        is_cause_known = (
            is_log and not verdict.suspects and not verdict.headline.startswith("undetermined")
        )
        return "" if is_cause_known else "undetermined"
    count = len(verdict.ranks)
    if count > 1 and verdict.root is not None and verdict.root.place.world_size == count:
        return f"all {count} ranks"
    if count > 1:
        text = format_ranks(verdict.ranks, _MAX_RANKS_CHARACTERS)
        is_short = count <= _MAX_LISTED_RANKS and len(text) <= _MAX_RANKS_CHARACTERS
        return f"ranks {text}" if is_short else f"{count} ranks"
    return f"rank {verdict.ranks[0]}" if verdict.ranks else ""


def _describe_fault(verdict: Verdict, name: str) -> str:
    """Return what happened, in the words of the field."""
    is_undetermined = verdict.scope is Scope.UNDETERMINED and _describe_subject(verdict) != ""
    if is_undetermined or verdict.is_at_time_limit or (verdict.root and name == "OOM-killed"):
        return name
    if verdict.category == TEARDOWN:  # "SIGABRT in the teardown"; the ranks follow
        return name.removeprefix("finished, then ").partition(" of ")[0]
    if verdict.code in JOB_END_CODES:
        return name
    about = ABOUT_CATEGORIES.get(verdict.category, {})
    if name in _GENERIC_EXCEPTIONS:
        name = about.get("short_of_generic", name)
    if verdict.category == "recoverable" and name in RETRY_REQUESTS:
        return verdict.category
    return about.get("short") or _PLAIN_NAMES.get(name, name)


def _describe_detail(verdict: Verdict, name: str, text: str) -> str:
    """Return what there is room for behind the answer, without the words that it has already."""
    root = verdict.root
    if root is None or verdict.scope is Scope.UNDETERMINED or name == "OOM-killed":
        return text
    if root.expired is not None and root.exception is None:
        # a line has no room for the function
        return headline_parts(verdict)[1].rpartition(" in ")[0] or text
    if verdict.category == "hang" and (frame := locate_main_thread(root).frame):
        return f"at {frame}"
    if "short" in ABOUT_CATEGORIES.get(verdict.category, {}):
        text = _CUDA_PREFIX.sub("", text)
    # the answer in front of it has the node, the signal and the category already
    text = text.removeprefix(f"{verdict.node} was ").removeprefix(f"{verdict.node} ")
    if root.signal == "SIGKILL":
        text = text.removeprefix("killed, ")
    return (
        text.removeprefix("terminated ").strip("()") if verdict.category == "preemption" else text
    )


def _to_one_line(text: str) -> str:
    """Return one line of printable ASCII, its words one space apart."""
    return " ".join(printable(text.encode("ascii", "backslashreplace").decode("ascii")).split())
