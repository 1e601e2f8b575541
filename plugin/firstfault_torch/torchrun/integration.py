"""The base class of an integration with a launcher that starts the ranks itself, without torch's
agent, and repeats a failed training, such as Ray Train. docs/project/changing.md, "Add a door".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from firstfault.attempt_reader import AttemptReader
from firstfault.conclude import Judgment, find_judgment
from firstfault.decision_mode import ACT, OBSERVE, read_decision_mode
from firstfault.layout import VERDICT_JSON
from firstfault.model.job import Action
from firstfault.render.flyte_message import flyte_message
from firstfault.retry import RetryContext, find_machine
from firstfault.store import join, split_name
from firstfault.wire.json_schemas import to_json
from firstfault_start import OWN_RANK, is_off
from firstfault_torch.guard import call_with_timeout, logger
from firstfault_torch.node.document_writer import put_file
from firstfault_torch.time_limits import (
    CONTROLLER_CONCLUDE_TIMEOUT_SECONDS,
    CONTROLLER_SETTLE_SECONDS,
    HANDOVER_TIMEOUT_SECONDS,
)
from firstfault_torch.torchrun import rank
from firstfault_torch.torchrun.job_folder import get_given_folder
from firstfault_torch.torchrun.job_names import read_job_names
from firstfault_torch.torchrun.settings import ATTEMPT_VARIABLE, FOLDER_VARIABLE, JOB_VARIABLE


class Integration:
    """Records the ranks of one training, and judges its failed attempts.

    The launcher's controller makes it, and sends each rank a copy, so it can be pickled. A subclass
    calls these methods from the launcher's hooks, under `suppress_internal_errors`:

        controller   begin_run          once: name the folder of all attempts
                     begin_attempt      each time: count the attempts, because launchers don't name
                                        them
        rank         begin              before the training's function
                     record_exception   the exception that ended it, before the launcher makes a
                     or record_exit     text of it; or that it has returned
        controller   judge              after a failure; its caller raises what ends the retries

    A process serves as a rank only once: the next attempt needs new processes.
    """

    launcher: ClassVar[str] = ""
    """Its name in messages."""

    record_exception = staticmethod(rank.record_exception)
    record_exit = staticmethod(rank.record_exit)

    def __init__(self) -> None:
        self._folder = get_given_folder()
        self._mode = read_decision_mode()
        self.run = ""
        """The folder (URI) of all attempts; empty if nothing is recorded."""
        self._attempt = -1
        self._ranks = 0
        self._began_ns = 0
        self._is_judged = False
        self._previous: Judgment | None = None
        """On the attempt before; None if it left no document, or isn't charged to the training."""

    def begin_run(self, storage: str, name: str) -> None:
        """Name the folder of all attempts, unless firstfault is off.

        `name` is unique among runs, because users repeat a run under its name. `storage` is the
        folder (URI) for what the run leaves; `FIRSTFAULT_FOLDER` comes before it.
        """
        if not is_off():
            folder = self._folder or join(storage, "firstfault-runs")
            job = read_job_names("", {JOB_VARIABLE: name}).job.value
            self.run = join(folder, job)

    def begin_attempt(self, ranks: int) -> None:
        """Count the attempt that begins, with this number of ranks."""
        self._attempt += 1
        self._is_judged = False
        self._began_ns = time.monotonic_ns()
        self._ranks = ranks

    def begin(self, own_rank: int, local_rank: int, ranks: int) -> None:
        """Begin to record this process, which is one of the ranks."""
        if not self.run:
            return
        folder, job = split_name(self.run)
        os.environ.update(
            {FOLDER_VARIABLE: folder, JOB_VARIABLE: job, ATTEMPT_VARIABLE: str(self._attempt)}
        )
        OWN_RANK.append((own_rank, local_rank, ranks))
        rank.begin()

    def judge(self, is_charged: Callable[[], bool] = lambda: True) -> str:
        """Conclude on the attempt, which has failed, and log the report. Return the report if a
        retry would only repeat the fault, else "": then the launcher decides.

        Only the first call for an attempt concludes: launchers report a failure until all ranks
        have ended. `is_charged` returns False if the launcher has a separate budget for this
        failure, as for preemptions: then nothing is judged.
        """
        if self._is_judged or not self.run:
            return ""
        self._is_judged = True
        previous = self._previous
        self._previous = None
        if not is_charged():
            return ""
        # It returns its results: after the timeout its thread stays behind, while the next attempt
        # begins.
        conclude = partial(self._conclude, previous)
        doing = "concluding on a failed attempt"
        judged = call_with_timeout(conclude, CONTROLLER_CONCLUDE_TIMEOUT_SECONDS, doing)
        report, self._previous = judged or ("", None)
        return report

    def _conclude(self, previous: Judgment | None) -> tuple[str, Judgment | None]:
        """Log the report; return it if the training must stop, else an empty text,
        and the judgment on this attempt.
        """
        prefix = join(self.run, str(self._attempt))
        reader = AttemptReader(
            prefix, expected_nodes=self._ranks, settle_seconds=CONTROLLER_SETTLE_SECONDS
        )
        context = RetryContext(
            attempt=self._attempt,
            lifetime_seconds=(time.monotonic_ns() - self._began_ns) / 1e9,
            stops_repeats=True,
        )
        if previous is not None:
            context = replace(
                context,
                previous_fingerprint=previous.verdict.fingerprint,
                previous_machine=find_machine(previous.verdict),
                failed_starts=previous.decision.failed_starts,
            )
        conclusion = reader.conclude(context)
        if conclusion is None:
            logger.warning(
                "a worker failed, but left no document in %s; %s decides on a retry",
                prefix,
                self.launcher,
            )
            return "", None
        judgment = find_judgment(conclusion)
        acts = self._mode == ACT
        decision = replace(judgment.decision, enforced=acts)
        report = reader.report(replace(conclusion, verdict=judgment.verdict, decision=decision))
        text = flyte_message(report)
        logger.error("%s", text)
        # Readers don't know the attempt before, and would decide otherwise.
        leave = partial(
            put_file,
            prefix,
            VERDICT_JSON,
            to_json(report.verdict, report.decision).encode(),
        )
        call_with_timeout(leave, HANDOVER_TIMEOUT_SECONDS, "leaving the verdict for readers")
        stops = decision.action is Action.STOP
        if stops and self._mode == OBSERVE:
            logger.warning(
                "observed: would have stopped after attempt %d: %s", self._attempt, decision.reason
            )
        return text if stops and acts else "", judgment
