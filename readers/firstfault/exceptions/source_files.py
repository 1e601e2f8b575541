"""Which source files are the user's, a library's, or firstfault's."""

from __future__ import annotations

import re

from firstfault.model import FrameInfo

_LIBRARY_FILE = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|lib/python\d[\d.]*|flytekitplugins/firstfault|firstfault_torch)/"
    # generated code is a library's, except for functions from cloudpickle and cells of a notebook
    r"|^<(?!dynamic-code>|ipython-input)"
)
_FIRSTFAULT_FILE = re.compile(r"(?:flytekitplugins/firstfault|firstfault_torch)/")
_PACKAGE_FOLDER = re.compile(r"(?:site-packages|dist-packages)/(?P<name>[^/]+)")


def is_library_file(file: str) -> bool:
    """Whether a file belongs to an installed package, Python or firstfault."""
    return _LIBRARY_FILE.search(file) is not None


def find_library(frame: FrameInfo) -> str:
    """Return the name of a frame's package, such as "torch"; empty for the user's code."""
    if not is_library_file(frame.file):
        return ""
    package = _PACKAGE_FOLDER.search(frame.file)
    if package:
        return package["name"].removesuffix(".py")
    return "firstfault" if _FIRSTFAULT_FILE.search(frame.file) else "Python"
