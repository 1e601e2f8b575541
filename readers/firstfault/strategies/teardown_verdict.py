"""The verdict on a job that had finished, and then failed in its teardown:
no rank failed in the training.
"""

from __future__ import annotations

from dataclasses import replace

from firstfault.evidence.completion import (
    describe_teardown_end,
    find_teardown_failures,
    prove_completion,
)
from firstfault.evidence.diagnosis import Diagnosis
from firstfault.evidence.progress import describe_timed_out_call
from firstfault.evidence.texts import find_message
from firstfault.model import TIME_LIMIT, Reason, Subject, Verdict, WorkerError
from firstfault.model.failure import TEARDOWN
from firstfault.strategies.headlines import MAX_HEADLINE_CHARS, join_ranks, name_process
from firstfault.strategies.reasons import STRATEGY_NAME
from firstfault.strategies.verdicts import build_verdict
from firstfault.utils.text import one_line

_TEARDOWN_CODE = "USER:Teardown"
_TIME_LIMIT_TEXT = "reached the time limit"


def build_teardown_verdict(diagnosis: Diagnosis) -> Verdict | None:
    """Return the verdict "finished, then SIGABRT in the teardown of rank 3";
    None if the job isn't proven finished.
    """
    job = diagnosis.job
    proof = prove_completion(job)
    failures = find_teardown_failures(job)
    if not proof or not failures:
        return None
    root = failures[0]
    end = describe_teardown_end(root)
    same = [failure for failure in failures if describe_teardown_end(failure) == end]
    what = end or find_message(root).what
    failed = f"failed in its teardown: {what}" if root.code != TIME_LIMIT else _TIME_LIMIT_TEXT
    why = [
        # the sentence from a log names its line itself
        Reason(proof, () if job.completion else tuple(failures)),
        Reason(f"{name_process(root)} {failed}", (root,)),
    ]
    is_sure = bool(job.completion) or job.coverage.complete
    confidence = "high" if is_sure else "medium"
    shared = same if len(same) > 1 else ()
    verdict = build_verdict(
        job,
        root,
        strategy=STRATEGY_NAME,
        why=why,
        confidence=confidence,
        same=shared,
    )
    sentence = f"finished, then {what} in the teardown{_name_subject(root, verdict.ranks)}"
    if call := describe_timed_out_call(root):
        sentence += f": {call} timed out after the training"
    if root.code == TIME_LIMIT:
        sentence = f"finished, then {_TIME_LIMIT_TEXT}"
    headline = one_line(sentence, MAX_HEADLINE_CHARS)
    return replace(verdict, category=TEARDOWN, code=_TEARDOWN_CODE, headline=headline)


def _name_subject(root: WorkerError, ranks: tuple[int, ...]) -> str:
    """Return " of rank 3"; for a launcher's report, or a log without ranks, as much as is known."""
    if ranks:
        return f" of rank{'s' if len(ranks) > 1 else ''} {join_ranks(ranks)}"
    return f" of {name_process(root)}" if root.node and root.subject is Subject.WORKER else ""
