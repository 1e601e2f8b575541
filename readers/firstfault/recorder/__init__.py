"""The node's recorder: a process that uploads the documents of one node's workers and agent.

It has a storage client open, so a failing worker needs no slow imports. It outlives the agent and reports its death.
Imports `layout`, `model`, `store` and `wire`. Each name is imported on first use: a worker needs only the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.lazy import lazy_names

if TYPE_CHECKING:
    from firstfault.errors import RecorderUnavailableError
    from firstfault.recorder.folder import NodeFolder, Recorder, Spool, SpooledDocument, Target
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
        "firstfault.recorder.folder": ("NodeFolder", "Recorder", "Spool", "SpooledDocument", "Target"),
        "firstfault.recorder.process": ("RecorderProcess", "start_recorder"),
    },
)
