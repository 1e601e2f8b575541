"""Compare the log of a job with the log of another run of it: only what both logs prove."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from firstfault.brief.digest import FoldedLine, LogDigest, Place, QuotedLine, Weight
from firstfault.brief.quotes import format_numbered, hide_secrets
from firstfault.utils.text import counted

_MIN_EQUAL_STEPS = 3
"""First common steps at which a value must be equal to be the same computation;
times and rates aren't.
"""
_MAX_NEW_LINES = 10
_LINE_CHARS = 200
_VALUE = re.compile(
    r"([A-Za-z_][\w/]*)[\"']?(?:\s*[=:]\s*|\s+)([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf))\b",
    re.IGNORECASE,
)
_NOT_A_NUMBER = re.compile(r"[-+]?(?:nan|inf)", re.IGNORECASE)

_Steps = Mapping[tuple[str, str, Place], QuotedLine]


@dataclass(frozen=True, slots=True)
class StepDifference:
    """The first step at which a value of two runs differs."""

    place: Place
    name: str
    """Name of the value, such as "loss"."""
    here: str
    there: str
    line: QuotedLine
    other: QuotedLine


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a log differs from the log of another run."""

    other: str
    """Name of the log that this one is compared with."""
    new_lines: tuple[FoldedLine, ...]
    """Exceptions, reports and lines about failures that are only in this log, in order."""
    first_difference: StepDifference | None
    """None if no value can be compared or all values are equal."""
    first_not_a_number: StepDifference | None
    """The first step with NaN or infinity, if `other` had a number there."""
    last_place: Place | None
    other_last_place: Place | None
    has_several_files: bool = False
    """Whether a line's number needs the name of its file."""

    def lines(self) -> Iterator[str]:
        """Yield the comparison as text."""
        yield f"Against {self.other}"
        if self.last_place is not None and self.other_last_place is not None:
            yield (
                f"  last step: {_format_place(self.last_place)}, there"
                f" {_format_place(self.other_last_place)}"
            )
        for difference, what in (
            (self.first_difference, "differs"),
            (self.first_not_a_number, "isn't a number"),
        ):
            if difference is not None:
                values = f"{difference.name} {difference.here}, there {difference.there}"
                place = f"{difference.line.file}:{difference.line.number}"
                yield (
                    f"  first step that {what}: {_format_place(difference.place)}: {values}"
                    f" [{place}]"
                )
        if not self.new_lines:
            yield "  no line about trouble that isn't there, too"
            return
        yield "  new:"
        shown = self.new_lines[:_MAX_NEW_LINES]
        safe = hide_secrets([line.first for line in shown])
        for line, first in zip(shown, safe, strict=True):
            count = f"(x{line.count}) " if line.count > 1 else ""
            file = f"{first.file}:" if self.has_several_files else ""
            yield f"    {count}{file}{format_numbered(first, _LINE_CHARS)}"
        if len(self.new_lines) > len(shown):
            yield f"    and {counted(len(self.new_lines) - len(shown), 'more kind')} of lines"

    def to_json(self) -> dict[str, object]:
        """Return the comparison as the field ``against`` of the JSON."""
        safe = hide_secrets([line.first for line in self.new_lines[:_MAX_NEW_LINES]])
        differences = {
            "first_difference": self.first_difference,
            "first_not_a_number": self.first_not_a_number,
        }
        return {
            "other": self.other,
            "last_step": _find_step(self.last_place),
            "last_epoch": _find_epoch(self.last_place),
            "other_last_step": _find_step(self.other_last_place),
            "other_last_epoch": _find_epoch(self.other_last_place),
            **{
                name: (
                    None
                    if difference is None
                    else {
                        "step": _find_step(difference.place),
                        "epoch": _find_epoch(difference.place),
                        "name": difference.name,
                        "here": difference.here,
                        "there": difference.there,
                        "line": f"{difference.line.file}:{difference.line.number}",
                        "other_line": f"{difference.other.file}:{difference.other.number}",
                    }
                )
                for name, difference in differences.items()
            },
            "new": [
                {"line": f"{first.file}:{first.number}", "count": line.count, "text": first.text}
                for line, first in zip(self.new_lines, safe, strict=False)
            ],
        }


def compare(here: LogDigest, there: LogDigest, other: str) -> Comparison:
    """Compare a log with the log of the run named `other`. Both digests must cover all lines."""
    new = [line for template, line in here.folded.items() if template not in there.folded]
    # without room for all kinds of lines, a missing one proves nothing
    new = (
        []
        if there.dropped
        else [line for line in new if line.weight in {Weight.FATAL, Weight.FAILURE_WORD}]
    )
    important = sorted(new, key=lambda line: line.weight)[:_MAX_NEW_LINES]
    rest = [line for line in new if line not in important]
    common = [key for key in here.steps if key in there.steps]
    last, other_last = (
        max(
            (place for _, what, place in digest.steps if what == _main_counter(common)),
            default=None,
        )
        for digest in (here, there)
    )
    return Comparison(
        other,
        (*sorted(important, key=lambda line: line.first.number), *rest),
        _find_difference(here.steps, there.steps, common),
        _find_not_a_number(here.steps, there.steps, common),
        last,
        other_last,
        has_several_files=len(here.files) > 1,
    )


def _format_place(place: Place) -> str:
    if isinstance(place[0], float):
        return f"epoch {place[0]:g}"
    return str(place[0]) if len(place) == 1 else f"epoch {place[0]}, step {place[1]}"


def _find_step(place: Place | None) -> float | None:
    """Return the step, or None if only a part of an epoch is known."""
    return None if not place or isinstance(place[-1], float) else place[-1]


def _find_epoch(place: Place | None) -> float | None:
    """Return the epoch of a step that is counted anew in each epoch, or of a part of an epoch, or
    None if the place is neither.
    """
    return place[0] if place and (len(place) > 1 or isinstance(place[0], float)) else None


def _main_counter(common: Sequence[tuple[str, str, Place]]) -> str:
    """Return the name of the counter with the most common steps."""
    names = [what for _, what, _ in common]
    return max(names, key=names.count, default="")


def _read_values(line: QuotedLine) -> dict[str, str]:
    return dict(_VALUE.findall(line.text))


def _find_difference(
    here: _Steps, there: _Steps, common: Sequence[tuple[str, str, Place]]
) -> StepDifference | None:
    """Return the first step at which a value differs that was equal at the first common steps."""
    equal: dict[tuple[str, str, str], int] = {}
    refused: set[tuple[str, str, str]] = set()
    for process, what, place in common:
        line, other = here[process, what, place], there[process, what, place]
        values = _read_values(line)
        others = _read_values(other)
        for name in values.keys() & others.keys() - {what}:
            key = (process, what, name)
            if key in refused:
                continue
            if values[name] == others[name]:
                # a constant, such as a learning rate, proves nothing, but differs from no step on
                equal[key] = equal.get(key, 0) + 1
            elif equal.get(key, 0) >= _MIN_EQUAL_STEPS:
                return StepDifference(place, name, values[name], others[name], line, other)
            else:
                refused.add(key)
    return None


def _find_not_a_number(
    here: _Steps, there: _Steps, common: Sequence[tuple[str, str, Place]]
) -> StepDifference | None:
    for process, what, place in common:
        line, other = here[process, what, place], there[process, what, place]
        values = _read_values(line)
        others = _read_values(other)
        for name in values:
            is_bad = _NOT_A_NUMBER.fullmatch(values[name]) is not None
            if is_bad and name in others and not _NOT_A_NUMBER.fullmatch(others[name]):
                return StepDifference(place, name, values[name], others[name], line, other)
    return None
