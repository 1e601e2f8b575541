"""Parses JSON that any process may have written."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error
