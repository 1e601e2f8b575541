"""Attempts of one task side by side: how each ended, and what changed from one to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from firstfault.report.words import is_retried, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from firstfault.model import Decision, JobErrors, Verdict

_RANKS = 40
"""Characters."""


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """One attempt in short."""

    number: int
    verdict: Verdict | None = None
    """None: it did not fail, or this is not known; see `note`."""
    decision: Decision | None = None
    note: str = ""
    """"succeeded", or why nothing is known."""
    nodes: tuple[str, ...] = ()
    """Names of those that took part, as far as known."""
    seconds: float | None = None
    """How long it took; None: not known."""

    @property
    def outcome(self) -> str:
        """How it ended, in a line."""
        return self.verdict.headline if self.verdict is not None else self.note

    @property
    def line(self) -> str:
        """How it ended, whether it was worth another one, and how long it took."""
        retry = "" if self.decision is None else ", retry" if is_retried(self.decision) else ", no retry"
        took = f", {self.seconds:.1f} s" if self.seconds is not None else ""
        return f"attempt {self.number}: {self.outcome}{retry}{took}"


def summary_of(number: int, job: JobErrors, verdict: Verdict, decision: Decision) -> AttemptSummary:
    """Return the summary of an attempt that failed."""
    nodes = {entry.place.node for entry in job.roster} | {failure.node for failure in job.failures}
    return AttemptSummary(number, verdict, decision, nodes=tuple(sorted(nodes - {""})))


def changes_between(attempts: Sequence[AttemptSummary]) -> tuple[str, ...]:
    """Return a sentence for each attempt but the first: whether it had the same fault in the same place."""
    found = []
    for index, after in enumerate(attempts[1:], 1):
        # skip an attempt of which nothing is known, after it was mentioned once
        known = (item for item in reversed(attempts[:index]) if item.verdict is not None or after.verdict is None)
        before = next(known, attempts[index - 1])
        found.append(f"attempt {before.number} to {after.number}: {', '.join(_changes(before, after))}")
    return tuple(found)


def _changes(before: AttemptSummary, after: AttemptSummary) -> list[str]:
    one, other = before.verdict, after.verdict
    if one is None or other is None:
        return [f"attempt {item.number} {item.note}" for item in (before, after) if item.verdict is None]
    found = []
    if not (one.fingerprint and other.fingerprint):
        found.append(
            f"{other.category} after {one.category}" if one.category != other.category else "cannot be compared"
        )
    elif one.fingerprint == other.fingerprint:
        found.append("the same fault again")
    elif one.category == other.category:
        found.append(f"another fault of the same category ({other.category})")
    else:
        found.append(f"another fault: {other.category} after {one.category}")
    if one.ranks and other.ranks:
        same, ranks = one.ranks == other.ranks, "rank" if len(other.ranks) == 1 else "ranks"
        again, now = f"on the same {ranks}", f"on {ranks} {ranks_text(other.ranks, _RANKS)}"
        found.append(again if same else f"{now} after {ranks_text(one.ranks, _RANKS)}")
    found += _machines(one, other)
    versions = [dict(verdict.root.versions) if verdict.root is not None else {} for verdict in (one, other)]
    found += [
        f"{name} {versions[1][name]} after {versions[0][name]}"
        for name in sorted(versions[0].keys() & versions[1].keys())
        if versions[0][name] != versions[1][name]
    ]
    return found


def _machines(one: Verdict, other: Verdict) -> Iterator[str]:
    """Yield whether machine and GPU of the root cause are the same; nothing if that is not known.

    A machine is known by the kernel's boot id, which all of its pods share. The names of pods always differ: Flyte puts
    the attempt's number into them.
    """
    if one.root is None or other.root is None:
        return
    places = one.root.place, other.root.place
    gpus = [place.gpu for place in places]
    boots = [root.boot_id for root in (one.root, other.root)]
    names = [place.machine for place in places]
    if all(gpus) and gpus[0] == gpus[1]:
        yield f"on the same GPU ({gpus[0]})"
    elif (all(boots) and boots[0] == boots[1]) or (all(names) and names[0] == names[1]):
        yield f"on the same machine ({names[1]})" if names[1] else "on the same machine"
    elif all(names):
        yield f"on machine {names[1]} after {names[0]}"
    elif all(boots):
        yield "on another machine, or after a reboot"
