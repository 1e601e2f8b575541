"""A report in which every text of every dataclass is the same text,
also of fields that are added later.
"""

import dataclasses
import functools
import types
import typing
from typing import Any

from firstfault import model
from firstfault.evidence.diagnosis import diagnose
from firstfault.model.failure import TERMINATED
from firstfault.report import Report, build_report
from firstfault.report.data import AttemptSummary, summarize_attempt, with_attempts
from firstfault.testing import START_NS

_NAMES = {**vars(model), **vars(typing), "AttemptSummary": AttemptSummary}
_VALUES: dict[type, Any] = {int: 3, float: 1.5, bool: False, str: "", type(None): None}
_CHOSEN: dict[type, Any] = {
    model.Action: model.Action.STOP,
    model.Kind: model.Kind.NON_RECOVERABLE,
    model.Origin: model.Origin.USER,
    model.Writer: model.Writer.WORKER,
    model.Subject: model.Subject.WORKER,
    model.Phase: model.Phase.FAILED,
    model.Scope: model.Scope.RANK,
    model.Outcome: model.Outcome.FAILED,
    model.RestartKind: model.RestartKind.ROUND,
}
_DEEPEST = 3
"""Exceptions within exceptions."""


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, _NAMES)


@functools.cache
def filled(kind: Any, text: str, depth: int = 0) -> Any:
    """Return a value of a type in which every string is `text`, optional parts are there,
    and a list has an item.
    """
    origin = typing.get_origin(kind)
    parts = typing.get_args(kind)
    if kind is str:
        return text
    if kind in _CHOSEN:
        return _CHOSEN[kind]
    if kind in _VALUES:
        return _VALUES[kind]
    if origin in {typing.Union, types.UnionType}:
        return filled(next(part for part in parts if part is not type(None)), text, depth)
    if origin is tuple:
        return (
            (filled(parts[0], text, depth),)
            if parts[-1] is ...
            else tuple(filled(part, text) for part in parts)
        )
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"say in every_field.py what a value of {kind} is")
    values = {}
    for field in dataclasses.fields(kind):
        if kind is model.ExceptionInfo and field.name in {"causes", "members"}:
            values[field.name] = (
                (filled(model.ExceptionInfo, text, depth + 1),) if depth < _DEEPEST else ()
            )
        elif field.init:
            values[field.name] = filled(_hints(kind)[field.name], text, depth)
    return kind(**values)


def _failure(text: str, rank: int | None, at_ms: int, **changes: Any) -> model.WorkerError:
    failure: model.WorkerError = filled(model.WorkerError, text)
    place = dataclasses.replace(
        failure.place,
        rank=rank,
        engine="flyte",
        world_size=4,
        group_world_size=2,
        incarnation=START_NS // 10**6 - 9_000,
    )
    documents = (model.DocumentRef(f"{text}{rank}", text, START_NS, 400),)
    return dataclasses.replace(
        failure,
        place=place,
        timestamp_ns=START_NS + at_ms * 10**6,
        documents=documents,
        **changes,
    )


KINDS_OF_ROOT: dict[str, dict[str, Any]] = {
    "raised": {"expired": None, "sent_signals": ()},
    "killed": {"exception": None, "expired": None, "sent_signals": ()},
    "expired": {"exception": None, "sent_signals": ()},
    "stopped": {"exception": None},
    "silent": {
        "exception": None,
        "expired": None,
        "sent_signals": (),
        "signal": "",
        "exit_code": None,
    },
    "agent": {"subject": model.Subject.AGENT, "writer": model.Writer.AGENT, "exception": None},
    "stock": {"writer": model.Writer.STOCK, "exception": None, "place": model.Place()},
}
"""Changes that make the root cause another kind of failure."""


def fill_report(text: str, root: str = "raised", scope: model.Scope = model.Scope.RANK) -> Report:
    first = dataclasses.replace(_failure(text, 3, 0), **KINDS_OF_ROOT[root])
    sent = (model.SentSignal(text, TERMINATED), model.SentSignal(text, text))
    others = (
        _failure(text, 1, 40),
        _failure(text, 2, 90, exception=None, sent_signals=sent, expired=None),
    )
    own_dump = model.StackDump(
        first.place.pid, first.rank, f'File "/job/{text}.py", line 7 in {text}\n{text}'
    )
    own_frame = model.FrameInfo(f"/job/{text}.py", 7, text, text, (text, text), 6, (0, 2))
    if first.exception is not None:
        exception = dataclasses.replace(
            first.exception, frames=(own_frame, *first.exception.frames), relation="cause"
        )
        first = dataclasses.replace(first, exception=exception)
    first = dataclasses.replace(first, stack_dumps=(own_dump, *first.stack_dumps))
    entry: model.NodePresence = filled(model.NodePresence, text)
    silent = dataclasses.replace(
        entry, phase=model.Phase.JOINED, place=dataclasses.replace(entry.place, node=f"{text}2")
    )
    coverage: model.Coverage = dataclasses.replace(
        filled(model.Coverage, text), expected=4, reported=2
    )
    record: model.RestartRecord = dataclasses.replace(
        filled(model.RestartRecord, text), restart=True
    )
    job: model.JobErrors = dataclasses.replace(
        filled(model.JobErrors, text),
        failures=(first, *others),
        roster=(entry, silent),
        coverage=coverage,
        settled=False,
        unopened=(model.Unopened(text, 3, (7, 8), (1,), 5),),
        restarts=(record,),
    )
    verdict: model.Verdict = dataclasses.replace(
        filled(model.Verdict, text),
        scope=scope,
        root=first if scope is not model.Scope.UNDETERMINED else None,
        coverage=coverage,
        settled=False,
        timestamp_ns=START_NS,
        sources=((first.documents[0].name,),),
    )
    decision: model.Decision = filled(model.Decision, text)
    own = summarize_attempt(1, job, verdict, decision)
    attempts = (
        AttemptSummary(0, model.Outcome.UNKNOWN, note=text),
        own,
        AttemptSummary(2, model.Outcome.UNKNOWN, note=text),
    )
    uri = "s3://bucket/metadata/f00/n0/data/1"
    return with_attempts(
        build_report(job, verdict, decision, uri=uri, diagnosis=diagnose(job)), attempts
    )
