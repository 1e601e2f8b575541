"""Tasks without firstfault that fail in each of the ways that Flyte's own
entrypoint tells apart.
"""

from typing import Any

from flytekit import PythonFunctionTask, task
from flytekit.exceptions.system import FlyteNonRecoverableSystemException
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import TaskPlugins


class BrokenPlatform:
    """Configuration of a task type that fails outside of the user's function,
    as a plugin or a data upload does.
    """


class BrokenPlatformTask(PythonFunctionTask[BrokenPlatform]):
    """Never runs its function."""

    def __init__(self, task_config: BrokenPlatform, task_function: Any, **options: Any) -> None:
        super().__init__(task_config, task_function, task_type="python-task", **options)

    def dispatch_execute(self, *_: Any) -> Any:
        """Fail before the user's function is reached."""
        raise FlyteNonRecoverableSystemException(ValueError("the platform is gone"))


TaskPlugins.register_pythontask_plugin(BrokenPlatform, BrokenPlatformTask)


@task
def plain() -> None:
    """Raise an ordinary exception."""
    raise RuntimeError("a plain fault")


@task
def recoverable() -> None:
    """Raise what Flyte runs again."""
    raise FlyteRecoverableException("try again")


@task(task_config=BrokenPlatform())
def platform() -> None:
    """Never be reached."""


@task
def fine() -> int:
    return 7
