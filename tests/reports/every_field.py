"""A report in which every text of every dataclass is the same text, also of fields that are added later."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

from firstfault import model
from firstfault.evidence.diagnosis import diagnose
from firstfault.model import (
    Coverage,
    Decision,
    DocumentRef,
    ExceptionInfo,
    FrameInfo,
    JobErrors,
    Kind,
    NodePresence,
    Origin,
    Phase,
    Place,
    RestartKind,
    RestartRecord,
    Scope,
    SentSignal,
    StackDump,
    Subject,
    Unopened,
    Verdict,
    WorkerError,
    Writer,
)
from firstfault.model.failure import TERMINATED
from firstfault.report import Report, report_of
from firstfault.report.data import AttemptSummary, summary_of, with_attempts
from firstfault.testing import START_NS

_NAMES = {**vars(model), **vars(typing), "AttemptSummary": AttemptSummary}
_VALUES: dict[type, Any] = {int: 3, float: 1.5, bool: False, str: "", type(None): None}
_CHOSEN: dict[type, Any] = {
    Kind: Kind.NON_RECOVERABLE,
    Origin: Origin.USER,
    Writer: Writer.WORKER,
    Subject: Subject.WORKER,
    Phase: Phase.FAILED,
    Scope: Scope.RANK,
    RestartKind: RestartKind.ROUND,
}
_DEEPEST = 3
"""Exceptions within exceptions."""


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, _NAMES)


@functools.cache
def filled(kind: Any, text: str, depth: int = 0) -> Any:
    """Return a value of a type in which every string is `text`, every optional part is there, and lists have one item.

    Args:
        kind: a dataclass, or any annotation of a field of one.
        text: the text.
        depth: of the value in others of its type.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is str:
        return text
    if kind in _CHOSEN:
        return _CHOSEN[kind]
    if kind in _VALUES:
        return _VALUES[kind]
    if origin in {typing.Union, types.UnionType}:
        return filled(next(part for part in parts if part is not type(None)), text, depth)
    if origin is tuple:
        return (filled(parts[0], text, depth),) if parts[-1] is ... else tuple(filled(part, text) for part in parts)
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"say in every_field.py what a value of {kind} is")
    values = {}
    for field in dataclasses.fields(kind):
        if kind is ExceptionInfo and field.name in {"causes", "members"}:
            values[field.name] = (filled(ExceptionInfo, text, depth + 1),) if depth < _DEEPEST else ()
        elif field.init:
            values[field.name] = filled(_hints(kind)[field.name], text, depth)
    return kind(**values)


def _failure(text: str, rank: int | None, at_ms: int, **changes: Any) -> WorkerError:
    failure: WorkerError = filled(WorkerError, text)
    place = dataclasses.replace(
        failure.place,
        rank=rank,
        engine="flyte",
        world_size=4,
        group_world_size=2,
        incarnation=START_NS // 10**6 - 9_000,
    )
    documents = (DocumentRef(f"{text}{rank}", text, START_NS, 400),)
    return dataclasses.replace(
        failure, place=place, timestamp_ns=START_NS + at_ms * 10**6, documents=documents, **changes
    )


KINDS_OF_ROOT: dict[str, dict[str, Any]] = {
    "raised": {"expired": None, "sent_signals": ()},
    "killed": {"exception": None, "expired": None, "sent_signals": ()},
    "expired": {"exception": None, "sent_signals": ()},
    "stopped": {"exception": None},
    "silent": {"exception": None, "expired": None, "sent_signals": (), "signal": "", "exit_code": None},
    "agent": {"subject": Subject.AGENT, "writer": Writer.AGENT, "exception": None},
    "stock": {"writer": Writer.STOCK, "exception": None, "place": Place()},
}
"""Changes that make the root cause another kind of failure."""


def report_full_of(text: str, root: str = "raised", scope: Scope = Scope.RANK) -> Report:
    """Return a report on an attempt in which every text is `text`."""
    first = dataclasses.replace(_failure(text, 3, 0), **KINDS_OF_ROOT[root])
    sent = (SentSignal(text, TERMINATED), SentSignal(text, text))
    others = (_failure(text, 1, 40), _failure(text, 2, 90, exception=None, sent_signals=sent, expired=None))
    own_dump = StackDump(first.place.pid, first.rank, f'File "/job/{text}.py", line 7 in {text}\n{text}')
    own_frame = FrameInfo(f"/job/{text}.py", 7, text, text, (text, text), 6, (0, 2))
    if first.exception is not None:
        exception = dataclasses.replace(first.exception, frames=(own_frame, *first.exception.frames), relation="cause")
        first = dataclasses.replace(first, exception=exception)
    first = dataclasses.replace(first, stack_dumps=(own_dump, *first.stack_dumps))
    entry: NodePresence = filled(NodePresence, text)
    silent = dataclasses.replace(entry, phase=Phase.JOINED, place=dataclasses.replace(entry.place, node=f"{text}2"))
    coverage: Coverage = dataclasses.replace(filled(Coverage, text), expected=4, reported=2)
    record: RestartRecord = dataclasses.replace(filled(RestartRecord, text), restart=True)
    job: JobErrors = dataclasses.replace(
        filled(JobErrors, text),
        failures=(first, *others),
        roster=(entry, silent),
        coverage=coverage,
        settled=False,
        unopened=(Unopened(text, 3, (7, 8), (1,), 5),),
        restarts=(record,),
    )
    verdict: Verdict = dataclasses.replace(
        filled(Verdict, text),
        scope=scope,
        root=first if scope is not Scope.UNDETERMINED else None,
        coverage=coverage,
        settled=False,
        timestamp_ns=START_NS,
        sources=((first.documents[0].name,),),
    )
    decision: Decision = filled(Decision, text)
    own = summary_of(1, job, verdict, decision)
    attempts = (AttemptSummary(0, note=text), own, AttemptSummary(2, note=text))
    uri = "s3://bucket/metadata/f00/n0/data/1"
    return with_attempts(report_of(job, verdict, decision, uri=uri, diagnosis=diagnose(job)), attempts)
