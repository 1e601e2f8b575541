"""A report as JSON: everything that its other forms say, as fields."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from firstfault.exceptions.first_cause import first_cause, own_frames
from firstfault.exceptions.stderr import exception_of
from firstfault.report.headline import first_line
from firstfault.report.sections import log_lines, stack_lines
from firstfault.report.words import PLAIN, State
from firstfault.text import elide
from firstfault.wire.json_schemas import SCHEMA, decision_to_dict, format_timestamp, verdict_to_dict

if TYPE_CHECKING:
    from firstfault.model import CollectiveProgress, ExpiredDeadline, FrameInfo, WorkerError
    from firstfault.report.data import Report

_FRAMES = 50
_LINES = 200


def json_report(report: Report, longest: int | None = None, *, decided: bool = True) -> str:
    """Return a report as one line, an object of the schema ``firstfault.verdict/v1`` (docs/schemas).

    Args:
        report: the report.
        longest: characters that are kept of each message; None: all.
        decided: False for a preliminary answer on a running attempt, which then says so.
    """
    answers = report.answers
    verdict = replace(report.verdict, message=_kept(report.verdict.message, longest))
    document = {
        "schema": SCHEMA,
        **({} if decided else {"decided": False}),
        "verdict": verdict_to_dict(verdict),
        "decision": decision_to_dict(report.decision),
        "first_line": first_line(verdict, report.decision),
        "root": _root(report, verdict.root, longest) if verdict.root is not None else None,
        "what": answers.what,
        "fault": answers.fault_owner.value,
        "where": answers.where,
        "retry": f"{answers.fate}; {answers.fate_reason}",
        "next": [{"text": step.text, "command": step.command or None} for step in answers.steps],
        "unknown": list(answers.unknown),
        "victims_by_state": _by_state(report),
        "followers": report.followers or None,
        "clocks": report.clocks or None,
        "attempt": report.number,
        "attempts": [
            {
                "number": attempt.number,
                "outcome": attempt.outcome,
                "failed": attempt.verdict is not None,
                "retry": attempt.decision.retry if attempt.decision is not None else None,
                "seconds": attempt.seconds,
            }
            for attempt in report.attempts
        ],
        "changes": list(report.changes),
        "uri": report.uri or None,
        "execution": report.identity.execution or None,
        "versions": dict(report.identity.versions),
        "job": _job(report),
    }
    return json.dumps(document, ensure_ascii=True, separators=(",", ":"))


def _root(report: Report, root: WorkerError, longest: int | None) -> dict[str, Any]:
    place, found = root.place, root.resources
    raised = exception_of(root)
    exception = first_cause(raised) if raised is not None else None
    frames = own_frames(raised) if raised is not None else ()
    is_plain = report.engine is PLAIN
    return {
        "type": exception.type if exception is not None else None,
        "message": _kept(exception.message, longest) if exception is not None else None,
        "file": frames[-1].file if frames else None,
        "line": frames[-1].line if frames else None,
        "function": frames[-1].function if frames else None,
        "source": (frames[-1].code or None) if frames else None,
        "frames": [_frame(frame) for frame in frames[-_FRAMES:]],
        "stack": stack_lines(root)[:_LINES],
        "log": log_lines(root)[-_LINES:],
        "exit_code": root.exit_code,
        "signal": root.signal or None,
        "rank": place.rank,
        "local_rank": place.local_rank,
        "pod": (root.node or None) if not is_plain else None,
        "machine": place.machine or (place.host if is_plain else "") or None,
        "host": place.host or None,
        "gpu": place.gpu or None,
        "pid": place.pid or None,
        "time": format_timestamp(root.timestamp_ns),
        "round": place.round,
        "restarts": place.restart_count,
        "memory": {
            "peak_bytes": found.memory_peak_bytes,
            "used_bytes": found.memory_used_bytes,
            "limit_bytes": found.memory_limit_bytes,
            "oom_kills": found.oom_kill,
        },
        "deadline": _deadline(root.expired) if root.expired is not None else None,
        "last_collective": _collective(root.collectives[0]) if root.collectives else None,
        "threads": [
            {"name": thread.thread, "type": thread.exception.type, "message": _kept(thread.exception.message, longest)}
            for thread in root.thread_failures
        ],
    }


def _job(report: Report) -> dict[str, Any]:
    identity = report.identity
    return {
        "task": identity.task or None,
        "image": identity.image or None,
        "started": format_timestamp(identity.started_ns),
        "seconds": identity.seconds,
        "ranks": identity.ranks,
        "nodes": identity.nodes,
        "gpu_model": identity.gpu_model or None,
        "gpus": identity.gpus,
        "source": identity.source_url or None,
        "commit": identity.commit or None,
    }


def _kept(text: str, longest: int | None) -> str:
    return text if longest is None else elide(text, longest)


def _frame(frame: FrameInfo) -> dict[str, Any]:
    return {
        "file": frame.file,
        "line": frame.line,
        "function": frame.function,
        "source": frame.code or None,
        "context": list(frame.context),
        "context_line": frame.context_line or None,
        "marked": list(frame.marked) if frame.marked[1] else None,
    }


def _deadline(expired: ExpiredDeadline) -> dict[str, Any]:
    return {
        "scope": expired.scope or None,
        "seconds": expired.seconds,
        "heartbeat": expired.heartbeat,
        "since": expired.since or None,
    }


def _collective(progress: CollectiveProgress) -> dict[str, Any]:
    return {
        "group": progress.group,
        "operation": progress.last_operation or None,
        "enqueued": progress.enqueued,
        "completed": progress.completed,
    }


def _by_state(report: Report) -> dict[str, list[int]]:
    """Return the ranks in each state but the root cause's, by the state's name: "victim", "stopped"."""
    found: dict[str, list[int]] = {}
    for item in report.cascade.ranks:
        if item.state is not State.ROOT:
            found.setdefault(item.state.slug, []).append(item.rank)
    return found
