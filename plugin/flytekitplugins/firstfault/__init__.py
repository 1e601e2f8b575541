"""The flytekit task plugin: distributed PyTorch training with errors that name the
worker that caused them.

It replaces ``flytekitplugins.kfpytorch``, with more fields. It may import flytekit,
`firstfault_torch`, `firstfault`. Names are loaded when first used, so that `firstfault run --help`
doesn't wait for flytekit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from firstfault_torch.options import Hang
    from firstfault_torch.watchdog import Watchdog
    from flytekitplugins.firstfault.config import (
        CleanPodPolicy,
        Elastic,
        Master,
        PyTorch,
        RestartPolicy,
        RunPolicy,
        Worker,
    )
    from flytekitplugins.firstfault.task import ElasticFunctionTask, PyTorchFunctionTask

__all__ = [
    "CleanPodPolicy",
    "Elastic",
    "ElasticFunctionTask",
    "Hang",
    "Master",
    "PyTorch",
    "PyTorchFunctionTask",
    "RestartPolicy",
    "RunPolicy",
    "Watchdog",
    "Worker",
]

# not from `config`: importing `task` registers the task types with flytekit
__getattr__, __dir__ = lazy_names(__name__, {"flytekitplugins.firstfault.task": __all__})
