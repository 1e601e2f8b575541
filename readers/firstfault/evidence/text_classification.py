"""Classifies one text: its role, its category, and the process that it names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.evidence.re2_patterns import encoded
from firstfault.evidence.signatures import ANY_EXCEPTION, Role, Signature, built_in_signatures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from firstfault.evidence.signatures import Signatures

__all__ = ["Classification", "Pointer", "classify", "pointer_in"]

_READ = 20_000
"""Characters of a text that are read: its head and its tail."""
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*(?:\.|::))*(?:[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout|Iteration|Killed|Lost)|"
    r"Exception|system_error|bad_alloc)"
)
_CARRIER = re.compile(r"terminate called after throwing an instance of '[^']*'\s*(?:what\(\):)?", re.IGNORECASE)
"""Printed by C++ around an uncaught exception."""
_NOTHING = re.compile(r"[\W_]*")


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
    """What a text says."""

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
        # the name of the log is no text
        left = left.removeprefix(encoded(f"{exception_type}:"))
    if cut is not None and _NOTHING.fullmatch(left.decode("utf-8")):
        return Classification(cut.role, cut.category, cut.id, cut.why)
    for signature in signatures.possible(left):
        if not signature.fits(types):
            continue
        found = signature.search(left)
        if found is not None:
            pointer = _pointer(found)
            return Classification(signature.role, signature.category, signature.id, signature.why, pointer)
    if cut is not None:
        return Classification(cut.role, cut.category, cut.id, cut.why)
    return _UNKNOWN


def pointer_in(text: str, signature: str, signatures: Signatures | None = None) -> Pointer | None:
    """Return the process that a text names, by a signature that is known to fit it."""
    for candidate in (signatures or built_in_signatures()).signatures:
        if candidate.id == signature:
            found = candidate.search(_read_of(text))
            return _pointer(found) if found is not None else None
    return None


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
    """Return the text without noise, and the first noise that was found."""
    first = None
    for noise in signatures.possible_noise(text):
        if noise.search(text) is not None:
            first = first or noise
            text = noise.pattern.cut_from(text)
    return text, first


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
