"""The paths of an attempt's files."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from firstfault.store._base import join, split_name

ERRORS = "firstfault/errors"
"""Folder of error documents, below the output prefix.

Not ``errors/``: Flyte's reader takes every ``<output prefix>/error*.pb`` for a failure of the attempt, also a document
of a round that the job recovered from.
"""
ROSTER = "firstfault/roster"
"""Folder of roster entries, below the output prefix."""
OUTPUTS = "outputs.pb"
ERROR_FILE = "error.pb"
"""The attempt's error as Flyte reads it, where all pods write one file."""
DECK = "deck.html"
_STOCK = re.compile(r"error(?:-[0-9a-f]{32})?\.pb")
_BUNDLE = re.compile(r"copies-[0-9a-f]{64}\.bundle")
_RESTART = re.compile(r"decision-(?:round|in-process)-\d{5}-\d{7}\.json", re.ASCII)
_ATTEMPT = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)
_MAX_NUMBER, _MAX_RANK = 99_999, 9_999_999


@dataclass(frozen=True, slots=True)
class Layout:
    """The folders and files that a URI stands for. An empty folder name means the root, None that there is none."""

    root: str
    errors: str | None
    roster: str | None
    stock: str | None
    """Folder in which Flyte's own error.pb and error-<uuid>.pb lie."""
    document: str | None = None
    """Name of the only document to read."""

    @classmethod
    def of(cls, uri: str) -> Layout:
        """Return the layout of an output prefix, an errors/ folder or a single document."""
        folder, name = split_name(uri)
        if name.endswith(".pb"):
            return cls(folder, None, None, None, document=name)
        if name == "errors":
            # the roster is beside it
            return cls(folder, "errors", "roster", None)
        if name == "firstfault":
            return cls(uri, "errors", "roster", None)
        return cls(uri, ERRORS, ROSTER, "")

    def errors_uri(self) -> str:
        """Return the URI of the errors/ folder, or of the document itself."""
        return join(self.root, self.document or self.errors or "")


def is_error_file(name: str) -> bool:
    """Whether a file in an errors/ folder is an error document by its name."""
    return name.endswith(".pb")


def is_stock_error_file(name: str) -> bool:
    """Whether a file beside the outputs has one of the names that flytekit gives to errors.

    Flyte's own reader takes every ``error*.pb``, also ``error_rate_offloaded_metadata.pb``: an output "error_rate".
    """
    return _STOCK.fullmatch(name) is not None


def bundle_name(data: bytes) -> str:
    """Return the name, in the roster's folder, of a bundle of copies: it tells whether the content is whole."""
    return f"copies-{hashlib.sha256(data).hexdigest()}.bundle"


def is_bundle(name: str) -> bool:
    """Whether a file in the roster's folder is a bundle of copies by its name."""
    return _BUNDLE.fullmatch(name) is not None


def restart_record_name(kind: str, number: int, group_rank: int) -> str:
    """Return the name, in the roster's folder, of a node's record of a restart.

    It sorts before the roster's entries, and readers without it ignore the file: it is neither ``.pb`` nor a bundle.

    Args:
        kind: "round" or "in-process".
        number: of the round or iteration that failed.
        group_rank: of the node that writes it.
    """
    return f"decision-{kind}-{min(max(number, 0), _MAX_NUMBER):05d}-{min(max(group_rank, 0), _MAX_RANK):07d}.json"


def is_restart_record(name: str) -> bool:
    """Whether a file in the roster's folder is a record of a restart by its name."""
    return _RESTART.fullmatch(name) is not None


def bundle_path(path: str) -> str:
    """Return the name in a bundle of a document or roster entry: without the folders above ``errors`` or ``roster``."""
    return "/".join(path.split("/")[-2:])


def join_name(folder: str, name: str) -> str:
    """Return the path of an object relative to the store's root."""
    return f"{folder}/{name}" if folder else name


def attempt_of(uri: str) -> tuple[str, int] | None:
    """Return the folder of all attempts and this attempt's number; None if the output prefix does not end in one.

    Flyte's output prefix of an attempt is ``<...>/data/<number>``. `uri` may be a path below it.
    """
    folder, name = split_name(Layout.of(uri).root)
    if name == "firstfault":
        folder, name = split_name(folder)
    return (folder, int(name)) if _ATTEMPT.fullmatch(name) else None


def execution_of(uri: str) -> str | None:
    """Return the name of Flyte's execution, from an output prefix ``<...>/<execution>/<node>/data/<attempt>``."""
    here = attempt_of(uri) if uri else None
    parts = here[0].split("/") if here is not None else []
    return parts[-3] if len(parts) > 3 and parts[-1] == "data" else None  # noqa: PLR2004 - the parts above
