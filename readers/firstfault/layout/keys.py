"""Names of documents and roster entries, by which a reader chooses what to open.

If a name contradicts its document, the document is right. Grammar, version 1 (all fields have a fixed width)::

    error key   e1-<round>-<time>-<rank>-<group rank>-<fingerprint>-<incarnation>-<uuid>.pb
    roster key  r1-<round>-<group rank>-<phase>-<incarnation>-<uuid>.pb

``round`` is 99999 minus the round, so that the last round lists first; ``time`` is nanoseconds since the Unix epoch in
19 digits, all nines if unknown; ranks have 7 digits, all ``x`` if there is none; ``fingerprint`` is the 12 hex digits
of the fingerprint, zeros if there is none; ``incarnation`` has 13 digits (milliseconds).
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.model import Phase

if TYPE_CHECKING:
    from firstfault.model import NodePresence, Place, WorkerError

_MAX_ROUND = 99_999
_NO_TIME = "9" * 19
_MAX_TIME = int(_NO_TIME) - 1
_NO_RANK = "x" * 7
_MAX_RANK = 9_999_999
_MAX_INCARNATION = 10**13 - 1
_NO_FINGERPRINT = "0" * 12
_END = len(".pb")
_UUID_FROM = 32 + _END

_ERROR = re.compile(
    r"e1-(?P<round>\d{5})-(?P<time>\d{19})-(?P<rank>\d{7}|x{7})-(?P<group>\d{7}|x{7})"
    r"-(?P<fingerprint>[0-9a-f]{12})-(?P<incarnation>\d{13})-(?P<uuid>[0-9a-f]{32})\.pb",
    re.ASCII,
)
_ROSTER = re.compile(
    r"r1-(?P<round>\d{5})-(?P<group>\d{7}|x{7})-(?P<phase>joined|failed|succeeded)"
    r"-(?P<incarnation>\d{13})-(?P<uuid>[0-9a-f]{32})\.pb",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ErrorKey:
    """The fields of an error document's name."""

    round: int
    timestamp_ns: int | None
    rank: int | None
    group_rank: int | None
    fingerprint: str
    """12 hex digits, or empty."""
    incarnation: int
    uuid: str

    def __str__(self) -> str:
        time = _NO_TIME if self.timestamp_ns is None else f"{min(max(self.timestamp_ns, 0), _MAX_TIME):019d}"
        fingerprint = self.fingerprint or _NO_FINGERPRINT
        return (
            f"e1-{_round(self.round)}-{time}-{_rank(self.rank)}-{_rank(self.group_rank)}"
            f"-{fingerprint}-{_incarnation(self.incarnation)}-{self.uuid}.pb"
        )

    @classmethod
    def parse(cls, name: str) -> ErrorKey | None:
        """Return the fields of `name`; None if it does not match the grammar, and the file has to be opened."""
        match = _ERROR.fullmatch(name)
        if match is None:
            return None
        round_, time, rank, group, fingerprint, incarnation, uuid_ = match.groups()
        return cls(
            _parse_round(round_),
            None if time == _NO_TIME else int(time),
            _parse_rank(rank),
            _parse_rank(group),
            "" if fingerprint == _NO_FINGERPRINT else fingerprint,
            int(incarnation),
            uuid_,
        )


@dataclass(frozen=True, slots=True)
class RosterKey:
    """The fields of a roster entry's name."""

    round: int
    group_rank: int | None
    phase: Phase
    incarnation: int
    uuid: str

    def __str__(self) -> str:
        return (
            f"r1-{_round(self.round)}-{_rank(self.group_rank)}-{self.phase.value}"
            f"-{_incarnation(self.incarnation)}-{self.uuid}.pb"
        )

    @classmethod
    def parse(cls, name: str) -> RosterKey | None:
        """Return the fields of `name`; None if it does not match the grammar."""
        match = _ROSTER.fullmatch(name)
        if match is None:
            return None
        return cls(
            round=_parse_round(match["round"]),
            group_rank=_parse_rank(match["group"]),
            phase=Phase(match["phase"]),
            incarnation=int(match["incarnation"]),
            uuid=match["uuid"],
        )


def is_of_entry(key: ErrorKey, place: Place) -> bool:
    """Whether a document's name has the round, the group rank and the incarnation of a roster entry's place."""
    said = (key.round, key.group_rank, key.incarnation)
    return said == (
        _parse_round(_round(place.round)),
        _parse_rank(_rank(place.group_rank)),
        int(_incarnation(place.incarnation)),
    )


def unique_number(name: str) -> int | None:
    """Return the uuid of an error key as a number, None for any other name."""
    if not name.startswith("e1-") or _ERROR.fullmatch(name) is None:
        return None
    return int(name[-_UUID_FROM:-_END], 16)


def error_key_for(error: WorkerError) -> str:
    """Return a new unique name for a document about `error`."""
    place = error.place
    key = ErrorKey(
        round=place.round,
        timestamp_ns=error.timestamp_ns,
        rank=place.rank,
        group_rank=place.group_rank,
        fingerprint=error.fingerprint.partition(":")[2],
        incarnation=place.incarnation,
        uuid=uuid.uuid4().hex,
    )
    return str(key)


def roster_key_for(presence: NodePresence, unique: str = "") -> str:
    """Return a name for a roster entry, with a new uuid unless `unique` is one."""
    place = presence.place
    return str(RosterKey(place.round, place.group_rank, presence.phase, place.incarnation, unique or uuid.uuid4().hex))


def _round(number: int) -> str:
    return f"{_MAX_ROUND - min(max(number, 0), _MAX_ROUND):05d}"


def _parse_round(text: str) -> int:
    return _MAX_ROUND - int(text)


def _rank(rank: int | None) -> str:
    return _NO_RANK if rank is None or not 0 <= rank <= _MAX_RANK else f"{rank:07d}"


def _parse_rank(text: str) -> int | None:
    return None if text == _NO_RANK else int(text)


def _incarnation(number: int) -> str:
    return f"{min(max(number, 0), _MAX_INCARNATION):013d}"
