"""Names of documents and roster entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstfault.layout import ErrorKey, RosterKey, error_key_for, roster_key_for
from firstfault.model import Phase
from firstfault.testing import START_NS, make_error, make_presence

_LONGEST = 200
_HEX = "0123456789abcdef"
_RANKS = st.none() | st.integers(0, 9_999_999)
_FINGERPRINTS = st.just("") | st.text(_HEX, min_size=12, max_size=12).filter(
    lambda text: text != "0" * 12
)
_UUIDS = st.text(_HEX, min_size=32, max_size=32)
_INCARNATIONS = st.integers(0, 10**13 - 1)
_ROUNDS = st.integers(0, 99_999)
_ERROR_KEYS = st.builds(
    ErrorKey,
    round=_ROUNDS,
    timestamp_ns=st.none() | st.integers(0, 10**19 - 2),
    rank=_RANKS,
    group_rank=_RANKS,
    fingerprint=_FINGERPRINTS,
    incarnation=_INCARNATIONS,
    uuid=_UUIDS,
)
_ROSTER_KEYS = st.builds(
    RosterKey,
    round=_ROUNDS,
    group_rank=_RANKS,
    phase=st.sampled_from(Phase),
    incarnation=_INCARNATIONS,
    uuid=_UUIDS,
)


@given(_ERROR_KEYS | _ROSTER_KEYS)
def test_a_key_is_a_short_plain_name(key: ErrorKey | RosterKey) -> None:
    """A key is parsed as it was made; it has at most 200 bytes of ASCII, no slash,
    and ends as Flyte's files do.
    """
    name = str(key)
    assert (ErrorKey.parse(name), RosterKey.parse(name)) == (
        (key, None) if isinstance(key, ErrorKey) else (None, key)
    )
    assert len(name.encode("ascii")) <= _LONGEST
    assert "/" not in name
    assert name.endswith(".pb")


def _first(key: ErrorKey) -> tuple[int, int]:
    return (-key.round, 10**19 if key.timestamp_ns is None else key.timestamp_ns)


@given(st.lists(_ERROR_KEYS, max_size=20), st.lists(_ROSTER_KEYS, max_size=20))
def test_keys_sort_by_round_then_time(keys: list[ErrorKey], entries: list[RosterKey]) -> None:
    """Keys of a later round sort first, and within a round by time, those without a time last."""
    listed = [ErrorKey.parse(name) for name in sorted(map(str, keys))]
    assert [_first(key) for key in listed if key is not None] == sorted(map(_first, keys))
    roster = [RosterKey.parse(name) for name in sorted(map(str, entries))]
    assert [key.round for key in roster if key is not None] == sorted(
        (key.round for key in entries), reverse=True
    )


@pytest.mark.parametrize(
    ("key", "read"),
    [
        ({"round": -1}, {"round": 0}),
        ({"round": 10**9}, {"round": 99_999}),
        ({"timestamp_ns": -5}, {"timestamp_ns": 0}),
        ({"timestamp_ns": 10**30}, {"timestamp_ns": 10**19 - 2}),
        ({"rank": -1}, {"rank": None}),
        ({"rank": 10**9}, {"rank": None}),
        ({"group_rank": -1}, {"group_rank": None}),
        ({"incarnation": -1}, {"incarnation": 0}),
        ({"incarnation": 10**20}, {"incarnation": 10**13 - 1}),
    ],
)
def test_a_value_out_of_range_does_not_break_the_grammar(
    key: dict[str, int], read: dict[str, int | None]
) -> None:
    """A number out of range becomes the nearest valid one; a rank out of range becomes None."""
    values = {
        "round": 0,
        "timestamp_ns": 1,
        "rank": 1,
        "group_rank": 1,
        "incarnation": 1,
        "fingerprint": "",
    }
    parsed = ErrorKey.parse(str(ErrorKey(**{**values, **key, "uuid": "0" * 32})))
    assert parsed == ErrorKey(**{**values, **read, "uuid": "0" * 32})


_GOOD = str(ErrorKey(1, START_NS, 3, 1, "0123456789ab", 1_700_000_000_000, "f" * 32))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "error.pb",
            "error-0123456789abcdef.pb",
            _GOOD.removesuffix(".pb"),
            f"{_GOOD}.part",
            f"{_GOOD}\n",
        ),
        *(
            f" {_GOOD}",
            _GOOD.replace("e1-", "e2-"),
            _GOOD.replace("0000003", "3"),
            _GOOD.replace("f" * 32, "F" * 32),
        ),
        *(_GOOD.replace("0000003", "\u0663" * 7), str(RosterKey(1, 0, Phase.FAILED, 1, "f" * 32))),
    ],
)
def test_a_foreign_name_is_no_key(name: str) -> None:
    """A name of another grammar is parsed as None."""
    assert ErrorKey.parse(_GOOD) is not None
    assert ErrorKey.parse(name) is None


def test_a_key_carries_round_time_ranks_and_fingerprint() -> None:
    """The key of an error or an entry carries its round, time or phase, ranks,
    fingerprint and incarnation.
    """
    error = make_error(
        3,
        at_ms=1.5,
        round=2,
        group_rank=1,
        incarnation=1_700_000_000_123,
        fingerprint="1:0123456789ab",
    )
    key = ErrorKey.parse(error_key_for(error))
    assert (key.round, key.timestamp_ns, key.rank, key.group_rank) == (
        2,
        START_NS + 1_500_000,
        3,
        1,
    )
    assert (key.fingerprint, key.incarnation) == ("0123456789ab", 1_700_000_000_123)
    entry = RosterKey.parse(
        roster_key_for(make_presence(Phase.SUCCEEDED, group_rank=4, round=7, incarnation=9))
    )
    assert (entry.round, entry.group_rank, entry.phase, entry.incarnation) == (
        7,
        4,
        Phase.SUCCEEDED,
        9,
    )
    # the same failure, written twice, gets two names: no document replaces another
    assert error_key_for(error) != error_key_for(error)
    assert roster_key_for(make_presence()) != roster_key_for(make_presence())
