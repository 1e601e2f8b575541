"""Sphinx builds the site from the Markdown in this folder: ``make docs``."""

# ruff: noqa: INP001 - a configuration file, not a package

from __future__ import annotations

import os
import re
from importlib import import_module
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING

from sphinx.ext.autodoc.mock import mock

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/firstfault/firstfault/blob/main"

project = "firstfault"
author = project_copyright = "the firstfault authors"
release = version = installed_version("firstfault")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["benchmarks", "schemas"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links to headings work as on the repository's pages
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["torch", "flytekit"]  # `make docs` installs none of the extras
add_module_names = False
suppress_warnings = ["ref.python"]  # a name that several public modules export

html_theme = "furo"
html_title = "firstfault"
html_extra_path = ["schemas"]
html_copy_source = False  # `_write_markdown` serves the sources under their own names
html_theme_options = {
    "source_repository": "https://github.com/firstfault/firstfault",
    "source_directory": "docs/",
}

_LINK = re.compile(r"\]\((?P<target>\.\.?/[^)#\s]+)(?P<anchor>#[^)\s]+)?\)")


def _point_to_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace links to files outside of docs/, which the site doesn't have,
    by links to the repository's pages.
    """
    folder = (Path(app.srcdir) / docname).parent

    def replace(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match["target"]))
        if path.is_relative_to(app.srcdir):
            return match[0]
        return f"]({REPOSITORY}/{path.relative_to(ROOT)}{match['anchor'] or ''})"

    source[0] = _LINK.sub(replace, source[0])


def _write_markdown(app: Sphinx, error: Exception | None) -> None:
    """Serve each page as Markdown, too, next to the HTML, and list all pages in llms.txt."""
    if error is not None or app.builder.name != "html":
        return
    lines = [
        "# firstfault",
        "",
        "Find out which worker killed a distributed training job, why, and whether to retry.",
        "",
    ]
    for docname in sorted(app.env.found_docs):
        page = Path(app.srcdir) / f"{docname}.md"
        target = Path(app.outdir) / f"{docname}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(page.read_bytes())
        title, _, rest = page.read_text(encoding="utf-8").lstrip("# ").partition("\n")
        about = " ".join(rest.strip().partition("\n\n")[0].split())
        lines.append(f"- [{title}]({docname}.md): {about}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _load_documented_names() -> None:
    """Raise if a name of the API can't be loaded: autodoc would leave it out without a warning."""
    with mock(autodoc_mock_imports):
        for package in ("firstfault_torch", "flytekitplugins.firstfault"):
            module = import_module(package)
            for name in module.__all__:
                getattr(module, name)


def setup(app: Sphinx) -> None:
    """Connect the hooks, if all documented names can be loaded."""
    _load_documented_names()
    app.connect("source-read", _point_to_repository)
    app.connect("build-finished", _write_markdown)
