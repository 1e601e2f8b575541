"""The task types that take kfpytorch's configurations."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from flytekitplugins.firstfault.config import Elastic, Master, PyTorch, Worker
from flytekitplugins.firstfault.task import ElasticFunctionTask, PyTorchFunctionTask

if TYPE_CHECKING:
    from collections.abc import Callable

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
