"""The JSON of a report: its schema, and that it leaves out nothing that the text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from firstfault.render.json_report import json_report
from firstfault.wire.json_schemas import decision_from_json, verdict_from_json
from tests.reports.scenes import CATEGORY_SCENES, HARD_SCENES, SCOPE_SCENES

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
