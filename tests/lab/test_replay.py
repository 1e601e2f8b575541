"""`evidence` on every recorded cascade: a change of its rules that changes a verdict fails here."""

import json
from pathlib import Path

import pytest

from firstfault.retry import decide
from lab.cascades.cases import CASES, NOT_KNOWN, PROGRAMS
from lab.cascades.replay import (
    OF_PROGRAMS,
    RECORDED,
    is_decided_right,
    judge,
    load,
    main,
    right_decision,
    verdict_of,
)

FILES = sorted(RECORDED.glob("*.zip"))
FILES_OF_PROGRAMS = sorted(OF_PROGRAMS.glob("*.zip"))


@pytest.mark.parametrize("file", FILES + FILES_OF_PROGRAMS, ids=lambda file: file.stem)
def test_the_verdict_on_a_recorded_cascade_is_the_injected_fault(file: Path) -> None:
    """The verdict names the injector's truth, and the decision is right;
    `NOT_KNOWN` cascades are undetermined.
    """
    cascade = load(file)

    verdict = verdict_of(cascade, "evidence")

    said = (verdict.headline, verdict.confidence, verdict.why) if verdict is not None else None
    outcome = "undetermined" if file.stem in NOT_KNOWN else "right"
    assert judge(cascade.truth, verdict) == outcome, (
        cascade.truth["ranks"],
        cascade.truth["nodes"],
        said,
    )
    decided = decide(verdict) if verdict is not None else None
    assert is_decided_right(cascade.truth, verdict), (decided, right_decision(cascade.truth))


def test_every_case_is_recorded() -> None:
    """Every case of the lab has a recording, and every recording has a case."""
    assert {file.stem for file in FILES} == set(CASES)
    assert {file.stem for file in FILES_OF_PROGRAMS} == set(PROGRAMS)


@pytest.mark.parametrize(
    ("last", "status", "counted"),
    [
        ("right", 0, "2 of 2"),
        ("partial", 0, "2 of 2"),
        ("undetermined", 0, "1 of 1"),
        ("wrong", 1, "1 of 2"),
        ("story", 1, "1 of 2"),
    ],
)
def test_a_wrong_verdict_with_high_confidence_fails_the_replay(
    last: str,
    status: int,
    counted: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Verdicts on generated trainings count in the table of confidences;
    a wrong one with "high" fails the command.
    """
    for seed, result in enumerate(("right", last)):
        outcome = tmp_path / "campaign" / str(seed) / "outcome.json"
        outcome.parent.mkdir(parents=True)
        outcome.write_text(json.dumps({"result": result, "confidence": "high"}))
    assert main(["no recording", "--generated", str(tmp_path / "campaign")]) == status
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("campaign ")]
    assert counted in row
