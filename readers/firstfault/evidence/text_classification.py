"""Classifies one text: its role, its category, and the process that it names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.evidence.re2_patterns import Pattern, encoded
from firstfault.evidence.signatures import ANY_EXCEPTION, Role, Signature, built_in_signatures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from firstfault.evidence.signatures import Signatures

_READ = 20_000
"""Characters of a text that are read: its head and its tail."""
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*(?:\.|::))*(?:[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout|Iteration|Killed|Lost)|"
    r"Exception|system_error|bad_alloc)"
)
_CARRIER = re.compile(r"terminate called after throwing an instance of '[^']*'\s*(?:what\(\):)?", re.IGNORECASE)
"""Printed by C++ around an uncaught exception."""
_NOTHING = re.compile(r"[\W_]*")
_OUT_OF_MEMORY = "gpu-out-of-memory"
_SIZES = Pattern(
    r"Tried to allocate (?P<asked>\d+(?:\.\d+)?) (?P<unit>[KMGTPE])iB"
    r"[^\n]*?total capac\w+ of (?P<total>\d+(?:\.\d+)?) (?P<of>[KMGTPE])iB"
)
_UNITS = "KMGTPE"
_CONTINUES = Pattern(
    r"^[^\n]{0,160}?(?:\bNCCL (?-i:INFO|TRACE)\b|(?:^|[ \t\[(|])(?-i:INFO|DEBUG|TRACE|WARNING)[ \t\])|:]|"
    r"(?:^|[ \[|])(?-i:WARN)[\]:|]|(?-i:\bI\d{3,4}) \d\d:\d\d:|(?:^|[ :])(?-i:\w*Warning): )[^\n]*$|"
    r"^[^\n]*(?:\b(?:ignor|skipp)(?:ed|ing)\b|\bfall(?:s|ing)? ?back\b|\bretrying\b|\bretry (?:in|\d+/)|\bRetry\(|"
    r"\btrying again\b|thrown while requesting|\bfrom scratch\b|\bstart\w* from random\b|"
    r"\b(?:lr|learning[_ ]rate)\b['\"]?\s*[:=|]\s*[\d.])[^\n]*$"
)
"""Lines of a log below the level of an error, and those in which a program tells that it continues."""
_DUMP_SIGNAL = "dump-signal"
_PROGRESS = Pattern(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)


@dataclass(frozen=True, slots=True)
class Pointer:
    """The process or host that a text names: a suspect, never a proof."""

    rank: int | None = None
    ip: str = ""
    host: str = ""
    port: int | None = None
    store: bool = False
    """The job's store, without saying on which host."""

    def as_dict(self) -> dict[str, int | str | bool]:
        """Return what is known, for JSON."""
        texts = {"ip": self.ip, "host": self.host}
        numbers = {"rank": self.rank, "port": self.port}
        known: dict[str, int | str | bool] = {name: text for name, text in texts.items() if text}
        known.update({name: number for name, number in numbers.items() if number is not None})
        return {**known, "store": True} if self.store else known


@dataclass(frozen=True, slots=True)
class Classification:
    """What a text tells."""

    role: Role
    category: str
    signature: str = ""
    """Id of the signature that fits; empty: none does."""
    why: str = ""
    pointer: Pointer | None = None


_UNKNOWN = Classification(Role.AMBIGUOUS, "unknown", "", "no signature fits this text")


def classify(
    message: str, exception_type: str = "", bases: Iterable[str] = (), signatures: Signatures | None = None
) -> Classification:
    """Classify a text as evidence about the process that wrote it.

    Args:
        message: an exception's text, or a line of a log.
        exception_type: the exception's name; for a line of a log its source, or nothing.
        bases: names of the exception's bases.
        signatures: tried in their order; None: those that come with firstfault.
    """
    signatures = signatures or built_in_signatures()
    types = _types(exception_type, bases)
    text = _read_of(f"{exception_type}: {message}" if exception_type else message)
    left, cut = _without_noise(encoded(_CARRIER.sub("", text)), signatures)
    if cut is not None and ANY_EXCEPTION not in types:
        # the name of the log is not part of the text
        left = left.removeprefix(encoded(f"{exception_type}:"))
    if cut is not None and _NOTHING.fullmatch(left.decode("utf-8")):
        return Classification(cut.role, cut.category, cut.id, cut.why)
    ends = _without_notices(left, exception_type, types)
    for signature in signatures.possible(left):
        if not signature.fits(types):
            continue
        # what a process survived is not its fault; that a connection ended may stand only among NCCL's information
        found = signature.search(ends if signature.role is Role.PRIMARY else left)
        if found is not None:
            decided = Classification(signature.role, signature.category, signature.id, signature.why, _pointer(found))
            return _by_size(_by_progress(decided, left), left)
    if cut is not None:
        return Classification(cut.role, cut.category, cut.id, cut.why)
    return _UNKNOWN


def with_numbers_of(text: str, found: Classification) -> Classification:
    """Return the classification of a text, given that of one that differs from it only in numbers.

    Numbers name processes, and tell whether a rank had a collective outstanding.
    """
    if found.pointer is None and found.signature != _DUMP_SIGNAL:
        return found
    read = _read_of(text)
    by_id = {candidate.id: candidate for candidate in built_in_signatures().signatures}
    groups = by_id[found.signature].search(read)
    return _by_progress(replace(found, pointer=_pointer(groups) if groups is not None else None), encoded(read))


def _by_size(found: Classification, text: bytes) -> Classification:
    """Return a lack of GPU memory as unclear if more was asked for than the GPU has: no model needs that at once."""
    sizes = _SIZES.search(text) if found.signature == _OUT_OF_MEMORY else None
    if sizes is None or _kib(sizes["asked"], sizes["unit"]) <= _kib(sizes["total"], sizes["of"]):
        return found
    why = "more memory was asked for than the GPU has; the size may have come from another rank"
    return replace(found, role=Role.AMBIGUOUS, why=why)


def _kib(number: str, unit: str) -> float:
    return float(number) * 1024.0 ** _UNITS.index(unit.upper())


def _by_progress(found: Classification, text: bytes) -> Classification:
    """Return another rank's dump signal as a consequence if this rank had a collective outstanding."""
    progress = _PROGRESS.search(text) if found.signature == _DUMP_SIGNAL else None
    if progress is None:
        return found
    enqueued, completed = _number(progress["enqueued"]), _number(progress["completed"]) or 0
    role = Role.SECONDARY if enqueued is not None and enqueued > completed else Role.AMBIGUOUS
    return replace(found, role=role)


def _read_of(text: str) -> str:
    """Return a text, or the head and the tail of a long one."""
    return text if len(text) <= _READ else f"{text[: _READ // 2]}\n{text[-_READ // 2 :]}"


def _types(exception_type: str, bases: Iterable[str]) -> set[str]:
    given = [name for name in (exception_type, *bases) if name]
    names = {re.split(r"\.|::", name)[-1] for name in given}
    # a class that is defined in a function has "<locals>" in its name
    if any(_EXCEPTION.fullmatch(name.replace("<locals>.", "")) for name in given):
        names.add(ANY_EXCEPTION)
    return names


def _without_noise(text: bytes, signatures: Signatures) -> tuple[bytes, Signature | None]:
    """Return the text without noise, and the first noise with a role that was found, else the first."""
    found = []
    for noise in signatures.possible_noise(text):
        if noise.search(text) is not None:
            found.append(noise)
            text = noise.pattern.cut_from(text)
    return text, min(found, key=lambda noise: noise.role is Role.AMBIGUOUS, default=None)


def _without_notices(text: bytes, exception_type: str, types: set[str]) -> bytes:
    """Return the text without lines that tell that the program continues."""
    # an exception's first line is what was raised, and a log's name is not part of the text
    whole = text.find(b"\n") + 1 or len(text)
    name = encoded(f"{exception_type}:")
    begin = whole if ANY_EXCEPTION in types else len(name) if text.startswith(name) else 0
    return text[:begin] + _CONTINUES.cut_from(text[begin:])


def _pointer(found: Mapping[str, str]) -> Pointer | None:
    """Return the pointer in the groups of a match, None if they are empty."""
    named: dict[str, str] = {}
    for name, value in found.items():
        if value:
            named.setdefault(name.rstrip("0123456789"), value)
    pointer = Pointer(
        rank=_number(named.get("rank")),
        ip=named.get("ip", ""),
        host=named.get("host", ""),
        port=_number(named.get("port")),
        store=bool(named.get("store")),
    )
    return pointer if pointer != Pointer() else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 10 else None  # noqa: PLR2004 - a 32-bit number
