"""The base class of all hooks, and what chains several into one."""

from __future__ import annotations

import abc
import inspect
import types
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from firstfault_torch.inprocess.state import State

    _Anything: TypeAlias = Any
    """A chain has the type of its parts, so type checkers must accept it wherever they accept a part."""
else:
    _Anything = object

_CAN_HAVE_SUBCLASSES = 1 << 10
"""CPython's Py_TPFLAGS_BASETYPE, a bit of a class's ``__flags__``."""


class Hook(abc.ABC):
    """Called on a rank at one step of a restart. `Compose` chains several of one kind."""

    @abc.abstractmethod
    def __call__(self, state: State) -> State:
        """Do the step; return `state`, for the next hook of a chain.

        Args:
            state: of this rank; `fn_exception` is what the function raised.

        Raises:
            Exception: what that means depends on the kind of hook.
        """


class Compose(_Anything):
    """Calls its parts from the last to the first: ``Compose(a, b, c)(x)`` is ``a(b(c(x)))``.

    Each part gets what the part before it returned; a tuple is passed as several arguments. A part that returns None
    although it got an argument causes a `UserWarning`: it probably forgot to return its argument. Parts that take no
    arguments can be chained too.

    A chain is an instance of the nearest class that all its parts share. So a chain of health checks is a health check.
    A chain within a chain counts as its parts.

    Args:
        instances: the parts, at least one. The last is called first.

    Raises:
        ValueError: there are no parts.
        TypeError: a part cannot be called.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:  # noqa: D102, PYI034 - see the class
        if not instances:
            raise ValueError("Compose needs at least one part")
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"Compose cannot call {instance!r}")
        parts: list[Callable[..., Any]] = []
        for instance in instances:
            parts.extend(instance.instances if isinstance(instance, Compose) else [instance])
        ancestor = _common_ancestor([type(part) for part in parts])
        bases = (cls,) if issubclass(cls, ancestor) else (cls, ancestor)
        # the new class needs a plain __new__: this one would call itself
        members = {"__new__": object.__new__, "__module__": __name__, "__doc__": cls.__doc__}
        chain_class = types.new_class(
            f"Composed{ancestor.__name__}", bases, exec_body=lambda body: body.update(members)
        )
        chain: Compose = chain_class()
        chain.instances = tuple(parts)
        return chain

    def __init__(self, *instances: Callable[..., Any]) -> None:
        """Do nothing; without this method Python would call the shared class's."""

    def __reduce__(self) -> tuple[type[Compose], tuple[Callable[..., Any], ...]]:
        """Return how to make it again in another process, which lacks the class of this chain."""
        return Compose, self.instances

    def __call__(self, *args: Any) -> Any:
        """Call all parts.

        Args:
            args: the arguments of the last part.

        Returns:
            What the first part returned.
        """
        result: Any = None
        for part in reversed(self.instances):
            result = part(*args)
            has_argument = bool(args) and not (len(args) == 1 and args[0] is None)
            if result is None and has_argument:
                warnings.warn(
                    f"{part!r} got an argument and returned None; a part must return its argument", stacklevel=2
                )
            if isinstance(result, tuple):
                args = result
            elif result is None and not _takes_arguments(part):
                args = ()
            else:
                args = (result,)
        return result


def _common_ancestor(classes: Sequence[type]) -> type:
    """Return the first class in the first one's resolution order that all have, and from which a chain can inherit.

    That excludes the class of functions, which can have no subclasses, and the class of classes.
    """
    shared = set(classes[0].__mro__).intersection(*(part.__mro__ for part in classes[1:]))
    return next(
        part
        for part in classes[0].__mro__
        if part in shared and part.__flags__ & _CAN_HAVE_SUBCLASSES and not issubclass(part, type)
    )


def _takes_arguments(part: Callable[..., Any]) -> bool:
    try:
        return bool(inspect.signature(part).parameters)
    except ValueError:  # some built-in functions have no signature
        return True
