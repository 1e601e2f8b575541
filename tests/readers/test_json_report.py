"""The contract firstfault.verdict/v1."""

import json
import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstfault.model import (
    CATEGORIES,
    Coverage,
    Decision,
    Kind,
    Origin,
    Scope,
    Suspect,
    Verdict,
    Victims,
)
from firstfault.testing import START_NS, make_error
from firstfault.wire.json_schemas import format_timestamp, from_json, parse_timestamp, to_json
from tests.seals import DECISION, VERDICT

_TEXT = st.text(
    st.sampled_from(string.printable + "\u00e9\u2192\U0001f525\x00\x1b\u2028\udc80"), max_size=30
)
_COUNT = st.integers(0, 2**32)
_LAST_NS = 253_402_300_800 * 10**9 - 1
_VERDICTS = st.builds(
    Verdict,
    scope=st.sampled_from(Scope),
    code=_TEXT,
    category=st.sampled_from(sorted(CATEGORIES)),
    headline=_TEXT,
    message=_TEXT,
    strategy=_TEXT,
    ranks=st.lists(_COUNT, max_size=3).map(tuple),
    node=st.none() | _TEXT,
    fingerprint=_TEXT,
    timestamp_ns=st.none() | st.integers(0, _LAST_NS),
    confidence=st.sampled_from(["high", "medium", "low"]),
    why=st.lists(_TEXT, max_size=3).map(tuple),
    suspects=st.lists(
        st.builds(Suspect, _TEXT, st.none() | _COUNT, st.none() | _TEXT), max_size=3
    ).map(tuple),
    victims=st.builds(
        Victims,
        _COUNT,
        st.dictionaries(_COUNT, _TEXT, max_size=3).map(lambda lines: tuple(lines.items())),
    ),
    coverage=st.builds(
        Coverage,
        st.none() | _COUNT,
        _COUNT,
        _COUNT,
        st.booleans(),
        st.lists(_TEXT, max_size=3).map(tuple),
    ),
    settled=st.booleans(),
    digest=_TEXT,
    document_count=_COUNT,
)
_DECISIONS = st.builds(
    Decision,
    st.booleans(),
    st.sampled_from(Kind),
    st.sampled_from(Origin),
    st.booleans(),
    _TEXT,
)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("victims", "count"),
        ("documents", "count"),
        ("coverage", "expected"),
        ("coverage", "reported"),
        ("ranks", 0),
    ],
)
def test_a_verdict_with_an_impossible_number_is_not_ours(part: str, name: str | int) -> None:
    """A verdict or a decision with a number that no job has, or that no integer can hold,
    is not ours.
    """
    whole = to_json(VERDICT, DECISION)
    for number in (-1, 2**32 + 1, 10**400, 1.5):
        document = json.loads(whole)
        document["verdict"][part][name] = number
        assert from_json(json.dumps(document)) is None, number
    for ours, other in (
        ('"count":3', '"count":1e999'),
        ('"retries_left":null', '"retries_left":1e999'),
    ):
        assert from_json(whole.replace(ours, other)) is None


@given(_VERDICTS, _DECISIONS)
def test_verdict_and_decision_come_back(verdict: Verdict, decision: Decision) -> None:
    """Verdict and decision survive the round trip,
    in one line of ASCII without control characters.
    """
    text = to_json(verdict, decision)
    assert text.isascii()
    assert text.isprintable()
    assert from_json(text) == (verdict, decision)


def test_the_root_is_not_written() -> None:
    """The JSON does not have the root."""
    assert from_json(to_json(replace(VERDICT, root=make_error()), DECISION)) == (VERDICT, DECISION)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "not json",
        '{"schema": "firstfault.verdict/v2", "verdict": {}, "decision": {}}',
        '{"schema": "firstfault.verdict/v1"}',
        '{"schema": "firstfault.verdict/v1", "verdict": null, "decision": null}',
        (
            '{"schema": "firstfault.verdict/v1", "verdict": {"scope": "rank"}, "decision":'
            ' {"retry": true}}'
        ),
        to_json(VERDICT, DECISION).replace('"rank"', '"of the future"').replace("SYSTEM", "FUTURE"),
        to_json(VERDICT, DECISION)[:-20],
        "[" * 100_000,
    ],
)
def test_what_is_no_report_is_none(text: str) -> None:
    """Any text of another schema is read as None."""
    assert from_json(text) is None


@pytest.mark.parametrize(
    ("timestamp_ns", "text"),
    [
        (None, None),
        (0, "1970-01-01T00:00:00.000000000Z"),
        (START_NS + 123_456_789, "2023-11-14T22:13:20.123456789Z"),
        (-1, "1969-12-31T23:59:59.999999999Z"),
        (_LAST_NS, "9999-12-31T23:59:59.999999999Z"),
    ],
)
def test_times_survive_the_round_trip(timestamp_ns: int | None, text: str | None) -> None:
    """A time is RFC 3339 in UTC with nanoseconds, and survives the round trip;
    fewer decimals are read.
    """
    assert format_timestamp(timestamp_ns) == text
    assert parse_timestamp(text) == timestamp_ns
    if text is not None and text.endswith("000000000Z"):
        assert parse_timestamp(text[:-11] + "Z") == parse_timestamp(text[:-9] + "Z") == timestamp_ns


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2023-11-14",
        "2023-11-14T22:13:20",
        "2023-13-14T22:13:20Z",
        f"20{'2' * 5_000}Z",
    ],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    """A text that is not a time of RFC 3339 raises a ValueError."""
    with pytest.raises(ValueError, match=r"time|Time|day"):
        parse_timestamp(text)
