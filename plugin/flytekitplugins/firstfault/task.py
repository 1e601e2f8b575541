"""The flytekit task types, also for kfpytorch's configurations: serialization, environment,
and verdicts for Flyte.
"""

from __future__ import annotations

import os
import threading
import uuid
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from flyteidl.plugins.kubeflow import common_pb2 as kubeflow_common
from flyteidl.plugins.kubeflow import pytorch_pb2 as pytorch_task
from flytekit import PythonFunctionTask
from flytekit.configuration import SerializationSettings
from flytekit.core.context_manager import FlyteContext, FlyteContextManager
from flytekit.core.pod_template import PodTemplate
from flytekit.core.resources import convert_resources_to_resource_model
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekit.models.literals import LiteralMap
from google.protobuf.json_format import MessageToDict

from firstfault.errors import UsageError
from firstfault.model import Phase
from firstfault_start import is_off
from firstfault_torch.engine import Publication
from firstfault_torch.options import (
    Hang,  # noqa: F401 - the package's public names come from here
    Options,
)
from firstfault_torch.watchdog import Watchdog  # noqa: F401 - as above
from flytekitplugins.firstfault.config import (  # noqa: F401 - as above
    RENDEZVOUS_BACKEND,
    RETRIES_VARIABLE,
    STRATEGY_VARIABLE,
    CleanPodPolicy,
    Elastic,
    Master,
    PyTorch,
    RestartPolicy,
    RunPolicy,
    Worker,
    as_own,
    parse_nnodes,
)
from flytekitplugins.firstfault.flyte_engine import FlyteEngine, get_verdict_name
from flytekitplugins.firstfault.flytekit_classes import VerdictSealedError

_TASK_TYPE = "pytorch"
_SINGLE_NODE_TASK_TYPE = "python-task"
_TASK_TYPE_VERSION = 1
"""Version of the task template; the backend reads it."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives


class _ReportingTask(PythonFunctionTask[Any]):
    """The base of both task types. The configuration may also be kfpytorch's, see `kfpytorch`."""

    _deck_writer_phases: tuple[Phase, ...] = (Phase.FAILED, Phase.SUCCEEDED)
    """Last phases of nodes with pods that still run and can write the deck."""

    def __init__(self, task_config: Any, task_function: Callable[..., Any], **kwargs: Any) -> None:
        config = as_own(task_config)
        environment = {
            STRATEGY_VARIABLE: config.strategy,
            **(kwargs.pop("environment", None) or {}),
        }
        self._wants_shared_memory = False
        self._is_deck_pending = True
        super().__init__(
            task_config,
            task_function,
            task_type_version=_TASK_TYPE_VERSION,
            environment=environment,
            **kwargs,
        )
        if config.deck and self._disable_deck:
            kind = type(config).__name__
            raise UsageError(
                f"{kind}(deck=True) needs a task that has decks; write @task(..., enable_deck=True)"
            )
        if config.increase_shared_mem and not self.shared_memory:
            warnings.warn(
                "increase_shared_mem=True (the default of Elastic and PyTorch) is the older way to"
                " get shared memory; use @task(shared_memory=True) instead",
                DeprecationWarning,
                stacklevel=2,
            )
            if self.pod_template is not None:
                add_shared_mem_volume_to_pod_template(self.pod_template)
            else:
                self._wants_shared_memory = True

    @property
    def task_config(self) -> Any:
        """The configuration as `Elastic` or `PyTorch`;
        ``with_overrides`` may replace it by one of the same type.
        """
        return as_own(self._task_config)

    @property
    def pod_template(self) -> PodTemplate | None:
        """The user's template, or a new one with the shared memory volume.

        The new one is made on first use: it imports the Kubernetes client, which only registration
        needs.
        """
        if self._wants_shared_memory:
            self._wants_shared_memory = False
            self._pod_template = PodTemplate()
            add_shared_mem_volume_to_pod_template(self._pod_template)
        return self._pod_template

    @pod_template.setter
    def pod_template(self, template: PodTemplate | None) -> None:
        self._pod_template = template

    def dispatch_execute(self, ctx: FlyteContext, input_literal_map: LiteralMap) -> Any:
        """Run the task; write a sealed verdict to a file that the stock
        entrypoint uploads unchanged.

        An exception would reach Flyte as ``Trace: ...``, without nanoseconds and with the name of
        the pod that raised it. Flyte looks for errors first, so it ignores the empty outputs next
        to the file. If the verdict is in the storage already, the entrypoint uploads nothing.
        """
        self._is_deck_pending = True
        try:
            return super().dispatch_execute(ctx, input_literal_map)
        # In a pod, flytekit wraps any Exception of `execute` in this type. A local execution
        # re-raises the original one; `ElasticTaskError` is of this type, too, and passes through.
        except FlyteUserRuntimeException as error:
            if not isinstance(error.value, VerdictSealedError):
                raise
            publication = error.value.publication
            # On IgnoreOutputs the stock entrypoint returns before it uploads its folder or a deck,
            # so this pod can't overwrite the verdict and the deck that are in the storage.
            if publication.durable and not publication.is_deck_pending:
                raise FlyteUserRuntimeException(IgnoreOutputs(str(error.value))) from error
            # From here on the entrypoint uploads its folder, then reads `disable_deck`. Set the
            # flag before returning.
            self._is_deck_pending = bool(publication.is_deck_pending)
            folder = Path(ctx.execution_state.engine_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / get_verdict_name(_output_prefix())).write_bytes(publication.sealed.document)
            return LiteralMap(literals={})

    @property
    def disable_deck(self) -> bool:
        """The value of flytekit; also True after a failure if another pod has written the deck.

        The stock entrypoint reads this when the task is done; otherwise it would overwrite that
        pod's deck.
        """
        return not self._is_deck_pending or bool(super().disable_deck)

    @property
    def publishes_deck(self) -> bool:
        """Whether a failed attempt's deck begins with the report."""
        return in_pod() and not self._disable_deck and self.task_config.deck is not False

    def options(self) -> Options:
        """Return the time limits, the strategy and the retry policy of this task."""
        config = self.task_config
        return Options(
            strategy=os.environ.get(STRATEGY_VARIABLE, config.strategy),
            settle_seconds=config.settle_seconds,
            upload_deadline_seconds=config.upload_deadline_seconds,
            stop_seconds=_stop_seconds(config),
            watchdog=getattr(config, "watchdog", None),
            hang=getattr(config, "hang", None),
            retry_policy=config.retry_policy,
            stops_repeats=config.stops_repeats,
            in_process_restart=getattr(config, "in_process_restart", None),
            retries=int(os.environ.get(RETRIES_VARIABLE) or self.metadata.retries),
            restarts_follow_policy=getattr(config, "restarts_follow_policy", False),
        )

    def engine(self) -> FlyteEngine | None:
        """Return the engine of this execution, or None if recording is off.

        A strategy's name in the environment turns recording on, an empty value off. Without the
        variable (a local call) the task's configuration decides. ``FIRSTFAULT=0`` turns it off,
        too.
        """
        strategy = os.environ.get(STRATEGY_VARIABLE, self.task_config.strategy)
        if not strategy or is_off():
            return None
        command = click.get_current_context(silent=True)
        # In a pod the click command is `pyflyte-execute`: its parameters hold the URIs that the
        # backend filled in. A local call may have no click context, or another command's.
        params = command.params if command is not None else {}
        return FlyteEngine(
            _output_prefix(),
            in_pod=in_pod(),
            strategy=strategy,
            raw_prefix=_get_raw_prefix(params.get("checkpoint_path")),
            previous_raw_prefix=_get_raw_prefix(params.get("prev_checkpoint")),
            publish_deck=self._write_deck,
        )

    def _write_deck(
        self, publication: Publication, shutdown_requested: threading.Event | None
    ) -> bool:
        if not self.publishes_deck:
            return not self._disable_deck
        from flytekitplugins.firstfault.deck import (  # noqa: PLC0415 - only a failure needs it
            publish_deck,
        )

        return publish_deck(
            publication,
            self.name,
            live_phases=self._deck_writer_phases,
            shutdown_requested=shutdown_requested,
        )


class ElasticFunctionTask(_ReportingTask):
    """Runs a function with torch elastic on one or several nodes."""

    def __init__(
        self,
        task_config: Elastic,
        task_function: Callable[..., Any],
        **kwargs: Any,
    ) -> None:
        self.min_nodes, self.max_nodes = parse_nnodes(task_config.nnodes)
        self.rdzv_backend = RENDEZVOUS_BACKEND
        task_type = _SINGLE_NODE_TASK_TYPE if task_config.nnodes == 1 else _TASK_TYPE
        super().__init__(task_config, task_function, task_type=task_type, **kwargs)

    def execute(self, **kwargs: Any) -> Any:
        """Run the workers of this node and return the result of global rank 0.

        Raises:
            IgnoreOutputs: rank 0 is on another node, or the pod was terminated (SIGTERM).
            VerdictSealedError: the training failed; the exception carries the verdict.
            FlyteRecoverableException: in a local call, if the root cause is recoverable.
            FlyteUserRuntimeException: in a local call, if it isn't recoverable; the exception is
                also a RuntimeError.
        """
        from flytekitplugins.firstfault.elastic import (  # noqa: PLC0415 - it imports torch
            run_training,
        )

        engine = self.engine()
        keeps_decks = engine is not None and self.publishes_deck
        # flytekit has converted the inputs here, in the agent's process; the workers get Python
        # values.
        function = partial(self.task_function, **kwargs)
        return run_training(
            self.task_config,
            function,
            engine,
            self.options(),
            keeps_decks=keeps_decks,
        )

    def get_custom(self, settings: SerializationSettings) -> dict[str, Any] | None:
        """Return the PyTorchJob's specification, or None for a single node (a plain pod)."""
        if self.task_config.nnodes == 1:
            custom: dict[str, Any] | None = super().get_custom(settings)
            return custom
        config: Elastic = self.task_config
        job = pytorch_task.DistributedPyTorchTrainingTask(
            worker_replicas=pytorch_task.DistributedPyTorchTrainingReplicaSpec(
                replicas=self.max_nodes
            ),
            elastic_config=pytorch_task.ElasticConfig(
                rdzv_backend=self.rdzv_backend,
                min_replicas=self.min_nodes,
                max_replicas=self.max_nodes,
                nproc_per_node=config.nproc_per_node,
                max_restarts=config.max_restarts,
            ),
            run_policy=_run_policy(config.run_policy),
        )
        return dict(MessageToDict(job))


class PyTorchFunctionTask(_ReportingTask):
    """Runs a function once in each pod of a PyTorchJob, without an elastic agent."""

    _deck_writer_phases = (Phase.FAILED,)  # a pod that has succeeded has exited

    def __init__(
        self,
        task_config: PyTorch,
        task_function: Callable[..., Any],
        **kwargs: Any,
    ) -> None:
        if task_config.num_workers and task_config.worker.replicas:
            raise ValueError(
                "num_workers and worker.replicas mean the same; pass only worker.replicas"
            )
        if task_config.num_workers is None and task_config.worker.replicas is None:
            raise ValueError(
                "PyTorch needs worker.replicas, the number of worker pods besides the master"
            )
        super().__init__(task_config, task_function, task_type=_TASK_TYPE, **kwargs)

    def execute(self, **kwargs: Any) -> Any:
        """Run the function in this pod.

        Raises:
            VerdictSealedError: the function raised in a pod; the exception carries the verdict on
                the whole job.
            Exception: the function raised this in a local call.
        """
        engine = self.engine()
        # A local call has no other pods to wait for, so the caller gets the function's own
        # exception at once.
        if engine is None or not engine.in_pod:
            return self.task_function(**kwargs)
        from flytekitplugins.firstfault.pytorch import (  # noqa: PLC0415 - only a pod needs it
            run_in_pod,
        )

        return run_in_pod(partial(self.task_function, **kwargs), engine, self.options())

    def get_custom(self, settings: SerializationSettings) -> dict[str, Any]:
        """Return the PyTorchJob's specification."""
        del settings
        config: PyTorch = self.task_config
        worker = _build_replicas(config.worker)
        if config.num_workers:
            worker.replicas = config.num_workers
        job = pytorch_task.DistributedPyTorchTrainingTask(
            worker_replicas=worker,
            master_replicas=_build_replicas(config.master),
            run_policy=_run_policy(config.run_policy),
        )
        return dict(MessageToDict(job))


def _stop_seconds(config: Elastic | PyTorch) -> float:
    if isinstance(config, PyTorch):
        return 0.0  # no agent, no workers
    return config.stop_seconds if config.shutdown_timeout is None else config.shutdown_timeout


def _output_prefix() -> str:
    """Return the folder (URI) of this attempt's documents:
    the output prefix that the stock entrypoint got.

    A local call has no entrypoint and gets a new folder below the raw output prefix, so that two
    calls in one process don't read each other's documents.
    """
    command = click.get_current_context(silent=True)
    prefix = command.params.get("output_prefix") if command is not None else None
    if prefix:
        return str(prefix)
    raw = str(FlyteContextManager.current_context().file_access.raw_output_prefix).rstrip("/")
    return raw if in_pod() else f"{raw}/{uuid.uuid4().hex}"


def in_pod() -> bool:
    """Whether Flyte's entrypoint runs this execution; False for a local call."""
    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.mode is not None and not state.is_local_execution()


def _get_raw_prefix(checkpoints: object) -> str:
    """Return the raw output prefix above a checkpoints' folder;
    Flyte passes '""' if no such folder exists.
    """
    return str(checkpoints or "").strip("\"'").rstrip("/").rpartition("/")[0]


def _build_replicas(config: Master | Worker) -> pytorch_task.DistributedPyTorchTrainingReplicaSpec:
    resources = convert_resources_to_resource_model(requests=config.requests, limits=config.limits)
    return pytorch_task.DistributedPyTorchTrainingReplicaSpec(
        replicas=config.replicas if isinstance(config, Worker) else 1,
        image=config.image,
        resources=resources.to_flyte_idl() if resources else None,
        restart_policy=config.restart_policy.value if config.restart_policy else None,
    )


def _run_policy(policy: RunPolicy | None) -> kubeflow_common.RunPolicy | None:
    if policy is None:
        return None
    return kubeflow_common.RunPolicy(
        clean_pod_policy=policy.clean_pod_policy.value if policy.clean_pod_policy else None,
        ttl_seconds_after_finished=policy.ttl_seconds_after_finished,
        active_deadline_seconds=policy.active_deadline_seconds,
        backoff_limit=policy.backoff_limit,
    )


def add_shared_mem_volume_to_pod_template(pod_template: PodTemplate) -> None:
    """Add a memory-backed ``emptyDir`` at /dev/shm to the primary container, in place.

    Raises:
        ValueError: the template has several containers, or mounts a volume at /dev/shm already.
    """
    from kubernetes import (  # noqa: PLC0415 - takes a third of a second, and only registration needs it
        client,
    )

    if pod_template.pod_spec is None:
        pod_template.pod_spec = client.V1PodSpec(containers=[])
    spec = pod_template.pod_spec
    containers = spec.containers or []
    if len(containers) > 1:
        raise ValueError(
            "the pod template has several containers, so firstfault does not know which one needs"
            " shared memory; set increase_shared_mem=False and mount a volume at /dev/shm where it"
            " is needed"
        )
    container = containers[0] if containers else client.V1Container(name="primary")
    mounts = container.volume_mounts or []
    if any(mount.mount_path == _SHARED_MEMORY for mount in mounts):
        raise ValueError(
            "the pod template mounts a volume at /dev/shm already; remove it or set"
            " increase_shared_mem=False"
        )
    container.volume_mounts = [*mounts, client.V1VolumeMount(name="shm", mount_path=_SHARED_MEMORY)]
    spec.containers = [container]
    volume = client.V1Volume(name="shm", empty_dir=client.V1EmptyDirVolumeSource(medium="Memory"))
    spec.volumes = [*(spec.volumes or []), volume]


# flytekit looks up the task type when `@task` runs, by the exact type of `task_config`. So
# importing this module must register both; a second registration of the same pair is a no-op.
TaskPlugins.register_pythontask_plugin(Elastic, ElasticFunctionTask)
TaskPlugins.register_pythontask_plugin(PyTorch, PyTorchFunctionTask)
