"""What a node concluded, and from which files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion


class NodeConclusion(NamedTuple):
    """What a node concluded, and from what."""

    conclusion: Conclusion
    files: Mapping[str, bytes]
    """The documents and roster entries that were read, by path below the output prefix."""
