"""Every form of a report, as text, for tests of what all forms have in common."""

import io
from collections.abc import Callable

from rich.console import Console

from firstfault.render.flyte_message import flyte_message
from firstfault.render.html import deck_html, page
from firstfault.render.json_report import json_report
from firstfault.render.markdown import markdown
from firstfault.render.terminal import print_report, terminal_text
from firstfault.report import Report


def print_to_terminal(report: Report, width: int = 80, *, verbose: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, no_color=True, color_system=None)
    print_report(report, console, verbose=verbose)
    return out.getvalue()


FORMS: dict[str, Callable[[Report], str]] = {
    "terminal": print_to_terminal,
    "terminal -v": lambda report: print_to_terminal(report, verbose=True),
    "narrow terminal": lambda report: print_to_terminal(report, 30),
    "plain": terminal_text,
    "plain -v": lambda report: terminal_text(report, verbose=True),
    "message": flyte_message,
    "markdown": markdown,
    "json": json_report,
    "page": page,
    "deck": deck_html,
}
"""By name; each returns the report's text in that form."""
