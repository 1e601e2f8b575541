"""An engine in which an agent's main thread blocks in C++, as in torch's store."""

from __future__ import annotations

import datetime as dt
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from firstfault.model import JobErrors
from firstfault_torch.engine import PlainEngine, Publication
from tests.nodes import mark

WITHOUT_VERDICT = 7
WITH_VERDICT = 8
LONG = dt.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class BlockingEngine(PlainEngine):
    """Blocks the main thread of the first node in one step, and marks that with "blocked"."""

    step: str = ""
    """The method in which it blocks."""

    def enforces(self, job: JobErrors) -> bool:
        """Block a leader that concludes."""
        self._reach("enforces")
        return PlainEngine.enforces(self, job)

    def publish(self, publication: Publication, **how: Any) -> Publication:
        """Block after the upload."""
        published = PlainEngine.publish(self, publication, **how)
        self._reach("publish")
        return published

    def announce(self, publication: Publication) -> None:
        """Block the node that concluded, after the verdict."""
        if publication.own is not None:
            self._reach("announce")
        PlainEngine.announce(self, publication)

    def choose_exit_code(self, publication: Publication | None) -> int:
        """Show whether the process had a verdict when another thread ended it."""
        return WITHOUT_VERDICT if publication is None else WITH_VERDICT

    def _reach(self, step: str) -> None:
        if step != self.step or threading.current_thread() is not threading.main_thread():
            return
        try:
            Path(self.folder, "first").touch(exist_ok=False)
        except FileExistsError:
            return  # only the first node is blocked
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        report = threading.Thread(target=_mark_inside, args=(self.folder, threading.get_ident()))
        report.daemon = True
        report.start()
        _wait(store)


def _wait(store: TCPStore) -> None:
    store.wait(["never"], LONG)


def _mark_inside(folder: str, thread: int) -> None:
    """Mark when the thread is in the store's own code: twice at the same place, with time for many
    others.
    """
    places = [("", -1), ("", -2)]
    while places[-1] != places[-2] or places[-1][0] != "_wait":
        time.sleep(0.02)
        frame = sys._current_frames()[thread]
        places.append((frame.f_code.co_name, frame.f_lasti))
    mark(folder, "blocked")
