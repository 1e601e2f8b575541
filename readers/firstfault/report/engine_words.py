"""The words of a report that depend on the engine that ran the job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstfault.model import Decision, JobErrors, Verdict

_POD = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
"""A name that Kubernetes accepts, and that needs no quotes in a shell."""


@dataclass(frozen=True, slots=True)
class EngineWords:
    """What a report says about one kind of engine."""

    log: str
    """What to call the log of the root cause's node."""
    events: str
    """What to call the place where the platform says why a node is gone."""
    node: str
    """What a node of it is: "pod"."""
    enforcer: str = ""
    """The part that carries out decisions; empty: there is none."""
    has_kubectl: bool = False

    @property
    def nodes(self) -> str:
        """What its nodes are, plural."""
        return f"{self.node}s"

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

    def events_command(self, node: str, namespace: str) -> str:
        """Return a shell command that prints a node's events; empty if there is none."""
        command = self._kubectl("get events", node, namespace)
        return command.replace(f" {node}", f" --field-selector involvedObject.name={node}", 1)

    def machine_command(self, machine: str) -> str:
        """Return a shell command that prints what the cluster knows of a machine; empty if there is none."""
        return self._kubectl("describe node", machine, "")

    def log_command(self, node: str, namespace: str) -> str:
        """Return a shell command that prints a node's log; empty if there is none."""
        return self._kubectl("logs", node, namespace)

    def _kubectl(self, verb: str, node: str, namespace: str) -> str:
        if not self.has_kubectl or not _POD.fullmatch(node):
            return ""
        return f"kubectl {verb} {node}" + (f" -n {namespace}" if _POD.fullmatch(namespace) else "")


_NO_RETRIES = "nothing retries this job by itself"

FLYTE = EngineWords("its pod's log", "its pod's events", "pod", enforcer="Flyte", has_kubectl=True)
PLAIN = EngineWords("its node's log", "its node's system log", "node")
_ENGINES = {"": FLYTE, "flyte": FLYTE, "plain": PLAIN}


def engine_of(job: JobErrors, verdict: Verdict) -> EngineWords:
    """Return the engine that the documents name; `FLYTE` if none does, `PLAIN` for a name that is not known."""
    places = job.places
    if verdict.root is not None:
        places.append(verdict.root.place)
    return _ENGINES.get(next((place.engine for place in places if place.engine), ""), PLAIN)
