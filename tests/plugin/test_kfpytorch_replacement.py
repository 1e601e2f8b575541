"""Tasks that import stock kfpytorch run on firstfault, if the image or a shared module says so."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TASKS = """
from flytekit import task, workflow
from flytekitplugins.kfpytorch import Elastic, PyTorch, Worker


@task(task_config=Elastic(nnodes="2:4", nproc_per_node=2))
def elastic() -> float:
    return 1.0


@task(task_config=Elastic(nnodes=1, start_method="fork", increase_shared_mem=False))
def one_node() -> None:
    raise ValueError("no labels")


@task(task_config=PyTorch(worker=Worker(replicas=3)))
def pods() -> float:
    return 1.0


@workflow
def flow() -> float:
    return elastic().with_overrides(task_config=Elastic(nnodes=8, nproc_per_node=2))
"""
HOOK = "import flytekitplugins.firstfault.kfpytorch\n"


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs code in a process of its own, beside a module of tasks."""

    def in_process(code: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "training.py").write_text(TASKS)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=tmp_path,
        )

    return in_process


@pytest.mark.parametrize("first", ["flytekit", "flytekitplugins.kfpytorch"])
def test_an_entry_point_in_the_image_replaces_kfpytorch_for_every_process(
    run: Run, tmp_path: Path, first: str
) -> None:
    """A package with an entry point does it for every process that imports flytekit,
    whatever is imported first.
    """
    info = tmp_path / "our_platform-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our-platform\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[flytekit.plugins]\nfirstfault = flytekitplugins.firstfault.kfpytorch\n"
    )
    code = f"""
import {first}, training
print(type(training.elastic).__name__, type(training.pods).__name__, training.elastic.engine() is not None)
training.flow.compile()
config = training.elastic.task_config
print(config.nnodes, config.monitor_interval, config.strategy, type(config).__module__)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "firstfault: failed" not in done.stderr
    assert "ElasticFunctionTask PyTorchFunctionTask True" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "8 0.1 evidence flytekitplugins.firstfault.config"


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ("import sys\nsys.modules['flytekitplugins.kfpytorch'] = None\n", ""),
        (
            (
                "from flytekit.extend import TaskPlugins\ndel"
                " TaskPlugins._PYTHONFUNCTION_TASK_PLUGINS\n"
            ),
            "firstfault: failed while taking the place of kfpytorch's task types",
        ),
    ],
    ids=["no kfpytorch", "another flytekit"],
)
def test_the_hook_never_breaks_a_process(run: Run, lacks: str, said: str) -> None:
    """The hook cannot break a process: without kfpytorch there is nothing to do,
    another flytekit is a warning.
    """
    done = run(lacks + HOOK)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert bool(said) == ("firstfault: failed" in done.stderr)


@pytest.mark.jobs
def test_a_stock_task_fails_with_a_verdict(run: Run) -> None:
    """A stock task that fails raises firstfault's error, with the name of the rank."""
    done = run(HOOK + "import training\ntraining.one_node()\n")
    assert done.returncode != 0
    assert "ValueError rank 0" in done.stdout + done.stderr
