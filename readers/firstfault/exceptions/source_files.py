"""Which source files are the user's, a library's, or firstfault's."""

from __future__ import annotations

from firstfault.model import FrameInfo
from firstfault.utils.lazy_pattern import LazyPattern

# A file of an installed package, Python or firstfault. Generated code is a library's, except for
# functions from cloudpickle and cells of a notebook
_LIBRARY_FILE = LazyPattern(r"""
  (?:^|/)(?:site-packages|dist-packages|lib/python\d[\d.]*|flyte(?:kit)?plugins/firstfault|firstfault_(?:torch|inprocess))/
  |^<(?!dynamic-code>|ipython-input)
""")


def is_library_file(file: str) -> bool:
    """Whether a file belongs to an installed package, Python or firstfault."""
    return _LIBRARY_FILE.search(file) is not None


_FIRSTFAULT_FILE = LazyPattern(
    r"(?:flyte(?:kit)?plugins/firstfault|firstfault_(?:torch|inprocess))/"
)
_PACKAGE_FOLDER = LazyPattern(r"(?:site-packages|dist-packages)/(?P<name>[^/]+)")


def find_library(frame: FrameInfo) -> str:
    """Return the name of a frame's package, such as "torch"; empty for the user's code."""
    if not is_library_file(frame.file):
        return ""
    package = _PACKAGE_FOLDER.search(frame.file)
    if package:
        return package["name"].removesuffix(".py")
    return "firstfault" if _FIRSTFAULT_FILE.search(frame.file) else "Python"
