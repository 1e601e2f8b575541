"""The decks that rank 0 has made, kept in a file in case its process crashes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence

from flytekit import Deck
from flytekit.deck.deck import TimeLineDeck

from firstfault.recorder.folder import NodeFolder
from firstfault_torch.guard import call_with_timeout, logger, suppress_internal_errors
from firstfault_torch.time_limits import DECKS_POLL_SECONDS, FINAL_DECKS_TIMEOUT_SECONDS

_PAUSE_FACTOR = 20
"""The pause after a slow check is this many times its duration,
so that large decks don't slow the training.
"""
_MAX_DECK_BYTES = 20 * 1024 * 1024
"""Limit for all decks together."""


class DeckKeeper:
    """Writes rank 0's decks to a file in the node's folder,
    which is still there if the process crashes.

    A thread of the worker checks the decks about once a second, also while the main thread waits
    inside C++. The agent reads the file after its node has failed. It leaves out flytekit's
    timeline, which has no text until flytekit renders it; the agent has its own timeline. The task
    function adds to `decks`, which is flytekit's list.
    """

    def __init__(self, files: NodeFolder, round_: int, decks: list[Deck]) -> None:
        self._file = files.rank_0_decks_file(round_)
        self._decks = decks
        self._written_decks: list[tuple[str, str]] = []
        self._left_out: list[str] = []
        self._lock = threading.Lock()
        self._ended = False
        self._wake = threading.Event()
        self._checked = threading.Event()
        # A daemon thread: a check that hangs on a full or slow disk must not keep the worker from
        # exiting.
        threading.Thread(target=self._run, name="firstfault-decks", daemon=True).start()

    def check_now(self, seconds: float) -> None:
        """Check now, because this process is about to be stopped; wait at most `seconds` for it."""
        # If a check is running right now, it may end the wait early, with decks that are a moment
        # old.
        self._checked.clear()
        self._wake.set()
        self._checked.wait(seconds)

    def end(self) -> None:
        """Check for the last time, and end the thread."""
        self._ended = True
        self._wake.set()
        # Don't wait for the keeper's thread: it may have ended after an error. This check runs in a
        # separate thread with a limit, because the worker's exit waits for it.
        call_with_timeout(self._check, FINAL_DECKS_TIMEOUT_SECONDS, "keeping the decks")

    def _run(self) -> None:
        # a failure ends the thread, with one warning
        with suppress_internal_errors("keeping the decks"):
            pause: float = DECKS_POLL_SECONDS
            while not self._ended:
                self._wake.wait(pause)
                # Clear before the check, not after it: a request that comes during the check then
                # ends the next pause at once.
                self._wake.clear()
                began = time.monotonic()
                self._check()
                self._checked.set()
                pause = max(DECKS_POLL_SECONDS, _PAUSE_FACTOR * (time.monotonic() - began))

    def _check(self) -> None:
        # `end` starts a check in another thread while the keeper's thread may be in the middle of
        # one.
        with self._lock:
            # unchanged texts are the same objects, so comparing them costs nothing
            decks = [
                (deck.name, deck.html)
                for deck in list(self._decks)
                if not isinstance(deck, TimeLineDeck)
            ]
            # The recorder removes the node's folder when it ends, for example after the agent's
            # death; then nobody reads decks.
            if decks != self._written_decks and self._file.parent.is_dir():
                self._write(decks)
                self._written_decks = decks

    def _write(self, decks: Sequence[tuple[str, str]]) -> None:
        entries: list[bytes] = []
        left_out: list[str] = []
        bytes_left = _MAX_DECK_BYTES
        for deck in decks:
            # UTF-8 can't encode a lone surrogate
            data = json.dumps(deck, ensure_ascii=False).encode("utf-8", "replace")
            if len(data) <= bytes_left:
                entries.append(data)
                bytes_left -= len(data)
            else:
                left_out.append(deck[0])
        if left_out and left_out != self._left_out:
            self._left_out = left_out
            text = (
                "if this attempt fails, its deck will lack %s, because all decks together exceed"
                " %d MB"
            )
            logger.warning(text, ", ".join(map(repr, left_out)), _MAX_DECK_BYTES // 1024**2)
        # an atomic rename: this process may be killed at any moment
        partial_file = self._file.with_suffix(".part")
        partial_file.write_bytes(b"[" + b",\n".join(entries) + b"]")
        partial_file.replace(self._file)


def read_kept_decks(files: NodeFolder, round_: int) -> list[Deck]:
    """Return rank 0's decks of a round; none if rank 0 made none, or was on another node."""
    try:
        # Rank 0 may still be replacing the file: the rename is atomic, so this reads either the old
        # or the new decks.
        data = files.rank_0_decks_file(round_).read_bytes()
    except FileNotFoundError:
        return []
    return [build_deck(str(name), str(html)) for name, html in json.loads(data)]


def build_deck(name: str, html: str) -> Deck:
    """Return a deck that isn't added to the list of flytekit's context."""
    return Deck(name, html, auto_add_to_deck=False)
