"""Names of a package that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__`` (PEP 562).

    `homes` are the modules to import, with the names that the package takes from each. A module of
    the package itself is an attribute too.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of and f"{package}.{name}" in homes:
            return importlib.import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted(home_of)

    return get, names
