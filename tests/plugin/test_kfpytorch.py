"""The behaviour that kfpytorch documents, on our Elastic and PyTorch."""

import copy
import gc
import json
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock, patch

import flytekit
import pytest
from flyteidl.core.tasks_pb2 import TaskTemplate
from flytekit import Deck, PodTemplate, Resources, task, workflow
from flytekit.bin import entrypoint
from flytekit.bin.entrypoint import setup_execution
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.core.artifact import Artifact
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.core.mock_stats import MockStats
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekit.models.literals import LiteralMap
from flytekit.tools.translator import get_serializable
from flytekitplugins import firstfault as plugin
from flytekitplugins import kfpytorch as stock
from kubernetes.client import (
    V1Container,
    V1EmptyDirVolumeSource,
    V1PodSpec,
    V1Volume,
    V1VolumeMount,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

import firstfault_inprocess as inprocess
from firstfault.layout import error_key_for
from firstfault.model import Place
from firstfault.wire.documents import encode
from firstfault_torch import Watchdog
from firstfault_torch.agent.deaths import describe_agent_failure
from firstfault_torch.agent.launch import RoundEnd
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.failures.failure_records import ErrorClass
from firstfault_torch.node.document_writer import document_path
from firstfault_torch.worker.in_flight import Moment
from flytekitplugins.firstfault import Elastic, PyTorch, Worker
from flytekitplugins.firstfault.config import STRATEGY_VARIABLE
from flytekitplugins.firstfault.entrypoints import WorkerResult
from flytekitplugins.firstfault.flytekit_classes import RecoverableVerdictSealedError
from tests.prefix import Prefix

pytestmark = [
    pytest.mark.forks,
    # flytekit leaves a folder for checkpoints of each local call to the garbage collector
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up <TemporaryDirectory:ResourceWarning"),
]

METHODS = ("spawn", "fork")
CLOSE_S = 20.0
"""Largest difference between a recorded time and the raise, seconds; milliseconds are usual."""


def _config(method: str = "spawn", **fields: Any) -> Elastic:
    return Elastic(
        nproc_per_node=2,
        start_method=method,
        increase_shared_mem=False,
        settle_seconds=1,
        **fields,
    )


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[None]:
    """Let local calls write to the test's folder."""
    access = FileAccessProvider(str(tmp_path / "local"), str(tmp_path / "raw"))
    context = FlyteContextManager.current_context()
    with FlyteContextManager.with_context(context.with_file_access(access)):
        yield
    gc.collect()  # so that flytekit's leftovers are collected here and not in another test


# --- training that succeeds -----------------------------------------------------------------------


@dataclass
class Pod:
    """The results of a task that ran as in a pod."""

    folder: Path
    outputs: LiteralMap
    facts: dict[str, Any]
    decks: list[str]
    metadata: dict[Any, Any]


CHECKED = Artifact(name="checked", partition_keys=["split"])


@pytest.fixture(scope="module", params=METHODS)
def pod(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """Run a task once by each method, in the execution context that Flyte's entrypoint makes."""
    folder = tmp_path_factory.mktemp(request.param)

    config = _config(
        request.param, in_process_restart=inprocess.InProcessRestart(), watchdog=Watchdog()
    )

    @task(task_config=config, enable_deck=True)
    def train(folder: str) -> Annotated[str, CHECKED]:
        context = flytekit.current_context()
        rank = int(os.environ["RANK"])
        Deck(f"deck of rank {rank}", "<b>it works</b>")
        checkpoint = context.checkpoint
        facts = {
            "execution": context.execution_id.name,
            "raw": context.raw_output_prefix,
            "checkpoint": [checkpoint._checkpoint_dest, checkpoint._checkpoint_src],
            # forked workers share flytekit's folder for it, into which each would download
            "before": (checkpoint.read() or b"").decode() if rank == 0 else "",
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "world": os.environ["WORLD_SIZE"],
            "restarts": inprocess.current_call() is not None,
            "watchdog": os.environ.get("FIRSTFAULT_TIMERS"),
        }
        if rank == 0:
            checkpoint.write(b"of this attempt")
        return CHECKED.create_from(json.dumps(facts), split="train")

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FLYTE_INTERNAL_EXECUTION_ID", "a1b2c3")
        patched.delenv("OMP_NUM_THREADS", raising=False)
        # flytekit leaves its socket for statistics open, and its folder for checkpoints to the
        # garbage collector
        patched.setattr(entrypoint, "_get_stats", lambda **_: MockStats())
        if request.param == "spawn":
            (folder / "before").write_bytes(b"of the attempt before")
        with setup_execution(
            raw_output_data_prefix=str(folder / "raw"),
            checkpoint_path=str(folder / "checkpoint"),
            prev_checkpoint=str(folder / "before"),
        ) as context:
            outputs = train.dispatch_execute(context, _literals(train, folder=str(folder)))
            metadata = dict(context.output_metadata_tracker.output_metadata)
            decks = [deck.name for deck in flytekit.current_context().decks]
            flytekit.current_context().checkpoint._td.cleanup()
    facts = json.loads(outputs.literals["o0"].scalar.primitive.string_value)
    return Pod(folder, outputs, facts, decks, metadata)


def _literals(function_task: Any, **inputs: Any) -> LiteralMap:
    from flytekit.core.type_engine import TypeEngine  # noqa: PLC0415 - one use

    context = FlyteContextManager.current_context()
    return TypeEngine.dict_to_literal_map(context, inputs, function_task.python_interface.inputs)


@pytest.mark.jobs
def test_workers_have_the_tasks_context_checkpoints_and_decks(pod: Pod) -> None:
    """Workers know their execution, read the last checkpoint and write one,
    and get one OpenMP thread, as by torchrun.

    They can restart in their processes and have a watchdog, if the task asks for that. The task has
    the decks of rank 0 and at most one timeline; what rank 0 attached to its output is the task's.
    """
    assert pod.facts["execution"] == "a1b2c3"
    assert pod.facts["raw"] == str(pod.folder / "raw")
    assert (pod.facts["world"], pod.facts["omp"]) == ("2", "1")
    assert pod.facts["restarts"]
    assert pod.facts["watchdog"]
    assert pod.facts["checkpoint"] == [str(pod.folder / "checkpoint"), str(pod.folder / "before")]
    assert pod.facts["before"] == (
        "of the attempt before" if (pod.folder / "before").exists() else ""
    )
    written = [path for path in (pod.folder / "checkpoint").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in written] == [b"of this attempt"]
    assert "deck of rank 0" in pod.decks
    assert "deck of rank 1" not in pod.decks
    assert pod.decks.count("Timeline") <= 1
    (metadata,) = pod.metadata.values()
    assert (metadata.artifact.name, metadata.dynamic_partitions) == ("checked", {"split": "train"})
    assert pod.outputs.literals["o0"].metadata


# --- training that fails --------------------------------------------------------------------------


def _wait_for_a_document() -> None:
    node_context = json.loads(os.environ["FIRSTFAULT_RECORDING"])
    errors = Path(node_context["identity"]["output_prefix"], "firstfault", "errors")
    deadline = time.monotonic() + 60
    while not list(errors.glob("*.pb")) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.jobs
@pytest.mark.parametrize("recoverable", [True, False])
@pytest.mark.usefixtures("sandbox")
def test_a_local_call_raises_kfpytorchs_exception_for_the_root_cause(recoverable: bool) -> None:
    """The caller gets kfpytorch's exception for the root cause, with its time,
    although another worker failed too.
    """

    class LostShardError(FlyteRecoverableException):
        pass

    class BrokenShardError(Exception):
        pass

    @task(task_config=_config("fork"))
    def train() -> None:
        if os.environ["RANK"] == "0":
            _wait_for_a_document()
            raise RuntimeError("a victim")
        raise (LostShardError if recoverable else BrokenShardError)(f"at {time.time()} on rank 1")

    @workflow
    def pipeline() -> None:
        train()

    began = time.time()
    with pytest.raises(
        FlyteRecoverableException if recoverable else FlyteUserRuntimeException
    ) as caught:
        pipeline()
    error = caught.value
    raised_at = (
        float(str(error).split("at ", 1)[1].split(" on rank", 1)[0]) if recoverable else None
    )
    assert error.timestamp is not None
    assert began <= error.timestamp <= time.time()
    if recoverable:
        assert raised_at is not None
        assert 0 <= error.timestamp - raised_at < CLOSE_S
        assert "LostShardError rank 1" in str(error)
        assert not isinstance(error, RuntimeError)
        return
    assert isinstance(error, RuntimeError)
    assert isinstance(error.value, ChildFailedError)
    rank, first = error.value.get_first_failure()
    assert (rank, first.local_rank) == (1, 1)
    text = first.message["message"]
    assert text.startswith("BrokenShardError: at ")
    assert 0 <= error.timestamp - float(text.split()[2]) < CLOSE_S


@pytest.mark.jobs
@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("variable", [{STRATEGY_VARIABLE: ""}, {"FIRSTFAULT": "0"}])
def test_switched_off_plain_torch_elastic_runs(
    variable: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty strategy, or FIRSTFAULT=0, plain torch elastic runs,
    raises kfpytorch's exception, and sets no variables of ours.
    """
    for name, value in variable.items():
        monkeypatch.setenv(name, value)

    @task(task_config=_config("fork"))
    def train() -> None:
        assert "FIRSTFAULT_RECORDING" not in os.environ
        raise ValueError("boom")

    with pytest.raises(FlyteUserRuntimeException) as caught:
        train()
    assert isinstance(caught.value.value, ChildFailedError)
    assert caught.value.timestamp is not None


# --- without processes ----------------------------------------------------------------------------


class _NotStartedError(Exception):
    """Ends an execution at the point that a test checks."""


def _launch_arguments(config: Elastic) -> dict[str, Any]:
    """Return the arguments that an execution passes to torch's LaunchConfig."""
    own = task(task_config=config)(_nothing)
    with (
        patch(
            "torch.distributed.launcher.api.LaunchConfig", side_effect=_NotStartedError
        ) as launch_config,
        pytest.raises(_NotStartedError),
    ):
        own.execute()
    return dict(launch_config.call_args.kwargs)


def _nothing() -> float:
    """Stand in for a training loop."""
    return 1.0


@pytest.mark.parametrize(
    ("fields", "environment", "expected"),
    [
        ({}, {}, {"min_nodes": 1, "max_nodes": 1, "rdzv_endpoint": "localhost:0"}),
        ({"nnodes": "2:4"}, {}, {"min_nodes": 2, "max_nodes": 4}),
        (
            {"nnodes": 2},
            {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "job-worker-0:23456"},
            {"rdzv_endpoint": "job-worker-0:23456"},
        ),
        ({"nnodes": 2}, {"PET_NNODES": "1:3"}, {"min_nodes": 1, "max_nodes": 3}),
        ({}, {}, {"rdzv_configs": {"timeout": 900, "join_timeout": 900}}),
        (
            {"rdzv_configs": {"timeout": 1200, "read_timeout": 90}},
            {},
            {"rdzv_configs": {"timeout": 1200, "read_timeout": 90}},
        ),
    ],
)
def test_the_operators_variables_override_the_configuration(
    fields: dict[str, Any],
    environment: dict[str, str],
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The configuration reaches torch; the operator's environment variables override it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = _config("fork", max_restarts=3, monitor_interval=0.5, **fields)
    common = {
        "nproc_per_node": 2,
        "max_restarts": 3,
        "monitor_interval": 0.5,
        "start_method": "fork",
    }
    arguments = _launch_arguments(config)
    assert {**arguments, **common, **expected, "rdzv_backend": "c10d"} == arguments
    config.rdzv_configs["timeout"] = 1
    assert _config().rdzv_configs["timeout"] == 900, "two configurations share no settings"


def test_several_nodes_outside_of_a_pytorchjob_cause_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log warns if several nodes are configured outside of a PyTorchJob;
    within one it does not.
    """
    _launch_arguments(_config(nnodes=2))
    assert "PET_NNODES isn't set" in caplog.text
    caplog.clear()
    monkeypatch.setenv("PET_NNODES", "2")
    _launch_arguments(_config(nnodes=2))
    assert "PET_NNODES" not in caplog.text


@pytest.mark.parametrize(
    ("processes", "before", "after"),
    [(2, None, "1"), (2, "4", "4"), (2, "", ""), (1, None, None), (1, "4", "4")],
)
def test_omp_num_threads_is_1_unless_the_user_sets_it(
    processes: int,
    before: str | None,
    after: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OMP_NUM_THREADS is set to 1 for several workers per node; the user's value is kept."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if before is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    _launch_arguments(Elastic(nproc_per_node=processes, increase_shared_mem=False))
    assert os.environ.get("OMP_NUM_THREADS") == after


def execute_with_outcome(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> Any:
    """Execute a task whose launch ends with these results, or as given."""

    def launch(*_: object, **__: object) -> Any:
        return outcome if isinstance(outcome, RoundEnd) else RoundEnd(Mock(), NodeReport(), outcome)

    monkeypatch.setattr("firstfault_torch.run.launch_agent", launch)
    return task(task_config=_config())(_nothing).execute()


def test_only_rank_0s_node_returns_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node returns global rank 0's result; without it, it raises IgnoreOutputs,
    not to overwrite rank 0's outputs.
    """
    assert (
        execute_with_outcome(monkeypatch, {1: WorkerResult(2.0, []), 0: WorkerResult(1.0, [])})
        == 1.0
    )
    with pytest.raises(IgnoreOutputs):
        execute_with_outcome(monkeypatch, {2: WorkerResult(2.0, []), 3: WorkerResult(3.0, [])})


def build_terminated_end(prefix: Prefix, *, recorded: bool) -> RoundEnd:
    """Return the end of a launch on a node that got SIGTERM,
    with or without a document about it.
    """
    error = SignalException("terminated", sigval=signal.SIGTERM)
    said = describe_agent_failure(
        error,
        ErrorClass.PREEMPTION,
        Place(node="worker-1"),
        Moment.now(),
    )
    copies = {document_path(error_key_for(said)): encode(said)} if recorded else {}
    return RoundEnd(prefix.node_context(), NodeReport(copies), error=error)


@pytest.mark.parametrize(
    ("recorded", "raised"),
    [(True, RecoverableVerdictSealedError), (False, IgnoreOutputs)],
    ids=["with a document", "without"],
)
def test_a_terminated_pod_raises_a_recoverable_verdict_or_ignore_outputs(
    recorded: bool,
    raised: type[Exception],
    prefix: Prefix,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A terminated pod raises a recoverable verdict; without a document about it,
    it raises IgnoreOutputs.
    """
    monkeypatch.setattr("flytekitplugins.firstfault.task.in_pod", lambda: True)
    with pytest.raises(raised):
        execute_with_outcome(monkeypatch, build_terminated_end(prefix, recorded=recorded))


def test_without_recording_sigterm_raises_ignore_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without recording, SIGTERM to the agent raises IgnoreOutputs, as with kfpytorch."""
    monkeypatch.setenv(STRATEGY_VARIABLE, "")
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch",
        Mock(return_value=Mock(side_effect=SignalException("terminated", sigval=signal.SIGTERM))),
    )
    with pytest.raises(IgnoreOutputs):
        task(task_config=_config())(_nothing).execute()


# --- serialization --------------------------------------------------------------------------------

SETTINGS = SerializationSettings(
    project="project",
    domain="domain",
    version="version",
    image_config=ImageConfig(default_image=Image("default", "registry.example/image", "tag")),
)


def _template(function_task: Any) -> TaskTemplate:
    return get_serializable(OrderedDict(), SETTINGS, function_task).template.to_flyte_idl()


def _without_environment(template: TaskTemplate) -> tuple[TaskTemplate, dict[str, str]]:
    """Return the template without the primary container's environment, and that environment."""
    if template.HasField("container"):
        environment = {item.key: item.value for item in template.container.env}
        del template.container.env[:]
        return template, environment
    (primary,) = template.k8s_pod.pod_spec["containers"]
    environment = (
        {item["name"]: item["value"] for item in primary["env"]} if "env" in primary else {}
    )
    if "env" in primary:
        del primary["env"]
    return template, environment


def _elastic(module: Any, **fields: Any) -> Any:
    return module.Elastic(nproc_per_node=4, max_restarts=2, **fields)


def _run_policy(module: Any) -> Any:
    return module.RunPolicy(
        clean_pod_policy=module.CleanPodPolicy.ALL,
        ttl_seconds_after_finished=10,
        active_deadline_seconds=20,
        backoff_limit=3,
    )


CONFIGURATIONS = {
    "one node": _elastic,
    "one node as text": lambda module: _elastic(module, nnodes="1"),
    "two nodes": lambda module: _elastic(module, nnodes=2),
    "elastic nodes": lambda module: _elastic(module, nnodes="1:3"),
    "a run policy": lambda module: _elastic(module, nnodes=2, run_policy=_run_policy(module)),
    "an empty run policy": lambda module: _elastic(module, nnodes=2, run_policy=module.RunPolicy()),
    "master and workers": lambda module: module.PyTorch(
        master=module.Master(
            image="master:1",
            requests=Resources(cpu="1"),
            limits=Resources(mem="2Gi", gpu="1"),
            restart_policy=module.RestartPolicy.FAILURE,
        ),
        worker=module.Worker(
            image="worker:1",
            requests=Resources(cpu="2"),
            replicas=3,
            restart_policy=module.RestartPolicy.NEVER,
        ),
        run_policy=_run_policy(module),
    ),
    "workers by their older name": lambda module: module.PyTorch(num_workers=2),
}
_DATA = V1VolumeMount(name="data", mount_path="/data")
_VOLUME = V1Volume(name="data", empty_dir=V1EmptyDirVolumeSource())
_WITH_VOLUME = PodTemplate(
    pod_spec=V1PodSpec(
        containers=[V1Container(name="primary", volume_mounts=[_DATA])], volumes=[_VOLUME]
    )
)
OPTIONS = {
    "plain": ({"increase_shared_mem": False}, {}),
    "increase_shared_mem": ({"increase_shared_mem": True}, {}),
    "increase_shared_mem beside a volume": (
        {"increase_shared_mem": True},
        {"pod_template": _WITH_VOLUME},
    ),
    "shared_memory": ({"increase_shared_mem": True}, {"shared_memory": "2Gi"}),
    "everything": (
        {"increase_shared_mem": True},
        {
            "retries": 3,
            "cache": True,
            "cache_version": "1",
            "timeout": 60,
            "interruptible": True,
            "requests": Resources(cpu="1"),
            "environment": {"A": "1"},
            "enable_deck": True,
            "pod_template": PodTemplate(labels={"a": "b"}, primary_container_name="primary"),
        },
    ),
}


def train(epochs: int, name: str = "x") -> float:
    """Train; this text is part of the template."""
    del name
    return float(epochs)


def define_task(module: Any, configuration: str, option: str) -> Any:
    fields, options = OPTIONS[option]
    config = CONFIGURATIONS[configuration](module)
    config.increase_shared_mem = fields["increase_shared_mem"]
    # each task changes its template
    return task(task_config=config, **copy.deepcopy(options))(train)


# both plugins warn of the older way to get shared memory; ours has its own test
@pytest.mark.filterwarnings("ignore:.*increase_shared_mem")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_pod_template_is_kfpytorchs_but_for_one_variable(
    configuration: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task's template is identical to kfpytorch's, except for one environment variable."""
    ours, theirs = (define_task(module, configuration, option) for module in (plugin, stock))
    for config, kind in (
        (stock.Elastic, plugin.ElasticFunctionTask),
        (stock.PyTorch, plugin.PyTorchFunctionTask),
    ):
        monkeypatch.setitem(TaskPlugins._PYTHONFUNCTION_TASK_PLUGINS, config, kind)
    migrated = define_task(stock, configuration, option)
    their_template, their_environment = _without_environment(_template(theirs))
    for one in (ours, migrated):
        assert type(one).__module__ == "flytekitplugins.firstfault.task"
        template, environment = _without_environment(_template(one))
        assert (one.name, one.metadata) == (theirs.name, theirs.metadata)
        assert template == their_template
        assert template.SerializeToString(deterministic=True) == their_template.SerializeToString(
            deterministic=True
        )
        assert environment == {**their_environment, STRATEGY_VARIABLE: "evidence"}


@pytest.mark.parametrize(
    ("strategy", "environment", "expected"),
    [
        ("earliest", None, "earliest"),
        ("evidence", None, "evidence"),
        ("earliest", {"A": "1"}, "earliest"),
        ("earliest", {STRATEGY_VARIABLE: "evidence"}, "evidence"),
        ("earliest", {STRATEGY_VARIABLE: ""}, ""),
    ],
)
@pytest.mark.parametrize("kind", [Elastic, PyTorch])
def test_every_pod_has_the_strategy_in_its_environment(
    kind: Any,
    strategy: str,
    environment: dict[str, str] | None,
    expected: str,
) -> None:
    """The strategy is in the environment of every pod; the user's value overrides it,
    also an empty one.
    """
    before = dict(environment or {})
    fields = {"worker": Worker(replicas=1)} if kind is PyTorch else {}
    config = kind(strategy=strategy, increase_shared_mem=False, **fields)
    _, found = _without_environment(
        _template(task(task_config=config, environment=environment)(train))
    )
    assert found == {**before, STRATEGY_VARIABLE: expected}
    assert (environment or {}) == before, "several tasks may share it"


# --- shared memory --------------------------------------------------------------------------------


def _containers(*names: str, **fields: Any) -> PodTemplate:
    return PodTemplate(
        pod_spec=V1PodSpec(containers=[V1Container(name=name, **fields) for name in names])
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (_containers("primary", "sidecar"), "several containers"),
        (
            _containers(
                "primary",
                volume_mounts=[V1VolumeMount(name="own", mount_path="/dev/shm")],  # noqa: S108
            ),
            "mounts a volume at /dev/shm already",
        ),
    ],
)
def test_a_template_that_cannot_mount_shared_memory_is_refused(
    template: PodTemplate, message: str
) -> None:
    """A template with several containers, or with the mount, is refused;
    the message says what to do.
    """
    with (
        pytest.warns(DeprecationWarning, match="increase_shared_mem"),
        pytest.raises(ValueError, match=message) as caught,
    ):
        task(task_config=Elastic(), pod_template=template)(train)
    assert "increase_shared_mem=False" in str(caught.value)


# --- a PyTorchJob with a master -------------------------------------------------------------------


@pytest.mark.usefixtures("sandbox")
def test_a_local_call_of_a_pytorch_task_raises_its_own_exception() -> None:
    """In a local call the function runs in this process, and its exception is raised unchanged."""
    config = PyTorch(worker=Worker(replicas=1), increase_shared_mem=False)
    error = KeyError("boom")

    @task(task_config=config)
    def fails() -> None:
        raise error

    assert task(task_config=config)(train)(epochs=3) == 3.0
    with pytest.raises(KeyError) as caught:
        fails()
    assert caught.value is error
