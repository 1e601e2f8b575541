"""What ran, on what, and for how long."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from firstfault.layout import parse_execution
from firstfault.model.failure import OF_LOGS
from firstfault.model.job import JobSize, NodeSetup, Progress
from firstfault.report.cascade.ranks_and_nodes import world_size
from firstfault.report.case import Case
from firstfault.report.engine_words import EngineWords
from firstfault.report.formatting import format_time, shorten_list
from firstfault.utils.text import counted, duration, one_line

_NS_PER_MS = 1_000_000
_NS_PER_SECOND = 1_000_000_000
_MIN_START_NS = 1_577_836_800 * _NS_PER_SECOND
"""The year 2020: no job started before."""
_MAX_START_NS = 4_102_444_800 * _NS_PER_SECOND
"""The year 2100."""
# git's object names: 40 digits of SHA-1, or 64 of SHA-256
_MAX_END_CHARS = 60
_MAX_EARLIER_STARTS = 2
"""Maximum number of earlier starts to report with their ends."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """What ran, on what, and for how long. Unknown values are empty, 0 or None."""

    task: str = ""
    """Its full name."""
    execution: str = ""
    """Name of Flyte's execution."""
    image: str = ""
    started_ns: int | None = None
    """When its first agent started, nanoseconds since the Unix epoch."""
    seconds: float | None = None
    """From then to the root cause, or to the last failure if the root cause has no time."""
    progress: Progress = field(default_factory=Progress)
    """Progress of the last round."""
    ranks: int = 0
    nodes: int = 0
    at_least: tuple[str, ...] = ()
    """Which of "ranks" and "nodes" are only lower limits."""
    gpu_model: str = ""
    gpus: int = 0
    """Number of GPUs of the nodes that report it."""
    all_gpus: bool = False
    """Whether every node reports it."""
    versions: tuple[tuple[str, str], ...] = ()
    """Versions of packages."""
    earlier_starts: tuple[str, ...] = ()
    """How the starts above this one ended, if one log has several."""
    source_url: str = ""
    """Where its source code can be read: "https://github.com/org/repo/blob/<commit>"."""
    source_root: str = ""
    """The local folder that corresponds to this address."""

    @property
    def commit(self) -> str:
        """The commit of its source code; empty if the address names none."""
        match = _COMMIT.search(self.source_url)
        return match[0] if match else ""

    def _describe_size(self, engine: EngineWords) -> str:
        ranks = counted(self.ranks, "rank") if self.ranks else ""
        nodes = counted(self.nodes, engine.node) if self.nodes else ""
        ranks = f"at least {ranks}" if ranks and "ranks" in self.at_least else ranks
        nodes = f"at least {nodes}" if nodes and "nodes" in self.at_least else nodes
        return " on ".join(filter(None, [ranks, nodes]))

    @property
    def _after(self) -> str:
        return (
            f"failed after {duration(int(self.seconds * _NS_PER_SECOND))}"
            if self.seconds is not None
            else ""
        )

    @property
    def trained(self) -> str:
        """Return how far the last round came: "40,312 collectives, 3 h of training";
        empty if unknown.
        """
        calls, seconds = self.progress.collectives, self.progress.seconds
        if not calls:
            return ""
        took = (
            f" in {duration(int(seconds * _NS_PER_SECOND))}" if seconds >= 1 and calls > 1 else ""
        )
        return f"{calls:,} collective{'s' if calls > 1 else ''}{took}"

    def brief(self, engine: EngineWords) -> str:
        """Return what ran in few words; the rest is the same for every attempt of it."""
        gpus = f"{self.gpus} {self.gpu_model}" if self.gpus else ""
        progress = f"progress: {self.trained}" if self.trained else ""
        parts = (
            self.task or self.execution,
            self._describe_size(engine),
            gpus,
            self._after,
            progress,
        )
        return ", ".join(filter(None, (*parts, self._describe_earlier_starts())))

    def _describe_earlier_starts(self) -> str:
        if not self.earlier_starts:
            return ""
        number = len(self.earlier_starts) + 1
        is_teen = 10 < number % 100 < 20  # noqa: PLR2004 - "11th" to "19th"
        ending = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
        ends = shorten_list(
            [one_line(headline, _MAX_END_CHARS) for headline in self.earlier_starts],
            _MAX_EARLIER_STARTS,
        )
        return f"{number}{ending} start in the log, after {'; '.join(ends)}"

    def parts(self, engine: EngineWords) -> tuple[str, ...]:
        """Return what is known, in the order in which a person asks for it."""
        start = (
            f"started {format_time(self.started_ns)[:19]} UTC"
            if self.started_ns is not None
            else ""
        )
        parts = (
            self.task,
            f"execution {self.execution}" if self.execution else "",
            self.image,
            f"commit {self.commit[:7]}" if self.commit else "",
            ", ".join(filter(None, [start, self._after])),
            self._describe_size(engine),
            ": ".join(
                filter(
                    None,
                    [
                        counted(self.gpus, "GPU") if self.gpus and self.all_gpus else "",
                        self.gpu_model,
                    ],
                )
            ),
            ", ".join(f"{name} {version}" for name, version in self.versions),
        )
        return tuple(filter(None, parts))


def identify_job(case: Case) -> JobIdentity:
    """Return what ran, as far as the documents and the output prefix show."""
    job, verdict, places = case.job, case.verdict, case.job.places
    times = [failure.timestamp_ns for failure in job.failures if failure.timestamp_ns is not None]
    ended_ns = (
        verdict.timestamp_ns if verdict.timestamp_ns is not None else max(times, default=None)
    )
    # a clock that wasn't set yet, or a damaged entry, isn't a start
    longest = _MAX_START_NS if ended_ns is None else min(ended_ns, _MAX_START_NS)
    started = [
        start
        for place in places
        if _MIN_START_NS < (start := place.incarnation * _NS_PER_MS) <= longest
    ]
    started_ns = min(started, default=None)
    took_ns = ended_ns - started_ns if started_ns is not None and ended_ns is not None else -1
    setups = {entry.place.node: entry.setup for entry in job.roster if entry.setup != NodeSetup()}
    # all nodes run the same task and image, so any node's setup has them
    first = next(iter(setups.values()), NodeSetup())
    versions = verdict.root.versions if verdict.root is not None else ()
    hosts = len({place.node for place in places})
    size = job.size or JobSize(
        world_size(job) or len({rank for entry in job.roster for rank in entry.ranks}),
        # ranks without an agent report for themselves: their coverage counts ranks, not nodes
        hosts if case.engine.reporter else verdict.coverage.expected or len(case.cascade.nodes),
    )
    is_of_logs = any(place.engine == OF_LOGS for place in places)
    return JobIdentity(
        task=first.task,
        execution=parse_execution(case.uri) or "",
        image=first.image,
        started_ns=started_ns,
        seconds=took_ns / _NS_PER_SECOND if took_ns >= 0 else None,
        progress=job.progress,
        ranks=size.ranks,
        nodes=size.nodes,
        at_least=size.at_least,
        gpu_model=next((setup.gpu_model for setup in setups.values() if setup.gpus), ""),
        gpus=sum(setup.gpus for setup in setups.values()),
        all_gpus=len(setups) == verdict.coverage.expected,
        versions=versions
        or next((failure.versions for failure in job.failures if failure.versions), ()),
        earlier_starts=(
            tuple(record.headline for record in job.restarts if record.restart)
            if is_of_logs
            else ()
        ),
        source_url=first.source_url,
        source_root=first.source_root,
    )
