"""A time limit with a description of its purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class TimeLimit(float):
    """Seconds, as a row of a table: who waits, for what, and what happens when the time is up."""

    who: str
    waits_for: str
    then: str

    def __new__(cls, seconds: float, who: str, waits_for: str, then: str) -> Self:
        """Return the limit, which counts as a float everywhere."""
        limit = super().__new__(cls, seconds)
        limit.who = who
        limit.waits_for = waits_for
        limit.then = then
        return limit

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Other processes get the number."""
        return float, (float(self),)
