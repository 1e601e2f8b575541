"""The JSON schema ``firstfault.verdict/v1`` of a verdict and a decision, as a table of its keys."""

from __future__ import annotations

import json
from typing import Any

from firstfault.model import Coverage, Decision, Kind, Origin, Scope, Suspect, Verdict, Victims
from firstfault.wire import json_table
from firstfault.wire.json_table import (
    COUNT,
    FLAG,
    NOT_OURS,
    TEXT,
    TIME,
    Row,
    Rows,
    format_timestamp,
    list_of,
    one_of,
    or_null,
    parse_timestamp,
)

__all__ = [
    "SCHEMA",
    "decision_from_json",
    "decision_to_dict",
    "format_timestamp",
    "parse_timestamp",
    "to_json",
    "verdict_from_json",
    "verdict_to_dict",
]

SCHEMA = "firstfault.verdict/v1"
MAX_RANKS = 100_000
"""Ranks of a verdict that is read."""
MAX_SENTENCES = 1_000
"""Reasons, suspects, victims and notes that are read, each; writers have far fewer."""

_SENTENCES = list_of(TEXT, MAX_SENTENCES)


_CONFIDENCE = json_table.Kind({"enum": ["high", "medium", "low"]}, TEXT.read)


# --- the parts of a verdict -----------------------------------------------------------------------------------------


def _suspect_to_dict(suspect: Suspect) -> dict[str, Any]:
    named = {"rank": suspect.rank, "node": suspect.node}
    return {**{key: value for key, value in named.items() if value is not None}, "why": suspect.why}


def _suspect_from_dict(found: dict[str, Any]) -> Suspect:
    rank, node = (or_null(kind).read(found.get(key)) for key, kind in (("rank", COUNT), ("node", TEXT)))
    return Suspect(TEXT.read(found["why"]), rank, node)


_SUSPECT = json_table.Kind({"type": "object", "required": ["why"]}, _suspect_from_dict, _suspect_to_dict)


def _victims_from_dict(found: dict[str, Any]) -> tuple[tuple[int, str], ...]:
    if len(found) > MAX_SENTENCES:
        raise ValueError(f"expected lines of at most {MAX_SENTENCES} victims")
    return tuple((COUNT.read(int(rank)), TEXT.read(line)) for rank, line in found.items())


_LINES = json_table.Kind(
    {"type": "object", "additionalProperties": {"type": "string"}},
    _victims_from_dict,
    lambda lines: {str(rank): line for rank, line in lines},
)

_VICTIMS = Rows(Victims, (Row("count", COUNT), Row("ranks", _LINES, "by_rank")))

_COVERAGE = Rows(
    Coverage,
    (
        Row("expected", or_null(COUNT)),
        Row("reported", COUNT),
        Row("unreadable", COUNT),
        Row("complete", FLAG),
        Row("notes", _SENTENCES),
    ),
)

_DOCUMENTS = Rows(dict, (Row("digest", TEXT), Row("count", COUNT, "document_count")))
"""Two attributes of the verdict itself."""


# --- verdict and decision -------------------------------------------------------------------------------------------

VERDICT = Rows(
    Verdict,
    (
        Row("scope", one_of(Scope)),
        Row("ranks", list_of(COUNT, MAX_RANKS), meaning="Global ranks of the root cause."),
        Row("node", or_null(TEXT), meaning="Its pod, or its machine without Kubernetes."),
        Row("code", TEXT, meaning="The error code that Flyte shows."),
        Row("category", TEXT),
        Row("fingerprint", TEXT, meaning="Equal for the same fault elsewhere."),
        Row("headline", TEXT),
        Row("message", TEXT),
        Row("timestamp", TIME, "timestamp_ns"),
        Row("strategy", TEXT),
        Row("rule", TEXT, meaning="The strategy's rule that found the root cause; empty: not known."),
        Row("confidence", _CONFIDENCE),
        Row("why", _SENTENCES),
        Row("suspects", list_of(_SUSPECT, MAX_SENTENCES)),
        Row("victims", _VICTIMS.kind),
        Row("coverage", _COVERAGE.kind),
        Row("settled", FLAG),
    ),
)
"""Without `documents`, which is last."""

DECISION = Rows(
    Decision,
    (
        Row("retry", FLAG),
        Row("kind", one_of(Kind)),
        Row("origin", one_of(Origin)),
        Row("enforced", FLAG),
        Row("reason", TEXT),
        Row("retries_left", or_null(COUNT)),
    ),
)


def to_json(verdict: Verdict, decision: Decision) -> str:
    """Return ``{"schema", "verdict", "decision"}`` as one line."""
    document = {"schema": SCHEMA, "verdict": verdict_to_dict(verdict), "decision": decision_to_dict(decision)}
    return json.dumps(document, ensure_ascii=True, separators=(",", ":"))


def verdict_to_dict(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as an object of the schema."""
    return {**VERDICT.write(verdict), "documents": _DOCUMENTS.write(verdict)}


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """Return the decision as an object of the schema."""
    return DECISION.write(decision)


def verdict_from_json(text: str) -> Verdict | None:
    """Return the verdict that `to_json` wrote, without its root; None for any other text."""
    try:
        found = _part(text, "verdict")
        return Verdict(**VERDICT.values(found), **_DOCUMENTS.values(found["documents"]))
    except NOT_OURS:
        return None


def decision_from_json(text: str) -> Decision | None:
    """Return the decision that `to_json` wrote; None for any other text."""
    try:
        return Decision(**DECISION.values(_part(text, "decision")))
    except NOT_OURS:
        return None


def _part(text: str, name: str) -> Any:
    document = json.loads(text)
    if document["schema"] != SCHEMA:
        raise ValueError("of another schema")
    return document[name]


def schema_parts() -> dict[str, Any]:
    """Return the definitions of verdict and decision, for the JSON Schema in docs/schemas."""
    verdict = VERDICT.schema()
    verdict["required"].append("documents")
    verdict["properties"]["documents"] = _DOCUMENTS.schema()
    return {"verdict": verdict, "decision": DECISION.schema()}
