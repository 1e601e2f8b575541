"""A real browser: the machine's own chromium, driven by playwright; and the pages of the scenes,
made once.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from firstfault.render.html import page
from tests.reports.scenes import PAGE_SCENES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SCREENSHOTS = Path("build/screenshots")
"""The folder of the screenshots, which CI keeps."""


def keep_screenshot(page: Page, name: str) -> None:
    """Keep a screenshot for people; no test compares it,
    so that chromium may be too busy to draw one.
    """
    from playwright.sync_api import Error  # noqa: PLC0415 - other tests run without it

    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with suppress(Error):
        page.screenshot(path=SCREENSHOTS / f"{name}.png")


# for one module only: while playwright runs, no other event loop can run in the main thread
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start chromium for a module; without chromium, skip and say what to install."""
    path = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    )
    if path is None and os.environ.get("CI"):
        pytest.fail("there is no chromium, and in CI nothing of this may be left out")
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium, or say where one is in CHROMIUM")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - other tests run without it

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def _page(browser: Browser) -> tuple[Callable[[bool], Page], list[str]]:
    """Return a page with scripts and one without, and what went wrong in them:
    a new page for each file is slow.
    """
    problems: list[str] = []

    @cache
    def page(scripts: bool) -> Page:
        page = browser.new_context(java_script_enabled=scripts).new_page()
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on(
            "console",
            lambda message: problems.append(message.text) if message.type == "error" else None,
        )
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda asked: (
                None
                if asked.url.startswith(("file:", "blob:", "data:", "about:"))
                else problems.append(asked.url)
            ),
        )
        return page

    return page, problems


@pytest.fixture
def open_page(
    _page: tuple[Callable[[bool], Page], list[str]], tmp_path: Path
) -> Iterator[Callable[..., Page]]:
    """Return a function that shows a text in the page instead of what was there.

    The test fails on an error in the page or a request to another address.
    """
    page_with, problems = _page
    problems.clear()
    numbers = itertools.count()

    def opened(
        text: str,
        *,
        width: int = 880,
        height: int = 720,
        scripts: bool = True,
        **media: Any,
    ) -> Page:
        page = page_with(scripts)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(
            **{"media": "screen", "color_scheme": "light", "forced_colors": "none", **media}
        )
        page.mouse.move(-1, -1)
        file = tmp_path / f"page-{next(numbers)}.html"
        file.write_text(text, encoding="utf-8")
        page.goto(file.as_uri())
        return page

    yield opened
    assert problems == []


@cache
def render_scene(scene: str) -> str:
    return page(PAGE_SCENES[scene]())


def wait_for_condition(page: Page, condition: str) -> None:
    """Wait for a condition; the page's security policy forbids `wait_for_function`."""
    page.evaluate(f"""() => new Promise((done, fail) => {{
          const look = async () => ((await ({condition})) ? done() : requestAnimationFrame(look));
          setTimeout(fail, 60000);
          look();
        }})""")
