"""A job of Slurm: Slurm's data about it, and how it's requeued."""

from __future__ import annotations

import datetime as dt
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from firstfault.slurm.client import SEPARATOR, SlurmError, expand_nodes, run_slurm
from firstfault.slurm.placement import Constraints, find_exclusion_problem

_CHECK_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.5
_OUR_COMMENT = "firstfault: "
_WAITING_STATES = {"PENDING", "REQUEUED", "COMPLETING", "CONFIGURING", "RUNNING"}

# Job names, comments and commands are whatever the user likes, also "JobInfo=FAILED Restarts=7"
# after a line break. `scontrol show job` prints them between its own fields, `squeue --json` all
# jobs of the cluster, and `scontrol --json` came with Slurm 23.02. These columns have no free text.
_COLUMN_CHARACTERS = 40
_COLUMNS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "State",
    "RestartCnt",
    "StartTime",
    "Contiguous",
    "ReqSwitch",
    "Reason",
)
_LONG_COLUMNS = ("%N", "%n", "%x", "%P", "%v", "%f")
"""Nodes of the job, required and excluded ones, partition, reservation, features:
lists that may be long.
"""
_COMMENT = "%k"
_OTHER_CONSTRAINTS = {
    "HetJobID": "several components",
    "Contiguous": "the option --contiguous",
    "ReqSwitch": "the option --switches",
}
_ROW_END = "\x1e"
"""A comment may have several lines."""
_EMPTY_VALUES = {"", "(null)", "N/A", "n/a", "0", "no"}
_NO_TASK = "N/A"


def find_job_id(environment: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's number of the job around this process, or an empty string outside a job.

    Each task of an array has its own number. The variables of the array may be those of another
    job: sbatch passes on the environment that it was called in, and overrides only those that the
    new job has.
    """
    return environment.get("SLURM_JOB_ID", "")


class JobInfo(NamedTuple):
    """Slurm's data about a job."""

    id: str
    """The id that scontrol accepts: "42", "42_7"."""
    number: str
    """Slurm's number; each task of an array has one."""
    state: str
    reason: str
    """Slurm's word on why the job is in this state, such as TimeLimit."""
    restarts: int
    start_time: float
    """Time of the last start, in seconds since the Unix epoch; 0 if unknown."""
    other_constraint: str
    """A constraint on where the job runs that isn't a list, or empty if there is none."""


def read_job(job_id: str, *, is_own: bool = False) -> JobInfo:
    """Return Slurm's data about a job.

    Args:
        job_id: "42", or "42_7" for a task of an array.
        is_own: whether it's the number of the job around this process. The last task of an array
            has the array's.

    Raises:
        SlurmError: Slurm has no such job, or doesn't answer.
    """
    columns = ",".join(f"{name}:{_COLUMN_CHARACTERS}" for name in _COLUMNS)
    return parse_job(_query(job_id, "-O", columns), job_id, is_own=is_own)


class SlurmJob(NamedTuple):
    """A job, or one task of an array: "42", "42_7"."""

    id: str

    def find_exclusion_problem(self, info: JobInfo, node: str) -> str:
        """Return why the job must not exclude a node from its next start, or "" if it may."""
        try:
            columns = self._read_columns(*_LONG_COLUMNS)
            nodes, required, excluded = (frozenset(expand_nodes(names)) for names in columns[:3])
        except SlurmError as error:
            return str(error)
        partition, reservation, features = columns[3:]
        constraints = Constraints(
            nodes,
            required,
            excluded,
            partition,
            reservation,
            features,
            info.other_constraint,
        )
        return find_exclusion_problem(constraints, node)

    def requeue(self, before: JobInfo, *, exclude: str, headline: str) -> list[str]:
        """Run the job again. Return the changes that Slurm refused.

        It can run inside the job that it requeues. The job is never held: if Slurm kills this
        process half-way, the job starts without the change. A requeued job waits two minutes
        (`cred_expire`), long enough to change it.

        Args:
            before: Slurm's data about the job when the requeue was decided.
            exclude: a node that the job must not use again, or empty if there is none.
            headline: for the job's comment, unless the comment is another program's: it may be a
                setting.

        Raises:
            SlurmError: Slurm doesn't requeue it.
        """
        # Slurm ends the processes of a job that it requeues. Ignored signals, unlike handled ones,
        # are also ignored by the children: scontrol itself would get the signal.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            run_slurm("scontrol", "requeue", self.id)
        except SlurmError:
            # Slurm itself, or this command on another node of the job, may have been faster.
            if read_job(self.id).restarts <= before.restarts:
                raise
        # Only now: Slurm changes neither the nodes of a running job nor anything of one that has
        # ended.
        refused = self._exclude(exclude) if exclude else []
        self._comment(headline)
        return [*refused, *self._find_missing(before)]

    def _exclude(self, node: str) -> list[str]:
        """Exclude a node from the requeued job; return what is wrong with the result."""
        deadline = time.monotonic() + _CHECK_TIMEOUT_SECONDS
        while True:
            try:
                excluded = self._add_to_excluded(node)
            except SlurmError as error:
                if time.monotonic() > deadline:
                    return [f"{node} is not excluded: {error}"]
                time.sleep(_POLL_SECONDS)  # the controller may not have ended the last start yet
            else:
                return (
                    []
                    if node in excluded
                    else [f"{node} is not excluded; the job's list is {','.join(excluded)}"]
                )

    def _add_to_excluded(self, node: str) -> list[str]:
        """Return the excluded nodes afterwards: a site's plugin may change the list again."""
        (excluded,) = self._read_columns("%x")
        if node not in expand_nodes(excluded):
            names = node if excluded in _EMPTY_VALUES else f"{excluded},{node}"
            run_slurm("scontrol", "update", f"JobId={self.id}", f"ExcNodeList={names}")
            (excluded,) = self._read_columns("%x")
        return expand_nodes(excluded)

    def _comment(self, headline: str) -> None:
        """Give the job a comment, unless it has one. People may read it; nothing depends on it."""
        try:
            (comment,) = self._read_columns(_COMMENT)
            if comment in _EMPTY_VALUES or comment.startswith(_OUR_COMMENT):
                # Other programs parse what scontrol prints.
                text = f"{_OUR_COMMENT}{headline.replace('=', ':')}"
                run_slurm("scontrol", "update", f"JobId={self.id}", f"Comment={text}")
        except SlurmError:
            pass

    def _find_missing(self, before: JobInfo) -> list[str]:
        """Check that the job waits for its next start."""
        deadline = time.monotonic() + _CHECK_TIMEOUT_SECONDS
        while True:
            now = read_job(self.id)
            if now.restarts > before.restarts and now.state in _WAITING_STATES:
                return []
            if time.monotonic() > deadline:
                return [f"the job is {now.state}, not waiting to start again"]
            time.sleep(_POLL_SECONDS)

    def _read_columns(self, *columns: str) -> list[str]:
        """Return columns of squeue that may be of any length;
        only the last one may have free text.
        """
        printed = _query(self.id, "-o", SEPARATOR.join(("%A", "%F", "%K", *columns)) + _ROW_END)
        rows = [row.split(SEPARATOR, len(columns) + 2) for row in printed.split(f"{_ROW_END}\n")]
        return _find_row(rows, self.id)[3:]


def _query(job_id: str, *columns: str) -> str:
    return run_slurm("squeue", "--all", "-h", "-t", "all", "-j", job_id, *columns)


def parse_job(printed: str, job_id: str, *, is_own: bool = False) -> JobInfo:
    """Return the data in squeue's rows about a job; see `read_job`.

    Raises:
        SlurmError: there is no such row, or several.
    """
    starts = range(0, len(_COLUMNS) * _COLUMN_CHARACTERS, _COLUMN_CHARACTERS)
    rows = [
        [line[start : start + _COLUMN_CHARACTERS].strip() for start in starts]
        for line in printed.splitlines()
    ]
    row = dict(zip(_COLUMNS, _find_row(rows, job_id, is_own=is_own), strict=True))
    task = row["ArrayTaskID"]
    return JobInfo(
        id=row["JobID"] if task in {"", _NO_TASK} else f"{row['ArrayJobID']}_{task}",
        number=row["JobID"],
        state=row["State"],
        reason=row["Reason"],
        restarts=int(row["RestartCnt"]) if row["RestartCnt"].isdecimal() else 0,
        start_time=_parse_time(row["StartTime"]),
        other_constraint=next(
            (text for name, text in _OTHER_CONSTRAINTS.items() if row[name] not in _EMPTY_VALUES),
            "",
        ),
    )


def _find_row(rows: Sequence[Sequence[str]], job_id: str, *, is_own: bool = False) -> list[str]:
    """Return the row of a job; the first three columns are the numbers of the job,
    its array and its task.
    """
    matching_rows = []
    for first, *others in rows:
        # squeue may print the name of the cluster before the first row
        number = first.rpartition("\n")[2]
        if len(others) < len(("array", "task")):
            continue
        array, task = others[:2]
        names = {number} if is_own else {number, array, f"{array}_{task}"}
        if job_id in names and (task.isdecimal() or task == _NO_TASK or not is_own):
            matching_rows.append([number, *others])
    if not matching_rows:
        raise SlurmError(
            f"Slurm doesn't know job {job_id}; it forgets jobs some minutes after their end"
        )
    if len(matching_rows) > 1 or not (
        matching_rows[0][2].isdecimal() or matching_rows[0][2] == _NO_TASK
    ):
        raise SlurmError(
            f"{job_id} is an array of jobs; name one of its tasks, such as"
            f" {job_id}_{_find_task(matching_rows)}"
        )
    return matching_rows[0]


def _find_task(rows: Sequence[Sequence[str]]) -> str:
    return next((row[2] for row in rows if row[2].isdecimal()), "1")


def _parse_time(text: str) -> float:
    try:
        return dt.datetime.fromisoformat(text).timestamp()  # both are in this process's time zone
    except ValueError:
        return 0.0
