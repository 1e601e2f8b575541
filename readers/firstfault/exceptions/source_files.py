"""Which code a file belongs to: the user's, a library's, or firstfault's."""

from __future__ import annotations

import re

from firstfault.model import FrameInfo

_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|lib/python\d[\d.]*|flytekitplugins/firstfault|firstfault_torch)/"
    r"|^<(?!dynamic-code>|ipython-input)"  # a function that cloudpickle made, a notebook's cell
)
_OURS = re.compile(r"(?:flytekitplugins/firstfault|firstfault_torch)/")
_PACKAGE = re.compile(r"(?:site-packages|dist-packages)/(?P<name>[^/]+)")


def is_library_file(file: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to firstfault."""
    return _LIBRARY.search(file) is not None


def find_library(frame: FrameInfo) -> str:
    """Return the package of a frame, "torch"; empty for the user's code."""
    if not is_library_file(frame.file):
        return ""
    package = _PACKAGE.search(frame.file)
    if package:
        return package["name"].removesuffix(".py")
    return "firstfault" if _OURS.search(frame.file) else "Python"
