"""NVIDIA's own wrapper, whose faults are on our record, and the names that ours has of it:
with the real package.
"""

import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import firstfault_inprocess as inprocess
from firstfault import MultiErrorFileOutputReader
from firstfault.model import RestartKind
from tests.plugin.running import Ended, running

pytestmark = pytest.mark.jobs
theirs = pytest.importorskip("nvidia_resiliency_ext.inprocess", reason="make nvrx runs it")

FILE = Path(__file__).parent / "jobs" / "nvrx.py"
MODULES = (
    "abort completion compose exception finalize health_check initialize rank_assignment state"
    " terminate wrap"
)
NOT_HERE = {
    *("HealthCheckPassed", "Layer", "LayerFlag", "Node", "Tree"),
    *(
        "AbortPersistentCheckpointProcesses",
        "ChainedGPUHealthCheck",
        "ChainedNVLHealthCheck",
        "ChainedNicHealthCheck",
    ),
}
"""NVIDIA's internal classes, and those in docs/guides/in-process-restart.md;
the second line is new in 0.7.0.
"""
NOT_TAKEN = {"monitor_process_pidfile", "torch_fr_trace_path"}
"""Arguments that are new in 0.7.0, and not here."""


@pytest.mark.parametrize("name", MODULES.split())
def test_a_program_changes_only_its_imports(name: str) -> None:
    """Each of NVIDIA's modules of hooks, options and errors exists here,
    with its classes and their arguments.
    """
    module, ours = (
        importlib.import_module(f"{package.__name__}.{name}") for package in (theirs, inprocess)
    )
    for key, kind in vars(module).items():
        if not inspect.isclass(kind) or kind.__module__ != module.__name__ or key in NOT_HERE:
            continue
        assert hasattr(ours, key), key
        if not issubclass(kind, BaseException) and key != "CallWrapper":
            wanted = [
                name
                for name in inspect.signature(kind).parameters
                if name not in {"args", "kwargs"} | NOT_TAKEN
            ]
            taken = inspect.signature(getattr(ours, key)).parameters
            assert (
                set(wanted) <= set(taken) if key == "Wrapper" else [*taken][: len(wanted)] == wanted
            ), key
    offered = {name for name in vars(theirs.CallWrapper) if not name.startswith("_")} - {"shutdown"}
    assert {"iteration", "ping", "atomic"} <= offered <= set(dir(inprocess.CallWrapper))


def test_the_installed_release_is_documented_with_its_arguments() -> None:
    """The release is one that docs/reference/versions.md names,
    and takes the arguments that the guide lists.
    """
    release = importlib.metadata.version("nvidia-resiliency-ext")
    taken = inspect.signature(theirs.Wrapper).parameters.keys() & {
        "rank_filter",
        "monitor_process_pidfile",
    }
    assert taken == {"0.4.1": {"rank_filter"}, "0.7.0": {"monitor_process_pidfile"}}[release]


def _end(folder: Path, faults: list[str]) -> Ended:
    with running(FILE, "train", folder, {"faults": faults}) as run:
        ended = run.end()
    assert run.find_leftovers() == []
    return ended


def test_a_job_succeeds_after_two_exceptions_with_both_restarts_on_record(tmp_path: Path) -> None:
    """After two exceptions the job succeeds; both restarts are on record, with what was raised."""
    ended = _end(tmp_path, ["2 raise", "0 raise"])
    assert ended.status == 0, ended.stderr
    assert ended.verdict is None
    reader = MultiErrorFileOutputReader(str(ended.prefix))
    assert not reader.is_error()
    first, second = reader.restarts()
    assert (first.kind, first.number, first.rank) == (RestartKind.IN_PROCESS, 0, 2)
    assert first.headline.startswith("rank 2: exception, FlyteRecoverableException: ")
    assert first.headline.endswith("the fault of iteration 0")
    assert (first.world_size_before, first.world_size_after) == (3, 3)
    assert (second.number, second.rank) == (1, 0)
    assert 0 < (first.lost_seconds or 0) < 60
    shown = subprocess.run(
        [sys.executable, "-m", "firstfault", "show", "--recovered", "--json", str(ended.prefix)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len(json.loads(shown.stdout)["restarts"]) == 2


def test_the_last_exception_is_the_root_cause_when_retries_end(tmp_path: Path) -> None:
    """When NVIDIA's RetryController gives up, the last exception is the root cause,
    and it decides on the retry.
    """
    ended = _end(tmp_path, ["2 raise", "0 raise", "1 raise"])
    assert ended.verdict["ranks"] == [1], ended.verdict
    assert "the fault of iteration 2" in ended.verdict["headline"]
    assert ended.verdict["code"] == "USER:Recoverable"
    ended.flyte_saw_the_verdict()
    records = MultiErrorFileOutputReader(str(ended.prefix)).restarts()
    assert [(record.number, record.rank) for record in records] == [(0, 2), (1, 0)]


def test_a_killed_worker_ends_the_round(tmp_path: Path) -> None:
    """NVIDIA's wrapper would go on without it; torch's agent stops the others. The killed
    rank is the root cause.
    """
    ended = _end(tmp_path, ["1 kill"])
    assert ended.verdict["ranks"] == [1], ended.verdict
    assert ended.verdict["category"] == "signal"
