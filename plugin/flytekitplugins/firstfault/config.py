"""What a user writes into ``@task(task_config=...)``."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyteidl.plugins.kubeflow import common_pb2 as kubeflow_common

from firstfault.errors import UsageError
from firstfault.retry import as_policy
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy

if TYPE_CHECKING:
    from flytekit import Resources

    from firstfault.retry import RetryPolicy

__all__ = [
    "STRATEGY_VARIABLE",
    "CleanPodPolicy",
    "Elastic",
    "Master",
    "PyTorch",
    "RestartPolicy",
    "RunPolicy",
    "Worker",
    "parse_nnodes",
]

STRATEGY_VARIABLE = "FLYTE_INTERNAL_ERROR_PROPAGATION"
"""Turns recording on and names the strategy; set but empty turns it off."""
_NNODES = re.compile(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?")
START_METHODS = ("spawn", "fork")


class RestartPolicy(enum.Enum):
    """When the operator restarts a pod."""

    ALWAYS = kubeflow_common.RESTART_POLICY_ALWAYS
    FAILURE = kubeflow_common.RESTART_POLICY_ON_FAILURE
    NEVER = kubeflow_common.RESTART_POLICY_NEVER


class CleanPodPolicy(enum.Enum):
    """Which pods the operator removes when the job is finished."""

    NONE = kubeflow_common.CLEANPOD_POLICY_NONE
    ALL = kubeflow_common.CLEANPOD_POLICY_ALL
    RUNNING = kubeflow_common.CLEANPOD_POLICY_RUNNING


@dataclass
class RunPolicy:
    """How Kubeflow runs the job."""

    clean_pod_policy: CleanPodPolicy | None = None
    """Which pods go when the job is finished; None: none."""
    ttl_seconds_after_finished: int | None = None
    """Seconds until a finished PyTorchJob is removed."""
    active_deadline_seconds: int | None = None
    """Seconds the job may be active before it is ended; for pods that are restarted."""
    backoff_limit: int | None = None
    """Retries before the job counts as failed."""


@dataclass
class Worker:
    """The worker replicas of a `PyTorch` task."""

    image: str | None = None
    requests: Resources | None = None
    limits: Resources | None = None
    replicas: int | None = None
    restart_policy: RestartPolicy | None = None


@dataclass
class Master:
    """The master replica of a `PyTorch` task; there is always one."""

    image: str | None = None
    requests: Resources | None = None
    limits: Resources | None = None
    restart_policy: RestartPolicy | None = None


@dataclass
class _Reporting:
    """Checks the fields that firstfault adds; both task configurations have them."""

    def _check_reporting(self) -> None:
        get_strategy(self.strategy)  # type: ignore[attr-defined]
        for name in ("settle_seconds", "upload_deadline_seconds", "stop_seconds"):
            value = getattr(self, name, 0.0)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise UsageError(f"{type(self).__name__}.{name} must be a number of seconds, 0 or more, not {value!r}")
        deck = self.deck  # type: ignore[attr-defined]
        if deck is not None and not isinstance(deck, bool):
            raise UsageError(f"{type(self).__name__}.deck must be True, False or None, not {deck!r}")
        if self.retry_policy is not None:  # type: ignore[attr-defined]
            as_policy(self.retry_policy)  # type: ignore[attr-defined]


@dataclass
class PyTorch(_Reporting):
    """A PyTorchJob of one master and several workers, one process a pod, without an elastic agent.

    Raises:
        firstfault.errors.UsageError: a field cannot be used.
    """

    master: Master = field(default_factory=Master)
    worker: Worker = field(default_factory=Worker)
    run_policy: RunPolicy | None = None
    num_workers: int | None = None
    """Older spelling of ``worker.replicas``."""
    increase_shared_mem: bool = True
    """Mount a memory volume at /dev/shm. Newer: ``@task(shared_memory=...)``."""
    strategy: str = DEFAULT_STRATEGY
    """How the root cause is found: a name that ``firstfault`` knows."""
    settle_seconds: float = 10.0
    """Longest wait for the other pods' reports, once this one has failed."""
    upload_deadline_seconds: float = 5.0
    """Longest time a failing process waits for its error document to be durable."""
    retry_policy: RetryPolicy | None = None
    """None: firstfault's default."""
    deck: bool | None = None
    """Whether a failed attempt's deck begins with the report. None: if the task has ``enable_deck=True``, which True
    insists on; False: the deck stays flytekit's."""

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        self._check_reporting()


@dataclass
class Elastic(_Reporting):
    """Torch elastic training on one node (``nnodes=1``, a plain pod) or several (a PyTorchJob).

    As ``torchrun`` does, ``OMP_NUM_THREADS`` is set to 1 for several processes on a node unless it is set.

    Raises:
        firstfault.errors.UsageError: a field cannot be used.
    """

    nnodes: int | str = 1
    """Number of nodes, or ``"<minimum>:<maximum>"``."""
    nproc_per_node: int = 1
    """Worker processes on each node."""
    start_method: str = "spawn"
    """How workers are started: "spawn" or "fork"."""
    monitor_interval: float = 0.1
    """Seconds between two looks of the agent at its workers. torchrun's default; kfpytorch's is 5."""
    max_restarts: int = 0
    """How often torch elastic restarts the workers before the attempt fails."""
    rdzv_configs: dict[str, Any] = field(default_factory=lambda: {"timeout": 900, "join_timeout": 900})
    """Rendezvous settings for torch. 15 minutes by default: some pods wait for a node or an image."""
    increase_shared_mem: bool = True
    """Mount a memory volume at /dev/shm. Newer: ``@task(shared_memory=...)``."""
    run_policy: RunPolicy | None = None
    strategy: str = DEFAULT_STRATEGY
    """How the root cause is found: a name that ``firstfault`` knows."""
    settle_seconds: float = 10.0
    """Longest wait for the other nodes' reports, once this one has failed."""
    upload_deadline_seconds: float = 5.0
    """Longest time a failing worker waits for its error document to be durable."""
    stop_seconds: float = 2.0
    """How long workers that are stopped, because another one failed or the pod has to go, may take before they are
    killed; torch's is 30. The one that failed has 8 s for its exit handlers."""
    retry_policy: RetryPolicy | None = None
    """None: firstfault's default. Compose policies of `firstfault.retry`."""
    deck: bool | None = None
    """Whether a failed attempt's deck begins with the report. None: if the task has ``enable_deck=True``, which True
    insists on; False: the deck stays flytekit's."""

    def __post_init__(self) -> None:
        """Refuse what cannot run, before anything is registered."""
        self._check_reporting()
        parse_nnodes(self.nnodes)
        if self.start_method not in START_METHODS:
            raise UsageError(
                f"Elastic.start_method must be one of {', '.join(START_METHODS)}, not {self.start_method!r}"
            )
        for name, least in (("nproc_per_node", 1), ("max_restarts", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"Elastic.{name} must be a whole number, {least} or more, not {value!r}")
        if not isinstance(self.monitor_interval, int | float) or not 0 < self.monitor_interval < float("inf"):
            raise UsageError(
                f"Elastic.monitor_interval must be a number of seconds above 0, not {self.monitor_interval!r}"
            )


def parse_nnodes(nnodes: int | str) -> tuple[int, int]:
    """Return (minimum, maximum) number of nodes.

    Raises:
        firstfault.errors.UsageError: neither a number nor ``"<minimum>:<maximum>"``.
    """
    match = _NNODES.fullmatch(str(nnodes))
    smallest = int(match[1]) if match else 0
    largest = int(match[2] or match[1]) if match else 0
    if not 1 <= smallest <= largest:
        raise UsageError(f'Elastic.nnodes must be a number like 2 or a range like "1:4", not {nnodes!r}')
    return smallest, largest
