"""The decorator that adds in-process restarts to a function."""

from __future__ import annotations

import functools
import inspect
import typing
from typing import TYPE_CHECKING, Any

from firstfault_torch.inprocess.call import CallWrapper, Observer
from firstfault_torch.inprocess.options import InProcessOptions

if TYPE_CHECKING:
    from collections.abc import Callable


class Wrapper:
    """Calls a function again in the same processes after a fault on any rank, without the ranks that are gone.

    On a fault all ranks abort their collectives, agree on who continues, get new ranks and a new world size, and call
    the function again, until all have completed or a limit is met. Decorate the function that calls
    ``init_process_group``; all ranks call it in their main thread. A parameter annotated with `CallWrapper` receives
    the call.

    Args:
        options: the fields of `InProcessOptions`.

    Raises:
        firstfault.errors.UsageError: an option is not valid.
    """

    def __init__(self, **options: Any) -> None:
        self.options = InProcessOptions(**options)

    def __call__(self, function: Callable[..., Any], observer: Observer | None = None) -> Callable[..., Any]:
        """Return the function with restarts; the function itself if they are not enabled.

        Args:
            function: it may be called again, but not within a call, nor after a rank was lost.
            observer: learns of this rank's faults.
        """
        if not self.options.enabled:
            return function
        names = _parameters_for_the_call(function)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with CallWrapper(self.options, observer) as call:
                bound = inspect.signature(function).bind_partial(*args, **kwargs)
                bound.arguments.update(dict.fromkeys(names, call))
                return call(function, bound.args, bound.kwargs)

        return wrapped


def _parameters_for_the_call(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that are annotated with `CallWrapper`, or with that or None."""
    annotations = getattr(function, "__annotations__", {})
    if any(isinstance(annotation, str) for annotation in annotations.values()):
        try:
            annotations = typing.get_type_hints(function)
        except Exception:  # noqa: BLE001 - the user's annotations may name what is not there
            annotations = {name: annotation for name, annotation in annotations.items() if "CallWrapper" in annotation}
            return list(annotations)
    found = [name for name, kind in annotations.items() if kind is CallWrapper or CallWrapper in typing.get_args(kind)]
    return [name for name in found if name != "return"]
