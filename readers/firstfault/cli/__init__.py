"""The command ``firstfault``: parses arguments, prints reports,
sets exit codes. May import every other package.
"""

from firstfault.cli._main import main as main
from firstfault.cli._support import (
    EXIT as EXIT,
    complete_files as complete_files,
    complete_strategies as complete_strategies,
    debug_option as debug_option,
    missing_package as missing_package,
    show_report as show_report,
    write_file as write_file,
)
