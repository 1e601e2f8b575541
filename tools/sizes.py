"""Print how large the product and the tests are, and what is larger than it should be:
``make sizes``.

Sizes are statements: what the grammar calls so, without docstrings. They don't change with the
layout. `self`, `cls`, `*args` and `**kwargs` do not count as parameters, and generated code doesn't
count at all. The core is the product without the optional folders, which pyproject.toml names in
their import contract.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PRODUCT = ("plugin", "readers", "proto")
LARGEST_FILE = 380
LARGEST_CLASS = 265
LARGEST_FUNCTION = 42
MOST_PARAMETERS = 6
MOST_MODULES = 14
GENERATED = "_pb2.py"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def optional_folders() -> tuple[str, ...]:
    """Return the packages that pyproject.toml protects from being imported,
    as paths below a source root.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (names,) = re.findall(r"^protected_modules = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    return tuple(name.replace(".", "/") for name in re.findall(r'"(.*?)"', names))


def files_of(*folders: str) -> dict[Path, str]:
    """Return the text of each Python file below these folders."""
    paths = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.endswith(GENERATED)
    ]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


def iter_definitions(files: dict[Path, str]) -> Iterator[tuple[Path, Function | ast.ClassDef]]:
    """Yield each class and function, methods and inner ones included, with its file."""
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function | ast.ClassDef):
                yield path, node


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a text: a docstring, also one below an attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def count_statements(node: ast.AST) -> int:
    """Return the number of statements within a module, class or function."""
    children = (child for child in ast.walk(node) if child is not node)
    return sum(isinstance(child, ast.stmt) and not is_docstring(child) for child in children)


def parameters_of(function: Function) -> int:
    """Return how many parameters a caller has to know."""
    taken = function.args
    names = [item.arg for item in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    return len([name for name in names if name not in {"self", "cls"}])


def table(name: str, files: dict[Path, str]) -> str:
    """Return a line with the figures of some files."""
    sizes = sorted(
        count_statements(node) for _, node in iter_definitions(files) if isinstance(node, Function)
    )
    total = sum(count_statements(ast.parse(text)) for text in files.values())
    middle = statistics.median(sizes)
    most = sizes[int(len(sizes) * 0.95)]
    return f"{name:10}{total:12,}{len(files):9}{len(sizes):11,}{middle:8g}{most:8}{sizes[-1]:9}"


def excesses(files: dict[Path, str]) -> Iterator[str]:
    """Yield a line for each file, function and folder of the product that is
    larger than it should be.
    """
    for path, text in files.items():
        count = count_statements(ast.parse(text))
        if count > LARGEST_FILE:
            yield f"{path}: {count} statements"
    for path, node in iter_definitions(files):
        place = f"{path}:{node.lineno}: {node.name}"
        count = count_statements(node)
        if count > (LARGEST_CLASS if isinstance(node, ast.ClassDef) else LARGEST_FUNCTION):
            yield f"{place}: {count} statements"
        if isinstance(node, Function) and parameters_of(node) > MOST_PARAMETERS:
            yield f"{place}: {parameters_of(node)} parameters"
    modules = Counter(path.parent for path in files if path.name != "__init__.py")
    yield from (
        f"{folder}: {count} modules" for folder, count in modules.items() if count > MOST_MODULES
    )


def main() -> None:
    """Print the figures, then what is too large in the product."""
    product = files_of(*PRODUCT)
    optional = optional_folders()
    core = {
        path: text
        for path, text in product.items()
        if not "/".join(path.parts[1:]).startswith(optional)
    }
    print(
        f"{'':10}{'statements':>12}{'modules':>9}{'functions':>11}"
        f"{'median':>8}{'95 %':>8}{'largest':>9}"
    )
    for name, files in (
        ("product", product),
        ("  core", core),
        ("tests", files_of("tests")),
        ("lab", files_of("lab")),
    ):
        print(table(name, files))
    print(
        f"\nmore than {LARGEST_FILE} statements of a file, {LARGEST_CLASS} of a class,"
        f" {LARGEST_FUNCTION} or {MOST_PARAMETERS} parameters of a function,"
        f" or {MOST_MODULES} modules of a folder:"
    )
    print("\n".join(excesses(product)) or "none")


if __name__ == "__main__":
    main()
