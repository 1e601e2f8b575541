"""Removes credentials from what was read and concluded: stock error files are not redacted when they are written.

This happens before texts are cut: a credential without its end is not recognised.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from firstfault.model import WorkerError
from firstfault.text import redact

if TYPE_CHECKING:
    from firstfault.model import JobErrors, Verdict

_LEFT_ALONE = {"documents", "fingerprint", "boot_id", "receipts"}
"""Fields that identify objects or boots; redaction would break them."""


def redacted(job: JobErrors, verdict: Verdict) -> tuple[JobErrors, Verdict]:
    """Return both with ``***`` in place of credentials; parts without one are the same objects."""
    failures = tuple(map(_clean, job.failures))
    roots = {id(before): after for before, after in zip(job.failures, failures, strict=True)}
    root = verdict.root and (roots.get(id(verdict.root)) or _clean(verdict.root))
    verdict = replace(_clean(replace(verdict, root=None)), root=root, sources=verdict.sources)
    history = tuple(map(_clean, job.history))
    return replace(job, failures=failures, history=history, coverage=_clean(job.coverage)), verdict


def _clean(value: Any) -> Any:
    """Return a dataclass with redacted texts; the same object if there was nothing to redact."""
    changed: dict[str, Any] = {}
    for field in fields(value):
        if field.name in _LEFT_ALONE:
            continue
        before = getattr(value, field.name)
        after = _cleaned(before)
        if after is not before:
            changed[field.name] = after
    return replace(value, **changed) if changed else value


def _cleaned(value: Any) -> Any:
    if isinstance(value, str) and type(value) is str:
        text = _redacted(value)
        return value if text == value else text
    if isinstance(value, tuple):
        parts = tuple(map(_cleaned, value))
        return value if all(one is other for one, other in zip(parts, value, strict=True)) else parts
    if is_dataclass(value) and not isinstance(value, type) and not isinstance(value, WorkerError):
        return _clean(value)
    return value


@lru_cache(maxsize=4096)
def _redacted(text: str) -> str:
    """Redact with a cache: thousands of documents have the same frames, nodes and reasons."""
    return redact(text)
