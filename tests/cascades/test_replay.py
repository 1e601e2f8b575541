"""Every recorded cascade, judged by `evidence`: a change of rules shows here what it turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cascades.replay import RECORDED, judge, load, verdict_of

if TYPE_CHECKING:
    from pathlib import Path

FILES = sorted(RECORDED.glob("*.zip"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_cascade(file: Path) -> None:
    """The verdict names what the injector wrote down."""
    cascade = load(file)
    verdict = verdict_of(cascade, "evidence")
    said = (verdict.headline, verdict.confidence, verdict.why) if verdict is not None else None
    assert judge(cascade.truth, verdict) == "right", (cascade.truth["ranks"], cascade.truth["nodes"], said)


def test_the_lab_is_not_empty() -> None:
    """The files are there."""
    assert len(FILES) > 20
