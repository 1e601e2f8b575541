"""The structure that a reader of the product can rely on: sizes, class names that mean one thing,
and exports. Ruff, mypy and import-linter check the rest.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

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
_CLASSES_WITH_TWO_MEANINGS = {
    "Wrapper",  # NVIDIA's name, for its class and for the adapter to it
    "State",  # of a rank within in-process restart; of a line in a report
    # the readers of logs have names of their own
    "Attempt",
    "Worker",
    "Progress",
}


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


def _find_classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield each class of the product with its file; generated files are left out."""
    for path, text in SOURCES.items():
        if not path.name.endswith(sizes.GENERATED):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    yield path, node


def test_no_file_function_or_folder_is_too_large() -> None:
    """No file, function or folder of the product is larger than `make sizes` allows;
    parameters are ruff's matter.
    """
    assert [line for line in sizes.excesses(SOURCES) if not line.endswith("parameters")] == []


def test_make_sizes_names_what_is_too_large() -> None:
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
    for path, node in _find_classes():
        places[node.name].append(f"{path}:{node.lineno}")
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    assert {
        name: found for name, found in repeated.items() if name not in _CLASSES_WITH_TWO_MEANINGS
    } == {}
    assert set(repeated) == _CLASSES_WITH_TWO_MEANINGS, "take it out of the list"


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
