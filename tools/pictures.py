"""Make README's pictures from a real failing job: what `firstfault show` prints,
and the report's first screen.

``make pictures`` runs this. It needs a browser (``apt-get install chromium``). It runs
examples/user_error.py, which fails, on two nodes of two workers.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs/pictures"
_WIDTH, _HEIGHT = 880, 720
_COLUMNS = 100
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_FONT = "'DejaVu Sans Mono', monospace"


def main() -> None:
    """Run the job, and take a picture of the terminal and of the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="build/pictures", help="where the job's files go")
    store = parser.parse_args().store
    browser = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    )
    if browser is None:
        sys.exit("needs a browser: apt-get install chromium, or say where one is in CHROMIUM")
    run = _failing_run(store)
    attempt = run["attempts"][-1]["errors"].removesuffix("/firstfault/errors")
    screen = _on_a_terminal(["firstfault", "show", os.path.relpath(attempt)])
    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=_FLAGS)
        page = started.new_page(
            viewport={"width": _WIDTH, "height": _HEIGHT}, device_scale_factor=2
        )
        report = Path(run["report"]).resolve().with_name("picture.html")
        # replace the folder of this machine
        report.write_text(Path(run["report"]).read_text().replace(f"{ROOT}/", "/root/"))
        page.goto(report.as_uri())
        page.screenshot(path=PICTURES / "report.png")
        # a new page: the report's content security policy would also apply to content set on its
        # page
        page = started.new_page(
            viewport={"width": _COLUMNS * 12, "height": _HEIGHT}, device_scale_factor=2
        )
        page.set_content(_as_html(screen))
        page.locator("svg").screenshot(path=PICTURES / "terminal.png")
        started.close()
    print("\n".join(str(path.relative_to(ROOT)) for path in sorted(PICTURES.glob("*.png"))))


def _failing_run(store: str) -> dict[str, object]:
    command = [
        "firstfault",
        "run",
        "examples/user_error.py",
        "train",
        "--nodes",
        "2",
        "--store",
        store,
        "--json",
    ]
    done = subprocess.run(_ours(command), stdout=subprocess.PIPE, cwd=ROOT, check=False)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def _on_a_terminal(command: list[str]) -> str:
    """Return a command's output on a terminal, with its colours."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(_COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        _ours(command),
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment,
        cwd=ROOT,
    )
    os.close(child)
    printed = b""
    try:
        while part := os.read(parent, 65_536):
            printed += part
    except OSError:
        pass  # a terminal raises this when the other end closes
    process.wait()
    # replace the name of this machine
    text = (
        printed.decode().replace("\r", "").replace(f"host {socket.gethostname()}", "host trainer-7")
    )
    return f"$ {' '.join(command)}\n{text}"


def _as_html(screen: str) -> str:
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(screen.rstrip()))
    svg = console.export_svg(title="firstfault show", theme=MONOKAI).replace(
        "Fira Code, monospace", _FONT
    )
    return (
        f"<!doctype html><style>svg {{ width: 1000px }} svg text {{ font-family: {_FONT} !important"
        f" }}</style>{svg}"
    )


def _ours(command: list[str]) -> list[str]:
    return [str(Path(sys.executable).parent / command[0]), *command[1:]]


if __name__ == "__main__":
    main()
