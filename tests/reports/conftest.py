"""A real browser: the machine's own chromium, driven by playwright; and the pages of the scenes, made once."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from firstfault.render.html import page
from tests.reports.scenes import PAGE_SCENES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SCREENSHOTS = Path("build/screenshots")
"""The folder of the screenshots, which CI keeps."""


# for one module only: while playwright runs, no other event loop can run in the main thread
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start chromium for a module; without chromium, skip and say what to install."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None and os.environ.get("CI"):
        pytest.fail("there is no chromium, and in CI nothing of this may be left out")
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium, or say where one is in CHROMIUM")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - other tests run without it

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Return a function that opens a page; the test fails on an error in the page or a request to another address."""
    problems: list[str] = []
    contexts = []

    def opened(text: str, *, width: int = 880, height: int = 720, **options: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith(("file:", "blob:", "data:", "about:")) else problems.append(asked.url)
            ),
        )
        file = tmp_path / f"page-{len(contexts)}.html"
        file.write_text(text, encoding="utf-8")
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


@cache
def page_of(scene: str) -> str:
    """Return the page of a scene."""
    return page(PAGE_SCENES[scene]())


def until(page: Page, condition: str) -> None:
    """Wait for a condition; the page's security policy forbids `wait_for_function`."""
    page.evaluate(
        f"""() => new Promise((done, fail) => {{
          const look = async () => ((await ({condition})) ? done() : requestAnimationFrame(look));
          setTimeout(fail, 60000);
          look();
        }})"""
    )
