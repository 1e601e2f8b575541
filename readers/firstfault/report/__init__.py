"""What a person sees: an attempt's root cause as Flyte's message, page, deck, Markdown, terminal and JSON.

`report_of` turns what was read and concluded into a `Report`, which is data; the other modules draw it. Modules that
need jinja2 or rich (`firstfault.report.html`, `firstfault.report.terminal`) are imported by whoever draws with them.
"""

from firstfault.report.content import Report, report_of
from firstfault.report.json import to_json, verdict_from_json, verdict_to_dict
from firstfault.report.markdown import markdown
from firstfault.report.message import flyte_message

__all__ = ["Report", "flyte_message", "markdown", "report_of", "to_json", "verdict_from_json", "verdict_to_dict"]
