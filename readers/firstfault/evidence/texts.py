"""One text's role, category and pointer: is it about the process that wrote it, or whom does it name?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.evidence.patterns import encoded
from firstfault.evidence.signatures import ANY_EXCEPTION, Role, Signature, built_in_signatures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from firstfault.evidence.signatures import Signatures

__all__ = ["Classification", "Pointer", "classify", "pointer_in"]

_READ = 20_000
"""Characters of a text that are looked at, from both its ends."""
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*(?:\.|::))*(?:[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout|Iteration|Killed|Lost)|"
    r"Exception|system_error|bad_alloc)"
)
_CARRIER = re.compile(r"terminate called after throwing an instance of '[^']*'\s*(?:what\(\):)?", re.IGNORECASE)
"""What C++ prints around an exception that nobody caught: the exception is what counts."""
_NOTHING = re.compile(r"[\W_]*")


@dataclass(frozen=True, slots=True)
class Pointer:
    """Whom a text names. A suspect, never a proof."""

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
    """Id of the signature that decided; empty: none did."""
    why: str = ""
    pointer: Pointer | None = None


_UNKNOWN = Classification(Role.AMBIGUOUS, "unknown", "", "no signature knows this text")


def classify(
    message: str, exception_type: str = "", bases: Iterable[str] = (), signatures: Signatures | None = None
) -> Classification:
    """Return what a text says about the process that wrote it.

    Args:
        message: an exception's text, or a line of a log.
        exception_type: the exception's name; for a line of a log whatever tells its source, or nothing.
        bases: names of the exception's bases.
        signatures: which to ask; None: those that come with firstfault.
    """
    signatures = signatures or built_in_signatures()
    types = _types(exception_type, bases)
    text = _read_of(f"{exception_type}: {message}" if exception_type else message)
    left, cut = _without_noise(encoded(_CARRIER.sub("", text)), signatures)
    if cut is not None and ANY_EXCEPTION not in types:
        # a log's name alone is nothing that is left
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
    """Return whom a text names, by a signature that is known to fit it."""
    for candidate in (signatures or built_in_signatures()).signatures:
        if candidate.id == signature:
            found = candidate.search(_read_of(text))
            return _pointer(found) if found is not None else None
    return None


def _read_of(text: str) -> str:
    """Return what is read of a text: all of it, or both its ends if it is long."""
    return text if len(text) <= _READ else f"{text[: _READ // 2]}\n{text[-_READ // 2 :]}"


def _types(exception_type: str, bases: Iterable[str]) -> set[str]:
    given = [name for name in (exception_type, *bases) if name]
    names = {re.split(r"\.|::", name)[-1] for name in given}
    # a class of a function's own has "<locals>" in its name
    if any(_EXCEPTION.fullmatch(name.replace("<locals>.", "")) for name in given):
        names.add(ANY_EXCEPTION)
    return names


def _without_noise(text: bytes, signatures: Signatures) -> tuple[bytes, Signature | None]:
    """Return the text without its noise, and the first noise that was in it."""
    first = None
    for noise in signatures.possible_noise(text):
        if noise.search(text) is not None:
            first = first or noise
            text = noise.pattern.cut_from(text)
    return text, first


def _pointer(found: Mapping[str, str]) -> Pointer | None:
    """Return what the groups of a match name, None if nothing."""
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
