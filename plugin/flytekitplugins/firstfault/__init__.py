"""The flytekit task plugin: distributed PyTorch training whose errors name the worker that caused them.

It replaces ``flytekitplugins.kfpytorch``, with more fields. It may import flytekit, `firstfault_torch`, `firstfault`.
"""

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
    "Master",
    "PyTorch",
    "PyTorchFunctionTask",
    "RestartPolicy",
    "RunPolicy",
    "Worker",
]
