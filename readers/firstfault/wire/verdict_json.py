"""The JSON schema ``firstfault.verdict/v1`` of a verdict and a decision."""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import Any

from firstfault.model import Coverage, Decision, Kind, Origin, Scope, Suspect, Verdict, Victims

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
_NANO = 1_000_000_000
_MAX_COUNT = 2**32
MAX_RANKS = 100_000
"""Ranks of a verdict that is read."""
MAX_SENTENCES = 1_000
"""Reasons, suspects, victims and notes that are read, each; writers have far fewer."""
_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a text of another kind raises."""
_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


def to_json(verdict: Verdict, decision: Decision) -> str:
    """Return ``{"schema", "verdict", "decision"}`` as one line."""
    document = {"schema": SCHEMA, "verdict": verdict_to_dict(verdict), "decision": decision_to_dict(decision)}
    return json.dumps(document, ensure_ascii=True, separators=(",", ":"))


def verdict_to_dict(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as an object of the schema."""
    return {
        "scope": verdict.scope.value,
        "ranks": list(verdict.ranks),
        "node": verdict.node,
        "code": verdict.code,
        "category": verdict.category,
        "fingerprint": verdict.fingerprint,
        "headline": verdict.headline,
        "message": verdict.message,
        "timestamp": format_timestamp(verdict.timestamp_ns),
        "strategy": verdict.strategy,
        "rule": verdict.rule,
        "confidence": verdict.confidence,
        "why": list(verdict.why),
        "suspects": [_suspect_to_dict(suspect) for suspect in verdict.suspects],
        "victims": {
            "count": verdict.victims.count,
            "ranks": {str(rank): line for rank, line in verdict.victims.by_rank},
        },
        "coverage": {
            "expected": verdict.coverage.expected,
            "reported": verdict.coverage.reported,
            "unreadable": verdict.coverage.unreadable,
            "complete": verdict.coverage.complete,
            "notes": list(verdict.coverage.notes),
        },
        "settled": verdict.settled,
        "documents": {"digest": verdict.digest, "count": verdict.document_count},
    }


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """Return the decision as an object of the schema."""
    return {
        "retry": decision.retry,
        "kind": decision.kind.value,
        "origin": decision.origin.value,
        "enforced": decision.enforced,
        "reason": decision.reason,
        "retries_left": decision.retries_left,
    }


def verdict_from_json(text: str) -> Verdict | None:
    """Return the verdict that `to_json` wrote, without its root; None for any other text."""
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            return None
        return _verdict_from_dict(document["verdict"])
    except _NOT_OURS:
        return None


def decision_from_json(text: str) -> Decision | None:
    """Return the decision that `to_json` wrote; None for any other text."""
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            return None
        data = document["decision"]
        return Decision(
            retry=_flag(data["retry"]),
            kind=Kind(data["kind"]),
            origin=Origin(data["origin"]),
            enforced=_flag(data["enforced"]),
            reason=_text(data["reason"]),
            retries_left=None if data.get("retries_left") is None else _count(data["retries_left"]),
        )
    except _NOT_OURS:
        return None


def format_timestamp(timestamp_ns: int | None) -> str | None:
    """Return RFC 3339 in UTC with nine decimals; None for None, and for a time that no calendar has."""
    if timestamp_ns is None:
        return None
    seconds, nanos = divmod(timestamp_ns, _NANO)
    try:
        moment = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(seconds=seconds)
    except OverflowError:
        return None
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z"


def parse_timestamp(text: str | None) -> int | None:
    """Return nanoseconds since the Unix epoch; None for None.

    Raises:
        ValueError: `text` is not RFC 3339 in UTC.
    """
    if text is None:
        return None
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError(f"not an RFC 3339 time in UTC: {text!r}")
    moment = dt.datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=dt.timezone.utc)
    return int(moment.timestamp()) * _NANO + int((match[2] or "0").ljust(9, "0"))


def _suspect_to_dict(suspect: Suspect) -> dict[str, Any]:
    named = {"rank": suspect.rank, "node": suspect.node}
    return {**{key: value for key, value in named.items() if value is not None}, "why": suspect.why}


def _verdict_from_dict(data: dict[str, Any]) -> Verdict:
    coverage, victims, documents = data["coverage"], data["victims"], data["documents"]
    return Verdict(
        scope=Scope(data["scope"]),
        ranks=tuple(map(_count, _list(data["ranks"], MAX_RANKS))),
        node=None if data["node"] is None else _text(data["node"]),
        code=_text(data["code"]),
        category=_text(data["category"]),
        fingerprint=_text(data["fingerprint"]),
        headline=_text(data["headline"]),
        message=_text(data["message"]),
        timestamp_ns=parse_timestamp(data["timestamp"]),
        strategy=_text(data["strategy"]),
        confidence=_text(data["confidence"]),
        rule=_text(data.get("rule", "")),
        why=tuple(map(_text, _list(data["why"], MAX_SENTENCES))),
        suspects=tuple(_suspect_from_dict(item) for item in _list(data["suspects"], MAX_SENTENCES)),
        victims=Victims(
            count=_count(victims["count"]),
            by_rank=tuple((_count(int(rank)), _text(line)) for rank, line in _victims(victims["ranks"]).items()),
        ),
        coverage=Coverage(
            expected=None if coverage["expected"] is None else _count(coverage["expected"]),
            reported=_count(coverage["reported"]),
            unreadable=_count(coverage["unreadable"]),
            complete=_flag(coverage["complete"]),
            notes=tuple(map(_text, _list(coverage.get("notes", []), MAX_SENTENCES))),
        ),
        settled=_flag(data["settled"]),
        digest=_text(documents["digest"]),
        document_count=_count(documents["count"]),
    )


def _suspect_from_dict(item: dict[str, Any]) -> Suspect:
    rank, node = item.get("rank"), item.get("node")
    return Suspect(_text(item["why"]), None if rank is None else _count(rank), None if node is None else _text(node))


def _count(value: object) -> int:
    """Return `value` if it is a number of ranks or documents, or a rank."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise ValueError("expected a whole number from 0 to 2**32")
    return value


# a seal may come from any writer, and what is drawn must have its type


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {type(value).__name__}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {type(value).__name__}")
    return value


def _list(value: object, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise ValueError(f"expected a list of at most {limit}")
    return value


def _victims(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MAX_SENTENCES:
        raise ValueError(f"expected lines of at most {MAX_SENTENCES} victims")
    return value
