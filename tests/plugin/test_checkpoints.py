"""flytekit's checkpoint in a worker, after an attempt that saved one and after one that saved none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flytekit
import pytest
from flytekit.bin import entrypoint
from flytekit.bin.entrypoint import setup_execution
from flytekit.core.mock_stats import MockStats

from flytekitplugins.firstfault.flytekit_classes import expect_missing_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


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
