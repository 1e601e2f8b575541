"""Loaded by each Python process of a test: what opens,
makes or lists a path in DEAD_FOLDER waits for ever.
"""

import os
import sys
import threading
from typing import Any

_DEAD = os.environ["DEAD_FOLDER"]


def _wait(_event: str, args: tuple[Any, ...]) -> None:
    if any(isinstance(item, str | os.PathLike) and str(item).startswith(_DEAD) for item in args):
        threading.Event().wait()


sys.addaudithook(_wait)
