"""Runs a case of the lab again, so that the rules are tested on the documents that the plugin writes today."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.model import Phase
from tests.cascades.cases import CASES
from tests.cascades.programs import faketime, truth_of
from tests.cascades.record import Lab
from tests.cascades.replay import is_decided_right, judge

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.jobs
def test_a_case(tmp_path: Path) -> None:
    """The sealed verdict and the one read afterwards both name the injector's truth."""
    case = CASES["raise-clock+5-rank3-of4"]
    try:
        faketime()
    except ValueError as error:
        pytest.skip(str(error))

    with Lab() as lab:
        run = lab.run(case, tmp_path)

    truth = truth_of(case, run.told)
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
