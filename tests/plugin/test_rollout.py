"""Tasks that import stock kfpytorch run on firstfault, if the image or a shared module says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

TASKS = """
from flytekit import Resources, task, workflow
from {module} import CleanPodPolicy, Elastic, Master, PyTorch, RestartPolicy, RunPolicy, Worker


POLICY = RunPolicy(clean_pod_policy=CleanPodPolicy.ALL, backoff_limit=3)
MASTER = Master(restart_policy=RestartPolicy.FAILURE)
WORKERS = Worker(replicas=3, requests=Resources(cpu="2"), restart_policy=RestartPolicy.NEVER)


@task(task_config=Elastic(nnodes="2:4", nproc_per_node=2, max_restarts=1, run_policy=POLICY), retries=2)
def elastic() -> float:
    return 1.0


@task(task_config=Elastic(nnodes=1, start_method="fork", increase_shared_mem=False))
def one_node() -> None:
    raise ValueError("no labels")


@task(task_config=Elastic(nnodes=2), environment={{"FLYTE_INTERNAL_ERROR_PROPAGATION": ""}})
def opted_out() -> float:
    return 1.0


@task(task_config=PyTorch(worker=WORKERS, master=MASTER, run_policy=POLICY))
def pods() -> float:
    return 1.0


@workflow
def flow() -> float:
    return elastic().with_overrides(task_config=Elastic(nnodes=8, nproc_per_node=2))
"""
SERIALIZE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import training
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable
from google.protobuf.json_format import MessageToDict
settings = SerializationSettings(image_config=ImageConfig(Image("a", "b", "c")), project="p", domain="d", version="v")
found = {}
for name in ("elastic", "one_node", "opted_out", "pods"):
    task = getattr(training, name)
    template = MessageToDict(get_serializable({}, settings, task).template.to_flyte_idl())
    found[name] = {"class": type(task).__name__, "template": template}
json.dump(found, sys.stdout)
"""
HOOK = "import flytekitplugins.firstfault.kfpytorch\n"


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs code in a process of its own, beside a module of tasks."""

    def in_process(code: str, module: str = "flytekitplugins.kfpytorch") -> subprocess.CompletedProcess[str]:
        (tmp_path / "training.py").write_text(TASKS.format(module=module))
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)

    return in_process


def _serialized(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_stock_tasks_become_ours(run: Run) -> None:
    """With the hook, a stock task's template is that of firstfault's own task; kfpytorch's differs by one variable.

    An empty variable in a task's environment stays empty, so that its pods record nothing.
    """
    stock, hooked = _serialized(run(SERIALIZE)), _serialized(run(HOOK + SERIALIZE))
    ours = _serialized(run(SERIALIZE, "flytekitplugins.firstfault"))
    assert {name: found["template"] for name, found in hooked.items()} == {
        name: found["template"] for name, found in ours.items()
    }
    (variable,) = [item for container in _containers(hooked["opted_out"]["template"]) for item in container["env"]]
    assert _name(variable) == "FLYTE_INTERNAL_ERROR_PROPAGATION"
    assert not variable.get("value")
    for name, found in hooked.items():
        assert found["class"] == ("PyTorchFunctionTask" if name == "pods" else "ElasticFunctionTask")
        _without_variable(found["template"])
        _without_variable(stock[name]["template"])
        assert found["template"] == stock[name]["template"]


def _without_variable(template: dict[str, Any]) -> None:
    """Take the variable that names the strategy out of a template, and flytekit's version."""
    del template["metadata"]["runtime"]
    for container in _containers(template):
        left = [item for item in container.pop("env", []) if _name(item) != "FLYTE_INTERNAL_ERROR_PROPAGATION"]
        if left:
            container["env"] = left


def _containers(found: Any) -> list[dict[str, Any]]:
    """Return all objects in a template that have environment variables."""
    if isinstance(found, list):
        return [item for part in found for item in _containers(part)]
    if not isinstance(found, dict):
        return []
    own = [found] if "env" in found else []
    return [*own, *(item for part in found.values() for item in _containers(part))]


def _name(variable: dict[str, Any]) -> str:
    return str(variable.get("key") or variable.get("name"))


@pytest.mark.parametrize("first", ["flytekit", "flytekitplugins.kfpytorch"])
def test_by_the_image(run: Run, tmp_path: Path, first: str) -> None:
    """A package with an entry point does it for every process that imports flytekit, whatever is imported first.

    `with_overrides` takes kfpytorch's configuration, and the options that kfpytorch lacks have our defaults.
    """
    info = tmp_path / "our_platform-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our-platform\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flytekit.plugins]\nfirstfault = flytekitplugins.firstfault.kfpytorch\n")
    code = f"""
import {first}, training
print(type(training.elastic).__name__, training.elastic.engine() is not None)
training.flow.compile()
config = training.elastic.task_config
print(config.nnodes, config.monitor_interval, config.strategy, type(config).__module__)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "firstfault failed" not in done.stderr
    assert "ElasticFunctionTask True" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "8 0.1 evidence flytekitplugins.firstfault.config"


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("import sys\nsys.modules['flytekitplugins.kfpytorch'] = None\n", ""),
        (
            "from flytekit.extend import TaskPlugins\ndel TaskPlugins._PYTHONFUNCTION_TASK_PLUGINS\n",
            "firstfault failed while taking the place of kfpytorch's task types",
        ),
    ],
    ids=["no kfpytorch", "another flytekit"],
)
def test_what_is_missing(run: Run, lacks: str, said: str) -> None:
    """The hook cannot break a process: without kfpytorch there is nothing to do, another flytekit is a warning."""
    done = run(lacks + HOOK)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert bool(said) == ("firstfault failed" in done.stderr)


@pytest.mark.jobs
def test_a_stock_task_fails_with_a_verdict(run: Run) -> None:
    """A stock task that fails raises firstfault's error, with the name of the rank."""
    done = run(HOOK + "import training\ntraining.one_node()\n")
    assert done.returncode != 0
    assert "ValueError rank 0" in done.stdout + done.stderr
