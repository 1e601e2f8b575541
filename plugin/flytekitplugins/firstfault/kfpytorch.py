"""Lets firstfault run the tasks of ``flytekitplugins.kfpytorch``: import this module, and leave the tasks as they are.

The import takes the place of kfpytorch's task types in this process. It may come before or after the tasks' modules
import kfpytorch, but before they define a task. It does nothing if kfpytorch is not installed.
"""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from flytekit.extend import TaskPlugins

from flytekitplugins.firstfault.config import Elastic, Master, PyTorch, Worker
from flytekitplugins.firstfault.task import ElasticFunctionTask, PyTorchFunctionTask

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StockElasticTask", "StockPyTorchTask"]

_STOCK_INTERVAL_S = 5
"""kfpytorch's default `monitor_interval`; a task with it gets ours."""


class _StockConfig:
    """Keeps kfpytorch's configuration, which ``with_overrides`` may replace, and shows it as ours."""

    _task_config: Any

    @property
    def task_config(self) -> Any:
        return _ours(self._task_config)


class StockElasticTask(_StockConfig, ElasticFunctionTask):
    """A task with kfpytorch's `Elastic`."""

    def __init__(self, task_config: Any, task_function: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(_ours(task_config), task_function, **kwargs)
        self._task_config = task_config


class StockPyTorchTask(_StockConfig, PyTorchFunctionTask):
    """A task with kfpytorch's `PyTorch`."""

    def __init__(self, task_config: Any, task_function: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(_ours(task_config), task_function, **kwargs)
        self._task_config = task_config


def _ours(config: Any) -> Any:
    """Return one of kfpytorch's configurations as ours; any other as it is."""
    if isinstance(config, Elastic | PyTorch):
        return config
    values = _values(config)
    if "nproc_per_node" not in values:
        return PyTorch(
            **{**values, "master": Master(**_values(config.master)), "worker": Worker(**_values(config.worker))}
        )
    if values["monitor_interval"] == _STOCK_INTERVAL_S:
        del values["monitor_interval"]
    return Elastic(**values)


def _values(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _replace() -> None:
    """Map kfpytorch's configurations to our task types; flytekit's own call refuses a type that is registered."""
    try:
        kfpytorch = importlib.import_module("flytekitplugins.kfpytorch")
    except ImportError:
        return
    registered = TaskPlugins._PYTHONFUNCTION_TASK_PLUGINS  # noqa: SLF001 - there is no public way to replace a type
    registered[kfpytorch.Elastic] = StockElasticTask
    registered[kfpytorch.PyTorch] = StockPyTorchTask


_replace()
