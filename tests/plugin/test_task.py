"""The task types: their names, other plugins beside them, their executions, and the way of a verdict to Flyte."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import flytekitplugins
import pytest
from flytekit import PythonFunctionTask, task
from flytekit.configuration import SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs
from flytekit.models.literals import LiteralMap
from flytekitplugins import firstfault as plugin

from firstfault_torch import run as run_module
from flytekitplugins.firstfault import Elastic, ElasticFunctionTask, PyTorch, PyTorchFunctionTask, Worker
from flytekitplugins.firstfault.config import STRATEGY_VARIABLE
from flytekitplugins.firstfault.flyte_engine import Published
from flytekitplugins.firstfault.flytekit_classes import VerdictSealedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firstfault_torch.context import Recording

ELASTIC = Elastic(increase_shared_mem=False)


def _train() -> float:
    """Stand in for a training loop."""
    return 1.0


# --- names and other plugins ----------------------------------------------------------------------------------------


def test_names() -> None:
    """The package has all of kfpytorch's names, and the watchdog's."""
    assert set(plugin.__all__) == {
        "CleanPodPolicy",
        "Elastic",
        "ElasticFunctionTask",
        "Master",
        "PyTorch",
        "PyTorchFunctionTask",
        "RestartPolicy",
        "RunPolicy",
        "Watchdog",
        "Worker",
    }
    for name in plugin.__all__:
        assert getattr(plugin, name).__module__.startswith(("flytekitplugins.firstfault", "firstfault_torch."))


def test_the_namespace_is_shared() -> None:
    """`flytekitplugins` is a shared namespace: the stock plugin can be imported too, and each has its own task type."""
    stock = importlib.import_module("flytekitplugins.kfpytorch")
    assert flytekitplugins.__file__ is None
    assert stock.Elastic is not Elastic
    theirs = task(task_config=stock.Elastic(increase_shared_mem=False))(_train)
    ours = task(task_config=ELASTIC)(_train)
    assert type(theirs) is stock.task.PytorchElasticFunctionTask
    assert type(ours) is ElasticFunctionTask


def test_a_process_that_has_both() -> None:
    """Defining a task does not import torch, also if the stock plugin is installed."""
    code = """if True:
        import sys
        import flytekitplugins.firstfault
        assert 'torch' not in sys.modules
        import flytekitplugins.kfpytorch
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "first",
    [
        "from flytekitplugins.firstfault import Elastic",
        "from flytekitplugins.firstfault.task import Elastic",
        "import flytekitplugins.firstfault; Elastic = flytekitplugins.firstfault.Elastic",
    ],
    ids=["package", "task", "attribute"],
)
def test_every_import_registers_the_task_types(first: str, tmp_path: Path) -> None:
    """Wherever a process takes Elastic from, its tasks get our task type."""
    code = f"{first}\nfrom flytekit import task\ndef train() -> float:\n    return 1.0\n"
    code += "print(type(task(task_config=Elastic(increase_shared_mem=False))(train)).__name__)"
    script = tmp_path / "train.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ElasticFunctionTask", done.stderr


def test_an_unregistered_subclass_is_not_ours() -> None:
    """Flytekit looks up a task type by the configuration's exact class, so a user's subclass does not get ours."""

    @dataclass
    class OwnElastic(Elastic):
        pass

    assert type(task(task_config=OwnElastic(increase_shared_mem=False))(_train)) is PythonFunctionTask


def test_flytekitplugins_is_a_namespace_package() -> None:
    """Neither the namespace nor the folder above it has an __init__.py."""
    folder = Path(plugin.__file__).parents[1]
    assert folder.name == "flytekitplugins"
    assert not (folder / "__init__.py").exists()
    assert not (folder.parent / "__init__.py").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PyTorch(increase_shared_mem=False), "PyTorch needs worker.replicas"),
        (PyTorch(worker=Worker(replicas=2), num_workers=2, increase_shared_mem=False), "say the same"),
    ],
)
def test_the_number_of_workers_is_said_once(config: PyTorch, message: str) -> None:
    """A PyTorch task needs its number of workers, by one of the two names."""
    with pytest.raises(ValueError, match=message):
        task(task_config=config)(_train)


# --- the engine of an execution -------------------------------------------------------------------------------------


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[str]:
    """Run in a Flyte context whose raw output prefix is a folder of this test."""
    access = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"))
    context = FlyteContextManager.current_context()
    with FlyteContextManager.with_context(context.with_file_access(access)):
        yield str(tmp_path / "raw")


def _recording(function_task: Any) -> Recording:
    return run_module.recording_of(function_task.engine(), function_task.options())


@pytest.mark.parametrize(
    ("variable", "strategy"), [(None, "earliest"), ("evidence", "evidence"), ("of_a_module_not_loaded", None)]
)
def test_recording(raw: str, variable: str | None, strategy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy is the environment's, else the task's."""
    if variable is not None:
        monkeypatch.setenv(STRATEGY_VARIABLE, variable)
    config = Elastic(strategy="earliest", upload_deadline_seconds=2.5, increase_shared_mem=False)
    recording = _recording(task(task_config=config)(_train))
    assert recording.strategy == (strategy or variable)
    assert recording.upload_deadline_seconds == 2.5
    assert recording.incarnation > 0
    assert recording.output_prefix.startswith(raw)


def test_recording_is_switched_off(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty value in the environment switches recording off for one execution."""
    monkeypatch.setenv(STRATEGY_VARIABLE, "")
    assert task(task_config=ELASTIC)(_train).engine() is None


def test_two_local_calls_have_two_folders(raw: str) -> None:
    """Each local call has its own folder, so that it does not read another call's documents."""
    own = task(task_config=ELASTIC)(_train)
    prefixes = {_recording(own).output_prefix for _ in range(2)}
    assert len(prefixes) == 2


def test_the_output_prefix_is_the_entrypoints(raw: str) -> None:
    """In a pod the documents are below the stock entrypoint's output prefix."""
    command = click.Command("pyflyte-execute")
    with click.Context(command) as context:
        context.params["output_prefix"] = "s3://bucket/out/0"
        assert _recording(task(task_config=ELASTIC)(_train)).output_prefix == "s3://bucket/out/0"


def test_the_fallback_in_a_pod(raw: str) -> None:
    """Without the stock entrypoint, a pod's documents are below the raw output prefix."""
    context = FlyteContextManager.current_context()
    state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        assert _recording(task(task_config=ELASTIC)(_train)).output_prefix == raw


def test_a_slow_name_service_does_not_hold_the_task_up(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose address cannot be looked up in time has no address."""

    def fail() -> str:
        raise TimeoutError("name service")

    monkeypatch.setattr(run_module, "node_address", fail)
    assert _recording(task(task_config=ELASTIC)(_train)).ip == ""


# --- the verdict on its way to Flyte --------------------------------------------------------------------------------


def _dispatch(function_task: PythonFunctionTask[Any], folder: Path) -> Any:
    """Run a task as the stock entrypoint does in a pod."""
    context = FlyteContextManager.current_context()
    state = context.execution_state.with_params(
        mode=ExecutionState.Mode.TASK_EXECUTION, engine_dir=str(folder), working_dir=str(folder / "work")
    )
    settings = SerializationSettings(project="p", domain="d", version="v", image_config=None)
    inner = context.with_execution_state(state).with_serialization_settings(settings)
    with FlyteContextManager.with_context(inner) as pod:
        return function_task.dispatch_execute(pod, LiteralMap(literals={}))


@pytest.mark.usefixtures("raw")
@pytest.mark.parametrize(
    ("strategy", "name"), [(None, r"error\.pb"), ("", r"error\.pb"), ("Earliest", r"error-[0-9a-f]{32}\.pb")]
)
@pytest.mark.parametrize("config", [ELASTIC, PyTorch(worker=Worker(replicas=1), increase_shared_mem=False)])
def test_a_sealed_verdict_is_left_for_upload(
    config: Any, strategy: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seal is in the engine's folder under the name that the backend expects, and the outputs are empty."""
    if strategy is not None:
        monkeypatch.setenv("_F_DES", strategy)
    own = task(task_config=config)(_train)

    def execute(**_: object) -> None:
        raise VerdictSealedError("one line", Published(b"the sealed bytes", durable=False, writes_deck=False))

    monkeypatch.setattr(own, "execute", execute)
    outputs = _dispatch(own, tmp_path / "engine" / "dir")
    assert outputs == LiteralMap(literals={})
    (left,) = (tmp_path / "engine" / "dir").iterdir()
    assert re.fullmatch(name, left.name)
    assert left.read_bytes() == b"the sealed bytes"


@pytest.mark.parametrize("writes_deck", [False, True], ids=["nothing is left to upload", "the deck is left"])
def test_a_verdict_in_the_storage(writes_deck: bool, raw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the verdict is in the storage, the entrypoint uploads nothing; only flytekit's own deck may be left."""
    own = task(task_config=ELASTIC)(_train)

    def execute(**_: object) -> None:
        raise VerdictSealedError("one line", Published(b"the bytes", durable=True, writes_deck=writes_deck))

    monkeypatch.setattr(own, "execute", execute)
    if writes_deck:
        assert _dispatch(own, tmp_path / "engine") == LiteralMap(literals={})
        return
    with pytest.raises(FlyteUserRuntimeException) as caught:
        _dispatch(own, tmp_path / "engine")
    assert isinstance(caught.value.value, IgnoreOutputs)
    assert not list((tmp_path / "engine").rglob("error*"))


def test_another_exception_is_flytes(raw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception without a verdict is raised unchanged, and no file is written."""
    own = task(task_config=ELASTIC)(_train)

    def execute(**_: object) -> None:
        raise ValueError("boom")

    monkeypatch.setattr(own, "execute", execute)
    with pytest.raises(FlyteUserRuntimeException) as caught:
        _dispatch(own, tmp_path / "engine")
    assert isinstance(caught.value.value, ValueError)
    assert not list((tmp_path / "engine").rglob("error*"))


def test_outputs_are_flytes(raw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that succeeds returns its outputs and writes no error file."""
    own = task(task_config=ELASTIC)(_train)
    monkeypatch.setattr(own, "execute", lambda **_: 2.5)
    outputs = _dispatch(own, tmp_path / "engine")
    assert outputs.literals["o0"].scalar.primitive.float_value == 2.5
    assert not list((tmp_path / "engine").rglob("error*"))


def test_task_classes() -> None:
    """Both configurations are registered with flytekit."""
    assert type(task(task_config=ELASTIC)(_train)) is ElasticFunctionTask
    config = PyTorch(num_workers=2, increase_shared_mem=False)
    assert type(task(task_config=config)(_train)) is PyTorchFunctionTask
