"""The command ``firstfault``: parses arguments, prints reports, sets exit codes. May import every other package."""

from firstfault.cli._main import main
from firstfault.cli._support import EXIT, complete_files, complete_strategies, debug_option, show_report, write_file

__all__ = [
    "EXIT",
    "complete_files",
    "complete_strategies",
    "debug_option",
    "main",
    "show_report",
    "write_file",
]
