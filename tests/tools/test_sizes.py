"""tools/sizes.py finds what is too large."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "tools" / "sizes.py"
_spec = importlib.util.spec_from_file_location("sizes", FILE)
assert _spec is not None
assert _spec.loader is not None
sizes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sizes)


def test_what_is_too_large() -> None:
    """A long file, a long function, a function with many parameters and a crowded folder are named, and no other."""
    body = "    x = 1\n"
    files = {
        Path("p/long.py"): "\n" * 601,
        Path("p/function.py"): f"def good():\n{body * 59}\ndef bad():\n{body * 60}",
        Path(
            "p/parameters.py"
        ): "class A:\n  def f(self, a, b, c, d, e, /, f): ...\n  def g(a, b, c, d, *, e, f, g): ...\n",
        **{Path(f"q/{number}.py"): "" for number in range(14)},
        **{Path(f"r/{number}.py"): "" for number in range(15)},
        Path("q/__init__.py"): "",
    }
    assert list(sizes.excesses(files)) == [
        "p/long.py: 601 lines",
        "p/function.py:62: bad: 61 lines",
        "p/parameters.py:3: g: 7 parameters",
        "r: 15 modules",
    ]


def test_the_table() -> None:
    """A row has the lines, modules, functions, and the lengths of the median, 95th and longest function."""
    text = "".join(f"def f{number}():\n{'    x = 1' + chr(10)}" for number in range(9)) + "def g():\n    x = (\n1)\n"
    assert sizes.table("all", {Path("a.py"): text}).split() == ["all", "21", "1", "10", "2", "3", "3"]
