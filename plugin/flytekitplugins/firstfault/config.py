"""The task configurations: the values of ``@task(task_config=...)``."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyteidl.plugins.kubeflow import common_pb2 as kubeflow_common

from firstfault.errors import UsageError
from firstfault.retry import as_policy
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy
from firstfault_torch.launch_options import DEFAULT_SIGNALS, check_numa, parse_ranks, parse_signals, parse_streams
from firstfault_torch.options import Watchdog

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from flytekit import Resources

    from firstfault.retry import RetryPolicy
    from firstfault_torch.options import RestartsInProcess

STRATEGY_VARIABLE = "FLYTE_INTERNAL_ERROR_PROPAGATION"
"""An environment variable: it names the strategy and turns recording on. An empty value turns recording off."""
RENDEZVOUS_BACKEND = "c10d"
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
    """Which pods the operator removes when the job is finished. None: no pod."""
    ttl_seconds_after_finished: int | None = None
    """Seconds after which the operator removes a finished PyTorchJob."""
    active_deadline_seconds: int | None = None
    """Seconds after which the operator ends a running job; for pods that are restarted."""
    backoff_limit: int | None = None
    """How often the operator retries before the job counts as failed."""


@dataclass
class Worker:
    """The worker replicas of a `PyTorch` task."""

    image: str | None = None
    """Container image; None: the task's."""
    requests: Resources | None = None
    limits: Resources | None = None
    replicas: int | None = None
    """Number of worker pods, without the master."""
    restart_policy: RestartPolicy | None = None
    """None: the operator's default."""


@dataclass
class Master:
    """The master replica of a `PyTorch` task; there is always exactly one."""

    image: str | None = None
    requests: Resources | None = None
    limits: Resources | None = None
    restart_policy: RestartPolicy | None = None


@dataclass
class _Reporting:
    """Checks the fields that firstfault adds; both task configurations have them."""

    def _check_reporting(self) -> None:
        get_strategy(self.strategy)  # type: ignore[attr-defined]
        for name in ("settle_seconds", "upload_deadline_seconds", "stop_seconds", "shutdown_timeout"):
            value = getattr(self, name, None)
            if value is None and name in {"stop_seconds", "shutdown_timeout"}:
                continue  # a `PyTorch` has neither
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise UsageError(f"{type(self).__name__}.{name} must be a number of seconds, 0 or more, not {value!r}")
        deck = self.deck  # type: ignore[attr-defined]
        if deck is not None and not isinstance(deck, bool):
            raise UsageError(f"{type(self).__name__}.deck must be True, False or None, not {deck!r}")
        if self.retry_policy is not None:  # type: ignore[attr-defined]
            as_policy(self.retry_policy)  # type: ignore[attr-defined]


@dataclass
class PyTorch(_Reporting):
    """A PyTorchJob of one master pod and several worker pods; each pod runs one process, without an elastic agent.

    Raises:
        firstfault.errors.UsageError: a field has a value that is not valid.
    """

    master: Master = field(default_factory=Master)
    worker: Worker = field(default_factory=Worker)
    run_policy: RunPolicy | None = None
    num_workers: int | None = None
    """Older spelling of ``worker.replicas``."""
    increase_shared_mem: bool = True
    """Mount a memory volume at /dev/shm. flytekit's newer way is ``@task(shared_memory=True)``."""
    strategy: str = DEFAULT_STRATEGY
    """Name of the strategy that finds the root cause: a built-in one, or one that is registered."""
    settle_seconds: float = 10.0
    """Seconds that a failed pod waits, at most, for the other pods' reports."""
    upload_deadline_seconds: float = 5.0
    """Seconds that a failing process waits, at most, until the storage has confirmed its error document."""
    retry_policy: RetryPolicy | None = None
    """Whether a failed attempt is retried: a policy of `firstfault.retry`. None: the default policy."""
    deck: bool | None = None
    """Whether a failed attempt's deck begins with the report. None: yes, if the task has ``enable_deck=True``. True:
    yes, and a task without ``enable_deck=True`` is refused when it is defined. False: no."""

    def __post_init__(self) -> None:
        """Check the fields."""
        self._check_reporting()


@dataclass
class Elastic(_Reporting):
    """Torch elastic training on one node (``nnodes=1``, a plain pod) or several nodes (a PyTorchJob).

    Like ``torchrun``, it sets ``OMP_NUM_THREADS`` to 1 if a node runs several processes and the variable is not set.

    Raises:
        firstfault.errors.UsageError: a field has a value that is not valid.
    """

    nnodes: int | str = 1
    """Number of nodes: ``2``, or a range ``"1:4"`` (minimum and maximum)."""
    nproc_per_node: int = 1
    """Number of worker processes on each node."""
    start_method: str = "spawn"
    """How the agent starts the workers: "spawn" or "fork"."""
    monitor_interval: float = 0.1
    """Seconds between two checks of the workers by the agent. 0.1 is torchrun's default; kfpytorch's is 5."""
    max_restarts: int = 0
    """How often torch elastic restarts the workers before the attempt fails."""
    rdzv_configs: dict[str, Any] = field(default_factory=lambda: {"timeout": 900, "join_timeout": 900})
    """Torch's rendezvous settings. The timeouts are 15 minutes, because pods may wait for a node or an image."""
    increase_shared_mem: bool = True
    """Mount a memory volume at /dev/shm. flytekit's newer way is ``@task(shared_memory=True)``."""
    run_policy: RunPolicy | None = None
    strategy: str = DEFAULT_STRATEGY
    """Name of the strategy that finds the root cause: a built-in one, or one that is registered."""
    settle_seconds: float = 10.0
    """Seconds that a failed node waits, at most, for the other nodes' reports."""
    upload_deadline_seconds: float = 5.0
    """Seconds that a failing worker waits, at most, until the storage has confirmed its error document."""
    stop_seconds: float = 2.0
    """Seconds that the agent waits for its workers to stop before it kills them; torch waits 30. The agent stops them
    when another worker failed or the pod is terminated. A worker that failed has 8 s for its exit handlers."""
    retry_policy: RetryPolicy | None = None
    """Whether a failed attempt is retried: a policy of `firstfault.retry`. None: the default policy."""
    restarts_follow_policy: bool = True
    """Whether the retry policy also decides on each of `max_restarts`: a fault that is not worth
    another try ends the attempt. False: torch elastic restarts the workers after any failure."""
    deck: bool | None = None
    """Whether a failed attempt's deck begins with the report. None: yes, if the task has ``enable_deck=True``. True:
    yes, and a task without ``enable_deck=True`` is refused when it is defined. False: no."""
    in_process_restart: RestartsInProcess | None = None
    """How the workers call the task function again in the same processes after a fault, without ranks that are gone.
    None: they do not."""
    watchdog: Watchdog | None = None
    """Deadlines for blocks and loops of the training (``firstfault_torch.watchdog``). None: off."""
    log_dir: str | None = None
    """Folder for the workers' log files, ``<log_dir>/<run>_<random>/attempt_<restart>/<local rank>``. None: a new
    temporary folder."""
    redirects: str | int | Mapping[int, int] = "0"
    """Streams that go to a file in `log_dir` instead of the pod's log, in torchrun's form: "1" stdout, "2" stderr, "3"
    both, or by local rank "0:1,1:2"."""
    tee: str | int | Mapping[int, int] = "0"
    """Streams that go to a file and to the pod's log; in the same form."""
    local_ranks_filter: str | Collection[int] | None = None
    """Local ranks whose output the pod's log shows, "0,1" or [0, 1]. None: all."""
    log_line_prefix_template: str | None = None
    """Prefix of the lines of `tee`, with ``${role_name}``, ``${rank}``, ``${local_rank}``, ``${group_rank}`` and
    ``${node}``. None: ``[${role_name}${local_rank}]:``."""
    duplicate_stdout_filters: Collection[str] = ()
    """Lines of stdout that contain one of these texts go to one more file, for all workers of `tee`."""
    duplicate_stderr_filters: Collection[str] = ()
    """The same for stderr."""
    event_log_handler: str = "null"
    """Name of the torch elastic event handler: "null", "console", or one that is registered."""
    numa_options: Any = None
    """Binds each worker to the CPUs near its GPU: "node", "socket", "exclusive", "core-complex", or torch's
    NumaOptions. None: torch's default."""
    signals_to_handle: str = DEFAULT_SIGNALS
    """Signals that end the pod with a verdict, and are passed on to the workers."""
    shutdown_timeout: float | None = None
    """torchrun's name for `stop_seconds`; it counts if it is given."""
    role: str = "default_role"
    """The workers' role: ROLE_NAME, and part of torch's prefix of log lines."""
    virtual_local_rank: bool = False
    """LOCAL_RANK is 0 in each worker, which sees its own GPU only."""

    def __post_init__(self) -> None:
        """Check the fields, so that a bad value is refused before the task is registered."""
        self._check_reporting()
        parse_nnodes(self.nnodes)
        restart = self.in_process_restart
        if restart is not None and type(restart).__name__ != "InProcessRestart":
            raise UsageError(f"Elastic.in_process_restart must be an InProcessRestart or None, not {restart!r}")
        if self.start_method not in START_METHODS:
            raise UsageError(
                f"Elastic.start_method must be one of {', '.join(START_METHODS)}, not {self.start_method!r}"
            )
        for name, least in (("nproc_per_node", 1), ("max_restarts", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"Elastic.{name} must be a whole number, {least} or more, not {value!r}")
        if not isinstance(self.restarts_follow_policy, bool):
            raise UsageError(
                f"Elastic.restarts_follow_policy must be True or False, not {self.restarts_follow_policy!r}"
            )
        if not isinstance(self.monitor_interval, int | float) or not 0 < self.monitor_interval < float("inf"):
            raise UsageError(
                f"Elastic.monitor_interval must be a number of seconds above 0, not {self.monitor_interval!r}"
            )
        self._check_torch_options()

    def _check_torch_options(self) -> None:
        for name in ("redirects", "tee"):
            parse_streams(getattr(self, name), f"Elastic.{name}", self.nproc_per_node)
        parse_ranks(self.local_ranks_filter, "Elastic.local_ranks_filter", self.nproc_per_node)
        parse_signals(self.signals_to_handle, "Elastic.signals_to_handle")
        check_numa(self.numa_options, "Elastic.numa_options")
        for name in ("event_log_handler", "role"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise UsageError(f"Elastic.{name} must be a name, not {value!r}")
        for name in ("log_dir", "log_line_prefix_template"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise UsageError(f"Elastic.{name} must be a text or None, not {value!r}")
        for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
                raise UsageError(f"Elastic.{name} must be a list of texts, not {value!r}")
        if not isinstance(self.virtual_local_rank, bool):
            raise UsageError(f"Elastic.virtual_local_rank must be True or False, not {self.virtual_local_rank!r}")
        if self.watchdog is not None and not isinstance(self.watchdog, Watchdog):
            raise UsageError(f"Elastic.watchdog must be a Watchdog or None, not {self.watchdog!r}")


def parse_nnodes(nnodes: int | str) -> tuple[int, int]:
    """Return (minimum, maximum) number of nodes.

    Raises:
        firstfault.errors.UsageError: `nnodes` is neither a number nor ``"<minimum>:<maximum>"``.
    """
    match = _NNODES.fullmatch(str(nnodes))
    smallest = int(match[1]) if match else 0
    largest = int(match[2] or match[1]) if match else 0
    if not 1 <= smallest <= largest:
        raise UsageError(f'Elastic.nnodes must be a number like 2 or a range like "1:4", not {nnodes!r}')
    return smallest, largest
