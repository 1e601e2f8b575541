"""The report in a real browser: layout, accessibility, keyboard, print, large jobs,
and hostile text.
"""

import json
import time
from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

from firstfault.render.html import deck_html, page
from firstfault.render.json_report import json_report
from firstfault.report import markdown
from firstfault.testing import make_error, make_job
from tests.reports.conftest import keep_screenshot, render_scene, wait_for_condition
from tests.reports.every_field import fill_report
from tests.reports.scenes import (
    CATEGORY_SCENES,
    HARD_SCENES,
    PAGE_SCENES,
    SCOPE_SCENES,
    report_conclusion,
)

pytestmark = pytest.mark.slow

_ANSWERS = ("#ff-what", "#ff-where", "#ff-next", "#ff-retry", "#ff-unknown")
"""What failed, where, what to look at next, whether and why it is retried, and what is unknown,
if anything is.
"""
_WIDTH, _HEIGHT = 880, 720
_LARGEST = 5_000_000
_AT_ONCE_MS = 1_000


def _answers(name: str) -> tuple[str, ...]:
    return _ANSWERS if PAGE_SCENES[name]().answers.unknown else _ANSWERS[:-1]


_NOT_WHOLE = """selectors => selectors.filter(selector => {
  const element = document.querySelector(selector);
  const box = element.getBoundingClientRect();
  const inner = [element, ...element.querySelectorAll("*")].every((part) => {
    const own = part.getBoundingClientRect();
    return part.hidden || !own.height || own.bottom <= box.bottom + 1;
  });
  return !(box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth && inner
    && element.innerText.trim().length > 3);
})"""
"""Which elements are not completely in the window, are cut off, or are empty."""


@pytest.mark.parametrize("scripts", [True, False])
def test_five_answers_are_seen_without_scrolling(
    scripts: bool, open_page: Callable[..., Page]
) -> None:
    """All five answers are completely visible in the first 880 x 720 pixels."""
    names = [*SCOPE_SCENES, *(CATEGORY_SCENES if scripts else ()), "long-names"]
    found = {
        name: open_page(render_scene(name), scripts=scripts).evaluate(
            _NOT_WHOLE, list(_answers(name))
        )
        for name in names
    }
    assert found == {name: [] for name in names}


def test_answers_of_hard_scenes_begin_in_the_window(open_page: Callable[..., Page]) -> None:
    """Also with much text, the answers begin in the window."""
    top = "document.querySelector(name).getBoundingClientRect().top"
    below = f"names => names.filter(name => {top} + 40 >= innerHeight)"
    found = {
        name: open_page(render_scene(name)).evaluate(below, list(_answers(name)))
        for name in HARD_SCENES
    }
    assert found == {name: [] for name in HARD_SCENES}


_WAYS: dict[str, dict[str, object]] = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "zoom-200": {"width": _WIDTH // 2, "height": _HEIGHT // 2},
    "forced-colors": {"forced_colors": "active"},
}
_SEEN = [
    (name, way)
    for number, name in enumerate([*SCOPE_SCENES, *HARD_SCENES])
    for index, way in enumerate(_WAYS)
    if name == "rank" or number % len(_WAYS) == index
]
"""Every scene in one way of display, in turn, and one scene in all ways."""


@pytest.mark.parametrize(("name", "way"), _SEEN)
def test_axe_finds_nothing(name: str, way: str, open_page: Callable[..., Page]) -> None:
    """The page has no violation of WCAG 2.2 AA or of best practices that axe finds;
    a screenshot is kept.
    """
    opened = open_page(render_scene(name), **_WAYS[way])
    keep_screenshot(opened, f"{name}-{way}")
    found = Axe().run(opened).response["violations"]
    assert [
        (rule["id"], [node["html"][:160] for node in rule["nodes"][:3]]) for rule in found
    ] == []


# --- used with a keyboard, a mouse, a printer -----------------------------------------------------


def _tab_to(page: Page, selector: str, most: int = 80) -> None:
    """Press Tab until an element that matches has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not lead to {selector}")


def test_the_keyboard_reaches_everything(open_page: Callable[..., Page]) -> None:
    """Tab reaches tools, links, folded parts and the grid; arrows move in the grid; Enter opens;
    focus is visible.
    """
    opened = open_page(render_scene("rank"))
    _tab_to(opened, "#ff-copy")
    outline = opened.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    _tab_to(opened, "nav a[href='#ff-ranks']")
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.id") == "ff-ranks"
    _tab_to(opened, ".ff-cell")
    assert (
        opened.evaluate("document.activeElement.getAttribute('aria-label')") == "rank 3, root cause"
    )
    opened.keyboard.press("ArrowLeft")
    opened.keyboard.press("ArrowUp")
    assert opened.evaluate("document.activeElement.getAttribute('aria-label')") == "rank 0, stopped"
    opened.keyboard.press("Enter")
    assert (
        opened.locator("#ff-detail")
        .inner_text()
        .startswith("rank 0 (local rank 0) on a7xk2m9qp4vd8wz3hj6t-n0-0-worker-0, stopped")
    )
    _tab_to(opened, ".ff-source")
    opened.keyboard.press("Enter")
    assert opened.evaluate("document.activeElement.id") == "ff-doc-1"
    opened.evaluate("document.querySelector('.ff-library summary').focus()")
    opened.keyboard.press("Enter")
    assert opened.locator(".ff-library").first.get_attribute("open") is not None


@pytest.mark.parametrize("name", ["rank", "hang", "ranks", "external"])
def test_each_sentence_leads_to_its_document(name: str, open_page: Callable[..., Page]) -> None:
    """A number after a sentence of the evidence links to its document, which has its address."""
    report = PAGE_SCENES[name]()
    opened = open_page(render_scene(name))
    links = opened.locator("#ff-evidence + ol li").first.locator("a")
    assert links.count() >= 1
    links.first.click()
    shown = opened.evaluate("document.activeElement.innerText")
    assert report.verdict.sources[0][0] in shown
    assert opened.evaluate("document.activeElement.getBoundingClientRect().top") < _HEIGHT


def test_copies_and_downloads_have_the_markdown_command_and_json(
    open_page: Callable[..., Page],
) -> None:
    """The clipboard gets the Markdown, a command its own text;
    the download is firstfault.verdict/v1.
    """
    report = PAGE_SCENES["rank"]()
    opened = open_page(render_scene("rank"))
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.click("#ff-copy")
    wait_for_condition(opened, "document.querySelector('#ff-said').textContent === 'copied'")
    assert opened.evaluate("navigator.clipboard.readText()") == markdown(report)
    opened.locator(".ff-copy-one").first.click()
    command = report.answers.steps[1].command
    wait_for_condition(
        opened, f"navigator.clipboard.readText().then(text => text === {json.dumps(command)})"
    )
    with opened.expect_download() as waiting:
        opened.click("#ff-download")
    assert waiting.value.suggested_filename == "firstfault.json"
    saved = json.loads(waiting.value.path().read_text(encoding="utf-8"))
    assert saved == json.loads(json_report(report))


def test_without_scripts_it_answers(open_page: Callable[..., Page]) -> None:
    """Without scripts the answers, ranks, errors and evidence are shown,
    and elements that need scripts are hidden.
    """
    opened = open_page(render_scene("rank"), scripts=False)
    assert opened.locator("h1").inner_text() == "ValueError: batch 17 has 3 columns, expected 4"
    assert opened.locator("#ff-grid .ff-cell").count() == 4
    assert opened.locator("#ff-group-table tbody tr").count() == 3
    assert not [
        button for button in opened.locator("button, select, input").all() if button.is_visible()
    ]


# --- ten thousand ---------------------------------------------------------------------------------


def test_a_page_of_10000_ranks_is_small_and_filterable(open_page: Callable[..., Page]) -> None:
    """The file is small, pages have 100 ranks, and filters find one rank among all."""
    text = render_scene("ten-thousand-ranks")
    assert len(text.encode()) < _LARGEST
    opened = open_page(text)
    cells = opened.locator(".ff-cell")
    assert cells.count() == 100
    assert opened.locator(".ff-cell.ff-is-root").inner_text().split() == ["4321", "root", "cause"]
    opened.click(".ff-pages [data-to='1']")
    assert opened.locator("#ff-shown").inner_text() == "ranks 4400 to 4499; 100 of 10000"
    opened.fill("[name=ranks]", "0-7, 9990-9999")
    assert (cells.count(), opened.locator(".ff-filter output").inner_text()) == (
        18,
        "18 of 10000 ranks",
    )
    opened.fill("[name=ranks]", "")
    opened.select_option("[name=state]", "stopped")
    assert opened.locator(".ff-filter output").inner_text() == "3334 of 10000 ranks"
    opened.fill("[name=node]", "worker-77")
    assert 0 < cells.count() < 100
    opened.click("[type=reset]")
    opened.select_option("[name=group]", "1")
    assert cells.count() == 1


@pytest.mark.timing
def test_a_page_of_10000_ranks_is_shown_and_filtered_at_once(
    open_page: Callable[..., Page],
) -> None:
    """The page is shown at once, and a filter takes less than a second."""
    opened = open_page(render_scene("ten-thousand-ranks"))
    wait_for_condition(opened, "performance.getEntriesByName('first-contentful-paint').length")
    painted = opened.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert painted < _AT_ONCE_MS
    began = time.monotonic()
    opened.fill("[name=ranks]", "0-7, 9990-9999")
    assert opened.locator(".ff-filter output").inner_text() == "18 of 10000 ranks"
    assert time.monotonic() - began < 1


def test_groups_of_10000_messages_are_paged_in_a_small_file(open_page: Callable[..., Page]) -> None:
    """If each rank is its own group, the groups are paged too, and the file is small."""
    text = render_scene("ten-thousand-messages")
    assert len(text.encode()) < _LARGEST
    opened = open_page(text)
    rows = opened.locator("#ff-group-table tbody tr")
    assert rows.count() == 50
    opened.click(".ff-group-pages [data-to='1']")
    assert (rows.count(), rows.first.locator("td").first.inner_text()) == (50, "51")
    opened.select_option("[name=group]", "9876")
    assert opened.locator(".ff-cell").count() == 1
    for _ in range(2):
        opened.focus(".ff-group-pages [data-to='-1']")
        opened.keyboard.press("Enter")
        assert opened.evaluate("document.activeElement.dataset.to") == "-1"
    assert rows.first.locator("td").first.inner_text() == "1"


@pytest.mark.parametrize(
    ("text", "one_fault"),
    [("文件不存在" * 80, True), ("<" * 200, False)],
    ids=["three bytes, one fault", "escaped, a fault each"],
)
def test_no_characters_make_a_large_file(text: str, one_fault: bool) -> None:
    """The limit counts a character's encoded size in the page,
    so that no text makes a large file.
    """
    print_ = "1:{:012x}"
    job = make_job(
        *(
            make_error(n, message=f"{n} {text}", fingerprint=print_.format(0 if one_fault else n))
            for n in range(5_000)
        )
    )
    assert len(page(report_conclusion(job, strategy="earliest")).encode()) < _LARGEST


# --- 64 nodes of 8 ranks --------------------------------------------------------------------------


def test_the_grid_opens_at_a_lost_node(open_page: Callable[..., Page]) -> None:
    """If a node is the root cause, the grid opens at its ranks, and Tab leads to them."""
    for scripts in (True, False):
        opened = open_page(render_scene("lost-node"), scripts=scripts)
        assert (
            opened.locator("#ff-grid tr", has_text="worker-37")
            .locator(".ff-cell")
            .first.inner_text()[:3]
            == "296"
        )
        assert (
            "root cause: pod a7xk2m9qp4vd8wz3hj6t-n0-0-worker-37"
            in opened.locator(".ff-legend").first.inner_text()
        )
    assert (
        open_page(render_scene("lost-node"))
        .locator(".ff-cell[tabindex='0']")
        .inner_text()
        .split()[0]
        == "296"
    )


@pytest.mark.parametrize("height", [_HEIGHT, _HEIGHT // 2])
def test_the_line_about_a_rank_is_seen_where_the_rank_is_chosen(
    height: int, open_page: Callable[..., Page]
) -> None:
    """The line about a rank is above the grid from the start, stays in the window,
    and covers no cell in focus.
    """
    opened = open_page(render_scene("64x8"), width=_WIDTH // 2, height=height)
    detail = opened.locator("#ff-detail")
    assert detail.inner_text() == "Choose a rank (arrow keys, Enter) to see what happened to it."
    assert detail.evaluate("part => getComputedStyle(part).backgroundColor") == "rgb(244, 245, 247)"
    cell = opened.locator(".ff-cell").last
    assert cell.get_attribute("title") == "RuntimeError: Connection closed by peer [10.0.0.8]:29500"
    cell.click()
    box = detail.bounding_box()
    assert 0 <= box["y"] < box["y"] + box["height"] <= height
    assert (
        "rank 299 (local rank 3) on a7xk2m9qp4vd8wz3hj6t-n0-0-worker-37, victim"
        in detail.inner_text()
    )
    opened.keyboard.press("Home")
    for _ in range(12):
        opened.keyboard.press("ArrowDown")
    for _ in range(12):
        opened.keyboard.press("ArrowUp")
        covered = (
            "document.activeElement.getBoundingClientRect().top - {}.getBoundingClientRect().bottom"
        )
        assert opened.evaluate(covered.format("document.querySelector('#ff-detail')")) >= 0


_ALL = 512
_RANGES = {
    "0-63, 70": 65,
    "0-7 16": 9,
    "300\u2013309": 10,
    "300 \u2014 309": 10,
    "300:309": 10,
    "300..309": 10,
    "300 to 309": 10,
    "309-300": 10,
    "500-": 12,
    "-20": 21,
    "5, -2": 4,
    "": _ALL,
}


def test_ranges_are_read_as_they_are_meant(open_page: Callable[..., Page]) -> None:
    """Usual spellings of ranges are understood; other text is reported as no range,
    and hides no rank.
    """
    opened = open_page(render_scene("64x8"))
    said = opened.locator("#ff-count")
    field = opened.locator("[name=ranks]")
    for text, count in _RANGES.items():
        field.fill(text)
        found = (text, said.inner_text(), field.get_attribute("aria-invalid"))
        assert found == (text, f"{count} of 512 ranks", "false")
    for text in ("abc", "5, abc", "1-2-3", "-", "3.5", "0x1f"):
        field.fill(text)
        assert said.inner_text().startswith("not a range: "), text
        assert said.inner_text().endswith("; 512 of 512 ranks"), text
        assert field.get_attribute("aria-invalid") == "true"


def test_nodes_are_selected_by_name_or_part(open_page: Callable[..., Page]) -> None:
    """A full or short node name selects that node; other text matches any part;
    all names are offered.
    """
    opened = open_page(render_scene("64x8"))
    said = opened.locator("#ff-count")
    for text, count in {
        "a7xk2m9qp4vd8wz3hj6t-n0-0-worker-3": 8,
        "worker-3": 8,
        "WORKER-3": 88,
        "no-node": 0,
        "": _ALL,
    }.items():
        opened.fill("[name=node]", text)
        assert (text, said.inner_text()) == (text, f"{count} of 512 ranks")
    assert opened.locator("#ff-nodes option").count() == 64


def test_filters_are_cleared_and_restored(open_page: Callable[..., Page]) -> None:
    """Clearing a filter equals "Show all", and values that a browser restores
    after Back are applied.
    """
    opened = open_page(render_scene("64x8"))
    first = opened.locator(".ff-cell").first
    for clear in (lambda: opened.fill("[name=ranks]", ""), lambda: opened.click("[type=reset]")):
        opened.fill("[name=ranks]", "0-200")
        assert opened.locator("#ff-shown").inner_text() == "ranks 0 to 99; 100 of 201 that match"
        clear()
        wait_for_condition(
            opened, "document.querySelector('#ff-count').textContent === '512 of 512 ranks'"
        )
        assert first.inner_text().split()[0] == "200"
    assert opened.locator(".ff-filter").get_attribute("autocomplete") == "off"
    opened.evaluate(
        "document.querySelector('[name=state]').value = 'root'; dispatchEvent(new"
        " Event('pageshow'))"
    )
    assert opened.locator("#ff-count").inner_text() == "1 of 512 ranks"


def test_pages_keep_the_focus(open_page: Callable[..., Page]) -> None:
    """On the last page the button keeps the focus and is marked as disabled;
    ranks are counted as they are named.
    """
    opened = open_page(render_scene("64x8"))
    button = opened.locator(".ff-pages [data-to='1']")
    shown = opened.locator("#ff-shown")
    assert shown.inner_text() == "ranks 200 to 299; 100 of 512"
    opened.evaluate("document.querySelector('.ff-pages').scrollIntoView()")
    button.focus()
    above = opened.locator("#ff-detail").bounding_box()
    below = button.bounding_box()
    assert above["y"] + above["height"] <= below["y"]
    for _ in range(4):
        opened.keyboard.press("Enter")
        assert opened.evaluate("document.activeElement.dataset.to") == "1"
    assert (shown.inner_text(), button.get_attribute("aria-disabled")) == (
        "ranks 500 to 511; 12 of 512",
        "true",
    )


def test_links_leave_back_and_ctrl_click_to_the_browser(open_page: Callable[..., Page]) -> None:
    """Back returns to the last position, Ctrl-click opens a tab,
    and a document links to its evidence.
    """
    opened = open_page(render_scene("64x8"))
    source = opened.locator(".ff-source").first
    source.scroll_into_view_if_needed()
    before = opened.evaluate("scrollY")
    source.click()
    assert opened.evaluate("[location.hash, document.activeElement.id]") == [
        "#ff-doc-1",
        "ff-doc-1",
    ]
    opened.go_back()
    wait_for_condition(opened, f"!location.hash && Math.abs(scrollY - {before}) < 2")
    with opened.context.expect_page() as tab:
        source.click(modifiers=["Control"])
    tab.value.close()
    assert opened.evaluate("[location.hash, scrollY, document.activeElement.className]") == [
        "",
        before,
        "ff-source",
    ]
    opened.click("#ff-doc-1 .ff-back")
    assert opened.evaluate("document.activeElement.id") == "ff-why-1"


def test_tables_keep_words_whole(open_page: Callable[..., Page]) -> None:
    """Ranks have enough width, and all are shown without scripts."""
    opened = open_page(render_scene("64x8"), scripts=False)
    box = opened.locator("#ff-group-table td:nth-child(4)", has_text="more").first.bounding_box()
    assert box["width"] >= 180
    assert "listed with all their ranks" in opened.locator("noscript").first.inner_text()
    opened.click(".ff-all summary")
    assert "504, 507, 510" in opened.locator(".ff-all").inner_text()


def test_print_shows_the_filter_and_open_folds(open_page: Callable[..., Page]) -> None:
    """In print the filter and the range are shown, folds are open without scripts,
    and the drawing is whole.
    """
    opened = open_page(render_scene("64x8"))
    opened.fill("[name=ranks]", "0-200")
    opened.select_option("[name=state]", "victim")
    opened.emulate_media(media="print")
    assert opened.locator("#ff-shown").inner_text() == "ranks 1 to 149; 100 of 134 that match"
    assert (
        opened.locator("#ff-filtered").inner_text() == "Only ranks 0-200; victim: 134 of 512 ranks."
    )
    assert not opened.locator("#ff-detail").is_visible()
    plain = open_page(render_scene("64x8"), scripts=False, width=400)
    plain.emulate_media(media="print")
    folded = (
        "[...document.querySelectorAll('details:not([open]) > :not(summary)')].map(part =>"
        " part.checkVisibility())"
    )
    assert set(plain.evaluate(folded)) == {True}
    for drawing in plain.locator("svg").all():
        box = drawing.bounding_box()
        assert box["x"] + box["width"] <= 400


@pytest.mark.parametrize(
    ("name", "width"), [("long-host", _WIDTH // 2), ("longest-host", _WIDTH), ("longest-host", 320)]
)
def test_long_names_never_scroll_the_page_sideways(
    name: str, width: int, open_page: Callable[..., Page]
) -> None:
    """A page with long host names scrolls only vertically."""
    opened = open_page(render_scene(name), width=width)
    opened.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
    opened.locator(".ff-cell").first.click()
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


# --- hostile text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["raised", "killed"])
@pytest.mark.parametrize("kind", ["page", "deck"])
def test_no_field_runs_a_script(kind: str, root: str, open_page: Callable[..., Page]) -> None:
    """No field runs a script, a handler or an address that is one,
    also where the page's own script shows it.
    """
    script = "window.owned=1;document.title='owned'"
    text = (
        f"</script><script>{script}</script></textarea></title></style></svg></pre><svg"
        f' onload="{script}"><img src=x onerror="{script}"><a href="javascript:{script}">a</a>"'
        f' autofocus onfocus="{script}'
    )
    report = fill_report(text, root)
    opened = open_page(
        page(report) if kind == "page" else f"<!doctype html><title>deck</title>{deck_html(report)}"
    )
    for part in opened.locator("details").all():
        part.evaluate("part => part.open = true")
    for cell in opened.locator(".ff-cell").all():
        cell.click(force=True)
        assert opened.locator("#ff-detail").inner_text().strip()
    opened.evaluate("scrollTo(0, document.body.scrollHeight)")
    assert opened.evaluate("window.owned") is None
    assert opened.title() != "owned"
    assert opened.locator("img, [onload], [onerror], [onfocus], a:not([href^='#'])").count() == 0


# --- the deck -------------------------------------------------------------------------------------

_OTHER_TAB = (
    "<h1>mine</h1><table><tr><td>cell</td></tr></table><ul><li>one</li></ul><button>b</button>"
)
_LOOKS = """() => [...document.querySelectorAll('#other *')].map(element => {
  const style = getComputedStyle(element);
  return [element.tagName, style.font, style.color, style.backgroundColor, style.border, style.padding, style.margin];
})"""


def _deck_page(*tabs: tuple[str, str]) -> str:
    """Return flytekit's page of decks, without the fonts that it loads from a network."""
    from flytekit.deck.deck import get_deck_template  # noqa: PLC0415 - slow to import

    names = "".join(f'<li onclick="handleLinkClick(this)">{name}</li>' for name, _ in tabs)
    bodies = "".join(f"<div>{body}</div>" for _, body in tabs)
    text = get_deck_template().substitute(NAV_HTML=names, BODY_HTML=bodies)
    return "\n".join(line for line in text.splitlines() if "fonts.googleapis.com" not in line)


@pytest.mark.flyte
def test_the_deck_works_in_the_consoles_sandboxed_frame(open_page: Callable[..., Page]) -> None:
    """In the console's sandboxed frame of 880 x 720, the answers are visible and scripts run."""
    inner = _deck_page(("firstfault", deck_html(PAGE_SCENES["rank"]())), ("Input", "<p>1</p>"))
    escaped = inner.replace("&", "&amp;").replace('"', "&quot;")
    sandbox = "allow-scripts allow-downloads"
    frame = (
        f'<iframe sandbox="{sandbox}" width="880" height="720" style="border:0"'
        f' srcdoc="{escaped}"></iframe>'
    )
    opened = open_page(f"<!doctype html><body style='margin:0'>{frame}", color_scheme="dark")
    framed = opened.frame_locator("iframe")
    for selector in _answers("rank"):
        box = framed.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= _HEIGHT, selector
    keep_screenshot(opened, "deck")
    assert framed.locator(".ff-cell").count() == 4
    framed.locator("nav a[href='#ff-evidence']").click()
    assert (
        framed.locator("#ff-evidence").evaluate("heading => heading.getBoundingClientRect().top")
        < _HEIGHT
    )
    found = (
        Axe().run(opened, context={"include": [["iframe", ".firstfault"]]}).response["violations"]
    )
    assert [
        (rule["id"], [node["html"][:160] for node in rule["nodes"][:3]]) for rule in found
    ] == []


@pytest.mark.flyte
def test_the_deck_leaves_other_tabs_alone(open_page: Callable[..., Page]) -> None:
    """Another tab looks the same with our tab beside it and without."""
    other = f'<div id="other">{_OTHER_TAB}</div>'
    alone = open_page(_deck_page(("x", "<p>x</p>"), ("mine", other))).evaluate(_LOOKS)
    beside = open_page(
        _deck_page(("firstfault", deck_html(PAGE_SCENES["rank"]())), ("mine", other))
    ).evaluate(_LOOKS)
    assert beside == alone
