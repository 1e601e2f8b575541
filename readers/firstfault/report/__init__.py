"""A report on an attempt, as data: the five answers, the facts, the cascade, the attempts.

`report_of` builds a `Report`; `firstfault.render` draws it. The names of release 0.1 stay importable from here.
Imports `conclude`, `strategies`, `evidence`, `exceptions`, `model` and the JSON of `wire`, never a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firstfault.report.data import Report, report_of
from firstfault.wire.verdict_json import to_json, verdict_from_json, verdict_to_dict

if TYPE_CHECKING:
    from firstfault.render.flyte_message import flyte_message
    from firstfault.render.markdown import markdown

__all__ = ["Report", "flyte_message", "markdown", "report_of", "to_json", "verdict_from_json", "verdict_to_dict"]

_DRAWN_BY = {"flyte_message": "firstfault.render.flyte_message", "markdown": "firstfault.render.markdown"}


def __getattr__(name: str) -> Any:
    if name not in _DRAWN_BY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - reports do not import what draws them

    return getattr(importlib.import_module(_DRAWN_BY[name]), name)
