"""Which source files are the user's, a library's, or firstfault's."""

from __future__ import annotations

from firstfault.exceptions.texts import PATTERNS
from firstfault.model import FrameInfo


def is_library_file(file: str) -> bool:
    """Whether a file belongs to an installed package, Python or firstfault."""
    return PATTERNS["library_file"].search(file) is not None


def find_library(frame: FrameInfo) -> str:
    """Return the name of a frame's package, such as "torch"; empty for the user's code."""
    if not is_library_file(frame.file):
        return ""
    package = PATTERNS["package_folder"].search(frame.file)
    if package:
        return package["name"].removesuffix(".py")
    return "firstfault" if PATTERNS["firstfault_file"].search(frame.file) else "Python"
