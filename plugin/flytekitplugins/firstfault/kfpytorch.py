"""Lets firstfault run the tasks of ``flytekitplugins.kfpytorch``: import this module,
and leave the tasks as they are.

The import replaces kfpytorch's task types in this process. It may come before, during or after the
import of kfpytorch, but must come before a task is defined. It does nothing if kfpytorch isn't
installed.
"""

from __future__ import annotations

from typing import Any

from flytekit.extend import TaskPlugins

from firstfault_torch.guard import suppress_internal_errors

_STOCK = "flytekitplugins.kfpytorch.task"
"""The module of kfpytorch's configurations. It may be half imported:
its first import may load this module.
"""


class TaskTypes(dict[type, Any]):
    """Flytekit's task types by configuration; those of kfpytorch's configurations are ours,
    looked up when used.
    """

    def __getitem__(self, config: type) -> Any:
        """Return the task type of a configuration."""
        # By name: importing kfpytorch here would recurse into a module that may be importing this
        # one.
        if config.__module__ == _STOCK and config.__name__ in {"Elastic", "PyTorch"}:
            # flytekit is imported completely when a task is defined, but not when it loads this
            # module
            from flytekitplugins.firstfault import task  # noqa: PLC0415

            # flytekit tests `in` before it reads `[]`. That test is the plain dict's: it is true
            # once kfpytorch has registered its configurations, which it does while it is imported.
            return (
                task.ElasticFunctionTask
                if config.__name__ == "Elastic"
                else task.PyTorchFunctionTask
            )
        return super().__getitem__(config)


with suppress_internal_errors("taking the place of kfpytorch's task types"):
    # flytekit has no public way to replace a type
    TaskPlugins._PYTHONFUNCTION_TASK_PLUGINS = TaskTypes(TaskPlugins._PYTHONFUNCTION_TASK_PLUGINS)  # noqa: SLF001
