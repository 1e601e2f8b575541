"""Where a rank's main thread stands when a hang is interrupted: it tells the one that hangs from its peers."""

from __future__ import annotations

import json
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_COLLECTIVES = "torch.distributed"
_INSTALLED = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib"), "<frozen")
_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Position:
    """Where a thread stands."""

    text: str
    """The innermost line of the user's code, and what it calls."""
    waits: bool
    """Whether it is inside a collective, and so may wait for another rank."""
    begun: int | None = None
    """Collectives that this rank has begun in this iteration; None: torch does not tell."""

    def encode(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, line: str) -> Position:
        """Return a position from its line."""
        return cls(**json.loads(line))


def position_of(thread: int, begun: int | None = None) -> Position | None:
    """Return where a thread of this process stands; None if it has ended.

    Args:
        thread: its identifier.
        begun: collectives that this rank has begun.
    """
    frame: FrameType | None = sys._current_frames().get(thread)  # noqa: SLF001 - documented, for debuggers and the like
    if frame is None:
        return None
    waits, called, innermost = False, "", frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        waits = waits or module == _COLLECTIVES or module.startswith(_COLLECTIVES + ".")
        if not _is_installed(frame):
            return Position(_line(frame, called), waits, begun)
        called = f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return Position(_line(innermost, ""), waits, begun)


def _is_installed(frame: Any) -> bool:
    return any(part in frame.f_code.co_filename for part in _INSTALLED)


def _line(frame: Any, called: str) -> str:
    code = frame.f_code
    text = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    return (f"{text}, which calls {called}" if called else text)[:_LENGTH]
