"""A verdict, shown: as text, as JSON. Knows nothing of how it was found."""

from firstfault.report.json import to_json, verdict_from_json, verdict_to_dict
from firstfault.report.text import flyte_message, terminal_text

__all__ = ["flyte_message", "terminal_text", "to_json", "verdict_from_json", "verdict_to_dict"]
