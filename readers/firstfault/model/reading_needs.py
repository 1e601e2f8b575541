"""Which documents of a large cascade a strategy needs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from firstfault.model.job import JobErrors


class DocumentsNeeded(enum.Enum):
    """How many documents of a large cascade a strategy needs. Small cascades are
    always read completely.
    """

    ALL = "every document"
    SAMPLE = "some documents of each fault, and those of the ranks that the strategy asks for"
    EARLIEST = "the earliest document of the last round"


@dataclass(frozen=True, slots=True)
class ReadingNeeds:
    """What a strategy needs to read of a large cascade."""

    documents: DocumentsNeeded = DocumentsNeeded.ALL
    find_more_ranks: Callable[[JobErrors], Iterable[int]] | None = None
    """For `DocumentsNeeded.SAMPLE`: returns more ranks to read, given the documents read so far.

    A sample of each fault isn't enough. A rank that its peers blame may have the same fault as 599
    victims, so that its document isn't in the sample; without it, the blamed rank looks like the
    one rank that didn't time out.
    """
