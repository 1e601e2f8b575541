"""The default strategy: what each failure tells about itself and about others counts more than its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.evidence.diagnosis import diagnose
from firstfault.evidence.faults import with_faults
from firstfault.model import Reads
from firstfault.strategies._registry import reads, takes_diagnosis
from firstfault.strategies.rules import judge

if TYPE_CHECKING:
    from firstfault.evidence.diagnosis import Diagnosis
    from firstfault.model import JobErrors, Verdict

_MAX_OF_INTEREST = 16
"""Ranks whose documents are opened for each reason in a large cascade."""
_MAX_NODES = 5
"""Accused nodes whose ranks' documents are opened in a large cascade."""


def _of_interest(job: JobErrors) -> set[int]:
    """Return the ranks whose documents have to be opened: the verdict's, and those that others name."""
    if not job.failures:
        return set()
    diagnosis = diagnose(job)
    accusations, verdict = diagnosis.accusations, evidence(job, diagnosis)
    ranks = {rank for rank, _ in accusations.ranks.most_common(_MAX_OF_INTEREST)}
    ranks |= {cause.rank for cause, _ in accusations.broadcast.most_common(_MAX_OF_INTEREST) if cause.rank is not None}
    ranks |= {suspect.rank for suspect in verdict.suspects if suspect.rank is not None}
    ranks |= set(verdict.ranks[:_MAX_OF_INTEREST])
    nodes = {node for node, _ in accusations.nodes.most_common(_MAX_NODES)} | {verdict.node}
    nodes |= {suspect.node for suspect in verdict.suspects}
    return ranks | {rank for entry in job.roster if entry.place.node in nodes for rank in entry.ranks}


@takes_diagnosis
@reads(Reads.GROUPS, _of_interest)
def evidence(job: JobErrors, diagnosis: Diagnosis | None = None) -> Verdict:
    """Pick the failure that explains the others.

    The rules are in `rules.RULES`. A process that was stopped, or names a peer that is gone, is a victim whatever its
    time. Times decide only as far as the clocks are known.
    """
    return judge(with_faults(diagnosis or diagnose(job)))
