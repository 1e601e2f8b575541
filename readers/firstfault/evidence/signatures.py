"""Load the signatures of failures from a TOML file: patterns, each with its role,
an example and a reason.

Patterns are RE2 regular expressions: unlike Python's ``re``, RE2 takes linear time for any text.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import re2

from firstfault.errors import SignatureError
from firstfault.model import CATEGORIES
from firstfault.utils.toml import parse_toml

SCHEMA = 1
ANY_EXCEPTION = "*"
"""Among a signature's types: any exception."""
_REQUIRED_KEYS = {"id", "pattern", "role", "category", "example", "why"}
_OPTIONAL_KEYS = {"types", "unless"}
_POINTER_GROUPS = {"rank", "ip", "host", "port", "store"}
"""Allowed names of groups, without the trailing number ("rank2") that
alternatives of one pattern need.
"""
_TABLE_HEADER = re.compile(r"^\s*\[\[\s*(?P<kind>\w+)\s*\]\]")
_BOUNDED_REPETITION = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\])|\{\d+,\d*\}")
"""An escaped character or a class, to leave alone; or a repetition "{0,300}"."""
_MULTILINE_FLAG = "(?m)"
"""Prefix that makes ^ and $ match at line boundaries; RE2 has no option for it."""
_NOT_IN_RE2 = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?P=": "a back-reference",
    **{f"\\{digit}": "a back-reference" for digit in range(1, 10)},
}


# --- patterns -------------------------------------------------------------------------------------


def _build_options() -> re2.Options:
    # max_mem stays at RE2's 8 MiB a pattern. Searches use little of it: with three texts of 1 MB
    # that nearly fit for each signature, a process's memory grew by 24 MB
    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    return options


def encoded(text: str | bytes) -> bytes:
    """Return the UTF-8 that patterns search, with "?" for each lone surrogate."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "replace")


def widen(pattern: str) -> str:
    """Return a pattern that also matches all that `pattern` matches,
    and compiles several times faster.

    RE2 copies what is repeated "{0,300}" 300 times. For a first search, any number of repetitions
    will do.
    """
    return _BOUNDED_REPETITION.sub(lambda match: match[1] or "*", pattern)


class Pattern:
    """A regular expression of RE2; case is ignored, ^ and $ match at lines.

    RE2's binding releases the GIL during a search. Measured: during a search of 1 s, a thread that
    slept for 1 ms at a time ran again within 60 ms.
    """

    def __init__(self, source: str) -> None:
        """Take a pattern; it's compiled on first use."""
        self.source = source

    @cached_property
    def _regexp(self) -> Any:
        """Compile the pattern; raise a SignatureError with RE2's reason if it is invalid."""
        try:
            return re2.compile(_MULTILINE_FLAG + self.source, _build_options())
        except (re2.error, UnicodeEncodeError) as error:
            raise SignatureError(_why_refused(self.source, error)) from error

    @property
    def groups(self) -> frozenset[str]:
        """Names of its groups."""
        return frozenset(self._regexp.groupindex)

    def search(self, text: str | bytes) -> dict[str, str] | None:
        """Return the named groups that took part in the first match;
        None if the pattern isn't found.
        """
        match = self._regexp.search(encoded(text))
        return _list_groups(match) if match is not None else None

    def find_all(self, text: str | bytes) -> list[dict[str, str]]:
        """Return the named groups that took part in each match."""
        return [_list_groups(match) for match in self._regexp.finditer(encoded(text))]

    def cut_from(self, text: bytes) -> bytes:
        """Return a text without all matches of the pattern."""
        kept, end = [], 0
        for match in self._regexp.finditer(text):
            kept.append(text[end : match.start()])
            end = match.end()
        return b"".join((*kept, text[end:]))


def _list_groups(match: Any) -> dict[str, str]:
    return {
        name: value.decode("utf-8")
        for name, value in match.groupdict().items()
        if value is not None
    }


def _why_refused(source: str, error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(error)
    for mark, name in _NOT_IN_RE2.items():
        if mark in source:
            instead = "give the pattern of what must not be found in the key 'unless'"
            return f"has {name} ({mark}), which RE2 does not support; {instead}"
    return f"is not a regular expression that RE2 accepts: {reason}"


# --- signatures -----------------------------------------------------------------------------------


class Role(str, enum.Enum):
    """Whether a text blames the process that wrote it, or another process."""

    PRIMARY = "primary"
    """The fault is local to the process, host or service that reports it."""
    SECONDARY = "secondary"
    """The text is about a lost peer, or another process stopped this one."""
    AMBIGUOUS = "ambiguous"
    """May be cause or consequence."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One pattern and what it means."""

    id: str
    pattern: Pattern
    role: Role
    category: str
    example: str
    why: str
    types: frozenset[str] = frozenset()
    """Names of exceptions, without their modules; empty for any text."""
    unless: Pattern | None = None
    """The signature doesn't match a text that contains this pattern."""

    def fits(self, types: Iterable[str]) -> bool:
        """Whether the signature is for an exception with these names: its own and its bases'."""
        return not self.types or not self.types.isdisjoint(types)

    def search(self, text: str | bytes) -> dict[str, str] | None:
        """Return the match's groups; None if the pattern isn't found, or `unless` is found."""
        groups = self.pattern.search(text)
        if groups is None or (self.unless is not None and self.unless.search(text) is not None):
            return None
        return groups


class Prefilter:
    """Find the signatures that can match a text, in one pass:
    by the literal words that their patterns require.
    """

    def __init__(self, signatures: Sequence[Signature]) -> None:
        self._signatures = signatures

    @cached_property
    def _build_filter(self) -> re2.Filter:
        re2_filter = re2.Filter()
        for signature in self._signatures:
            re2_filter.Add(_MULTILINE_FLAG + widen(signature.pattern.source), _build_options())
        re2_filter.Compile()
        return re2_filter

    def possible(self, text: bytes) -> list[Signature]:
        """Return the signatures that may fit a text,
        in their order. The caller searches for each.
        """
        # RE2 logs an error for an empty filter
        possible = self._build_filter.Match(text, potential=True) or () if self._signatures else ()
        return [self._signatures[index] for index in sorted(possible)]


@dataclass(frozen=True)
class Signatures:
    """Signatures of one or several files, in the order in which they are tried."""

    noise: tuple[Signature, ...]
    signatures: tuple[Signature, ...]

    @cached_property
    def noise_filter(self) -> Prefilter:
        """Finds the noise that a text may contain."""
        return Prefilter(self.noise)

    @cached_property
    def filter(self) -> Prefilter:
        """Finds the signatures that may fit a text."""
        return Prefilter(self.signatures)

    def __add__(self, other: Signatures) -> Signatures:
        """Return both, these first."""
        return Signatures(self.noise + other.noise, self.signatures + other.signatures)


@cache
def built_in_signatures() -> Signatures:
    """Return the signatures that come with firstfault."""
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    # a test checks the patterns and examples, which would slow down each command
    return parse_signatures(text, "firstfault/evidence/signatures.toml", check_examples=False)


def load_signatures(path: str | Path) -> Signatures:
    """Return the signatures of a file like ``signatures.toml``;
    put them before the built-in ones with ``+``.

    Raises:
        SignatureError: it can't be read, or isn't valid; the text names file, line and reason.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SignatureError(f"{path}: cannot be read: {error}") from error
    return parse_signatures(text, str(path))


def parse_signatures(text: str, name: str, *, check_examples: bool = True) -> Signatures:
    """Return the signatures in the text of the TOML file `name`.

    Without `check_examples`, each pattern is compiled on first use, so an invalid one raises then.

    Raises:
        SignatureError: it isn't valid; the text names line and reason.
    """
    try:
        content = parse_toml(text)
    except ValueError as error:
        raise SignatureError(f"{name}: no valid TOML: {error}") from error
    if content.get("schema") != SCHEMA:
        raise SignatureError(
            f"{name}:1: must have schema = {SCHEMA}, not {content.get('schema')!r}"
        )
    unknown = sorted(content.keys() - {"schema", "noise", "signature"})
    if unknown:
        raise SignatureError(
            f"{name}:1: unknown table {unknown[0]!r}; there are [[noise]] and [[signature]]"
        )
    tables_at = _find_tables(text)
    line_by_id: dict[str, int] = {}
    tables: dict[str, tuple[Signature, ...]] = {}
    for kind in ("noise", "signature"):
        entries = content.get(kind, [])
        if not isinstance(entries, list):
            raise SignatureError(f"{name}:1: {kind} must be written as [[{kind}]]")
        signatures = []
        for index, entry in enumerate(entries):
            line = tables_at[kind][index] if index < len(tables_at[kind]) else 1
            signature = _parse_signature(entry, f"{name}:{line}")
            if signature.id in line_by_id:
                raise SignatureError(
                    f"{name}:{line}: id {signature.id!r} is taken by line"
                    f" {line_by_id[signature.id]}"
                )
            line_by_id[signature.id] = line
            signatures.append(signature)
        tables[kind] = tuple(signatures)
    if check_examples:
        for signature in (*tables["noise"], *tables["signature"]):
            _check_patterns(signature, f"{name}:{line_by_id[signature.id]}")
    return Signatures(tables["noise"], tables["signature"])


def _find_tables(text: str) -> dict[str, list[int]]:
    """Return the line of each table by its kind; tomllib has no line numbers."""
    lines_by_kind: dict[str, list[int]] = {"noise": [], "signature": []}
    for number, row in enumerate(text.splitlines(), start=1):
        match = _TABLE_HEADER.match(row)
        if match is not None and match["kind"] in lines_by_kind:
            lines_by_kind[match["kind"]].append(number)
    return lines_by_kind


def _parse_signature(entry: Mapping[str, Any], location: str) -> Signature:
    missing = sorted(_REQUIRED_KEYS - entry.keys())
    if missing:
        raise SignatureError(f"{location}: {missing[0]!r} is missing")
    unknown = sorted(entry.keys() - _REQUIRED_KEYS - _OPTIONAL_KEYS)
    if unknown:
        raise SignatureError(f"{location}: unknown key {unknown[0]!r}")
    for key in sorted(_REQUIRED_KEYS):
        if not isinstance(entry[key], str) or not entry[key].strip():
            raise SignatureError(f"{location}: {key!r} must be a text that is not empty")
    types = entry.get("types", [])
    if not isinstance(types, list) or not all(isinstance(item, str) and item for item in types):
        raise SignatureError(f"{location}: 'types' must be a list of exception names")
    if entry["role"] not in {role.value for role in Role}:
        raise SignatureError(
            f"{location}: role {entry['role']!r} must be one of"
            f" {', '.join(role.value for role in Role)}"
        )
    if entry["category"] not in CATEGORIES:
        raise SignatureError(
            f"{location}: category {entry['category']!r} is none; see docs/reference/categories.md"
        )
    if not isinstance(entry.get("unless", ""), str):
        raise SignatureError(f"{location}: 'unless' must be a pattern")
    return Signature(
        id=entry["id"],
        pattern=Pattern(entry["pattern"]),
        role=Role(entry["role"]),
        category=entry["category"],
        example=entry["example"],
        why=entry["why"],
        types=frozenset(types),
        unless=Pattern(entry["unless"]) if "unless" in entry else None,
    )


def _check_patterns(signature: Signature, location: str) -> None:
    _check_pattern(signature.pattern, "pattern", location)
    if signature.unless is not None:
        _check_pattern(signature.unless, "unless", location)
    if signature.pattern.search(signature.example) is None:
        raise SignatureError(
            f"{location}: the pattern of {signature.id!r} is not found in its own example"
        )
    if signature.search(signature.example) is None:
        raise SignatureError(
            f"{location}: 'unless' of {signature.id!r} is found in its own example"
        )


def _check_pattern(pattern: Pattern, key: str, location: str) -> None:
    try:
        is_in_empty_text = pattern.search("") is not None
    except SignatureError as error:
        raise SignatureError(f"{location}: {key!r} {error}") from error
    if is_in_empty_text:
        raise SignatureError(f"{location}: {key!r} is found in an empty text")
    strange = sorted(
        name for name in pattern.groups if name.rstrip("0123456789") not in _POINTER_GROUPS
    )
    if strange:
        raise SignatureError(
            f"{location}: group {strange[0]!r} must be one of {', '.join(sorted(_POINTER_GROUPS))}"
        )
