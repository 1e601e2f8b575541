"""The words for what ran a job: its nodes, its logs, who carries out decisions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from firstfault.model import Decision, JobErrors, Verdict
from firstfault.model.failure import OF_LOGS
from firstfault.report.formatting import shorten_list

_POD = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
"""A name that Kubernetes accepts, and that needs no quotes in a shell."""
_CITED = 3
_NO_RETRIES = "nothing retries this job by itself"


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
    """The part that carries out decisions; empty: there is none."""
    has_kubectl: bool = False
    reporter: str = ""
    """What reports for itself, if that isn't a node."""
    cites: bool = False
    """Whether facts are followed by the files and lines that show them."""

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
        """Return a text with the lines of logs that show it, if the engine's facts have such: "... [nohup.out:3-9]"."""
        found = ", ".join(shorten_list(list(names), _CITED, "and {} more")) if self.cites else ""
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
"""A job without firstfault that is known only from its logs."""
_ENGINES = {"": FLYTE, "flyte": FLYTE, "plain": PLAIN, "alone": ALONE, OF_LOGS: LOG}


def find_engine_words(job: JobErrors, verdict: Verdict) -> EngineWords:
    """Return the engine that the documents name; `FLYTE` if none does, `PLAIN` for a name that isn't known."""
    return _ENGINES.get(job.engine or (verdict.root.place.engine if verdict.root is not None else ""), PLAIN)


def is_retried(decision: Decision) -> bool:
    """Whether the decision makes another attempt: it wants one, and the retry budget isn't used up."""
    return decision.retry and not decision.is_spent
