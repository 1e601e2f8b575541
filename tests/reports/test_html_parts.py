"""The parts of the page in a real browser: their order, the traceback's lines, attempts, search,
the map.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from playwright.sync_api import Page

from firstfault.model import ExceptionInfo, FrameInfo, Outcome
from firstfault.render.html import page, source_lines
from firstfault.report.data import AttemptSummary
from firstfault.testing import make_error, make_job
from tests.reports.conftest import render_scene
from tests.reports.scenes import PAGE_SCENES, report_conclusion

_PARTS = {
    "rank": ["traceback", "ranks", "time", "groups", "evidence", "coverage", "documents", "raw"],
    "hang": [
        "stacks",
        "traceback",
        "ranks",
        "time",
        "groups",
        "evidence",
        "coverage",
        "documents",
        "raw",
    ],
    "three-attempts": [
        "attempts",
        "traceback",
        "ranks",
        "time",
        "groups",
        "evidence",
        "coverage",
        "documents",
        "raw",
    ],
}


@pytest.mark.parametrize("name", _PARTS)
def test_parts_are_in_the_order_of_questions(name: str, open_page: Callable[..., Page]) -> None:
    """The cause comes before the cascade, a hang's stack before its message;
    what few people need is folded.
    """
    opened = open_page(render_scene(name))
    found = opened.evaluate(
        "[...document.querySelectorAll('h2')].map(heading => heading.id.slice(3))"
    )
    assert found == _PARTS[name]
    links = opened.evaluate(
        "[...document.querySelectorAll('nav li > a')].map(link => link.hash.slice(4))"
    )
    assert links == found
    folded = opened.evaluate(
        "[...document.querySelectorAll('details.ff-part')].map(part => part.open)"
    )
    assert folded == [False] * 3


@pytest.mark.parametrize("name", ["rank", "hang", "host_oom", "external"])
def test_no_raw_values_outside_of_their_part(name: str, open_page: Callable[..., Page]) -> None:
    """Nanoseconds, process ids, boot ids and names of documents are seen in folded parts only."""
    opened = open_page(render_scene(name))
    report = PAGE_SCENES[name]()
    raw = opened.locator("details.ff-part").last
    opened.evaluate(
        "document.querySelectorAll('details:not(.ff-part)').forEach(part => { part.open = true; })"
    )
    seen = opened.locator("main").inner_text()
    assert re.search(r"\.\d{9}|\bPID:?\s*\d|boot-\d|[0-9a-f]{12}\.pb|\d:[0-9a-f]{12}", seen) is None
    opened.locator("#ff-raw").click()
    assert opened.evaluate("document.querySelectorAll('details.ff-part')[2].open")
    if report.verdict.timestamp_ns is not None:
        assert re.search(r"Time:?\s*\S+\.\d{9}Z", raw.inner_text())


def test_the_innermost_own_frame_is_open_with_its_lines(open_page: Callable[..., Page]) -> None:
    """The innermost own frame is open with its lines and a link; the marked part is underlined."""
    opened = open_page(render_scene("rank"))
    frames = opened.locator("details.ff-own")
    assert [frame.get_attribute("open") is not None for frame in frames.all()] == [
        False,
        False,
        True,
    ]
    innermost = frames.last
    assert innermost.locator("summary").inner_text() == "/root/model.py:12 in forward"
    assert innermost.locator("pre").inner_text().splitlines() == [
        "10def forward(self, batch):",
        "11    if batch.shape[1] != 4:",
        "12 >        raise ValueError(shape)",
        "13    return self.net(batch)",
    ]
    link = innermost.locator("a").get_attribute("href")
    assert link == f"https://github.com/org/repo/blob/{'3f2c1e9a' * 5}/model.py#L12"
    frames.nth(1).locator("summary").click()
    assert frames.nth(1).locator("mark").inner_text() == "step(model, batch)"
    assert opened.locator(".ff-library[open]").count() == 0


@pytest.mark.parametrize("marked", [(10, 2), (-1, 5), (3, 900), (5, 5)])
def test_a_mark_that_does_not_fit_marks_nothing(marked: tuple[int, int]) -> None:
    """A damaged mark neither repeats nor hides a part of the line;
    of many equal frames only the last one is open.
    """
    frame = FrameInfo(
        "/job/walk.py",
        7,
        "walk",
        "walk(node)",
        ("def walk(node):", "    walk(node)"),
        6,
        marked,
    )
    raised = ExceptionInfo("RecursionError", "deep", frames=(frame,) * 40)
    shown = page(report_conclusion(make_job(make_error(3, exception=raised))))
    assert shown.count('<details class="ff-own"') == 40
    assert shown.index('<details class="ff-own" open>') == shown.rindex('<details class="ff-own"')
    assert source_lines(frame) == [(6, "def walk(node):", "", ""), (7, "    walk(node)", "", "")]


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)//blob",
        'https://a.com/x" onclick="alert(1)',
        "//a.com/blob",
        "https://a.com/b?c=d",
    ],
)
def test_no_other_address_becomes_a_link(url: str, open_page: Callable[..., Page]) -> None:
    """An address in a document that is no plain web address is not linked."""
    report = PAGE_SCENES["rank"]()
    hostile = replace(report, identity=replace(report.identity, source_url=url))
    opened = open_page(page(hostile))
    assert opened.locator(".ff-own a").count() == 0


def test_attempts_are_tabs(open_page: Callable[..., Page]) -> None:
    """Each attempt has a tab with its outcome and what changed; arrow keys move;
    an attempt that succeeded is green.
    """
    opened = open_page(render_scene("three-attempts"))
    tabs = opened.locator("[role=tab]")
    assert [tab.inner_text() for tab in tabs.all()] == [
        "attempt 0: user_code",
        "attempt 1: could not be read: access denied",
        "attempt 2: user_code",
    ]
    panels = opened.locator("[role=tabpanel]")
    assert [panel.is_visible() for panel in panels.all()] == [True, False, False]
    tabs.first.focus()
    opened.keyboard.press("ArrowLeft")
    assert [panel.is_visible() for panel in panels.all()] == [False, False, True]
    assert opened.evaluate("document.activeElement.id") == "ff-tab-2"
    assert "attempt 0 to 2:" in panels.last.inner_text()
    plain = open_page(render_scene("three-attempts"), scripts=False)
    assert [panel.is_visible() for panel in plain.locator(".ff-attempt").all()] == [True] * 3
    report = PAGE_SCENES["three-attempts"]()
    saved = replace(report, attempts=(*report.attempts[:2], AttemptSummary(2, Outcome.SUCCEEDED)))
    green = open_page(page(saved)).locator("#ff-tab-2")
    assert green.inner_text() == "attempt 2: succeeded"
    assert green.evaluate("tab => getComputedStyle(tab).backgroundColor") == "rgb(220, 242, 227)"


def test_a_search_hit_is_shown_where_it_stands(open_page: Callable[..., Page]) -> None:
    """An error on a later page of the table, and a text in another attempt's tab,
    are shown when they are chosen.
    """
    error = make_error(3, message="\u0130" * 6 + " error in shard 3", exception="ValueError")
    grown = open_page(page(report_conclusion(make_job(error))))
    grown.fill("#ff-search", "shard 3")
    assert grown.locator("#ff-found button").count() >= 1
    opened = open_page(render_scene("a-thousand-messages"))
    opened.fill("#ff-search", "Error00")
    assert opened.locator("#ff-hits").inner_text().endswith("places, the first 50 are listed")
    assert opened.locator("#ff-found button").count() == 50
    opened.fill("#ff-search", "Error00876")
    opened.locator("#ff-found button").first.click()
    assert opened.evaluate("document.activeElement.id") == "ff-group-877"
    attempts = open_page(render_scene("three-attempts"))
    attempts.fill("#ff-search", "access denied")
    attempts.locator("#ff-found button").first.click()
    assert attempts.locator("#ff-attempt-1").is_visible()


def test_search_finds_errors_stacks_and_logs(open_page: Callable[..., Page]) -> None:
    """A text is found in errors, frames and stacks, also in folded ones;
    a hit opens what it is in.
    """
    opened = open_page(render_scene("hang"))
    opened.fill("#ff-search", "ALL_reduce")
    assert opened.locator("#ff-hits").inner_text().endswith("places")
    hits = opened.locator("#ff-found button")
    stack = hits.filter(has_text="Stacks: rank 2")
    stack.click()
    assert opened.evaluate("document.activeElement.getAttribute('aria-label')") == "rank 2"
    assert opened.evaluate("document.activeElement.closest('details').open")
    assert opened.evaluate("CSS.highlights.get('ff-hit').size") > 0
    opened.fill("#ff-search", "no such text")
    assert (opened.locator("#ff-hits").inner_text(), hits.count()) == ("0 places", 0)
    opened.fill("#ff-search", "")
    assert opened.locator("#ff-hits").inner_text() == ""


def test_each_node_of_a_map_has_its_worst_state(open_page: Callable[..., Page]) -> None:
    """Each of 125 pods has a cell with the worst state of its ranks;
    a click shows its ranks alone.
    """
    opened = open_page(render_scene("a-thousand-ranks"))
    map_ = opened.locator("#ff-map")
    drawn = map_.evaluate(
        "map => [...map.querySelectorAll('path')].map(path => path.getAttribute('d')).join('')"
    )
    assert drawn.count("M") == 125
    assert (
        map_.get_attribute("aria-label")
        == "One cell for each of 125 pods: 1 root cause, 124 victim"
    )
    map_.click(position={"x": 7, "y": 7 + 14})
    assert opened.locator("[name=node]").input_value() == "a7xk2m9qp4vd8wz3hj6t-n0-0-worker-54"
    assert opened.locator(".ff-cell").count() == 8
    assert opened.locator(".ff-cell.ff-is-root").inner_text().split() == ["432", "root", "cause"]
    assert open_page(render_scene("rank")).locator("#ff-map").count() == 0
