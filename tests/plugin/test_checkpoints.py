"""flytekit's checkpoint in a worker, after an attempt that saved one and after one that saved none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flytekit
import pytest
from flytekit.bin import entrypoint
from flytekit.bin.entrypoint import setup_execution
from flytekit.core.mock_stats import MockStats

from firstfault_torch.options import Options
from flytekitplugins.firstfault.entrypoints import expect_missing_checkpoint
from flytekitplugins.firstfault.flyte_engine import FlyteEngine
from flytekitplugins.firstfault.pytorch import run_in_pod

if TYPE_CHECKING:
    from pathlib import Path

    from tests.prefix import Prefix


@pytest.mark.parametrize("saved", [b"", b"weights"])
def test_what_the_attempt_before_saved(saved: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a saved checkpoint a retry reads None, as a first attempt does; flytekit raises."""
    monkeypatch.setattr(entrypoint, "_get_stats", lambda **_: MockStats())
    before = tmp_path / "before"
    if saved:
        before.mkdir()
        (before / "_dst_cp").write_bytes(saved)
    with setup_execution(
        raw_output_data_prefix=str(tmp_path / "raw"),
        checkpoint_path=str(tmp_path / "checkpoint"),
        prev_checkpoint=str(before),
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


def test_an_execution_without_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Flyte gives no folder for checkpoints, nothing is changed."""
    monkeypatch.setattr(entrypoint, "_get_stats", lambda **_: MockStats())
    with setup_execution(raw_output_data_prefix=str(tmp_path / "raw")):
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


def test_a_task_that_reads_what_was_not_saved(prefix: Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod of a PyTorch task reads None without preparing anything."""
    monkeypatch.setattr(entrypoint, "_get_stats", lambda **_: MockStats())
    for name, value in {**prefix.recording().environment(), "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with setup_execution(
        raw_output_data_prefix=str(tmp_path / "raw"),
        checkpoint_path=str(tmp_path / "checkpoint"),
        prev_checkpoint=str(tmp_path / "before"),
    ):
        assert run_in_pod(_read, FlyteEngine(prefix.uri, in_pod=True), Options()) is None
