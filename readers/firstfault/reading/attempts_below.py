"""Finds the attempts below a folder: of many executions in Flyte's metadata prefix, or of local runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firstfault.errors import StoreError
from firstfault.layout.keys import ErrorKey, RosterKey
from firstfault.layout.paths import ERRORS, OUTPUTS, ROSTER, is_stock_error_file
from firstfault.sync import gathered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from firstfault.store import ObjectInfo, Page, ReadableStore

_CUTS = "048cgkosw"
"""Characters at which the rest of a listing is split: names of executions are hexadecimal, or letters and digits."""


@dataclass
class FoundAttempt:
    """What the names below one output prefix tell."""

    path: str
    """Of the output prefix, relative to the listed folder."""
    error_files: list[ObjectInfo] = field(default_factory=list)
    """Flyte's own, with their paths relative to the listed folder."""
    documents: list[str] = field(default_factory=list)
    """Names of error documents; of a large attempt only some."""
    has_outputs: bool = False
    started_ns: int | None = None
    """When the first agent started; None: no name tells it."""
    changed_ns: int | None = None
    """When an error was last stored; None: the storage does not tell it."""

    @property
    def may_have_failed(self) -> bool:
        """Whether it has an error file, a document (of a round that recovered, perhaps), or a start without outputs."""
        return bool(self.error_files or self.documents) or (self.started_ns is not None and not self.has_outputs)


async def attempts_below(store: ReadableStore) -> list[FoundAttempt]:
    """Return the attempts below a store's root, by path, with or without failures.

    Lists page by page, and skips what is left of a large attempt's documents. From the second page on, the rest is
    split and its parts are listed at the same time. A store that does not page in order is listed once.

    Raises:
        StoreError: the storage could not be listed, or not in the order of names.
    """
    found: dict[str, FoundAttempt] = {}
    first = await _page(store, found, "")
    if first.more:
        start = _next(first, found)
        cuts = [name for name in _cuts(first.objects) if name > start]
        await gathered(*(_list(store, found, *part) for part in zip([start, *cuts], [*cuts, None], strict=True)))
    return [found[path] for path in sorted(found)]


async def _list(store: ReadableStore, found: dict[str, FoundAttempt], start: str, end: str | None) -> None:
    """Add the attempts of the names behind `start`, up to `end`."""
    while True:
        page = await _page(store, found, start, end)
        if not page.more or (end is not None and page.objects and page.objects[-1].name >= end):
            return
        start = _next(page, found)


async def _page(store: ReadableStore, found: dict[str, FoundAttempt], start: str, end: str | None = None) -> Page:
    page = await store.page(after=start)
    if not page.in_order:
        raise StoreError(f"{store.uri} is not listed in the order of names; name one attempt and use firstfault show")
    for item in page.objects:
        if end is None or item.name <= end:
            _add(found, item)
    return page


def _cuts(objects: Sequence[ObjectInfo]) -> list[str]:
    """Return names at which to split the rest of a listing: where those of its first page differ, and one before."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(objects[0].name, objects[-1].name, strict=False))
    common = "".join(character for character, _ in pairs)
    return sorted({f"{head}{character}" for head in {common, common[:-1]} for character in _CUTS})


def _next(page: Page, found: dict[str, FoundAttempt]) -> str:
    """Return the name behind which to continue."""
    last = page.objects[-1].name
    for folder in (ERRORS, ROSTER):
        path, inside = _split(last, folder)
        # the names of a round's first nodes tell when they started
        if inside and (folder == ERRORS or found[path].started_ns is not None):
            return f"{path}/{folder}0".lstrip("/")  # 0 sorts behind the slash
    return last


def _split(name: str, folder: str) -> tuple[str, str]:
    """Return the output prefix of a file in one of our folders and the file's name there; else empty names."""
    path, between, rest = f"/{name}".partition(f"/{folder}/")
    return (path.lstrip("/"), rest) if between else ("", "")


def _add(found: dict[str, FoundAttempt], item: ObjectInfo) -> None:
    path, name = _split(item.name, ERRORS)
    if name:
        attempt = found.setdefault(path, FoundAttempt(path))
        attempt.documents.append(name)
        key = ErrorKey.parse(name)
        _started(attempt, key.incarnation if key is not None else 0)
        _changed(attempt, item)
        return
    path, name = _split(item.name, ROSTER)
    if name:
        entry = RosterKey.parse(name)
        _started(found.setdefault(path, FoundAttempt(path)), entry.incarnation if entry is not None else 0)
        return
    path, _, name = item.name.rpartition("/")
    if is_stock_error_file(name):
        attempt = found.setdefault(path, FoundAttempt(path))
        attempt.error_files.append(item)
        _changed(attempt, item)
    elif name == OUTPUTS:
        found.setdefault(path, FoundAttempt(path)).has_outputs = True


def _started(attempt: FoundAttempt, incarnation_ms: int) -> None:
    if incarnation_ms:
        started = incarnation_ms * 1_000_000
        attempt.started_ns = min(attempt.started_ns or started, started)


def _changed(attempt: FoundAttempt, item: ObjectInfo) -> None:
    if item.last_modified_ns is not None:
        attempt.changed_ns = max(attempt.changed_ns or 0, item.last_modified_ns)
