"""Who this node is: job, attempt, node and namespace, and the variable that each came from."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

RENDEZVOUS_ID = "--rdzv-id"
"""torchrun's own name of a job; also ``PET_RDZV_ID``, which torchrun reads, as Kubeflow sets it."""
HOST = "the host's name"
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+")
"""What a folder's name and an object's key had better not contain, such as the slashes of ``TORCHX_JOB_ID``."""
_RANDOM = re.compile(r"none|[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}|\d{36,39}")
"""torchrun's default, and the ids that launchers draw for a job on one node."""
_LONGEST = 120


class Source(NamedTuple):
    """Where a name may come from."""

    of: str
    """"job", "attempt", "node" or "namespace"."""
    variables: tuple[str, ...]
    """All must be set; their values are joined by "_"."""
    launcher: str
    value: str = ""
    """Instead of the variables' own."""


SOURCES = (
    Source("job", ("FIRSTFAULT_JOB",), "all"),
    Source("job", ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), "Slurm, an array"),
    Source("job", ("SLURM_JOB_ID",), "Slurm"),
    Source("job", ("JOBSET_NAME",), "JobSet, if the pod's template sets it"),
    Source("job", ("SKYPILOT_TASK_ID",), "SkyPilot"),
    Source("job", ("TORCHX_JOB_ID",), "torchx"),
    Source("job", ("PET_RDZV_ID",), "Kubeflow's training operator"),
    Source("job", (RENDEZVOUS_ID,), "torchrun"),
    Source("job", ("HOSTNAME", "JOB_COMPLETION_INDEX"), "an indexed Job of Kubernetes, as its pods' names tell"),
    Source("attempt", ("FIRSTFAULT_ATTEMPT",), "all"),
    Source("attempt", ("SLURM_RESTART_COUNT",), "Slurm, after a requeue"),
    Source("attempt", ("SLURM_JOB_ID",), "Slurm, before a requeue: 0", "0"),
    Source("attempt", ("JOBSET_RESTART_ATTEMPT",), "JobSet, if the pod's template sets it"),
    Source("node", ("FIRSTFAULT_NODE",), "all"),
    Source("node", ("HOSTNAME",), "all: the host's name"),
    Source("namespace", ("FIRSTFAULT_NAMESPACE",), "all"),
    Source("namespace", ("POD_NAMESPACE",), "Kubernetes, if the pod's template sets it; else the service account's"),
)
"""In this order: the first whose variables are set is taken."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name, and where it came from; both empty: there is none."""

    value: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


@dataclass(frozen=True, slots=True)
class Who:
    """What the environment tells about a node's job."""

    job: Name = field(default_factory=Name)
    attempt: Name = field(default_factory=Name)
    node: Name = field(default_factory=Name)
    namespace: Name = field(default_factory=Name)
    run_id: str = ""
    """torchrun's."""

    @property
    def number(self) -> str:
        """The number of the attempt; 0 if nothing names it."""
        return self.attempt.value or "0"

    def told(self, run: str) -> str:
        """Return job and attempt of the folder `run` for a report, and where they came from."""
        job = self.job if self.job.value else Name(run, "nothing names it")
        return f"job {job}, attempt {self.attempt if self.attempt.value else Name('0', 'nothing names it')}"


def who(run_id: str = "", environment: Mapping[str, str] = os.environ) -> Who:
    """Return the names of this node's job.

    Args:
        run_id: torchrun's.
        environment: variables.

    Raises:
        ValueError: the number of the attempt is not a number.
    """
    host = socket.gethostname()
    known = {**environment, "HOSTNAME": host}
    if _RANDOM.fullmatch(run_id) is None:
        known[RENDEZVOUS_ID] = run_id
    if known.get("PET_RDZV_ID") != run_id or RENDEZVOUS_ID not in known:
        known.pop("PET_RDZV_ID", None)  # an argument of torchrun comes before it
    index = known.get("JOB_COMPLETION_INDEX", "")
    job = host.removesuffix(f"-{index}")
    names = {"job": Name(), "attempt": Name(), "node": Name(), "namespace": Name(_service_account(), str(_NAMESPACE))}
    for source in reversed(SOURCES):
        values = [known.get(name, "") for name in source.variables]
        if source.variables == ("HOSTNAME", "JOB_COMPLETION_INDEX"):
            values = [job] if index and job != host else [""]
        if all(values):
            text = HOST if source.variables == ("HOSTNAME",) else " and ".join(source.variables)
            names[source.of] = Name(_cleaned(source.value or "_".join(values)), text)
    if not (names["attempt"].value or "0").isdecimal():
        raise ValueError(f"{names['attempt'].source} must be 0 or more, not {names['attempt'].value!r}")
    return Who(**{name: found if found.value else Name() for name, found in names.items()}, run_id=run_id)


def _cleaned(name: str) -> str:
    return _FOREIGN.sub("-", name).strip("-.")[-_LONGEST:]


def _service_account() -> str:
    try:
        return _NAMESPACE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError):
        return ""
