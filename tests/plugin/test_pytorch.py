"""A `PyTorch` task in a pod: one process without an agent, which writes its own documents."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import flytekit
import pytest
from flytekit import task
from flytekit.bin import entrypoint
from flytekit.bin.entrypoint import setup_execution
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.mock_stats import MockStats
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import IgnoreOutputs

from firstfault.layout import roster_key_for
from firstfault.model import NodePresence, Phase
from firstfault.testing import make_presence
from firstfault.wire.documents import encode_presence
from firstfault_torch.notifiers import WEBHOOK_VARIABLE
from firstfault_torch.options import Options
from flytekitplugins.firstfault import PyTorch, Worker
from flytekitplugins.firstfault.config import STRATEGY_VARIABLE
from flytekitplugins.firstfault.flyte_engine import FlyteEngine
from flytekitplugins.firstfault.flytekit_classes import (
    VerdictSealedError,
    expect_missing_checkpoint,
)
from flytekitplugins.firstfault.pytorch import run_in_pod
from tests.http_receiver import serve_receiver
from tests.prefix import Prefix

CONFIG = PyTorch(worker=Worker(replicas=1), settle_seconds=0.2, increase_shared_mem=False)


@pytest.fixture(autouse=True)
def pod(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process look like the worker pod of a job with a master,
    started by the stock entrypoint.
    """
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "_F_WN": "job-worker-0",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    context = FlyteContextManager.current_context()
    state = context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
    with click.Context(click.Command("pyflyte-execute")) as command:
        command.params["output_prefix"] = prefix.uri
        with FlyteContextManager.with_context(context.with_execution_state(state)):
            yield


def _execute(function: Callable[[], Any], config: PyTorch = CONFIG) -> Any:
    def train() -> Any:
        return function()

    return task(task_config=config)(train).execute()


def _write_roster(prefix: Prefix, entry: NodePresence) -> None:
    folder = prefix.folder / "firstfault" / "roster"
    folder.mkdir(parents=True)
    (folder / roster_key_for(entry)).write_bytes(encode_presence(entry))


def test_a_successful_pod_writes_joined_and_succeeded(prefix: Prefix) -> None:
    """A pod that succeeds writes roster entries when it joins and when it has succeeded."""
    assert _execute(lambda: 2.5) == 2.5
    assert {entry.phase for entry in prefix.roster()} == {Phase.JOINED, Phase.SUCCEEDED}
    assert {
        (entry.place.node, entry.place.group_rank, entry.ranks) for entry in prefix.roster()
    } == {("job-worker-0", 1, (1,))}
    assert prefix.failures() == []


def test_a_recoverable_verdict_raises_flytes_recoverable_exception() -> None:
    """The task raises a FlyteRecoverableException if the verdict is recoverable,
    also outside of a dispatch.
    """
    with pytest.raises(VerdictSealedError) as caught:
        _execute(Mock(side_effect=FlyteRecoverableException("shard 7")))
    assert isinstance(caught.value, FlyteRecoverableException)


@pytest.mark.parametrize("master", [Phase.JOINED, Phase.SUCCEEDED, Phase.FAILED])
def test_only_the_first_failed_pod_notifies_after_publishing(
    prefix: Prefix, master: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the failed pods sends the verdict to the webhook, after it has been published;
    the others do not.
    """
    _write_roster(prefix, make_presence(master, node="job-master-0", group_rank=0, nodes=2))
    with serve_receiver() as webhook:
        monkeypatch.setenv(WEBHOOK_VARIABLE, webhook.url)
        with pytest.raises(VerdictSealedError):
            _execute(Mock(side_effect=ValueError("bad batch")))
    assert (prefix.folder / "error.pb").exists()
    events = [json.loads(request.body) for request in webhook.received]
    assert [event["data"]["root"]["message"] for event in events] == (
        ["bad batch"] if master != Phase.FAILED else []
    )


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0), IgnoreOutputs()], ids=repr)
def test_a_clean_exit_and_ignore_outputs_are_no_failures(
    error: BaseException, prefix: Prefix
) -> None:
    """A clean exit, and IgnoreOutputs for a pod without outputs, are not failures."""
    with pytest.raises(type(error)):
        _execute(Mock(side_effect=error))
    assert prefix.failures() == []


def test_switched_off_the_exception_passes_and_nothing_is_written(
    prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty strategy the exception passes unchanged and nothing is written."""
    monkeypatch.setenv(STRATEGY_VARIABLE, "")
    error = ValueError("bad batch")
    with pytest.raises(ValueError, match="bad batch") as caught:
        _execute(Mock(side_effect=error))
    assert caught.value is error
    assert not prefix.folder.exists()


def test_the_users_exception_passes_if_firstfault_cannot_conclude(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If our code cannot conclude, the user's exception passes unchanged."""
    broken = Mock(side_effect=ZeroDivisionError("ours"))
    monkeypatch.setattr("flytekitplugins.firstfault.pytorch.conclude_on_node", broken)
    error = ValueError("bad batch")
    with pytest.raises(ValueError, match="bad batch") as caught:
        _execute(Mock(side_effect=error))
    assert caught.value is error
    assert caught.value.__context__ is None
    assert "ZeroDivisionError: ours" in caplog.text


@contextlib.contextmanager
def _execution(folder: Path, **checkpoints: str) -> Iterator[None]:
    """Run the block in the execution that Flyte's entrypoint makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entrypoint, "_get_stats", lambda **_: MockStats())
        with setup_execution(raw_output_data_prefix=str(folder / "raw"), **checkpoints):
            yield


@pytest.mark.parametrize("saved", [b"", b"weights"])
def test_a_retry_without_a_saved_checkpoint_reads_none(saved: bytes, tmp_path: Path) -> None:
    """Without a saved checkpoint a retry reads None, as a first attempt does; flytekit raises."""
    before = tmp_path / "before"
    if saved:
        before.mkdir()
        (before / "_dst_cp").write_bytes(saved)
    with _execution(
        tmp_path, checkpoint_path=str(tmp_path / "checkpoint"), prev_checkpoint=str(before)
    ):
        expect_missing_checkpoint()
        checkpoint = flytekit.current_context().checkpoint
        assert checkpoint.prev_exists() is bool(saved)
        assert (checkpoint.read() or b"") == saved
        assert (checkpoint.restore() is None) is not bool(saved)
        checkpoint.write(b"of this attempt")
        checkpoint._td.cleanup()
    written = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in written] == [b"of this attempt"]


def test_without_a_checkpoint_folder_nothing_is_changed(tmp_path: Path) -> None:
    """Where Flyte gives no folder for checkpoints, nothing is changed."""
    with _execution(tmp_path):
        expect_missing_checkpoint()
        with pytest.raises(NotImplementedError):
            flytekit.current_context().checkpoint.read()


def _read() -> bytes | None:
    checkpoint = flytekit.current_context().checkpoint
    try:
        found: bytes | None = checkpoint.read()
    finally:
        checkpoint._td.cleanup()
    return found


def test_a_pytorch_tasks_pod_reads_none_without_a_checkpoint(
    prefix: Prefix, tmp_path: Path
) -> None:
    """The pod of a PyTorch task reads None without preparing anything."""
    folders = {
        "checkpoint_path": str(tmp_path / "checkpoint"),
        "prev_checkpoint": str(tmp_path / "before"),
    }
    with _execution(tmp_path, **folders):
        assert run_in_pod(_read, FlyteEngine(prefix.uri, in_pod=True), Options()) is None
