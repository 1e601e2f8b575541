"""Writes rank 0's decks to a file in the node's folder, which is still there if the process crashes.

A thread of the worker checks the decks about once a second, also while the main thread waits inside C++. The agent
reads the file after its node has failed.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flytekit.deck.deck import TimeLineDeck

from firstfault_torch.budgets import DECKS_INTERVAL_S, DECKS_LAST_S
from firstfault_torch.guard import bounded, guarded, logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    import flytekit

    from firstfault.recorder import NodeFolder

_LOOK_SHARE = 20
"""The pause after a slow check is this many times its duration, so that large decks do not slow the training."""
_MAX_BYTES = 20 * 1024 * 1024
"""Limit for all decks together."""


@dataclass(frozen=True, slots=True)
class KeptDeck:
    """A deck as text."""

    name: str
    html: str


class DeckKeeper:
    """Writes the decks to a file while the task function runs.

    It leaves out flytekit's timeline, which has no text until flytekit renders it; the agent has its own timeline.

    Args:
        files: the node's files.
        round_: the worker's round.
        decks: flytekit's list, to which the task function adds.
    """

    def __init__(self, files: NodeFolder, round_: int, decks: list[flytekit.Deck]) -> None:
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
        """Check now, because this process is about to be stopped; wait at most `seconds` for it."""
        self._looked.clear()
        self._wake.set()
        self._looked.wait(seconds)

    def end(self) -> None:
        """Check for the last time, and end the thread."""
        self._ended = True
        self._wake.set()
        bounded(self._look, DECKS_LAST_S, "keeping the decks")

    def _run(self) -> None:
        # a failure ends the thread, with one warning
        with guarded("keeping the decks"):
            pause: float = DECKS_INTERVAL_S
            while not self._ended:
                self._wake.wait(pause)
                self._wake.clear()
                began = time.monotonic()
                self._look()
                self._looked.set()
                pause = max(DECKS_INTERVAL_S, _LOOK_SHARE * (time.monotonic() - began))

    def _look(self) -> None:
        with self._lock:
            # unchanged texts are the same objects, so comparing them costs nothing
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
            # UTF-8 cannot encode a lone surrogate
            data = entry.encode("utf-8", "replace")
            if len(data) <= room:
                entries.append(data)
                room -= len(data)
            else:
                left_out.append(deck.name)
        if left_out and tuple(left_out) != self._left_out:
            self._left_out = tuple(left_out)
            logger.warning(
                "if this attempt fails, its deck leaves out %s: all decks together have more than %d MB",
                ", ".join(map(repr, left_out)),
                _MAX_BYTES // 1024**2,
            )
        # an atomic rename: this process may be killed at any moment
        part = self._file.with_suffix(".part")
        part.write_bytes(b"[" + b",\n".join(entries) + b"]")
        part.replace(self._file)


def kept_decks(files: NodeFolder, round_: int) -> tuple[KeptDeck, ...]:
    """Return rank 0's decks of a round; none if rank 0 made none, or was on another node.

    Args:
        files: the node's files.
        round_: the workers' round.
    """
    try:
        data = files.decks(round_).read_bytes()
    except FileNotFoundError:
        return ()
    return tuple(KeptDeck(str(item["name"]), str(item["html"])) for item in json.loads(data))


def _has_text(deck: flytekit.Deck) -> bool:
    return not isinstance(deck, TimeLineDeck)
