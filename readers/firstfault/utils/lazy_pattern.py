"""Regular expressions that are compiled on first use."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

_METHODS = ("findall", "finditer", "fullmatch", "match", "search", "sub")


class LazyPattern:
    r"""A verbose regular expression that is compiled on first use.

    Most commands need few of the hundreds of patterns. In a verbose expression blanks and line
    breaks don't count: write a blank as ``[ ]`` and a hash as ``\#``.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    if TYPE_CHECKING:

        def findall(self, string: str) -> list[Any]:
            """See `re.Pattern.findall`."""

        def finditer(self, string: str) -> Iterator[re.Match[str]]:
            """See `re.Pattern.finditer`."""

        def fullmatch(self, string: str, pos: int = 0) -> re.Match[str] | None:
            """See `re.Pattern.fullmatch`."""

        def match(
            self, string: str, pos: int = 0, endpos: int = sys.maxsize
        ) -> re.Match[str] | None:
            """See `re.Pattern.match`."""

        def search(self, string: str, pos: int = 0) -> re.Match[str] | None:
            """See `re.Pattern.search`."""

        def sub(self, repl: str | Callable[[re.Match[str]], str], string: str) -> str:
            """See `re.Pattern.sub`."""

    else:

        def __getattr__(self, name: str) -> Any:
            # Called for the first use only: then the methods are attributes, so that a search of
            # each line of a log costs no further call.
            if name not in _METHODS:
                raise AttributeError(name)
            self.compile()
            return getattr(self, name)

    @property
    def is_compiled(self) -> bool:
        """Whether the pattern was compiled."""
        return _METHODS[0] in vars(self)

    def compile(self) -> None:
        """Compile the pattern now."""
        compiled = re.compile(self.text, re.VERBOSE)
        vars(self).update({name: getattr(compiled, name) for name in _METHODS})


def find_patterns(package: ModuleType) -> dict[str, LazyPattern]:
    """Return all patterns that are constants of a package's modules, by module and name.

    Imports the modules, but none of packages within the package.
    """
    import pkgutil  # noqa: PLC0415 - most commands don't need it

    modules = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    return {
        f"{module.name}.{name}": value
        for module in modules
        if not module.ispkg
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, LazyPattern)
    }


def compile_patterns(package: ModuleType) -> None:
    """Compile the patterns of a package now, for a process that may lack the memory,
    the stack or the time later.
    """
    for pattern in find_patterns(package).values():
        pattern.compile()
