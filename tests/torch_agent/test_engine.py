"""What an engine must implement, and what it gets from the protocol."""

import threading
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from firstfault.model import ExceptionInfo
from firstfault_torch import Engine, ErrorName, NodeFailedError, PlainEngine, launch
from firstfault_torch.engine import Publication
from firstfault_torch.node_context import Identity

pytestmark = [pytest.mark.slow, pytest.mark.forks]


class _EngineOfFourMethods(Engine):
    """What a new engine has to write, here by a plain engine."""

    def __init__(self, folder: Path) -> None:
        self._plain = PlainEngine(str(folder))

    def identity(self) -> Identity:
        return self._plain.identity()

    def name_error(self, error: BaseException, exception: ExceptionInfo) -> ErrorName:
        return self._plain.name_error(error, exception)

    def publish(
        self,
        publication: Publication,
        *,
        shutdown_requested: threading.Event | None = None,
        leaving_now: bool = False,
    ) -> Publication:
        return self._plain.publish(
            publication, shutdown_requested=shutdown_requested, leaving_now=leaving_now
        )

    def published_verdict(self) -> bytes | None:
        return self._plain.published_verdict()


def _fail() -> None:
    raise LookupError("no such label")


def _run(folder: Path, function: object) -> object:
    config = LaunchConfig(
        1,
        1,
        nproc_per_node=1,
        start_method="fork",
        max_restarts=0,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )
    return launch(config, function, engine=_EngineOfFourMethods(folder))


def test_four_methods_run_a_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failure is published and logged, and nothing claims that a retry follows."""
    with pytest.raises(NodeFailedError) as failed:
        _run(tmp_path, _fail)
    assert failed.value.verdict is not None
    assert failed.value.verdict.decision.enforced is False
    assert (tmp_path / "0" / "error.pb").read_bytes() == failed.value.verdict.document
    assert failed.value.verdict.seal.message in caplog.text


def test_four_methods_wait_for_nothing_after_a_success(tmp_path: Path) -> None:
    """A node whose workers have succeeded waits for nothing."""
    assert _run(tmp_path, int) == {0: 0}


def test_an_engine_without_its_methods_is_refused() -> None:
    """A forgotten method is an error when the engine is made, not when a job fails."""
    with pytest.raises(TypeError, match="abstract method"):
        type("Forgetful", (Engine,), {})()
