"""The report in a real browser: what is seen at once, by whom, with what, and that nothing in it is obeyed."""

from __future__ import annotations

import json
import time
from functools import cache
from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe

from firstfault.report import markdown, to_json
from firstfault.report.html import deck_html, page
from tests.reports.conftest import SCREENSHOTS
from tests.reports.scenes import CATEGORY_SCENES, HARD_SCENES, SCOPE_SCENES

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

    from firstfault.report import Report

SCENES = {**SCOPE_SCENES, **CATEGORY_SCENES, **HARD_SCENES}
_OPENS = "Callable[..., Page]"
_ANSWERS = ("#ff-what", "#ff-where", "#ff-next", "#ff-retry", "#ff-unknown")
"""What failed, where, what to look at next, will it be retried and why, what is unknown."""
_WIDTH, _HEIGHT = 880, 720
_LARGEST = 5_000_000
_AT_ONCE_MS = 1_000


@cache
def _report(name: str) -> Report:
    return SCENES[name]()


@cache
def _page(name: str) -> str:
    return page(_report(name))


def _is_whole(page: Page, selector: str) -> bool:
    """Whether an element is in the window, none of it is cut off, and it says something."""
    return bool(
        page.evaluate(
            """selector => {
              const element = document.querySelector(selector);
              const box = element.getBoundingClientRect();
              const inner = [element, ...element.querySelectorAll("*")].every((part) => {
                const own = part.getBoundingClientRect();
                return part.hidden || !own.height || own.bottom <= box.bottom + 1;
              });
              return box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth && inner
                && element.innerText.trim().length > 3;
            }""",
            selector,
        )
    )


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
@pytest.mark.parametrize("name", [*SCOPE_SCENES, *CATEGORY_SCENES, "long-names"])
def test_five_answers_are_seen_without_scrolling(name: str, scripts: bool, open_page: Callable[..., Page]) -> None:
    """What, where, what next, retried or not and why, and what is unknown: whole, in the first 880 x 720."""
    opened = open_page(_page(name), java_script_enabled=scripts)
    assert {selector: _is_whole(opened, selector) for selector in _ANSWERS} == dict.fromkeys(_ANSWERS, True)


@pytest.mark.parametrize("name", [*HARD_SCENES])
def test_hard_ones_answer_too(name: str, open_page: Callable[..., Page]) -> None:
    """However much there is to say, the answers begin in the window."""
    opened = open_page(_page(name))
    for selector in _ANSWERS:
        box = opened.locator(selector).bounding_box()
        assert box is not None
        assert box["y"] + 40 < _HEIGHT, selector


@pytest.mark.parametrize("name", [*SCOPE_SCENES, *HARD_SCENES])
@pytest.mark.parametrize(
    "options",
    [
        {"color_scheme": "light"},
        {"color_scheme": "dark"},
        {"color_scheme": "light", "width": _WIDTH // 2, "height": _HEIGHT // 2, "device_scale_factor": 2},
        {"forced_colors": "active"},
    ],
    ids=["light", "dark", "zoom-200", "forced-colors"],
)
def test_axe_finds_nothing(name: str, options: dict[str, object], open_page: Callable[..., Page]) -> None:
    """No rule of WCAG 2.2 AA that axe knows is broken, nor a best practice; a screenshot is kept."""
    opened = open_page(_page(name), **options)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    way = "-".join(str(value) for value in options.values())
    opened.screenshot(path=SCREENSHOTS / f"{name}-{way}.png")
    found = Axe().run(opened).response["violations"]
    assert [(rule["id"], [node["html"][:160] for node in rule["nodes"][:3]]) for rule in found] == []


# --- used with a keyboard, a mouse, a printer -------------------------------------------------------------------------


def _tab_to(page: Page, selector: str, most: int = 80) -> None:
    """Press Tab until an element that matches has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not lead to {selector}")


def test_everything_is_reached_with_the_keyboard(open_page: Callable[..., Page]) -> None:
    """Tab reaches tools, links, folded parts and the grid; arrows walk the grid; Enter opens; the focus is seen."""
    opened = open_page(_page("rank"))
    _tab_to(opened, "#ff-copy")
    outline = opened.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    _tab_to(opened, "nav a[href='#ff-ranks']")
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.id") == "ff-ranks"
    _tab_to(opened, ".ff-cell")
    assert opened.evaluate("document.activeElement.getAttribute('aria-label')") == "rank 3, root cause"
    opened.keyboard.press("ArrowLeft")
    opened.keyboard.press("ArrowUp")
    assert opened.evaluate("document.activeElement.getAttribute('aria-label')") == "rank 0, stopped by its agent"
    opened.keyboard.press("Enter")
    assert (
        opened.locator("#ff-detail")
        .inner_text()
        .startswith("rank 0 (local_rank 0) on f3a9c2d4-n0-0-worker-0; stopped by its agent")
    )
    _tab_to(opened, ".ff-source")
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.id") == "ff-doc-1"
    opened.evaluate("document.querySelector('.ff-library summary').focus()")
    opened.keyboard.press("Enter")
    assert opened.locator(".ff-library").first.get_attribute("open") is not None


@pytest.mark.parametrize("name", ["rank", "hang", "ranks", "external"])
def test_each_sentence_leads_to_its_document(name: str, open_page: Callable[..., Page]) -> None:
    """A number behind a sentence of the evidence leads to the document that says so, with its address."""
    report = _report(name)
    opened = open_page(_page(name))
    links = opened.locator("#ff-evidence + ol li").first.locator("a")
    assert links.count() >= 1
    links.first.click()
    shown = opened.evaluate("document.activeElement.innerText")
    assert report.verdict.sources[0][0] in shown
    assert opened.evaluate("document.activeElement.getBoundingClientRect().top") < _HEIGHT


def test_copy_and_download(open_page: Callable[..., Page]) -> None:
    """The clipboard gets the Markdown, a command its own text; the download is firstfault.verdict/v1."""
    report = _report("rank")
    opened = open_page(_page("rank"), permissions=["clipboard-read", "clipboard-write"])
    opened.click("#ff-copy")
    opened.wait_for_function("document.querySelector('#ff-said').textContent === 'copied'")
    assert opened.evaluate("navigator.clipboard.readText()") == markdown(report)
    opened.locator(".ff-copy-one").first.click()
    command = report.answers.steps[1].command
    opened.wait_for_function("async text => (await navigator.clipboard.readText()) === text", arg=command)
    with opened.expect_download() as waiting:
        opened.click("#ff-download")
    assert waiting.value.suggested_filename == "firstfault.json"
    saved = json.loads(waiting.value.path().read_text(encoding="utf-8"))
    assert saved == json.loads(to_json(report.verdict, report.decision))


def test_print(open_page: Callable[..., Page]) -> None:
    """On paper all parts are open, nothing that only works on a screen is there, and it is black on white."""
    opened = open_page(_page("rank"), color_scheme="dark")
    opened.emulate_media(media="print")
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.evaluate("[...document.querySelectorAll('details')].every(part => part.open)")
    assert not opened.locator("nav").is_visible()
    assert not opened.locator("#ff-copy").is_visible()
    assert opened.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(0, 0, 0)"


def test_without_scripts_it_answers(open_page: Callable[..., Page]) -> None:
    """Without scripts there are the answers, the ranks, the errors and the evidence, and nothing that does nothing."""
    opened = open_page(_page("rank"), java_script_enabled=False)
    assert opened.locator("h1").inner_text() == "ValueError: batch 17 has 3 columns, expected 4"
    assert opened.locator("#ff-grid .ff-cell").count() == 4
    assert opened.locator("#ff-group-table tbody tr").count() == 3
    assert not [button for button in opened.locator("button, select, input").all() if button.is_visible()]


# --- ten thousand -----------------------------------------------------------------------------------------------------


def test_ten_thousand_ranks(open_page: Callable[..., Page]) -> None:
    """The file is small, the answer is there at once, pages hold 100 ranks, and filters find one among all."""
    text = _page("ten-thousand-ranks")
    assert len(text.encode()) < _LARGEST
    opened = open_page(text)
    painted = opened.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert painted < _AT_ONCE_MS
    cells = opened.locator(".ff-cell")
    assert cells.count() == 100
    assert opened.locator(".ff-cell.ff-is-root").inner_text().split() == ["4321", "X"]
    opened.click(".ff-pages [data-to='1']")
    assert opened.locator("#ff-shown").inner_text() == "4401 to 4500 of 10000"
    began = time.monotonic()
    opened.fill("[name=ranks]", "0-7, 9990-9999")
    assert (cells.count(), opened.locator(".ff-filter output").inner_text()) == (18, "18 of 10000 ranks")
    opened.fill("[name=ranks]", "")
    opened.select_option("[name=state]", "stopped")
    assert opened.locator(".ff-filter output").inner_text() == "3334 of 10000 ranks"
    opened.fill("[name=node]", "worker-77")
    assert 0 < cells.count() < 100
    opened.click("[type=reset]")
    opened.select_option("[name=group]", "1")
    assert cells.count() == 1
    assert time.monotonic() - began < 5  # seconds, for five answers


def test_ten_thousand_messages(open_page: Callable[..., Page]) -> None:
    """As many groups as ranks are paged too, and the file stays small."""
    text = _page("ten-thousand-messages")
    assert len(text.encode()) < _LARGEST
    opened = open_page(text)
    rows = opened.locator("#ff-group-table tbody tr")
    assert rows.count() == 50
    opened.click(".ff-group-pages [data-to='1']")
    assert (rows.count(), rows.first.locator("td").first.inner_text()) == (50, "51")


# --- hostile text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["page", "deck"])
def test_hostile_text_is_inert(kind: str, open_page: Callable[..., Page]) -> None:
    """Markup, scripts and escapes in types, messages, names, logs and stacks are shown, and do nothing."""
    report = _report("hostile")
    text = page(report) if kind == "page" else f"<!doctype html><title>deck</title>{deck_html(report)}"
    opened = open_page(text)
    opened.locator("summary").first.wait_for()
    for part in opened.locator("details").all():
        part.evaluate("part => part.open = true")
    assert opened.title() != "owned"
    assert opened.locator("img").count() == 0
    assert "onerror=" in opened.locator(".ff-raised").first.inner_text()
    assert "\x1b" not in text
    assert "\u202e" not in text


# --- the deck ---------------------------------------------------------------------------------------------------------

_OTHER_TAB = "<h1>mine</h1><table><tr><td>cell</td></tr></table><ul><li>one</li></ul><button>b</button>"
_LOOKS = """() => [...document.querySelectorAll('#other *')].map(element => {
  const style = getComputedStyle(element);
  return [element.tagName, style.font, style.color, style.backgroundColor, style.border, style.padding, style.margin];
})"""


def _deck_page(*tabs: tuple[str, str]) -> str:
    """What flytekit makes of decks, without the fonts that it loads from a network."""
    from flytekit.deck.deck import get_deck_template  # noqa: PLC0415 - slow to import

    names = "".join(f'<li onclick="handleLinkClick(this)">{name}</li>' for name, _ in tabs)
    bodies = "".join(f"<div>{body}</div>" for _, body in tabs)
    text = get_deck_template().substitute(NAV_HTML=names, BODY_HTML=bodies)
    return "\n".join(line for line in text.splitlines() if "fonts.googleapis.com" not in line)


def test_the_deck_in_its_frame(open_page: Callable[..., Page]) -> None:
    """In the console's sandboxed frame of 880 x 720, under flytekit's tabs, the answers are seen and scripts run."""
    inner = _deck_page(("firstfault", deck_html(_report("rank"))), ("Input", "<p>1</p>"))
    escaped = inner.replace("&", "&amp;").replace('"', "&quot;")
    sandbox = "allow-scripts allow-downloads"
    frame = f'<iframe sandbox="{sandbox}" width="880" height="720" style="border:0" srcdoc="{escaped}"></iframe>'
    opened = open_page(f"<!doctype html><body style='margin:0'>{frame}", color_scheme="dark")
    framed = opened.frame_locator("iframe")
    for selector in _ANSWERS:
        box = framed.locator(selector).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= _HEIGHT, selector
    opened.screenshot(path=SCREENSHOTS / "deck.png")
    assert framed.locator(".ff-cell").count() == 4
    framed.locator("nav a[href='#ff-evidence']").click()
    assert framed.locator("#ff-evidence").evaluate("heading => heading.getBoundingClientRect().top") < _HEIGHT / 2
    found = Axe().run(opened, context={"include": [["iframe", ".firstfault"]]}).response["violations"]
    assert [(rule["id"], [node["html"][:160] for node in rule["nodes"][:3]]) for rule in found] == []


def test_the_deck_leaves_other_tabs_alone(open_page: Callable[..., Page]) -> None:
    """Another tab looks the same with our tab beside it and without."""
    other = f'<div id="other">{_OTHER_TAB}</div>'
    alone = open_page(_deck_page(("x", "<p>x</p>"), ("mine", other))).evaluate(_LOOKS)
    beside = open_page(_deck_page(("firstfault", deck_html(_report("rank"))), ("mine", other))).evaluate(_LOOKS)
    assert beside == alone
