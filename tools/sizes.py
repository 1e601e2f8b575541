"""Print how large the product and the tests are, and what is larger than it should be:
``make sizes``.

A function's length counts its lines with its docstring; `self`, `cls`, `*args` and `**kwargs` do
not count as parameters. Generated code counts as lines only. The core is the product without the
optional folders, which pyproject.toml names in their import contract.
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
LONGEST_FILE, LONGEST_FUNCTION, MOST_PARAMETERS, MOST_MODULES = 600, 60, 6, 14
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
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


def functions_of(files: dict[Path, str]) -> Iterator[tuple[Path, Function]]:
    """Yield each function, methods and inner ones included, with its file."""
    for path, text in files.items():
        if not path.name.endswith(GENERATED):
            yield from (
                (path, node) for node in ast.walk(ast.parse(text)) if isinstance(node, Function)
            )


def length_of(function: Function) -> int:
    """Return a function's lines, without its decorators."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def parameters_of(function: Function) -> int:
    """Return how many parameters a caller has to know."""
    taken = function.args
    names = [item.arg for item in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    return len([name for name in names if name not in {"self", "cls"}])


def table(name: str, files: dict[Path, str]) -> str:
    """Return a line with the figures of some files."""
    lengths = sorted(length_of(function) for _, function in functions_of(files))
    lines = sum(text.count("\n") for text in files.values())
    middle, most = statistics.median(lengths), lengths[int(len(lengths) * 0.95)]
    return f"{name:10}{lines:8,}{len(files):9}{len(lengths):11,}{middle:8g}{most:8}{lengths[-1]:9}"


def excesses(files: dict[Path, str]) -> Iterator[str]:
    """Yield a line for each file, function and folder of the product that is
    larger than it should be.
    """
    for path, text in files.items():
        if text.count("\n") > LONGEST_FILE:
            yield f"{path}: {text.count(chr(10))} lines"
    for path, function in functions_of(files):
        place = f"{path}:{function.lineno}: {function.name}"
        if length_of(function) > LONGEST_FUNCTION:
            yield f"{place}: {length_of(function)} lines"
        if parameters_of(function) > MOST_PARAMETERS:
            yield f"{place}: {parameters_of(function)} parameters"
    modules = Counter(path.parent for path in files if path.name != "__init__.py")
    yield from (
        f"{folder}: {count} modules" for folder, count in modules.items() if count > MOST_MODULES
    )


def main() -> None:
    """Print the figures, then what is too large in the product."""
    product, optional = files_of(*PRODUCT), optional_folders()
    core = {
        path: text
        for path, text in product.items()
        if not "/".join(path.parts[1:]).startswith(optional)
    }
    print(
        f"{'':10}{'lines':>8}{'modules':>9}{'functions':>11}{'median':>8}{'95 %':>8}{'longest':>9}"
    )
    for name, files in (
        ("product", product),
        ("  core", core),
        ("tests", files_of("tests")),
        ("lab", files_of("lab")),
    ):
        print(table(name, files))
    print(
        f"\nmore than {LONGEST_FILE} lines, {LONGEST_FUNCTION} lines or {MOST_PARAMETERS}"
        f" parameters of a function, or {MOST_MODULES} modules of a folder:"
    )
    print("\n".join(excesses(product)) or "none")


if __name__ == "__main__":
    main()
