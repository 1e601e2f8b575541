"""The report as JSON, an object of the schema firstfault.verdict/v1 (docs/schemas)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from firstfault.exceptions.ending_exception import find_ending_exception
from firstfault.exceptions.first_cause import find_first_cause, find_own_frames
from firstfault.model import Outcome, WorkerError
from firstfault.report.data import AttemptSummary, Report
from firstfault.report.engine_words import PLAIN
from firstfault.report.job_identity import JobIdentity
from firstfault.report.parts.quoted_output import log_lines, stack_lines
from firstfault.report.states import State
from firstfault.utils.text import elide
from firstfault.wire.codecs import FieldTable
from firstfault.wire.fields import EXPIRED, FRAME, PLACE, PROGRESS, RESOURCES
from firstfault.wire.json_schemas import DECISION, SCHEMA, format_timestamp, verdict_to_dict

_MISSING = "not found"
_MAX_FRAMES = 50
_MAX_LOG_LINES = 200
_TEXTS = {"file", "function", "group"}
"""Fields that are never null."""


def json_report(report: Report, longest: int | None = None, *, decided: bool = True) -> str:
    """Return a report as a JSON object in one line; its schema is in docs/schemas.

    Of each message at most `longest` characters are kept. If it isn't `decided`, it is marked as
    preliminary.
    """
    answers, identity, root = report.answers, report.identity, report.verdict.root
    by_state: dict[str, list[int]] = {}
    for item in report.cascade.ranks:
        # the ranks of the root cause are in `verdict`
        if item.state is not State.ROOT:
            by_state.setdefault(item.state.slug, []).append(item.rank)
    document = {
        "schema": SCHEMA,
        **({} if decided else {"decided": False}),
        "verdict": verdict_to_dict(
            replace(report.verdict, message=_shorten(report.verdict.message, longest))
        ),
        "decision": DECISION.write(report.decision),
        "outcome": report.outcome.value,
        "first_line": report.first_line,
        "root": _build_root(report, root, longest) if root is not None else None,
        "what": answers.what,
        "fault": answers.fault_owner.value,
        "where": answers.where,
        "retry": f"{answers.retry}: {answers.retry_reason}",
        "next": [{"text": step.text, "command": step.command or None} for step in answers.steps],
        "unknown": list(answers.unknown),
        "victims_by_state": by_state,
        "sources": (
            [list(names) for _, names in report.verdict.reasons] if report.engine.cites else None
        ),
        "followers": report.followers or None,
        "clocks": report.clocks or None,
        "attempt": report.number,
        "attempts": [_build_attempt(attempt) for attempt in report.attempts],
        "changes": list(report.changes),
        "uri": report.uri or None,
        "execution": identity.execution or None,
        "versions": dict(identity.versions),
        "job": _build_job(identity),
    }
    # quoted texts may have lone surrogates, which only escapes can carry through any encoding
    return json.dumps(document, ensure_ascii=True, separators=(",", ":"))


def json_without_failure(outcome: Outcome | None, reason: str) -> dict[str, Any]:
    """Return the object for an attempt without a failure.

    Args:
        outcome: how it ended, or None if there is no such file or folder.
        reason: the sentence that `show` prints.
    """
    return {
        "schema": SCHEMA,
        "verdict": None,
        "decision": None,
        "outcome": outcome.value if outcome is not None else _MISSING,
        "reason": reason,
    }


def _build_attempt(attempt: AttemptSummary) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "outcome": attempt.summary,
        "failed": attempt.outcome.has_failed,
        "retry": attempt.decision.retry if attempt.decision is not None else None,
        "seconds": attempt.seconds,
    }


def _build_job(identity: JobIdentity) -> dict[str, Any]:
    return {
        "task": identity.task or None,
        "image": identity.image or None,
        "started": format_timestamp(identity.started_ns),
        "seconds": identity.seconds,
        "collectives": identity.progress.collectives or None,
        "training_seconds": identity.progress.seconds or None,
        "ranks": identity.ranks,
        "nodes": identity.nodes,
        "gpu_model": identity.gpu_model or None,
        "gpus": identity.gpus,
        "source": identity.source_url or None,
        "commit": identity.commit or None,
        # numbers of a log that no line states are minimums
        **({"at_least": list(identity.at_least)} if identity.at_least else {}),
    }


def _build_root(report: Report, root: WorkerError, longest: int | None) -> dict[str, Any]:
    raised = find_ending_exception(root)
    exception = find_first_cause(raised) if raised is not None else None
    frames = find_own_frames(raised) if raised is not None else ()
    innermost = _build_fields(FRAME, frames[-1]) if frames else {}
    place = {
        **_build_fields(PLACE, root.place),
        "pod": root.node or None,
        "pid": root.place.pid or None,
    }
    # outside of Kubernetes a node isn't a pod but a machine, perhaps known only by its host name
    if report.engine is PLAIN:
        place |= {"pod": None, "machine": place["machine"] or place["host"]}
    dead_threads = ((thread.thread, thread.exception) for thread in root.thread_failures)
    return {
        "type": exception.type if exception is not None else None,
        "message": _shorten(exception.message, longest) if exception is not None else None,
        **{name: innermost.get(name) for name in ("file", "line", "function", "source")},
        "frames": [
            {
                **_build_fields(FRAME, frame),
                "context_line": frame.context_line or None,
                "marked": frame.marked if frame.marked[1] else None,
            }
            for frame in frames[-_MAX_FRAMES:]
        ],
        "stack": stack_lines(root)[:_MAX_LOG_LINES],
        "log": log_lines(root)[-_MAX_LOG_LINES:],
        "exit_code": root.exit_code,
        "signal": root.signal or None,
        **place,
        "time": format_timestamp(root.timestamp_ns),
        "memory": _build_fields(RESOURCES, root.resources),
        "deadline": _build_fields(EXPIRED, root.expired) if root.expired is not None else None,
        "last_collective": (
            _build_fields(PROGRESS, root.collectives[0]) if root.collectives else None
        ),
        "threads": [
            {"name": name, "type": exception.type, "message": _shorten(exception.message, longest)}
            for name, exception in dead_threads
        ],
    }


def _build_fields(table: FieldTable, part: Any) -> dict[str, Any]:
    """Return the fields of a part by their names in JSON;
    null for an empty text that may be missing.
    """
    values = {field.json: getattr(part, field.name) for field in table.fields if field.json}
    return {
        name: None if value == "" and name not in _TEXTS else value
        for name, value in values.items()
    }


def _shorten(text: str, longest: int | None) -> str:
    return text if longest is None else elide(text, longest)
