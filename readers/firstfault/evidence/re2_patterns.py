"""Regular expressions of RE2: unlike Python's ``re`` they take linear time for any text."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import re2

from firstfault.errors import SignatureError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

_LINES = "(?m)"
"""Makes ^ and $ match at lines; RE2 has no option for it."""
_NOT_IN_RE2 = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?P=": "a back-reference",
    **{f"\\{digit}": "a back-reference" for digit in range(1, 10)},
}


def _options() -> re2.Options:
    # max_mem stays at RE2's 8 MiB a pattern. Searches use little of it: with three texts of 1 MB that nearly fit for
    # each signature, a process's memory grew by 24 MB
    options = re2.Options()
    options.case_sensitive = False
    options.log_errors = False
    return options


def encoded(text: str | bytes) -> bytes:
    """Return the UTF-8 that patterns search, with "?" for each lone surrogate."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "replace")


class Pattern:
    """A regular expression of RE2; case is ignored, ^ and $ match at lines.

    RE2's binding releases the GIL during a search. Measured: during a search of 1 s, a thread that slept for 1 ms at a
    time ran again within 60 ms.
    """

    __slots__ = ("_regexp", "source")

    def __init__(self, source: str) -> None:
        """Compile a pattern.

        Raises:
            SignatureError: RE2 does not accept it; the text tells why.
        """
        self.source = source
        try:
            self._regexp = re2.compile(_LINES + source, _options())
        except (re2.error, UnicodeEncodeError) as error:
            raise SignatureError(_why_refused(source, error)) from error

    @property
    def groups(self) -> frozenset[str]:
        """Names of its groups."""
        return frozenset(self._regexp.groupindex)

    def search(self, text: str | bytes) -> dict[str, str] | None:
        """Return the named groups that took part in the first match; None if the pattern is not found."""
        found = self._regexp.search(encoded(text))
        return _groups(found) if found is not None else None

    def find_all(self, text: str | bytes) -> list[dict[str, str]]:
        """Return the named groups that took part in each match."""
        return [_groups(found) for found in self._regexp.finditer(encoded(text))]

    def cut_from(self, text: bytes) -> bytes:
        """Return a text without all matches of the pattern."""
        kept, end = [], 0
        for found in self._regexp.finditer(text):
            kept.append(text[end : found.start()])
            end = found.end()
        return b"".join((*kept, text[end:]))


class Prefilter:
    """Finds in one pass over a text which patterns can match, by the literal words that they need."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._patterns = patterns

    @cached_property
    def _filter(self) -> re2.Filter:
        made = re2.Filter()
        for pattern in self._patterns:
            made.Add(_LINES + pattern.source, _options())
        made.Compile()
        return made

    def possible(self, text: bytes) -> Container[int]:
        """Return the indices of the patterns that can match; the others cannot."""
        # RE2 logs a complaint about an empty filter
        return frozenset(self._filter.Match(text, potential=True) or ()) if self._patterns else frozenset()


def _groups(found: Any) -> dict[str, str]:
    return {name: value.decode("utf-8") for name, value in found.groupdict().items() if value is not None}


def _why_refused(source: str, error: Exception) -> str:
    reason = error.args[0] if error.args else str(error)
    reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(error)
    mark = next((mark for mark in _NOT_IN_RE2 if mark in source), None)
    if mark is None:
        return f"is not a regular expression that RE2 accepts: {reason}"
    return (
        f"has {_NOT_IN_RE2[mark]} ({mark}), which RE2 does not support; "
        "give the pattern of what must not be found in the key 'unless'"
    )
