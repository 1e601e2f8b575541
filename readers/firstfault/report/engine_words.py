"""The words for what ran a job: its nodes, its logs, who carries out decisions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from firstfault.model import Action, Decision, JobErrors, Verdict
from firstfault.model.failure import OF_LOGS
from firstfault.report.formatting import shorten_list

_POD = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
"""A name that Kubernetes accepts, and that needs no quotes in a shell."""
_MAX_CITED_LINES = 3


@dataclass(frozen=True, slots=True)
class EngineWords:
    """The words of reports on jobs that one kind of engine ran."""

    log: str
    """What to call the log of the root cause's node."""
    events: str
    """What to call the place where the platform explains why a node is gone."""
    node: str
    """What a node of it is: "pod"."""
    enforcer: str = ""
    """The part that executes decisions, or empty if there is none."""
    has_kubectl: bool = False
    reporter: str = ""
    """What reports for itself, if that isn't a node."""
    source: str = "the error document"
    """Where a failure was read."""
    missing: str = "no error document"
    """What there is of a rank without a report."""
    retries_unknown: bool = True
    """Whether it may run the job again if nothing proves that a retry would help or fail."""
    cites: bool = False
    """Whether facts are followed by the files and lines that show them."""

    def describe_missing(self, *, has_lines: bool) -> str:
        """Return what there is from a rank without a report. `has_lines` is whether lines of the
        log mention the rank.
        """
        return "no exit status in the log" if has_lines and self.cites else self.missing

    @property
    def nodes(self) -> str:
        """What its nodes are, or whatever reports, plural."""
        return f"{self.reporter or self.node}s"

    def describe_retry(self, decision: Decision) -> str:
        """Return whether the job is retried, and whether that is only advice: "no (advice:
        Flyte may retry anyway)".

        "unclear" means that nothing is proven and the scheduler decides by its own rule.
        """
        if self.leaves_open(decision):
            return "unclear"
        if self.enforcer and decision.is_spent:
            return "no retries left"
        answer = "yes" if decision.retry else "no"
        if not self.enforcer or decision.enforced:
            return answer
        anyway = "may not retry" if decision.retry else "may retry anyway"
        return f"{answer} (advice: {self.enforcer} {anyway})"

    def summarize_retry(self, decision: Decision) -> str:
        """Return the same in short: "retry", "no retry", "no retries left", "retry unclear"."""
        if is_retried(decision):
            return "retry"
        return (
            "no retries left"
            if decision.is_spent
            else "retry unclear"
            if self.leaves_open(decision)
            else "no retry"
        )

    def leaves_open(self, decision: Decision) -> bool:
        """Whether firstfault leaves it to the scheduler to run the job again."""
        return decision.action is Action.UNKNOWN and self.retries_unknown

    def cited(self, text: str, names: Iterable[str], limit: int = 0) -> str:
        """Return a text with the log lines that show it, "... [nohup.out:3-9]", if the engine's
        facts have them.

        Args:
            text: a fact.
            names: of the documents that show it.
            limit: the number of names from which on there may be further ones, so that those left
                out aren't counted. 0 means that `names` is complete.
        """
        shown = list(names)
        more = "and more" if limit and len(shown) >= limit else "and {} more"
        cited_lines = (
            ", ".join(shorten_list(list(dict.fromkeys(shown)), _MAX_CITED_LINES, more))
            if self.cites
            else ""
        )
        return f"{text} [{cited_lines}]" if cited_lines else text

    def kubectl(self, command: str, name: str, namespace: str = "") -> str:
        """Return a shell command with the name in place of `{}`;
        empty if the cluster has no such name.
        """
        if not self.has_kubectl or not _POD.fullmatch(name):
            return ""
        return f"kubectl {command.format(name)}" + (
            f" -n {namespace}" if _POD.fullmatch(namespace) else ""
        )


FLYTE2 = EngineWords("the pod's log", "the pod's events", "pod", enforcer="Flyte", has_kubectl=True)
FLYTE = replace(FLYTE2, retries_unknown=False)
"""Flyte 1 retries only exceptions that ask for it."""
PLAIN = EngineWords("the node's log", "the node's system log", "node")
ALONE = EngineWords("the process's log", "the node's system log", "node", reporter="rank")
"""Ranks that no agent started: each reports for itself."""
LOG = EngineWords(
    "the log around these lines",
    "the node's system log",
    "node",
    source="the log",
    missing="not named in the log",
    cites=True,
)
"""A job without firstfault that is known only from its logs."""
_ENGINES = {
    "": FLYTE,
    "flyte": FLYTE,
    "flyte2": FLYTE2,
    "plain": PLAIN,
    "alone": ALONE,
    OF_LOGS: LOG,
}


def find_engine_words(job: JobErrors, verdict: Verdict) -> EngineWords:
    """Return the engine that the documents name; `FLYTE` if none does,
    `PLAIN` for a name that isn't known.
    """
    return _ENGINES.get(job.engine, PLAIN) if job.engine else find_words_of_root(verdict)


def find_words_of_root(verdict: Verdict) -> EngineWords:
    """Return the engine of a verdict's root cause; `FLYTE` if that isn't known."""
    return _ENGINES.get(verdict.root.place.engine if verdict.root is not None else "", PLAIN)


def is_retried(decision: Decision) -> bool:
    """Whether the decision makes another attempt: it wants one,
    and the retry budget isn't used up.
    """
    return decision.retry and not decision.is_spent
