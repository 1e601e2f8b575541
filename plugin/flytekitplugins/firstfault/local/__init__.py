"""``firstfault run``: runs a task on one machine. Only this package imports
``firstfault.cli`` and rich.

Each pod is a real ``pyflyte-execute``; the rules of Kubeflow's operator and of Flyte are simulated.
"""

from __future__ import annotations

import os
from pathlib import Path


def shown(place: str | Path) -> str:
    """Return a path as the user would type it: relative if it is below the working folder."""
    text = str(place)
    return (
        os.path.relpath(text)
        if Path(text).is_absolute() and Path(text).is_relative_to(Path.cwd())
        else text
    )
