"""A report on an attempt, as data: the five answers, the facts, the cascade, the attempts.

`build_report` builds a `Report`; `firstfault.render` draws it. `flyte_message`, `markdown` and the
JSON of a verdict can be imported from here too. Imports `strategies`, `evidence`, `exceptions`,
`layout`, `model` and the JSON of `wire`, never a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.utils.lazy_imports import lazy_names
from firstfault.report.data import Report as Report, build_report as build_report
from firstfault.wire.json_schemas import from_json, to_json, verdict_to_dict

if TYPE_CHECKING:
    from firstfault.render.flyte_message import flyte_message
    from firstfault.render.markdown import markdown

__all__ = [
    "Report",
    "build_report",
    "flyte_message",
    "from_json",
    "markdown",
    "to_json",
    "verdict_to_dict",
]

__getattr__, _ = lazy_names(
    __name__,
    {
        "firstfault.render.flyte_message": ("flyte_message",),
        "firstfault.render.markdown": ("markdown",),
    },
)
