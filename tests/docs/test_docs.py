"""The documentation agrees with the code: tables are complete, links resolve, examples run."""

import builtins
import dataclasses
import json
import re
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from firstfault import decide, errors, layout, retry
from firstfault.cli import EXIT
from firstfault.cli._ls import _attempt_json, _group_json
from firstfault.cli._main import COMMANDS_GROUP, group
from firstfault.failure_listing import FailedAttempt, FaultGroup
from firstfault.model import CATEGORIES, Kind, Origin
from firstfault.model.failure import SIGNALS
from firstfault.render.json_report import json_report
from firstfault.report import verdict_to_dict
from firstfault.report.states import State
from firstfault.strategies import ENTRY_POINT_GROUP, get_strategy, run_strategy, unregister_strategy
from firstfault.strategies.registry import BUILT_IN_STRATEGIES
from firstfault.testing import make_error, make_job
from firstfault.wire.documents import MAX_DOCUMENT_BYTES
from firstfault.wire.json_schemas import DECISION
from firstfault_proto.v1 import errors_pb2
from firstfault_torch.conclusion.notifications import NOTIFIERS
from firstfault_torch.failures.failure_records import ErrorClass
from firstfault_torch.notifiers import build_attributes
from lab.chaos.chaos import STORAGE_FAULTS
from lab.chaos.steps import CASES, PROMISES, STEPS
from tests.reports.scenes import SCOPE_SCENES
from tools.pages.blocks import FENCE, find_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
)
ERRORS = [value for value in vars(errors).values() if isinstance(value, type)]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@cache
def _text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def _plain(cell: str) -> str:
    return cell.strip().replace("`", "").replace("\\|", "|")


def _table(page: str, first_header: str) -> dict[str, list[str]]:
    """Return the rows below the header that starts with this cell: first cell -> the other cells,
    without backticks.
    """
    lines = iter(_text(page).splitlines())
    for line in lines:
        if line.startswith("|") and _plain(line.split("|")[1]) == first_header:
            break
    else:
        pytest.fail(f"{page} has no table whose first column is {first_header!r}")
    next(lines)  # the rule below the header
    rows: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [_plain(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert cells[0] not in rows, f"{page} lists {cells[0]} twice"
        rows[cells[0]] = cells[1:]
    return rows


def _section(page: str, heading: str) -> str:
    match = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", _text(page), re.MULTILINE | re.DOTALL
    )
    assert match is not None, f"{page} has no section {heading!r}"
    return match[1]


def test_tests_named_by_the_page_on_processes_exist() -> None:
    """Each test that the page names exists."""
    named = set(re.findall(r"`(test_\w+)`", _text("docs/guides/footprint.md")))
    written = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert named
    assert named - written == set()


@pytest.mark.parametrize(
    ("page", "header", "known"),
    [
        ("docs/guides/report.md", "Signal", SIGNALS),
        (
            "docs/reference/categories.md",
            "Category",
            {name: text.replace("`", "") for name, text in CATEGORIES.items()},
        ),
        ("docs/reference/cli.md", "Code", {str(code.value): code.name for code in EXIT}),
    ],
)
def test_closed_lists_are_documented(page: str, header: str, known: dict[str, str]) -> None:
    """Signals, categories with their meanings, and exit codes are those of the code."""
    assert {name: cells[0] for name, cells in _table(page, header).items()} == known


@pytest.mark.parametrize(
    ("page", "header", "known"),
    [
        ("docs/guides/report.md", "State", {state.value for state in State}),
        ("docs/guides/strategies.md", "Strategy", set(BUILT_IN_STRATEGIES)),
        (
            "docs/guides/retries.md",
            "Field of RetryContext",
            {it.name for it in dataclasses.fields(retry.RetryContext)},
        ),
    ],
)
def test_states_strategies_and_retry_fields_are_documented(
    page: str, header: str, known: set[str]
) -> None:
    """The tables of states, of built-in strategies, and of RetryContext's fields are complete,
    and have no others.
    """
    assert set(_table(page, header)) == known


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_default_decision_on_a_category_is_as_documented(category: str) -> None:
    """The default policy's decision on a category, and its budget, are those in the table."""
    claims = {sort.value.category: (sort.value.kind, sort.value.origin) for sort in ErrorClass}
    kind, origin = claims.get(category, (Kind.NON_RECOVERABLE, Origin.USER))
    job = make_job(make_error(category=category, kind=kind, origin=origin))
    decision = decide(run_strategy(get_strategy("earliest"), job))
    said = _table("docs/reference/categories.md", "Category")[category][1]
    expected = f"retry, {decision.origin.value.lower()}'s budget" if decision.retry else "no retry"
    assert said.startswith(expected)


def test_each_class_of_error_has_its_documented_category_and_origin() -> None:
    """Each class of error has the documented category, kind and origin;
    the reader sets a worker failure's category.
    """
    documented = {
        sort.name.replace("_", " ").lower(): [
            sort.value.category or "user_code",
            sort.value.kind.value,
            sort.value.origin.value,
        ]
        for sort in ErrorClass
    }
    table = _table("docs/reference/categories.md", "Class of error")
    assert {
        name: [cell.split(";")[0] for cell in cells] for name, cells in table.items()
    } == documented


def test_every_error_is_documented() -> None:
    """The table of errors has every slug with its class and exit code."""
    assert {slug: (cells[0], int(cells[2])) for slug, cells in _errors_table().items()} == {
        kind.slug: (kind.__name__, kind.exit_code) for kind in ERRORS
    }


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.slug)
def test_every_error_has_a_section_and_its_built_in_bases(
    kind: type[errors.FirstFaultError],
) -> None:
    """Each slug has a section, and each error has the built-in base classes of the table."""
    assert _section("docs/reference/categories.md", kind.slug).strip()
    for name in _errors_table()[kind.slug][1].split(", "):
        assert issubclass(kind, getattr(builtins, name))


def _errors_table() -> dict[str, list[str]]:
    return {
        link.split("]")[0][1:]: cells
        for link, cells in _table("docs/reference/categories.md", "Slug").items()
    }


@pytest.mark.parametrize("name", ["ls", "show", pytest.param("run", marks=pytest.mark.flyte)])
def test_every_option_is_documented(name: str) -> None:
    """A command's section has exactly its options."""
    command = group.get_command(click.Context(group), name)
    assert command is not None
    options = {
        option
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    documented = set(
        re.findall(
            r"^\| `(--[a-z-]+)",
            _section("docs/reference/cli.md", f"firstfault {name}"),
            re.MULTILINE,
        )
    )
    assert documented == options - {"--help", "--debug"}


def test_every_field_of_the_verdict_contract_is_documented() -> None:
    """The tables of firstfault.verdict/v1 have exactly the fields that are written."""
    verdict = run_strategy(get_strategy("earliest"), make_job(make_error()))
    documented = {
        field
        for cell in _table("docs/reference/cli.md", "Field of verdict")
        for field in cell.split(", ")
    }
    assert documented == set(verdict_to_dict(verdict))
    assert set(_table("docs/reference/cli.md", "Field of decision")) == set(
        DECISION.write(decide(verdict))
    )


def test_every_field_of_a_listed_attempt_is_documented() -> None:
    """The table of firstfault.ls/v1 has exactly the fields that are written."""
    attempt = FailedAttempt("s3://bucket/f3a9/n0/data/0", None)
    written = {*_attempt_json(attempt), *_group_json(FaultGroup("", 1, 1, None, attempt), "pod")}
    assert {
        name for cell in _table("docs/reference/cli.md", "Field of ls") for name in cell.split(", ")
    } == written


def test_every_retry_policy_is_documented() -> None:
    """The table of policies is complete."""
    policies = {name.split("(")[0] for name in _table("docs/guides/retries.md", "Policy")}
    own = {
        value.__name__
        for value in vars(retry).values()
        if getattr(value, "__module__", "") == retry.__name__
    }
    others = {"ComposablePolicy", "RetryContext", "Vote", "to_policy", "decide", "default_policy"}
    others |= {"find_machine", "find_proof_of_repeat", "is_gpu_gone"}
    assert policies == {name for name in own if name[0] != "_"} - others


def test_the_wire_format_is_documented() -> None:
    """Field numbers, the size limit and the key grammar on the page about the format
    are those of the code.
    """
    rows = _table("docs/reference/format.md", "Field")
    fields = errors_pb2.WorkerErrorDocument.DESCRIPTOR.fields
    assert set(rows) == {f"{field.number} {field.name}" for field in fields}
    assert f"at most {MAX_DOCUMENT_BYTES >> 20} MiB" in _text("docs/reference/format.md")
    grammar = re.findall(
        r"^(?:error|roster) key .*$", _text("docs/reference/format.md"), re.MULTILINE
    )
    assert len(grammar) == 2
    assert all(line in (layout.__doc__ or "") for line in grammar)


def _anchors(path: Path) -> set[str]:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _linked(path: Path) -> Path:
    """Return a file that a page links to; without sources, as in the wheel's test,
    return the installed file.
    """
    source_root, *rest = path.resolve().relative_to(ROOT).parts
    if source_root in {"plugin", "readers", "proto"} and not (ROOT / source_root).exists():
        return Path(sysconfig.get_path("purelib"), *rest)
    return path


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_resolves(page: str) -> None:
    """Each relative link leads to a file that exists, and to a heading of it."""
    for target in _LINK.findall(FENCE.sub("", _text(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = _linked((ROOT / page).parent / name) if name else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in _anchors(path), f"{page} links to {target}"


def _run_examples(page: str) -> dict[str, Any]:
    """Run a page's Python blocks in order, in one module; return the module's names."""
    module = ModuleType(f"example_{Path(page).stem}")
    module.__file__ = str(ROOT / page)
    sys.modules[module.__name__] = module  # flytekit looks up the module of a task
    try:
        for block in find_blocks(_text(page)):
            if block.language == "python":
                # the page is ours
                exec(compile(block.text, page, "exec"), vars(module))  # noqa: S102
    finally:
        del sys.modules[module.__name__]
    return vars(module)


@pytest.mark.flyte
@pytest.mark.filterwarnings("ignore:increase_shared_mem=True")
def test_the_examples_of_retry_policies_run() -> None:
    """The policies on the page can be built and used."""
    found = _run_examples("docs/guides/retries.md")
    job = make_job(make_error(category="disk_full"))
    decision = decide(run_strategy(get_strategy("earliest"), job), found["policy"])
    assert decision.retry
    assert decision.origin is Origin.USER
    assert found["train"].task_config.retry_policy is not None


def _strategy_page() -> tuple[dict[str, Any], object]:
    """Return the names that the page on strategies defines, and the strategy that it registers."""
    try:
        return _run_examples("docs/guides/strategies.md"), get_strategy("lowest_rank")
    finally:
        unregister_strategy("lowest_rank")


_DEFINED, _REGISTERED = _strategy_page()


class TestTheStrategyOnThePage(_DEFINED["TestLowestRank"]):
    """The page's strategy passes the conformance suite, as the page says."""


def test_the_strategy_on_the_page_is_registered() -> None:
    """The page's code registers its strategy by its name."""
    assert _REGISTERED is _DEFINED["lowest_rank"]


def test_the_compatibility_page_names_every_entry_point() -> None:
    """The table of what may change has the groups of entry points that the code looks up."""
    rows = _table("docs/guides/teams.md", "What")
    (named,) = [what for what in rows if what.startswith("entry points")]
    assert (
        named == f"entry points {NOTIFIERS}, .{ENTRY_POINT_GROUP.split('.')[1]},"
        f" .{COMMANDS_GROUP.split('.')[1]}"
    )


def test_fields_that_the_page_charts_exist() -> None:
    """Each question of the table names a field of the JSON, and an attribute of the log record."""
    report = SCOPE_SCENES["rank"]()
    data = json.loads(json_report(report))
    attributes = build_attributes(report, data)
    for fields, names in _table("docs/guides/teams.md", "Question").values():
        for path in fields.removesuffix(" is undetermined").split(", "):
            found: Any = data
            for part in path.split("."):
                assert part in found, path
                found = found[part]
        assert all(name in {*attributes, "firstfault.gpu"} for name in names.split(", "))


def test_the_steps_of_a_failure_are_documented() -> None:
    """The table of steps is the one that `make chaos` strikes at, in its order."""
    steps = {name: [step.process, step.begins.partition(":")[2]] for name, step in STEPS.items()}
    told = _table("docs/project/chaos.md", "Step")
    assert {
        name: [process, "" if "file" in begins else begins]
        for name, (process, begins) in told.items()
    } == steps


def test_every_fault_of_make_chaos_has_a_result_without_broken_promises() -> None:
    """The results have a row for each fault that `make chaos` tries, and no promise was broken."""
    assert tuple(_table("docs/project/chaos.md", "Promise")) == PROMISES
    rows = _table("docs/project/chaos.md", "Fault")
    assert set(rows) == {case.fault for case in CASES} | set(STORAGE_FAULTS.values())
    for cells in rows.values():
        counts = [cell.split(" of ") for cell in cells if cell]
        assert counts
        assert all(held == tried for held, tried in counts)
