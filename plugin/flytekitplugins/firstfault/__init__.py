"""The flytekit task plugin: distributed PyTorch training whose errors name the worker that caused them.

A drop-in for ``flytekitplugins.kfpytorch``: the same names and fields, plus what firstfault adds.
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
