"""Text that attacks, in every field of what a report is made of:
no form lets it be more than text.
"""

import json
import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from firstfault.model import Coverage, JobErrors, Scope
from firstfault.report import Report, build_report
from firstfault.retry import decide
from firstfault.strategies import build_undetermined_verdict
from tests.all_forms import FORMS
from tests.reports.every_field import KINDS_OF_ROOT, fill_report

_STEERING = "\x1b[2J\x1b]0;owned\x07\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\\x1bP1$r\x9b31m\x08\x0b\x0c\x7f\x85\r\x00\ufeff"
"""Colours, a title, a link, a device control string,
and control characters that move the cursor or end lines.
"""
_DIRECTION = "\u202e\u2066\u200f\u061c\u2028\u2029"
_LINES = (
    "\nRetry: yes OWNED\nCause: OWNED\n\nRetry    OWNED\n  rank 7: OWNED\n"
    "Documents: OWNED\nCommands:\nOWNED\r\nWhere: OWNED"
)
_MARKUP = (
    "</script><script>owned()</script></textarea></title></style></svg></pre><!-- --><img src=x"
    " onerror=owned()>\" onmouseover=\"owned() 'onfocus='owned() <a"
    " href='javascript:owned()'>a</a>{{ 7*7 }}{% raw %}&lt;&#60;"
)
_MARKDOWN = (
    "[x](http://evil) ![x](http://evil/i.png) <http://evil> **b** `c` | cell | ~~~ ``` @everyone"
    " @org/team #12 GH-12\n# title\n```\n~~~\n- item\n> quote\n| a | b |\n|---|---|\n[ref]:"
    " http://evil\n    code\n<details>\n***\n"
)
_HARMLESS = "a: b\nc"
"""Two lines: the cause has only the first, so the message is quoted as well."""
_RICH = "[red]x[/red] [link=http://evil]y[/link] [/] :fire:"
EVIL = {
    "steering": f"a{_STEERING}{_DIRECTION}b",
    "lines": f"a{_LINES}",
    "markup": f"a {_MARKUP} b",
    "markdown": f"a {_MARKDOWN} b",
    "rich": _RICH,
    "surrogates": "a\ud800b\udcffc",
    "long": "x y" * 700,
    "empty": "",
    "spaces": " \t \n \n\t",
    "formula": "=cmd|' /C calc'!A0",
}
_KINDS = [
    *((root, Scope.RANK) for root in KINDS_OF_ROOT),
    *(("raised", scope) for scope in Scope if scope != Scope.RANK),
]


@cache
def _report(text: str, root: str = "raised", scope: Scope = Scope.RANK) -> Report:
    return fill_report(text, root, scope)


@pytest.mark.parametrize(("root", "scope"), _KINDS)
def test_no_text_makes_a_form_raise(root: str, scope: Scope) -> None:
    """No text makes a form raise, whatever the root cause is, and the JSON is JSON."""
    for text in (
        EVIL["steering"] + EVIL["lines"] + EVIL["markup"] + EVIL["surrogates"],
        EVIL["spaces"],
        "",
    ):
        report = _report(text, root, scope)
        for draw in FORMS.values():
            draw(report)
        json.loads(
            FORMS["json"](report), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
        )


@pytest.mark.parametrize("form", FORMS)
def test_no_form_has_control_characters(form: str) -> None:
    """No form has escape sequences, other control characters or marks that change
    the direction of text.
    """
    control = re.compile(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
    )
    for text in EVIL.values():
        drawn = FORMS[form](_report(text))
        assert form != "json" or (drawn.isascii() and drawn.isprintable())
        assert form != "message" or drawn.isascii()
        assert not control.findall(drawn)


def _beginnings(text: str) -> Counter[str]:
    """Return how many lines begin in the first column with each name; without the first line,
    which may be repeated.
    """
    first, *others = text.split("\n")
    lines = [line for line in others if line[:1].strip() and line != first]
    return Counter(" ".join(re.split(r":| {2}", line)[0].split()[:3]) for line in lines)


@pytest.mark.parametrize(
    "form", ["plain", "plain -v", "message", "terminal", "terminal -v", "narrow terminal"]
)
def test_no_text_makes_a_line_of_its_own(form: str) -> None:
    """In the first column stand only the report's own names, as many as for a harmless text."""
    for kind in _KINDS:
        drawn = FORMS[form](_report("a" + _LINES + _STEERING, *kind))
        assert not re.search(
            "^(OWNED|Retry: yes OWNED|Retry    OWNED)", drawn.partition("\n")[2], re.MULTILINE
        ), kind
        ours = _beginnings(FORMS[form](_report(_HARMLESS, *kind)))
        assert _beginnings(drawn) - ours == Counter(), kind


class _Elements(HTMLParser):
    """Counts the elements and attributes of a page, and collects its links."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.names: Counter[str] = Counter()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.update([f"<{tag}>", *(name for name, _ in attrs)])
        self.links += [
            value or "" for name, value in attrs if name in {"href", "src", "action", "formaction"}
        ]


@pytest.mark.parametrize("root", KINDS_OF_ROOT)
@pytest.mark.parametrize("kind", ["page", "deck"])
def test_markup_is_text(kind: str, root: str) -> None:
    """A page has the same elements and attributes as with a harmless text,
    and links to itself only.
    """
    harmless = _Elements(FORMS[kind](_report("word " * 40, root))).names
    for text in (
        EVIL["markup"],
        _MARKUP.replace(" ", "\n"),
        "javascript:owned()",
        "data:text/html,<script>owned()</script>",
    ):
        found = _Elements(FORMS[kind](_report(text, root)))
        assert found.names.keys() <= harmless.keys()
        assert found.names["<script>"] == harmless["<script>"]
        assert not [link for link in found.links if not link.startswith("#")]


def test_data_in_scripts_is_json() -> None:
    """What the page's script reads cannot end its element, and is the data."""
    drawn = FORMS["page"](_report(EVIL["markup"]))
    parts = re.findall(
        r'<script type="application/json" id="[\w-]+">(.*?)</script>', drawn, re.DOTALL
    )
    assert len(parts) == 2
    assert all(json.loads(part) for part in parts)


_INLINE = {"text", "softbreak", "strong_open", "strong_close", "hardbreak"}
_BLOCKS = {
    *(
        f"{name}_{end}"
        for name in ("heading", "paragraph", "bullet_list", "list_item")
        for end in ("open", "close")
    ),
    *(
        f"{name}_{end}"
        for name in ("table", "thead", "tbody", "tr", "th", "td")
        for end in ("open", "close")
    ),
    "fence",
    "inline",
}


@cache
def _markdown(text: str, root: str) -> list[Token]:
    return (
        MarkdownIt("commonmark")
        .enable(["table", "strikethrough"])
        .parse(FORMS["markdown"](_report(text, root)))
    )


@pytest.mark.parametrize("root", KINDS_OF_ROOT)
@pytest.mark.parametrize("text", EVIL)
def test_markdown_has_no_markup_of_others(text: str, root: str) -> None:
    """Parsed as Markdown, the report has no links, images, HTML,
    titles or table cells beyond its own.
    """
    tokens = _markdown(EVIL[text], root)
    assert {token.type for token in tokens} <= _BLOCKS
    inline = {child.type for token in tokens for child in token.children or []}
    assert inline <= _INLINE
    harmless = Counter(token.type for token in _markdown(_HARMLESS, root))
    found = Counter(token.type for token in tokens)
    for kind in ("heading_open", "th_open", "td_open", "table_open"):
        assert found[kind] <= harmless[kind]
    # outside of code, no name behind an @ and no number behind a # is one that a forge makes a link
    # of
    shown = "".join(
        child.content
        for token in tokens
        for child in token.children or []
        if child.type != "code_inline"
    )
    assert not re.findall(r"@\w|#\d", shown)
    assert text != "markdown" or "everyone" in shown


@pytest.mark.parametrize("form", ["terminal -v", "plain -v", "message", "markdown"])
def test_a_note_is_printed_once(form: str) -> None:
    """A note about an unreadable document is in one part of a report only."""
    job = JobErrors(
        coverage=Coverage(None, 0, unreadable=2, notes=("not readable: e1x", "not readable: e1y"))
    )
    verdict = build_undetermined_verdict(job, "evidence")
    drawn = FORMS[form](build_report(job, verdict, decide(verdict)))
    assert (drawn.count("e1x"), drawn.count("e1y")) == (1, 1)
