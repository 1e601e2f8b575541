"""The faults that a generated training may have, each with what a verdict has to say about it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstfault.utils.toml import parse_toml

_USER = ("user_code", "data", "numerics", "config", "checkpoint")
_ENDS = {"raises": False, "in_loader": False}
_KINDS: dict[str, dict[str, Any]] = {
    "raises": {},
    "dies": _ENDS,
    "hangs": {**_ENDS, "hangs": True, "together": False},
}
"""What is true of most faults of a kind; one that dies ends the process, or its agent,
without an exception.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a faulty rank does.

    `body` is the source of the function ``fault()``; LONG_S is longer than any training.
    """

    body: str
    said: tuple[str, ...]
    """The headline has one of these; empty: anything will do."""
    categories: tuple[str, ...]
    raises: bool = True
    """Whether it raises an exception, which wrappers may turn into something else."""
    has_code: bool = True
    """Whether the exception comes from the function itself."""
    scope: str = "rank"
    """"rank", or "node": the whole node is at fault."""
    hangs: bool = False
    in_loader: bool = True
    """Whether it may be met in a data set, a collate function or a hook:
    it does not need the group.
    """
    together: bool = True
    """Whether several ranks may have it at once."""
    retry: bool | None = False
    """Whether another attempt makes sense; None: both are right."""


def _read_fault(body: str, kind: str = "raises", retry: bool | str = False, **fields: Any) -> Fault:
    names = fields.pop("categories", ["user"])
    return Fault(
        body.strip("\n"),
        said=tuple(fields.pop("said", ())),
        categories=tuple(
            category for name in names for category in (_USER if name == "user" else (name,))
        ),
        retry=None if retry == "either" else bool(retry),
        **{**_KINDS[kind], **fields},
    )


FAULTS = {
    name: _read_fault(**fields)
    for name, fields in parse_toml(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
