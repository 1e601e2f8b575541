"""Runs a case of the lab again, so that the rules are tested on the documents that the plugin writes today."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.model import Phase
from tests.cascades.cases import CASES
from tests.cascades.programs import faketime
from tests.cascades.record import Lab
from tests.cascades.replay import is_decided_right, judge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_NAMES = ("raise-clock+5-rank3-of4",)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Return a lab for this module."""
    with Lab() as opened:
        yield opened


@pytest.mark.jobs
@pytest.mark.parametrize("name", _NAMES)
def test_a_case(name: str, lab: Lab, tmp_path: Path) -> None:
    """The sealed verdict and the one read afterwards both name the injector's truth."""
    case = CASES[name]
    if case.clock is not None:
        try:
            faketime()
        except ValueError as error:
            pytest.skip(str(error))

    run = lab.run(case, tmp_path)

    truth = {
        "fault": case.fault,
        "scope": case.scope,
        "ranks": [item["rank"] for item in run.told],
        "nodes": sorted({item["node"] for item in run.told}),
    }
    reader = MultiErrorFileOutputReader(run.prefix, strategy="evidence")
    job, verdict = reader.job(), reader.verdict()
    assert verdict is not None
    assert judge(truth, verdict) == "right", (truth, verdict.headline, verdict.why)
    assert is_decided_right(truth, verdict)
    seen = run.ended.attempt["engine"]["error_seen"]
    assert (seen["code"], seen["worker"]) == (verdict.root.code if verdict.root else verdict.code, verdict.node or "")
    # every node names the same failure as the end of the round
    told = {entry.first_failure for entry in job.roster if entry.phase is Phase.FAILED}
    assert len({(cause.rank, cause.node) for cause in told if cause is not None}) == 1
