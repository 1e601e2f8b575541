"""No module imports itself through others, not for its annotations either."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = (
    "firstfault_proto",
    "firstfault",
    "firstfault_torch",
    "firstfault_inprocess",
    "firstfault_logs",
    "flytekitplugins.firstfault",
    "flyteplugins.firstfault",
)


def _modules() -> dict[str, Path]:
    """Return the file of each module of the packages."""
    found = {}
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = file
    return found


def imports_of(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Return which modules each module imports, anywhere in its text; `modules` has their texts."""
    return {
        name: {other for other in _imported(text, modules) if other != name}
        for name, text in modules.items()
    }


def _imported(text: str, modules: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else node.module or "" for name in whole)


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Return modules of which each imports the next one, and the last is the first;
    empty if there is no circle.
    """
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_modules_import_each_other_even_for_annotations() -> None:
    """In none of the packages do modules import each other, imports for annotations included."""
    texts = {name: file.read_text() for name, file in _modules().items()}
    assert circle(imports_of(texts)) == []


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (
            {
                "a": "import b",
                "b": "def f():\n    from c import x",
                "c": "if TYPE_CHECKING:\n    import a",
            },
            {"a", "b", "c"},
        ),
        ({"p": "from p.a import x", "p.a": "from p import b", "p.b": ""}, set()),
        ({"p": "from p.a import x", "p.a": "from p import x"}, {"p", "p.a"}),
        ({"a": "import b, c", "b": "import c", "c": "", "d": "import d.x"}, set()),
    ],
    ids=["three", "a submodule is not its package", "a package and its module", "none"],
)
def test_cycles_are_found_wherever_imports_stand(texts: dict[str, str], found: set[str]) -> None:
    """Imports count wherever they stand; a submodule's import is not its package's."""
    assert set(circle(imports_of(texts))) == found
