"""The words of a report that depend on the engine: Flyte on Kubernetes, or no engine at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from firstfault.model import Decision, Kind, Origin, Subject, Writer
from firstfault.render.plain import terminal_text
from firstfault.report import Report, flyte_message, markdown, report_of
from firstfault.report.words import CATEGORY_WORDS, FLYTE, PLAIN, engine_of, words_on
from firstfault.retry import decide
from firstfault.strategies import get_strategy, run_strategy
from firstfault.testing import make_error, make_job, make_presence

_NO = Decision(retry=False, kind=Kind.NON_RECOVERABLE, origin=Origin.USER, enforced=True, reason="it is a bug")
_YES = replace(_NO, retry=True, kind=Kind.RECOVERABLE)


def _report(engine: str, *, category: str = "", logs: dict[str, str] | None = None, **place: str) -> Report:
    fields = {"exception": None, "subject": Subject.AGENT, "writer": Writer.AGENT} if category else {}
    place = {"node": "w-1", "namespace": "team", **place}
    job = make_job(make_error(3, engine=engine, category=category, **place, **fields))
    verdict = run_strategy(get_strategy("earliest"), job)
    return report_of(job, verdict, decide(verdict), logs=logs)


def _commands(report: Report) -> list[str]:
    return [step.command for step in report.answers.steps if step.command]


@pytest.mark.parametrize(("name", "engine"), [("", FLYTE), ("flyte", FLYTE), ("plain", PLAIN), ("another", PLAIN)])
def test_the_engine_is_the_documents(name: str, engine: object) -> None:
    """Documents without an engine's name are Flyte's; an unknown name gives the words of no engine."""
    assert _report(name).engine is engine


def test_a_roster_names_the_engine_too() -> None:
    """Without error documents, the engine's name comes from the roster."""
    job = make_job(roster=(make_presence(node="w-0", engine="plain"),))
    assert engine_of(job, run_strategy(get_strategy("earliest"), job)) is PLAIN


@pytest.mark.parametrize(
    ("engine", "category", "commands"),
    [
        ("flyte", "", ["kubectl logs w-1 -n team"]),
        (
            "flyte",
            "node_lost",
            ["kubectl get events --field-selector involvedObject.name=w-1 -n team", "kubectl logs w-1 -n team"],
        ),
        ("plain", "", []),
        ("plain", "node_lost", []),
    ],
)
def test_the_commands(engine: str, category: str, commands: list[str]) -> None:
    """Only reports on Kubernetes have kubectl commands."""
    assert _commands(_report(engine, category=category)) == commands


@pytest.mark.parametrize("text", ["x; touch owned", "$(touch owned)", "-n", "a b", "a\nb", "`x`", "a'b", "\u00e9"])
def test_a_command_has_no_text_of_a_document(text: str) -> None:
    """What cannot be a name in Kubernetes is left out of the commands to copy: a document may hold anything."""
    for category in ("", "node_lost"):
        bare = [command.removesuffix(" -n team") for command in _commands(_report("flyte", category=category))]
        assert _commands(_report("flyte", category=category, namespace=text)) == bare
    assert _commands(_report("flyte", node=text)) == []
    assert _commands(_report("flyte", category="gpu_hardware", node=text, machine=text)) == []


@pytest.mark.parametrize("engine", ["flyte", "plain"])
def test_a_log_file_needs_no_engine(engine: str) -> None:
    """If the log is a file on this machine, the command shows the file."""
    assert _commands(_report(engine, logs={"w-1": "logs/w-1.log"})) == ["less logs/w-1.log"]


@pytest.mark.parametrize("category", CATEGORY_WORDS)
def test_the_advice(category: str) -> None:
    """Advice without Kubernetes names no pod."""
    (_, plain), (_, flyte) = words_on(category, PLAIN), words_on(category, FLYTE)
    assert "pod" not in plain
    assert not {"{", "}"} & set(plain + flyte)


@pytest.mark.parametrize(
    ("decision", "flyte", "plain"),
    [
        (_YES, "will be retried", "should be retried; nothing retries this job by itself"),
        (_NO, "will not be retried", "should not be retried; nothing retries this job by itself"),
        (
            replace(_YES, enforced=False),
            "should be retried; Flyte decides by itself, this is advice",
            "should be retried; nothing retries this job by itself",
        ),
        (
            replace(_YES, retries_left=0),
            "will not be retried: no retries are left",
            "should be retried; nothing retries this job by itself",
        ),
    ],
)
def test_what_will_happen(decision: Decision, flyte: str, plain: str) -> None:
    """Flyte retries a job; without an engine a person does."""
    assert (FLYTE.fate(decision), PLAIN.fate(decision)) == (flyte, plain)


def test_every_form_has_the_engines_words() -> None:
    """No form of a report on a job without an engine mentions Flyte's decisions or Kubernetes."""
    report = _report("plain", category="node_lost")
    for text in (flyte_message(report), markdown(report), terminal_text(report)):
        assert "nothing retries this job by itself" in text
        assert "kubectl" not in text
        assert "Flyte" not in text
    assert "enforced" not in flyte_message(_report("flyte")), "what is as it should be is not said"
