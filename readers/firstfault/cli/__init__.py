"""The command ``firstfault``. Thin: it parses, calls, prints and chooses an exit code."""

from firstfault.cli._main import main
from firstfault.cli._output import show_report, write_file
from firstfault.cli._support import EXIT, debug_option

__all__ = ["EXIT", "debug_option", "main", "show_report", "write_file"]
