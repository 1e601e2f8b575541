"""The task types: their names, other plugins beside them, their executions,
and the way of a verdict to Flyte.
"""

import importlib
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

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
from firstfault_torch.node_context import NodeContext
from flytekitplugins.firstfault import (
    Elastic,
    ElasticFunctionTask,
    PyTorch,
    PyTorchFunctionTask,
    Worker,
)
from flytekitplugins.firstfault.config import STRATEGY_VARIABLE
from flytekitplugins.firstfault.elastic import pickled
from flytekitplugins.firstfault.flytekit_classes import VerdictSealedError

ELASTIC = Elastic(increase_shared_mem=False)


def _train() -> float:
    """Stand in for a training loop."""
    return 1.0


def test_the_package_has_kfpytorchs_names_in_a_shared_namespace() -> None:
    """The package has kfpytorch's names, in a namespace that both share;
    each has its own task types.
    """
    stock = importlib.import_module("flytekitplugins.kfpytorch")
    of_kfpytorch = {
        "CleanPodPolicy",
        "Elastic",
        "Master",
        "PyTorch",
        "RestartPolicy",
        "RunPolicy",
        "Worker",
    }
    assert set(plugin.__all__) == {
        *of_kfpytorch,
        "ElasticFunctionTask",
        "Hang",
        "PyTorchFunctionTask",
        "Watchdog",
    }
    assert all(hasattr(stock, name) for name in of_kfpytorch)
    for name in plugin.__all__:
        assert getattr(plugin, name).__module__.startswith(
            ("flytekitplugins.firstfault", "firstfault_torch.")
        )
    assert flytekitplugins.__file__ is None
    folder = Path(plugin.__file__).parents[1]
    assert not (folder / "__init__.py").exists()
    assert not (folder.parent / "__init__.py").exists()
    theirs = task(task_config=stock.Elastic(increase_shared_mem=False))(_train)
    assert type(theirs) is stock.task.PytorchElasticFunctionTask
    assert type(task(task_config=ELASTIC)(_train)) is ElasticFunctionTask
    config = PyTorch(num_workers=2, increase_shared_mem=False)
    assert type(task(task_config=config)(_train)) is PyTorchFunctionTask


@pytest.mark.slow
def test_defining_a_task_imports_no_torch(tmp_path: Path) -> None:
    """Defining a task does not import torch, also if the stock plugin is installed;
    the task has our type.
    """
    script = tmp_path / "train.py"
    script.write_text("""
import sys
import flytekitplugins.firstfault
assert 'torch' not in sys.modules
import flytekitplugins.kfpytorch
from flytekit import task

@task(task_config=flytekitplugins.firstfault.Elastic(increase_shared_mem=False))
def train() -> float:
    return 1.0

print(type(train).__name__)
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ElasticFunctionTask", done.stderr


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PyTorch(increase_shared_mem=False), "PyTorch needs worker.replicas"),
        (
            PyTorch(worker=Worker(replicas=2), num_workers=2, increase_shared_mem=False),
            "mean the same",
        ),
    ],
)
def test_the_number_of_workers_has_exactly_one_of_two_names(config: PyTorch, message: str) -> None:
    """A PyTorch task needs its number of workers, by one of the two names."""
    with pytest.raises(ValueError, match=message):
        task(task_config=config)(_train)


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[str]:
    """Run in a Flyte context whose raw output prefix is a folder of this test."""
    access = FileAccessProvider(str(tmp_path / "sandbox"), str(tmp_path / "raw"))
    context = FlyteContextManager.current_context()
    with FlyteContextManager.with_context(context.with_file_access(access)):
        yield str(tmp_path / "raw")


def _node_context(function_task: Any) -> NodeContext:
    return run_module.build_node_context(function_task.engine(), function_task.options())


@pytest.mark.parametrize(
    ("variable", "strategy"),
    [(None, "earliest"), ("evidence", "evidence"), ("of_a_module_not_loaded", None)],
)
def test_the_strategy_is_the_environments_else_the_tasks(
    raw: str,
    variable: str | None,
    strategy: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The strategy is the environment's, else the task's."""
    if variable is not None:
        monkeypatch.setenv(STRATEGY_VARIABLE, variable)
    config = Elastic(strategy="earliest", upload_deadline_seconds=2.5, increase_shared_mem=False)
    node_context = _node_context(task(task_config=config)(_train))
    assert node_context.strategy == (strategy or variable)
    assert node_context.upload_deadline_seconds == 2.5
    assert node_context.incarnation > 0
    assert node_context.output_prefix.startswith(raw)


def test_documents_lie_in_the_output_prefix_or_a_folder_of_the_local_call(raw: str) -> None:
    """In a pod it is the entrypoint's output prefix, else the raw one;
    each local call has a folder of its own.
    """
    own = task(task_config=ELASTIC)(_train)
    assert len({_node_context(own).output_prefix for _ in range(2)}) == 2
    with click.Context(click.Command("pyflyte-execute")) as command:
        command.params["output_prefix"] = "s3://bucket/out/0"
        assert _node_context(own).output_prefix == "s3://bucket/out/0"
    context = FlyteContextManager.current_context()
    state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with FlyteContextManager.with_context(context.with_execution_state(state)):
        assert _node_context(own).output_prefix == raw


def _dispatch(function_task: PythonFunctionTask[Any], folder: Path) -> Any:
    """Run a task as the stock entrypoint does in a pod."""
    context = FlyteContextManager.current_context()
    state = context.execution_state.with_params(
        mode=ExecutionState.Mode.TASK_EXECUTION,
        engine_dir=str(folder),
        working_dir=str(folder / "work"),
    )
    settings = SerializationSettings(project="p", domain="d", version="v", image_config=None)
    inner = context.with_execution_state(state).with_serialization_settings(settings)
    with FlyteContextManager.with_context(inner) as pod:
        return function_task.dispatch_execute(pod, LiteralMap(literals={}))


def _executing(
    monkeypatch: pytest.MonkeyPatch, outcome: object, config: Any = ELASTIC
) -> PythonFunctionTask[Any]:
    """Return a task whose execution has this outcome, or raises it."""
    own = task(task_config=config)(_train)
    monkeypatch.setattr(own, "execute", Mock(side_effect=[outcome]))
    return own


def _sealed(*, durable: bool, is_deck_pending: bool) -> VerdictSealedError:
    verdict = SimpleNamespace(headline="one line")
    publication = SimpleNamespace(
        sealed=SimpleNamespace(verdict=verdict, document=b"the sealed bytes"),
        durable=durable,
        is_deck_pending=is_deck_pending,
    )
    return VerdictSealedError(cast("Any", publication))


@pytest.mark.usefixtures("raw")
@pytest.mark.parametrize(
    ("strategy", "name"),
    [("", r"error\.pb"), ("Earliest", r"error-[0-9a-f]{32}\.pb")],
    ids=["one file", "a file each"],
)
@pytest.mark.parametrize(
    "config", [ELASTIC, PyTorch(worker=Worker(replicas=1), increase_shared_mem=False)]
)
def test_a_sealed_verdict_is_uploaded_under_the_expected_name(
    config: Any,
    strategy: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The seal is in the engine's folder under the name that the backend expects,
    and the outputs are empty.
    """
    monkeypatch.setenv("_F_DES", strategy)
    own = _executing(monkeypatch, _sealed(durable=False, is_deck_pending=False), config)
    assert _dispatch(own, tmp_path / "engine" / "dir") == LiteralMap(literals={})
    (left,) = (tmp_path / "engine" / "dir").iterdir()
    assert re.fullmatch(name, left.name)
    assert left.read_bytes() == b"the sealed bytes"


@pytest.mark.usefixtures("raw")
@pytest.mark.parametrize(
    ("outcome", "raised"),
    [
        (_sealed(durable=True, is_deck_pending=False), IgnoreOutputs),
        (ValueError("boom"), ValueError),
    ],
    ids=["in the storage", "of the user"],
)
def test_a_stored_verdict_or_a_foreign_exception_leaves_no_file(
    outcome: Exception,
    raised: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a verdict in the storage the entrypoint uploads nothing;
    an exception without a verdict is Flyte's.
    """
    with pytest.raises(FlyteUserRuntimeException) as caught:
        _dispatch(_executing(monkeypatch, outcome), tmp_path / "engine")
    assert isinstance(caught.value.value, raised)
    assert not list((tmp_path / "engine").rglob("error*"))


@pytest.mark.usefixtures("raw")
def test_only_a_task_that_succeeds_has_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that succeeds returns its outputs; one whose verdict is stored has none,
    and may leave its deck.
    """
    outputs = _dispatch(_executing(monkeypatch, 2.5), tmp_path / "engine")
    assert outputs.literals["o0"].scalar.primitive.float_value == 2.5
    assert not list((tmp_path / "engine").rglob("error*"))
    own = _executing(monkeypatch, _sealed(durable=True, is_deck_pending=True))
    assert _dispatch(own, tmp_path / "other") == LiteralMap(literals={})


def test_a_pickled_functions_traceback_names_its_file() -> None:
    """A function that is pickled by value, and one inside it, name this file;
    so do their tracebacks and stacks.
    """

    def outer(number: int) -> object:
        def inner() -> int:
            return number

        return inner

    function = pickle.loads(pickled(partial(outer, 3)))  # noqa: S301 - pickled above
    inner = function()
    assert inner() == 3
    assert function.func is not outer, "it was pickled by reference"
    assert {function.func.__code__.co_filename, inner.__code__.co_filename} == {__file__}
