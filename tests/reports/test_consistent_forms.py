"""No form of a report contradicts another, itself, or claims more than is known;
the JSON follows its schema.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from firstfault.conclude import conclude
from firstfault.model import Kind, NodeSetup, Origin, Outcome, Phase, Scope, Subject, Writer
from firstfault.render.json_report import json_report
from firstfault.report import Report
from firstfault.report.data import AttemptSummary, build_report
from firstfault.report.fault_owner import FaultOwner
from firstfault.report.parts.sections import build_sections
from firstfault.report.states import State
from firstfault.strategies import build_undetermined_verdict
from firstfault.testing import make_error, make_job, make_presence
from firstfault.wire.json_schemas import from_json
from tests.all_forms import FORMS
from tests.reports.scenes import SCENES, report_conclusion

_NOBODYS = {FaultOwner.UNKNOWN, FaultOwner.TRANSIENT, FaultOwner.NONE}
_OWNERS = [owner.value for owner in FaultOwner if owner not in _NOBODYS]
_NO_OWNER = re.compile(
    "|".join(owner.value for owner in _NOBODYS) + "|In your code:|owner-infrastructure"
)
_FORMS = {
    name: FORMS[name] for name in ("plain", "plain -v", "markdown", "page", "json", "message")
}


def _nobodys_fault(report: Report) -> None:
    texts = {name: form(report) for name, form in _FORMS.items()}
    for name, text in texts.items():
        without = _NO_OWNER.sub("", text)
        assert [(name, owner) for owner in _OWNERS if owner in without] == []
    assert not re.search(r'class="[^"]*ff-owner-(code|infrastructure|either)', texts["page"])
    assert json.loads(texts["json"])["fault"] in {owner.value for owner in _NOBODYS}


@pytest.mark.parametrize("name", SCENES)
def test_a_report_on_a_torchrun_job_has_no_words_of_flyte(name: str) -> None:
    """A report on a torchrun job mentions no task, no pod, no retry budget and no Flyte."""
    job = SCENES[name]().job
    failures = (replace(item, place=replace(item.place, engine="plain")) for item in job.failures)
    roster = (
        replace(item, place=replace(item.place, engine="plain"), setup=NodeSetup())
        for item in job.roster
    )
    found = conclude(replace(job, failures=tuple(failures), roster=tuple(roster), seals=()))
    if found is None:
        return  # a scene without documents
    made = build_report(found.job, found.verdict, found.decision)
    texts = [
        made.first_line,
        *(fact.line for fact in (*build_sections(made).answers, *build_sections(made).details)),
    ]
    texts += [made.answers.category, *found.verdict.why]
    words = r"\b(tasks?|pods?|budget|kubectl|Flyte(?!RecoverableException)\w*)\b"
    assert [text for text in texts if re.search(words, text)] == []


@pytest.mark.parametrize("name", SCENES)
def test_printers_keep_words_and_order(name: str) -> None:
    """Message, plain text and Markdown have the facts in the report's order,
    each in the report's words.
    """
    report = SCENES[name]()
    parts = build_sections(report)
    facts = [fact for fact in (*parts.answers, *parts.details) if len(fact.line) < 200]
    lines = iter(_FORMS["message"](report).splitlines())
    assert [fact.line for fact in facts if fact.line not in lines] == [], (
        "each after the one before it"
    )
    values = ["".join(fact.value.split()) for fact in facts]
    folded = "".join(_FORMS["plain -v"](report).split())
    assert re.search(".*".join(map(re.escape, values)), folded), "each after the one before it"
    rows = re.findall(r"^([A-Z][a-z]+) ", _FORMS["plain"](report).partition("\n")[2], re.MULTILINE)
    assert rows[:4] == ["Cause", "Where", "Retry", "Next"]
    text = _FORMS["markdown"](report)
    titles = [
        f"### {part.title}\n"
        for part in (parts.stack, parts.message, parts.log, parts.evidence)
        if part.lines
    ]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)


@pytest.mark.parametrize("name", SCENES)
def test_an_undetermined_failure_is_nobodys_fault(name: str) -> None:
    """Of any scene whose root cause is not known,
    no form says that code or infrastructure is at fault.
    """
    report = SCENES[name]()
    if report.verdict.scope is not Scope.UNDETERMINED:
        report = report_conclusion(
            report.job, verdict=build_undetermined_verdict(report.job, "evidence")
        )
    _nobodys_fault(report)
    assert report.decision.origin is Origin.UNKNOWN


@pytest.mark.parametrize("category", ["recoverable", "user_code", "data"])
def test_a_recoverable_error_is_nobodys_fault(category: str) -> None:
    """An error that its code raised as recoverable, and whose retry succeeded,
    is no failure of the code.
    """
    raised = make_error(3, kind=Kind.RECOVERABLE, origin=Origin.USER, category=category)
    first = report_conclusion(make_job(raised))
    attempts = (
        AttemptSummary(0, first.outcome, first.verdict, first.decision),
        AttemptSummary(1, Outcome.SUCCEEDED),
    )
    report = replace(report_conclusion(make_job(raised), attempts=attempts), number=0)
    assert report.answers.fault_owner is FaultOwner.TRANSIENT
    _nobodys_fault(report)


def test_a_job_that_was_ended_from_outside_is_nobodys_fault() -> None:
    """If all pods were terminated at once, a person may have aborted the job:
    no form blames a pod or code.
    """
    report = SCENES["all-terminated"]()
    assert report.answers.where.startswith("all 2 pods, the first ")
    assert (
        "all 2 pods were terminated at once, as by an abort or a time limit"
        in report.answers.unknown[-1]
    )
    _nobodys_fault(report)


_PHASES = [
    (),
    (Phase.JOINED,),
    (Phase.JOINED, Phase.FAILED),
    (Phase.JOINED, Phase.SUCCEEDED),
    (Phase.FAILED,),
]


@st.composite
def _jobs(draw: st.DrawFn) -> Report:
    """Return a report on nodes of which any may be silent, any rank may lack a document,
    and any number is expected.
    """
    each = draw(st.integers(1, 3))
    size = draw(st.integers(0, 5))
    failures, roster = [make_error(0, node="w-0", group_rank=0, group_world_size=size)], []
    for node in range(draw(st.integers(1, 4))):
        ranks = tuple(range(node * each, (node + 1) * each))
        place = {"node": f"w-{node}", "group_rank": node}
        roster += [
            make_presence(phase, nodes=size, ranks=ranks, **place)
            for phase in draw(st.sampled_from(_PHASES))
        ]
        documented = draw(st.sets(st.sampled_from(ranks)))
        failures += [make_error(rank, at_ms=rank, **place) for rank in sorted(documented - {0})]
    if draw(st.booleans()):
        failures[0] = replace(
            failures[0], place=replace(failures[0].place, world_size=draw(st.integers(1, 12)))
        )
    job = make_job(*failures, roster=tuple(roster))
    expected = draw(st.none() | st.integers(1, 5))
    if expected is not None:
        complete = job.coverage.complete and expected <= job.coverage.reported
        job = replace(job, coverage=replace(job.coverage, expected=expected, complete=complete))
    return report_conclusion(replace(job, settled=draw(st.booleans())))


@given(_jobs())
def test_a_count_is_never_contradicted(report: Report) -> None:
    """A plain "2 of 2 reported" means that every known node and rank reported;
    no count exceeds its total.
    """
    found = re.match(r"(\d+) of (\d+) reported", report.coverage)
    assert found is None or int(found[1]) <= int(found[2])
    silent = [
        item
        for item in (*report.cascade.ranks, *report.cascade.nodes)
        if item.state is State.UNREPORTED
    ]
    missing = [sentence for sentence in report.answers.unknown if "no report" in sentence]
    if report.has_reported:
        assert found[1] == found[2]
        assert not silent
        assert not missing
    for form in ("plain", "message"):
        assert (
            report.coverage in " ".join(_FORMS[form](report).split())
        ) is not report.has_reported


@pytest.mark.parametrize(
    ("terminated_ms", "nodes", "unknown"),
    [
        (
            (0.0,),
            1,
            "why it was terminated: a preemption, a drain, an eviction, an abort, or a time limit",
        ),
        (
            (0.0, 500.0),
            2,
            "who ended the job: all 2 pods were terminated at once, as by an abort or a time limit",
        ),
        ((0.0, 60_000.0), 2, "who ended the job: all 2 pods were terminated, but not at once"),
        (
            (0.0, 500.0),
            3,
            "2 of 3 pods were terminated, which suggests a preemption, a drain or an eviction",
        ),
    ],
)
def test_what_terminated_the_pods_is_not_claimed(
    terminated_ms: tuple[float, ...], nodes: int, unknown: str
) -> None:
    """How many pods were terminated, and when, is all that the report builds on."""
    agent = {
        "exception": None,
        "signal": "SIGTERM",
        "category": "preemption",
        "subject": Subject.AGENT,
    }
    agent |= {
        "writer": Writer.AGENT,
        "kind": Kind.RECOVERABLE,
        "origin": Origin.SYSTEM,
        "group_world_size": nodes,
    }
    failures = [
        make_error(None, at_ms=at_ms, node=f"w-{node}", group_rank=node, **agent)
        for node, at_ms in enumerate(terminated_ms)
    ]
    assert any(
        unknown in sentence for sentence in report_conclusion(make_job(*failures)).answers.unknown
    )


_SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "schemas" / "verdict-v1.schema.json").read_text()
)


def _closed(schema: Any) -> Any:
    """Return a schema that refuses fields which it does not describe."""
    if isinstance(schema, dict):
        found = {name: _closed(value) for name, value in schema.items()}
        if "properties" in found and "additionalProperties" not in found:
            found["additionalProperties"] = False
        return found
    return [_closed(item) for item in schema] if isinstance(schema, list) else schema


def test_the_schema_is_valid() -> None:
    """It is a JSON Schema of the draft that it names,
    also for the answer about an attempt that did not fail.
    """
    Draft202012Validator.check_schema(_SCHEMA)
    assert _SCHEMA["$schema"].endswith("2020-12/schema")
    Draft202012Validator(_SCHEMA).validate(
        {"schema": "firstfault.verdict/v1", "verdict": None, "decision": None}
    )


@pytest.mark.parametrize("name", SCENES)
def test_each_report_matches_the_schema(name: str) -> None:
    """Each field is described and has the described type;
    what reads a sealed verdict also reads this.
    """
    report = SCENES[name]()
    text = json_report(report)
    Draft202012Validator(_closed(_SCHEMA)).validate(json.loads(text))
    found = from_json(text)
    assert found is not None
    verdict, decision = found
    assert decision == report.decision
    assert (verdict.headline, verdict.ranks) == (report.verdict.headline, report.verdict.ranks)
