"""Finds the regular expressions that modules have as constants."""

import importlib
import pkgutil
from types import ModuleType

from firstfault.utils.lazy_pattern import LazyPattern


def find_all(package: ModuleType) -> dict[str, LazyPattern]:
    """Return the patterns of all modules of a package, by module and name."""
    names = [package.__name__]
    modules = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names += [module.name for module in modules]
    return {
        f"{name}.{constant}": value
        for name in names
        for constant, value in vars(importlib.import_module(name)).items()
        if isinstance(value, LazyPattern)
    }
