"""What rank 0's decks hold, in a file of the node's folder: it outlives the process, which may die without a word.

A thread of the worker looks about once a second whether something was added, also while the main thread waits inside
C++. The agent reads the file when its node has failed.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flytekit.deck.deck import TimeLineDeck

from firstfault_torch.guard import bounded, guarded, logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    import flytekit

    from firstfault_torch.node.files import NodeFiles

__all__ = ["DeckKeeper", "KeptDeck", "kept_decks"]

_INTERVAL_S = 1.0
_LOOK_SHARE = 20
"""A pause is so many times as long as the look before it, if that took long: large decks cost the training little."""
_LAST_S = 1.0
"""Longest time for the last look, seconds."""
_MAX_BYTES = 20 * 1024 * 1024
"""Of all decks together."""


@dataclass(frozen=True, slots=True)
class KeptDeck:
    """A deck as text."""

    name: str
    html: str


class DeckKeeper:
    """Keeps what decks hold, for as long as the task function runs.

    flytekit's timeline is not kept: it has no text until it is asked for, and the agent has one of its own.

    Args:
        files: the node's.
        round_: the worker's.
        decks: flytekit's own list, to which the task function adds.
    """

    def __init__(self, files: NodeFiles, round_: int, decks: list[flytekit.Deck]) -> None:
        self._file = files.decks(round_)
        self._decks = decks
        self._kept: tuple[KeptDeck, ...] = ()
        self._left_out: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._ended = False
        self._wake = threading.Event()
        self._looked = threading.Event()
        threading.Thread(target=self._run, name="firstfault-decks", daemon=True).start()

    def look_now(self, seconds: float) -> None:
        """Look at once, and wait for that at most `seconds`: this process is about to be stopped."""
        self._looked.clear()
        self._wake.set()
        self._looked.wait(seconds)

    def end(self) -> None:
        """Look for the last time."""
        self._ended = True
        self._wake.set()
        bounded(self._look, _LAST_S, "keeping the decks")

    def _run(self) -> None:
        # a failure ends it, with one warning
        with guarded("keeping the decks"):
            pause = _INTERVAL_S
            while not self._ended:
                self._wake.wait(pause)
                self._wake.clear()
                began = time.monotonic()
                self._look()
                self._looked.set()
                pause = max(_INTERVAL_S, _LOOK_SHARE * (time.monotonic() - began))

    def _look(self) -> None:
        with self._lock:
            # the texts are the decks' own objects, so that comparing what has not changed costs nothing
            found = tuple(KeptDeck(deck.name, deck.html) for deck in list(self._decks) if _has_text(deck))
            if found != self._kept and self._file.parent.is_dir():
                self._write(found)
                self._kept = found

    def _write(self, decks: Sequence[KeptDeck]) -> None:
        entries: list[bytes] = []
        left_out: list[str] = []
        room = _MAX_BYTES
        for deck in decks:
            entry = json.dumps({"name": deck.name, "html": deck.html}, ensure_ascii=False)
            # a lone surrogate of somebody's text has no bytes
            data = entry.encode("utf-8", "replace")
            if len(data) <= room:
                entries.append(data)
                room -= len(data)
            else:
                left_out.append(deck.name)
        if left_out and tuple(left_out) != self._left_out:
            self._left_out = tuple(left_out)
            logger.warning(
                "should this attempt fail, it goes without the decks %s: together they have more than %d MB",
                ", ".join(map(repr, left_out)),
                _MAX_BYTES // 1024**2,
            )
        # whole or not at all: this process may be killed at any moment
        part = self._file.with_suffix(".part")
        part.write_bytes(b"[" + b",\n".join(entries) + b"]")
        part.replace(self._file)


def kept_decks(files: NodeFiles, round_: int) -> tuple[KeptDeck, ...]:
    """Return what rank 0's decks held in a round; nothing if they held nothing, or rank 0 was on another node.

    Args:
        files: the node's.
        round_: the workers'.
    """
    try:
        data = files.decks(round_).read_bytes()
    except FileNotFoundError:
        return ()
    return tuple(KeptDeck(str(item["name"]), str(item["html"])) for item in json.loads(data))


def _has_text(deck: flytekit.Deck) -> bool:
    return not isinstance(deck, TimeLineDeck)
