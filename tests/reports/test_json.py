"""The JSON of a report: its schema, and that it leaves out nothing that the text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from firstfault.render.json_report import json_report
from firstfault.report.headline import first_line
from firstfault.wire.json_schemas import decision_from_json, verdict_from_json
from tests.reports.scenes import CATEGORY_SCENES, HARD_SCENES, SCOPE_SCENES, URI

if TYPE_CHECKING:
    from collections.abc import Callable

    from firstfault.report import Report

_SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "verdict-v1.schema.json").read_text())
_SCENES = {**SCOPE_SCENES, **CATEGORY_SCENES, **HARD_SCENES}


def _closed(schema: Any) -> Any:
    """Return a schema that refuses fields which it does not describe."""
    if isinstance(schema, dict):
        found = {name: _closed(value) for name, value in schema.items()}
        if "properties" in found and "additionalProperties" not in found:
            found["additionalProperties"] = False
        return found
    return [_closed(item) for item in schema] if isinstance(schema, list) else schema


def test_the_schema_is_valid() -> None:
    """It is a JSON Schema of the draft that it names, also for the answer about an attempt that did not fail."""
    Draft202012Validator.check_schema(_SCHEMA)
    assert _SCHEMA["$schema"].endswith("2020-12/schema")
    Draft202012Validator(_SCHEMA).validate({"schema": "firstfault.verdict/v1", "verdict": None, "decision": None})


@pytest.mark.parametrize("name", _SCENES)
def test_each_report_matches_the_schema(name: str) -> None:
    """Each field is described and has the described type; what reads a sealed verdict also reads this."""
    report = _SCENES[name]()
    text = json_report(report)
    Draft202012Validator(_closed(_SCHEMA)).validate(json.loads(text))
    assert decision_from_json(text) == report.decision
    found = verdict_from_json(text)
    assert found is not None
    assert (found.headline, found.ranks) == (report.verdict.headline, report.verdict.ranks)


@pytest.mark.parametrize("scene", [*SCOPE_SCENES.values(), *CATEGORY_SCENES.values()])
def test_it_says_what_the_text_says(scene: Callable[[], Report]) -> None:
    """Answers, commands, states of ranks and the root cause's place are fields."""
    report = scene()
    found = json.loads(json_report(report))
    assert found["first_line"] == first_line(report.verdict, report.decision)
    assert [step["command"] or "" for step in found["next"]] == [step.command for step in report.answers.steps]
    assert found["unknown"] == list(report.answers.unknown)
    assert (found["uri"], found["attempt"]) == (URI, 0)
    assert found["execution"] == "project-development-a7xk2m9qp4vd8wz3hj6t"
    ranks = [rank for members in found["victims_by_state"].values() for rank in members]
    assert sorted([*ranks, *report.verdict.ranks]) == [item.rank for item in report.cascade.ranks]
    root = report.verdict.root
    if root is None:
        assert found["root"] is None
        return
    place = found["root"]
    assert (place["rank"], place["pod"], place["machine"]) == (root.rank, root.node, root.place.machine or None)
    if report.answers.code and root.exception is not None:
        assert report.answers.code == f"{place['file'].rpartition('/')[2]}:{place['line']} in {place['function']}"


def test_the_evidence() -> None:
    """Memory is in bytes, with the kernel's count; a hang has its stack and its last collective."""
    memory = json.loads(json_report(CATEGORY_SCENES["host_oom"]()))["root"]["memory"]
    assert (memory["oom_kills"], memory["limit_bytes"]) == (1, 16 << 30)
    root = json.loads(json_report(CATEGORY_SCENES["hang"]()))["root"]
    assert any("next_batch" in line for line in root["stack"])
    assert root["last_collective"] == {
        "group": "default_pg",
        "operation": "gloo:all_reduce",
        "enqueued": 119,
        "completed": 119,
    }
