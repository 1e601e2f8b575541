"""The task configurations: the values of ``@task(task_config=...)``."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from flyteidl.plugins.kubeflow import common_pb2 as kubeflow_common

from firstfault.errors import UsageError
from firstfault.retry import RetryPolicy, to_policy
from firstfault.strategies import DEFAULT_STRATEGY, get_strategy
from firstfault_torch import options, time_limits
from firstfault_torch.watchdog import Watchdog

if TYPE_CHECKING:
    from flytekit import Resources

    from firstfault_inprocess import InProcessRestart

STRATEGY_VARIABLE = "FLYTE_INTERNAL_ERROR_PROPAGATION"
"""An environment variable: it names the strategy and turns recording on. An empty
value turns recording off.
"""
RETRIES_VARIABLE = "FIRSTFAULT_TASK_RETRIES"
"""`firstfault run --retries` sets it in its pods: it overrides the retries of the task's decorator.
"""
RENDEZVOUS_BACKEND = "c10d"
_NNODES = re.compile(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?")
START_METHODS = ("spawn", "fork")
_STOCK_MONITOR_INTERVAL_SECONDS = 5
"""kfpytorch's default `monitor_interval`; a task with it gets ours."""


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
    """Which pods the operator removes when the job is finished; by default, none."""
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
    """Container image; by default, the task's."""
    requests: Resources | None = None
    limits: Resources | None = None
    replicas: int | None = None
    """Number of worker pods, without the master."""
    restart_policy: RestartPolicy | None = None
    """If None, the operator's default applies."""


@dataclass
class Master:
    """The master replica of a `PyTorch` task; there is always exactly one."""

    image: str | None = None
    requests: Resources | None = None
    limits: Resources | None = None
    restart_policy: RestartPolicy | None = None


@dataclass(kw_only=True)
class _Recorded:
    """The fields that both configurations have in addition to kfpytorch's."""

    strategy: str = DEFAULT_STRATEGY
    """Name of the strategy that finds the root cause: a built-in one, or one that is registered."""
    settle_seconds: float = time_limits.SETTLE_SECONDS
    """Seconds that a failed pod waits, at most, for other pods' reports."""
    upload_deadline_seconds: float = time_limits.UPLOAD_DEADLINE_SECONDS
    """Seconds that a failing process waits, at most,
    until the storage has confirmed its error document.
    """
    retry_policy: RetryPolicy | None = None
    """Policy of `firstfault.retry` that decides whether a failed attempt is retried, or None for
    the default policy.
    """
    stops_repeats: bool = False
    """Whether an attempt isn't retried, whatever the policy votes, if it failed with the fault of
    the one before and without progress.
    """
    deck: bool | None = None
    """Whether a failed attempt's deck begins with the report. By default (None), it does if the
    task has ``enable_deck=True``. With True, a task without ``enable_deck=True`` raises an error
    when it is defined.
    """

    def __post_init__(self) -> None:
        """Check the fields, so that a bad value is refused before the task is registered."""
        get_strategy(self.strategy)
        if self.retry_policy is not None:
            to_policy(self.retry_policy)
        for name, (wanted, is_valid) in _CHECKS.items():
            value = getattr(self, name, None)
            if hasattr(self, name) and not is_valid(value):
                raise UsageError(f"{type(self).__name__}.{name} must be {wanted}, not {value!r}")


@dataclass
class PyTorch(_Recorded):
    """A PyTorchJob of one master pod and several worker pods; each pod runs one process,
    without an elastic agent.

    Raises:
        firstfault.errors.UsageError: a field has a value that isn't valid.
    """

    master: Master = field(default_factory=Master)
    worker: Worker = field(default_factory=Worker)
    run_policy: RunPolicy | None = None
    num_workers: int | None = None
    """Older spelling of ``worker.replicas``."""
    increase_shared_mem: bool = True
    """Mount a memory volume at /dev/shm. flytekit's newer way is ``@task(shared_memory=True)``."""


@dataclass
class Elastic(_Recorded):
    """Torch elastic training on one node (``nnodes=1``,
    a plain pod) or several nodes (a PyTorchJob).

    Like ``torchrun``, it sets ``OMP_NUM_THREADS`` to 1 if a node runs several processes and the
    variable isn't set.

    Raises:
        firstfault.errors.UsageError: a field has a value that isn't valid.
    """

    nnodes: int | str = 1
    """Number of nodes: ``2``, or a range ``"1:4"`` (minimum and maximum)."""
    nproc_per_node: int = 1
    """Number of worker processes on each node."""
    start_method: str = "spawn"
    """How the agent starts the workers: "spawn" or "fork"."""
    monitor_interval: float = 0.1
    """Seconds between two checks of the workers by the agent. 0.1 is torchrun's default;
    kfpytorch's is 5.
    """
    max_restarts: int = 0
    """How often torch elastic restarts the workers before the attempt fails."""
    rdzv_configs: dict[str, Any] = field(
        default_factory=lambda: {"timeout": 900, "join_timeout": 900}
    )
    """Torch's rendezvous settings. The timeouts are 15 minutes,
    because pods may wait for a node or an image.
    """
    increase_shared_mem: bool = True
    """Mount a memory volume at /dev/shm. flytekit's newer way is ``@task(shared_memory=True)``."""
    run_policy: RunPolicy | None = None
    stop_seconds: float = time_limits.STOP_GRACE_SECONDS
    """Seconds that the agent waits for its workers to stop before it kills them; torch waits 30.
    The agent stops them when another worker failed or the pod is terminated. A worker that failed
    has 8 s for its exit handlers.
    """
    restarts_follow_policy: bool = True
    """Whether the retry policy also decides on each of `max_restarts`: a fault that isn't worth
    another try ends the attempt. If False, torch elastic restarts the workers after any failure.
    """
    in_process_restart: InProcessRestart | None = None
    """How the workers call the task function again in the same processes after a fault, without
    ranks that are gone. If None, they don't.
    """
    watchdog: Watchdog | None = None
    """Deadlines for blocks and loops of the training (``firstfault_torch.watchdog``), or None."""
    hang: options.Hang | None = field(default_factory=options.Hang)
    """What the agents do if no rank makes progress: by default, warn after 60 s. None is off."""
    log_dir: str | None = None
    """Folder for the workers' log files, ``<log_dir>/<run>_<random>/attempt_<restart>/<local
    rank>``. If None, a new temporary folder is used.
    """
    redirects: str | int | Mapping[int, int] = "0"
    """Streams that go to a file in `log_dir` instead of the pod's log, in torchrun's form: "1"
    stdout, "2" stderr, "3" both, or by local rank "0:1,1:2".
    """
    tee: str | int | Mapping[int, int] = "0"
    """Streams that go to a file and to the pod's log; in the same form."""
    local_ranks_filter: str | Collection[int] | None = None
    """Local ranks with output in the pod's log, "0,1" or [0, 1]; by default, all."""
    log_line_prefix_template: str | None = None
    """Prefix of the lines of `tee`, with ``${role_name}``, ``${rank}``, ``${local_rank}``,
    ``${group_rank}`` and ``${node}``; by default ``[${role_name}${local_rank}]:``.
    """
    duplicate_stdout_filters: Collection[str] = ()
    """Lines of stdout that contain one of these texts go to one more file,
    for all workers of `tee`.
    """
    duplicate_stderr_filters: Collection[str] = ()
    """The same for stderr."""
    event_log_handler: str = "null"
    """Name of the torch elastic event handler: "null", "console", or one that is registered."""
    numa_options: Any = None
    """Binds each worker to the CPUs near its GPU: "node", "socket", "exclusive", "core-complex", or
    torch's NumaOptions; by default, torch's default.
    """
    signals_to_handle: str = options.DEFAULT_SIGNALS
    """Signals that end the pod with a verdict, and are passed on to the workers."""
    shutdown_timeout: float | None = None
    """torchrun's name for `stop_seconds`; it counts if it is given."""
    role: str = "default_role"
    """The workers' role: ROLE_NAME, and part of torch's prefix of log lines."""
    virtual_local_rank: bool = False
    """LOCAL_RANK is 0 in each worker, which sees its own GPU only."""

    def __post_init__(self) -> None:
        """Check the fields of this configuration, too."""
        super().__post_init__()
        parse_nnodes(self.nnodes)
        for name in ("redirects", "tee"):
            options.parse_streams(getattr(self, name), f"Elastic.{name}", self.nproc_per_node)
        options.parse_ranks(
            self.local_ranks_filter, "Elastic.local_ranks_filter", self.nproc_per_node
        )
        options.parse_signals(self.signals_to_handle, "Elastic.signals_to_handle")
        options.check_numa(self.numa_options, "Elastic.numa_options")


_Check: TypeAlias = "tuple[str, Callable[[Any], bool]]"
"""What a value must be, and whether it is."""


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")


def _is_whole(value: Any, least: int) -> bool:
    # bool is a subclass of int: True would count as 1.
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


_SECONDS_CHECK: _Check = ("a number of seconds, 0 or more", _is_seconds)
_BOOL: _Check = ("True or False", lambda value: isinstance(value, bool))
_NAME: _Check = ("a name", _is_text)
_TEXT_OR_NONE: _Check = ("a text or None", lambda value: value is None or _is_text(value))
_TEXTS: _Check = (
    "a list of texts",
    lambda value: isinstance(value, list | tuple) and all(map(_is_text, value)),
)
_CHECKS: dict[str, _Check] = {
    "settle_seconds": _SECONDS_CHECK,
    "upload_deadline_seconds": _SECONDS_CHECK,
    "deck": ("True, False or None", lambda value: value is None or isinstance(value, bool)),
    "in_process_restart": (
        "an InProcessRestart or None",
        # by its name: the class is in an optional folder
        lambda value: value is None or type(value).__name__ == "InProcessRestart",
    ),
    "start_method": (f"one of {', '.join(START_METHODS)}", lambda value: value in START_METHODS),
    "nproc_per_node": ("a whole number, 1 or more", lambda value: _is_whole(value, 1)),
    "max_restarts": ("a whole number, 0 or more", lambda value: _is_whole(value, 0)),
    "monitor_interval": (
        "a number of seconds above 0",
        lambda value: _is_seconds(value) and value > 0,
    ),
    "stop_seconds": _SECONDS_CHECK,
    "shutdown_timeout": (_SECONDS_CHECK[0], lambda value: value is None or _is_seconds(value)),
    "restarts_follow_policy": _BOOL,
    "stops_repeats": _BOOL,
    "event_log_handler": _NAME,
    "role": _NAME,
    "log_dir": _TEXT_OR_NONE,
    "log_line_prefix_template": _TEXT_OR_NONE,
    "duplicate_stdout_filters": _TEXTS,
    "duplicate_stderr_filters": _TEXTS,
    "virtual_local_rank": _BOOL,
    "watchdog": ("a Watchdog or None", lambda value: value is None or isinstance(value, Watchdog)),
    "hang": ("a Hang or None", lambda value: value is None or isinstance(value, options.Hang)),
}


def parse_nnodes(nnodes: int | str) -> tuple[int, int]:
    """Return (minimum, maximum) number of nodes.

    Raises:
        firstfault.errors.UsageError: `nnodes` is neither a number nor ``"<minimum>:<maximum>"``.
    """
    match = _NNODES.fullmatch(str(nnodes))
    smallest = int(match[1]) if match else 0
    largest = int(match[2] or match[1]) if match else 0
    if not 1 <= smallest <= largest:
        raise UsageError(
            f'Elastic.nnodes must be a number like 2 or a range like "1:4", not {nnodes!r}'
        )
    return smallest, largest


def as_own(config: Any) -> Any:
    """Return one of kfpytorch's configurations as ours; any other as it is."""
    if isinstance(config, Elastic | PyTorch):
        return config
    values = _list_values(config)
    # Of kfpytorch's two configurations only Elastic has this field. Its classes aren't imported
    # here: kfpytorch may not be installed.
    if "nproc_per_node" not in values:
        values["master"] = Master(**_list_values(config.master))
        values["worker"] = Worker(**_list_values(config.worker))
        return PyTorch(**values)
    # A dataclass doesn't record whether a field was given, so an explicit 5 looks like the default.
    if values["monitor_interval"] == _STOCK_MONITOR_INTERVAL_SECONDS:
        del values["monitor_interval"]
    return Elastic(**values)


def _list_values(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}
