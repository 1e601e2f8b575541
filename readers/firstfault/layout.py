"""Paths and names of an attempt's files: readers select by name which files to open.

If a name contradicts its document, the document is right. Grammar of keys, version 1 (all fields
have a fixed width)::

    error key   e1-<round>-<time>-<rank>-<group rank>-<fingerprint>-<incarnation>-<uuid>.pb
    roster key  r1-<round>-<group rank>-<phase>-<incarnation>-<uuid>.pb

``round`` is 99999 minus the round, so that the last round lists first; ``time`` is nanoseconds
since the Unix epoch in 19 digits, all nines if unknown; ranks have 7 digits, all ``x`` if there is
none; ``fingerprint`` is the 12 hex digits of the fingerprint, zeros if there is none;
``incarnation`` has 13 digits (milliseconds).
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from firstfault.model import NodePresence, Phase, Place, WorkerError
from firstfault.store.uris import join, split_name

ERRORS = "firstfault/errors"
"""Folder of error documents, below the output prefix.

Not ``errors/``: Flyte's reader fails the attempt for every ``<output prefix>/error*.pb``, even if
the job recovered from the error by a restart.
"""
RUN_MARK = "firstfault.run"
"""File in a folder of a run. It has a line for each node that began the run: its host's name, and
in the fallback folder, which all working folders share, a tab and the node's working folder. The
nodes hold locks on it while they run.
"""
ROSTER = "firstfault/roster"
"""Folder of roster entries, below the output prefix."""
LIVE = "firstfault/live.json"
"""Progress of a running job's nodes; written while ``firstfault watch --live`` runs."""
OUTPUTS = "outputs.pb"
ERROR_FILE = "error.pb"
"""The attempt's error for Flyte's reader, if all pods write the same file."""
VERDICT, VERDICT_JSON = "firstfault/verdict.pb", "firstfault/verdict.json"
"""The sealed verdict below an attempt's handover URI, for the next attempt;
the second for programs that act on it.
"""
DECK = "deck.html"
_STOCK_ERROR_NAME = re.compile(r"error(?:-[0-9a-f]{32})?\.pb")
_BUNDLE_NAME = re.compile(r"(?:copies|nodes)-[0-9a-f]{64}\.bundle")
_NODES_BUNDLE_PREFIX = "nodes-"
_WATCH_MARK_NAME = re.compile(r"watched-(\d{1,15})\.json", re.ASCII)
_RESTART_RECORD_NAME = re.compile(
    r"decision-(?:round|in-process|stall)-\d{5}-\d{7}\.json", re.ASCII
)
# no leading zeros: "007" isn't one of Flyte's attempt numbers
_ATTEMPT_NUMBER = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)
_ERROR_NAME = re.compile(
    r"e1-(?P<round>\d{5})-(?P<time>\d{19})-(?P<rank>\d{7}|x{7})-(?P<group>\d{7}|x{7})"
    r"-(?P<fingerprint>[0-9a-f]{12})-(?P<incarnation>\d{13})-(?P<uuid>[0-9a-f]{32})\.pb",
    re.ASCII,
)
_ROSTER_NAME = re.compile(
    r"r1-(?P<round>\d{5})-(?P<group>\d{7}|x{7})-(?P<phase>joined|failed|succeeded)"
    r"-(?P<incarnation>\d{13})-(?P<uuid>[0-9a-f]{32})\.pb",
    re.ASCII,
)
_MAX_ROUND = 99_999
_NO_TIME = "9" * 19
_MAX_TIME = int(_NO_TIME) - 1
_NO_RANK = "x" * 7
_MAX_RANK = 9_999_999
_MAX_INCARNATION = 10**13 - 1
_NO_FINGERPRINT = "0" * 12


# --- an attempt's folders and files ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders and files of an attempt, found from a URI; paths are relative to the root."""

    root: str
    errors: str = ERRORS
    roster: str = ROSTER
    has_stock: bool = True
    """Whether the root may contain Flyte's own error.pb and error-<uuid>.pb."""
    document: str = ""
    """Name of a single document to read, without listing any folder, or empty to list the folders.
    """

    @classmethod
    def of(cls, uri: str) -> Layout:
        """Return the layout of an output prefix, an errors/ folder or a single document."""
        folder, name = split_name(uri)
        if name.endswith(".pb"):
            return cls(folder, document=name)
        if name == "errors":
            # the roster is its sibling folder, and Flyte's own files are outside of it
            return cls(folder, "errors", "roster", has_stock=False)
        if name == "firstfault":
            return cls(uri, "errors", "roster", has_stock=False)
        return cls(uri)

    def errors_uri(self) -> str:
        """Return the URI of the errors/ folder, or of the document itself."""
        return join(self.root, self.document or self.errors)


def is_error_file(name: str) -> bool:
    """Whether a file in an errors/ folder has an error document's name."""
    return name.endswith(".pb")


def is_stock_error_file(name: str) -> bool:
    """Whether a file in the output prefix has a name that flytekit gives to errors.

    Stricter than Flyte's reader, which takes any ``error*.pb``:
    ``error_rate_offloaded_metadata.pb`` is an output "error_rate".
    """
    return _STOCK_ERROR_NAME.fullmatch(name) is not None


def bundle_name(data: bytes, *, of_separate_nodes: bool = False) -> str:
    """Return a bundle's name in the roster folder. It contains a hash,
    so that readers detect a damaged bundle.

    Args:
        data: the bundle.
        of_separate_nodes: whether the nodes have separate folders, and the bundle holds the files
            of all peers.
    """
    return f"{_NODES_BUNDLE_PREFIX if of_separate_nodes else 'copies-'}{hashlib.sha256(data).hexdigest()}.bundle"


def is_bundle(name: str) -> bool:
    """Whether a file in the roster folder has a bundle's name."""
    return _BUNDLE_NAME.fullmatch(name) is not None


def is_nodes_bundle(bundle: str) -> bool:
    """Whether a bundle's name marks it as the files of nodes with separate folders."""
    return bundle.startswith(_NODES_BUNDLE_PREFIX)


def restart_record_name(kind: str, number: int, group_rank: int) -> str:
    """Return the name of a node's restart record in the roster folder.

    It sorts before the roster entries. Older readers ignore the file, because it is neither ``.pb``
    nor a bundle.

    Args:
        kind: "round", "in-process" or "stall".
        number: the number of the failed round or iteration, or of the stall.
        group_rank: the node's group rank.
    """
    return f"decision-{kind}-{min(max(number, 0), _MAX_ROUND):05d}-{min(max(group_rank, 0), _MAX_RANK):07d}.json"


def is_restart_record(name: str) -> bool:
    """Whether a file in the roster folder has a restart record's name."""
    return _RESTART_RECORD_NAME.fullmatch(name) is not None


def build_watch_mark_name(until_ms: int) -> str:
    """Return the name of an empty file in the roster folder:
    a person watches until this time (Unix, milliseconds).
    """
    return f"watched-{until_ms}.json"


def find_watch_end_ms(names: Iterable[str]) -> int:
    """Return the latest time in the names of `watch --live` files, in milliseconds since the Unix
    epoch, or 0 if there is no such file.
    """
    return max(
        (int(match[1]) for match in map(_WATCH_MARK_NAME.fullmatch, names) if match), default=0
    )


def get_path_in_bundle(path: str) -> str:
    """Return a file's path within a bundle: without the folders above ``errors`` or ``roster``."""
    return "/".join(path.split("/")[-2:])


def join_name(folder: str, name: str) -> str:
    """Return the path of an object relative to the store's root."""
    return f"{folder}/{name}" if folder else name


def parse_attempt_number(uri: str) -> tuple[str, int] | None:
    """Return the folder of all attempts and this attempt's number;
    None if the output prefix doesn't end in a number.

    Flyte's output prefix of an attempt is ``<...>/data/<number>``. `uri` may be a path below it.
    """
    folder, name = split_name(Layout.of(uri).root)
    if name == "firstfault":
        folder, name = split_name(folder)
    return (folder, int(name)) if _ATTEMPT_NUMBER.fullmatch(name) else None


def parse_execution(uri: str) -> str | None:
    """Return Flyte's execution in an output prefix ``<...>/<execution>/<node>/data/<attempt>``."""
    here = parse_attempt_number(uri) if uri else None
    parts = here[0].split("/") if here is not None else []
    # the parts above
    return parts[-3] if len(parts) > 3 and parts[-1] == "data" else None  # noqa: PLR2004


# --- names of documents and roster entries --------------------------------------------------------


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
        time = (
            _NO_TIME
            if self.timestamp_ns is None
            else f"{min(max(self.timestamp_ns, 0), _MAX_TIME):019d}"
        )
        fingerprint = self.fingerprint or _NO_FINGERPRINT
        return (
            f"e1-{_format_round(self.round)}-{time}-{_format_rank(self.rank)}-{_format_rank(self.group_rank)}"
            f"-{fingerprint}-{_format_incarnation(self.incarnation)}-{self.uuid}.pb"
        )

    @classmethod
    def parse(cls, name: str) -> ErrorKey | None:
        """Parse a name; None if it doesn't match the grammar,
        so that only the content has the fields.
        """
        match = _ERROR_NAME.fullmatch(name)
        if match is None:
            return None
        round_, time, rank, group, fingerprint, incarnation, uuid_ = match.groups()
        time_ns = None if time == _NO_TIME else int(time)
        fingerprint = "" if fingerprint == _NO_FINGERPRINT else fingerprint
        rank = _parse_rank(rank)
        group = _parse_rank(group)
        return cls(_parse_round(round_), time_ns, rank, group, fingerprint, int(incarnation), uuid_)


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
            f"r1-{_format_round(self.round)}-{_format_rank(self.group_rank)}-{self.phase.value}"
            f"-{_format_incarnation(self.incarnation)}-{self.uuid}.pb"
        )

    @classmethod
    def parse(cls, name: str) -> RosterKey | None:
        """Parse a name; None if it doesn't match the grammar."""
        match = _ROSTER_NAME.fullmatch(name)
        if match is None:
            return None
        round_, group, phase, incarnation, uuid_ = match.groups()
        return cls(_parse_round(round_), _parse_rank(group), Phase(phase), int(incarnation), uuid_)


def is_of_entry(key: ErrorKey, place: Place) -> bool:
    """Whether a document's name has the round, group rank and incarnation of a roster entry."""
    # names clamp numbers to their fixed width, so clamp the place's numbers in the same way before
    # the comparison
    round_ = _parse_round(_format_round(place.round))
    group_rank = _parse_rank(_format_rank(place.group_rank))
    incarnation = int(_format_incarnation(place.incarnation))
    return (key.round, key.group_rank, key.incarnation) == (round_, group_rank, incarnation)


def error_key_for(error: WorkerError, unique: str = "") -> str:
    """Return a name for a document about `error`; `unique` is its uuid, by default a new one."""
    place = error.place
    key = ErrorKey(
        round=place.round,
        timestamp_ns=error.timestamp_ns,
        rank=place.rank,
        group_rank=place.group_rank,
        fingerprint=error.fingerprint.partition(":")[2],
        incarnation=place.incarnation,
        uuid=unique or uuid.uuid4().hex,
    )
    return str(key)


def roster_key_for(presence: NodePresence, unique: str = "") -> str:
    """Return a name for a roster entry; `unique` is its uuid, by default a new one."""
    place = presence.place
    return str(
        RosterKey(
            place.round,
            place.group_rank,
            presence.phase,
            place.incarnation,
            unique or uuid.uuid4().hex,
        )
    )


def _format_round(number: int) -> str:
    # counted down: storages list by name in ascending order, and readers want the last round first
    return f"{_MAX_ROUND - min(max(number, 0), _MAX_ROUND):05d}"


def _parse_round(text: str) -> int:
    return _MAX_ROUND - int(text)


def _format_rank(rank: int | None) -> str:
    # an impossible rank from a damaged document must not break the name's fixed width
    return _NO_RANK if rank is None or not 0 <= rank <= _MAX_RANK else f"{rank:07d}"


def _parse_rank(text: str) -> int | None:
    return None if text == _NO_RANK else int(text)


def _format_incarnation(number: int) -> str:
    return f"{min(max(number, 0), _MAX_INCARNATION):013d}"
