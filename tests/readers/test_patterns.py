"""The regular expressions that modules have as constants."""

import importlib
import pkgutil
from types import ModuleType

import pytest

import firstfault_logs
from firstfault import evidence, exceptions
from firstfault.utils.lazy_pattern import LazyPattern


def _find_all(package: ModuleType) -> dict[str, LazyPattern]:
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


_OF_LIBRARY = _find_all(exceptions) | _find_all(evidence)
_OF_LOGS = _find_all(firstfault_logs)


@pytest.mark.parametrize("name", sorted(_OF_LIBRARY))
def test_patterns_of_the_library(name: str) -> None:
    """Each pattern compiles."""
    _OF_LIBRARY[name].compile()


@pytest.mark.parametrize("name", sorted(_OF_LOGS))
def test_patterns_of_logs(name: str) -> None:
    """Each pattern compiles, and none is so loose that it matches an empty text."""
    matches_empty = _OF_LOGS[name].search("") is not None
    assert matches_empty is (name == "firstfault_logs.completion.words._NOISE_LINE")


def test_a_pattern_is_compiled_on_first_use() -> None:
    """A pattern is compiled by its first search, or before; then it searches as `re` does."""
    pattern = LazyPattern(
        r"""(?i)
        step [ ] (?P<step>\d+)  # of a training
        """
    )
    assert not pattern.is_compiled
    assert [found["step"] for found in pattern.finditer("step 1, STEP 22")] == ["1", "22"]
    assert pattern.is_compiled
    assert pattern.sub("#", "at step 3") == "at #"
    assert not hasattr(pattern, "split")
    early = LazyPattern("a|b")
    early.compile()
    assert early.is_compiled
    assert early.fullmatch("b") is not None
