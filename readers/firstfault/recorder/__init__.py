"""The node's recorder: a process that uploads the documents of one node's workers and agent.

Its open storage client spares a dying worker slow imports, and it outlives the agent to report the agent's death.
Imports `layout`, `model`, `store` and `wire`. Each name is imported on first use: a worker needs the client alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.lazy import lazy_names

if TYPE_CHECKING:
    from firstfault.errors import RecorderUnavailableError
    from firstfault.recorder.client import Recorder, Target
    from firstfault.recorder.folder import NodeFolder, Spool, SpooledDocument
    from firstfault.recorder.process import RecorderProcess, start_recorder

__all__ = [
    "NodeFolder",
    "Recorder",
    "RecorderProcess",
    "RecorderUnavailableError",
    "Spool",
    "SpooledDocument",
    "Target",
    "start_recorder",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "firstfault.errors": ("RecorderUnavailableError",),
        "firstfault.recorder.client": ("Recorder", "Target"),
        "firstfault.recorder.folder": ("NodeFolder", "Spool", "SpooledDocument"),
        "firstfault.recorder.process": ("RecorderProcess", "start_recorder"),
    },
)
