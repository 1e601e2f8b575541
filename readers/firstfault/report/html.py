"""Import path of release 0.1; the page is drawn by `firstfault.render.html`."""

from firstfault.render.html import deck_html, page

__all__ = ["deck_html", "page"]
