"""The structure that a reader of the product can rely on: sizes, names that mean one thing,
and who imports whom.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools import sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = (
    "firstfault",
    "firstfault_logs",
    "firstfault_torch",
    "firstfault_inprocess",
    "flytekitplugins.firstfault",
)
_JOB_LOGS = Path("firstfault_logs")
_CLASSES_WITH_TWO_MEANINGS = {
    "Wrapper",  # NVIDIA's name, for its class and for the adapter to it
    "State",  # of a rank within in-process restart; of a line in a report
    # the readers of logs have names of their own
    "Attempt",
    "Worker",
    "Progress",
}
_RIDDLES = {
    "told_of", "Told", "may_stand", "what_workers_left", "await_passed_on", "others_suffice",
    "_FEW", "_LATER", "_USUAL", "_LONGER", "_SEVERAL", "_OF_ANY_CONNECTION", "_stands",
}  # fmt: skip
_MOST_FUNCTIONS_NAMED_OF = 24


def _read_sources() -> dict[Path, str]:
    """Return the text of each module of the packages under test, in the sources or installed."""
    texts = {}
    for package in _PACKAGES:
        spec = find_spec(package)
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        place = Path(*package.split("."))
        texts |= {
            place / path.relative_to(folder): path.read_text(encoding="utf-8")
            for path in sorted(folder.rglob("*.py"))
        }
    return texts


SOURCES = _read_sources()


def _nodes(*, with_logs: bool = True) -> Iterator[tuple[Path, ast.AST]]:
    """Yield each node of the product's code with its file; generated files are left out."""
    for path, text in SOURCES.items():
        if not path.name.endswith(sizes.GENERATED) and (with_logs or _JOB_LOGS not in path.parents):
            yield from ((path, node) for node in ast.walk(ast.parse(text)))


def test_sizes() -> None:
    """No file, function or folder of the product is larger than `make sizes` allows;
    parameters are ruff's matter.
    """
    assert [line for line in sizes.excesses(SOURCES) if not line.endswith("parameters")] == []


def test_a_size_that_is_too_large() -> None:
    """`make sizes` names a file, a class, a function and a folder that are too large."""
    large_function = "def far():\n" + "    pass\n" * (sizes.LARGEST_FUNCTION + 1)
    large_class = "class Far:\n" + "    pass\n" * (sizes.LARGEST_CLASS + 1)
    files = {Path(f"a/{number}.py"): large_function for number in range(sizes.MOST_MODULES + 1)}
    files[Path("b/far.py")] = large_class
    files[Path("b/long.py")] = "pass\n" * (sizes.LARGEST_FILE + 1)
    found = list(sizes.excesses(files))
    assert found[0] == "b/long.py: 381 statements"
    assert found[1] == "a/0.py:1: far: 43 statements"
    assert found[-2] == "b/far.py:1: Far: 266 statements"
    assert found[-1] == "a: 15 modules"


def test_a_class_name_means_one_thing() -> None:
    """No two classes of the product have one name."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in _nodes():
        if isinstance(node, ast.ClassDef):
            places[node.name].append(f"{path}:{node.lineno}")
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert {
        name: found for name, found in repeated.items() if name not in _CLASSES_WITH_TWO_MEANINGS
    } == {}
    assert set(repeated) == _CLASSES_WITH_TWO_MEANINGS, "take it out of the list"


def test_names_are_no_riddles() -> None:
    """Names that readers of the code could not explain don't come back."""
    for path, node in _nodes(with_logs=False):
        names = [getattr(node, field, None) for field in ("id", "name", "attr", "arg")]
        assert not _RIDDLES.intersection(name for name in names if isinstance(name, str)), (
            f"{path}: {names}"
        )


def test_a_lookup_has_a_verb() -> None:
    """Few functions are named `x_of`: such a name doesn't tell whether it finds, reads,
    builds or computes.
    """
    named = [
        f"{path}: {node.name}"
        for path, node in _nodes(with_logs=False)
        if isinstance(node, sizes.Function) and re.search(r"_of(_|$)", node.name)
    ]
    assert len(named) <= _MOST_FUNCTIONS_NAMED_OF, named


@pytest.mark.parametrize("package", ["lab", "tests", "tools", "examples"])
def test_the_product_needs_no_measurements(package: str) -> None:
    """No module of the product imports the lab, a test, a tool or an example."""
    found = set()
    for path, node in _nodes():
        if isinstance(node, ast.Import):
            found |= {(path, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((path, node.module or ""))
    assert len(found) > len(SOURCES)
    assert [place for place in found if place[1].split(".")[0] == package] == []


def test_exported_names_exist() -> None:
    """What a package of the library lists in `__all__` can be imported from it."""
    lists = [
        path.parent
        for path, text in SOURCES.items()
        if path.name == "__init__.py" and "\n__all__ = " in text
    ]
    packages = [
        import_module(".".join(path.parts)) for path in lists if path.parts[0] == "firstfault"
    ]
    assert packages
    missing = [
        (it.__name__, name) for it in packages for name in it.__all__ if not hasattr(it, name)
    ]
    assert missing == []
