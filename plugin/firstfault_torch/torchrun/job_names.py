"""The names of a torchrun job, its attempt and this node, as the environment defines them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from firstfault.slurm_pointer import find_start
from firstfault_torch.guard import try_call

RENDEZVOUS_ID = "--rdzv-id"
"""Placeholder for torchrun's run id in the variables of `SOURCES`; printed as the source."""
HOST = "the host's name"
"""Placeholder for the host's name in the variables of `SOURCES`; printed as the source."""
_FOREIGN_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters to replace in names of folders and keys of objects,
such as the slashes of ``TORCHX_JOB_ID``.
"""
_RANDOM_ID = re.compile(r"none|[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}|\d{36,39}")
"""torchrun's default, and the ids that launchers draw for a job on one node."""
_MAX_NAME_LENGTH = 120
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
SLURM_PREFIX = "SLURM_"
_SLURM_JOB_VARIABLE = "SLURM_JOB_ID"


class Source(NamedTuple):
    """Where a name may come from."""

    of: str
    """What is named: "job", "attempt", "node" or "namespace"."""
    variables: tuple[str, ...]
    """All must be set; their values are joined by "_"."""
    launcher: str
    """Which launchers set them, for the docs."""
    value: str = ""
    """Instead of the variables' own values; empty for their own."""
    is_suffix: bool = False
    """Whether the second variable is the end of the host's name, and is taken off."""


SOURCES = (
    Source("job", ("FIRSTFAULT_JOB",), "all"),
    Source("job", ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), "Slurm, an array"),
    Source("job", (_SLURM_JOB_VARIABLE,), "Slurm"),
    Source("job", ("JOBSET_NAME",), "JobSet, if the pod's template sets it"),
    Source("job", ("SKYPILOT_TASK_ID",), "SkyPilot"),
    Source("job", ("TORCHX_JOB_ID",), "torchx"),
    Source(
        "job", ("PET_RDZV_ID",), "Kubeflow's training operator, if the job has elasticPolicy.rdzvId"
    ),
    Source("job", (RENDEZVOUS_ID,), "torchrun"),
    Source(
        "job",
        (HOST, "JOB_COMPLETION_INDEX"),
        "an indexed Job, from its pods' names",
        is_suffix=True,
    ),
    Source("attempt", ("FIRSTFAULT_ATTEMPT",), "all"),
    Source("attempt", ("SLURM_RESTART_COUNT",), "Slurm, after a requeue"),
    Source("attempt", (_SLURM_JOB_VARIABLE,), "Slurm, before a requeue: 0", value="0"),
    Source("attempt", ("JOBSET_RESTART_ATTEMPT",), "JobSet, if the pod's template sets it"),
    Source("attempt", ("FLYTE_ATTEMPT_NUMBER",), "Flyte"),
    Source("node", ("FIRSTFAULT_NODE",), "all"),
    Source("node", ("SLURMD_NODENAME",), "Slurm"),
    Source("node", (HOST,), "all"),
    Source("namespace", ("FIRSTFAULT_NAMESPACE",), "all"),
    Source("namespace", ("POD_NAMESPACE",), "Kubernetes, if the pod's template sets it"),
)
"""By priority: the first source with all variables set wins."""


class Name(NamedTuple):
    """A name, and where it came from; both are empty if there is none."""

    value: str = ""
    source: str = "generated"

    def __str__(self) -> str:
        return f"{self.value} ({self.source})" if self.value else self.source


class JobNames(NamedTuple):
    """What the environment defines for a node's job."""

    run_id: str
    job: Name = Name()
    attempt: Name = Name()
    node: Name = Name()
    namespace: Name = Name()
    run: str = ""
    """The name of the run's folder; empty if the job has no name."""
    step: str = ""
    """Slurm's number of the step if Slurm counts the attempts, otherwise empty."""

    @property
    def number(self) -> str:
        """The number of the attempt, or 0 if it isn't set."""
        return self.attempt.value or "0"

    def describe(self, run: str) -> str:
        """Return job and attempt of the run for a report,
        and where these and its nodes' names came from.
        """
        nodes = f", nodes named by {self.node.source}" if self.node.source != HOST else ""
        return (
            f"{_name_source(run, self.job)}, attempt"
            f" {_name_source(self.number, self.attempt)}{nodes}"
        )


def _name_source(text: str, name: Name) -> str:
    """Return a name with its source, or only the name if firstfault made it."""
    return f"{text} ({name.source})" if name.value else text


def _read_namespace() -> Name:
    """Return the namespace that Kubernetes mounts into a pod with a service account, or ""."""
    text, _ = try_call(partial(_NAMESPACE_FILE.read_text, encoding="ascii"), Exception)
    return Name(text.strip(), "its service account") if text else Name()


def read_job_names(run_id: str, environment: Mapping[str, str] = os.environ) -> JobNames:
    """Return the names of this node's job; `run_id` is torchrun's."""
    known = {**environment, HOST: socket.gethostname()}
    if _RANDOM_ID.fullmatch(run_id) is None:
        known[RENDEZVOUS_ID] = run_id
    # torchrun reads PET_RDZV_ID only as the default of --rdzv-id.
    if known.get("PET_RDZV_ID") != known.get(RENDEZVOUS_ID):
        known.pop("PET_RDZV_ID", None)  # an argument of torchrun comes before it
    names: dict[str, Name] = {}
    for source in SOURCES:
        values = [known.get(name, "") for name in source.variables]
        if source.is_suffix:
            host, index = values
            # An indexed Job has the index at the end of each pod's host name: without it, all pods
            # have the same name.
            values = (
                [host.removesuffix(f"-{index}")] if index and host.endswith(f"-{index}") else [""]
            )
        value = _FOREIGN_CHARACTERS.sub("-", source.value or "_".join(values)).strip("-.")[
            -_MAX_NAME_LENGTH:
        ]
        if all(values) and value and (source.of != "attempt" or value.isdecimal()):
            names.setdefault(source.of, Name(value, " and ".join(source.variables)))
    job, attempt, node, namespace = (
        names.get(of, Name()) for of in ("job", "attempt", "node", "namespace")
    )
    job_names = JobNames(
        run_id, job, attempt, node, namespace if namespace.value else _read_namespace()
    )
    if not attempt.source.startswith(SLURM_PREFIX):
        return job_names._replace(run=job.value)
    # Slurm counts the attempts of one of its jobs. Another job with the same FIRSTFAULT_JOB is
    # another run with the same attempt numbers. So is a job that a task of an array submits: it
    # inherits the array's variables.
    start = find_start(environment)
    run = (
        f"{job.value}-{start.job}"
        if start is not None and job.source != _SLURM_JOB_VARIABLE
        else job.value
    )
    step = environment.get("SLURM_STEP_ID", "")
    return job_names._replace(run=run, step=step if step.isdecimal() else "")
