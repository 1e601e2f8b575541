"""Pages of example attempts for tests in a browser, made once."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from firstfault.model import Phase
from firstfault.render.html import page
from firstfault.retry import RetryContext
from firstfault.testing import make_error, make_job, make_presence
from tests.reports.scenes import CATEGORY_SCENES, HARD_SCENES, SCOPE_SCENES, report_on

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from firstfault.report import Report

__all__ = ["SCENES", "page_of", "report_of_scene", "until"]


def _many(root: int | None, *, lost: int | None = None, name: str = "a7xk2m9qp4vd8wz3hj6t-n0-0-worker-{}") -> Report:
    """64 nodes of 8 ranks: one rank fails by itself or a node is lost, every third rank has an error of its own."""
    failures = []
    for rank in range(512):
        here = {"node": name.format(rank // 8), "local_rank": rank % 8, "group_rank": rank // 8, "world_size": 512}
        peer = "Connection closed by peer [10.0.0.8]:29500" + (" again" if rank % 3 else "")
        kind, text = ("ValueError", "batch 17 has 3 columns") if rank == root else ("RuntimeError", peer)
        at_ms = 0 if rank == root else 30 + rank / 11
        if rank // 8 != lost:
            failures.append(make_error(rank, at_ms=at_ms, exception=kind, message=text, **here))
    roster = [
        make_presence(
            Phase.JOINED if node == lost else Phase.FAILED,
            node=name.format(node),
            group_rank=node,
            nodes=64,
            ranks=tuple(range(8 * node, 8 * node + 8)),
        )
        for node in range(64)
    ]
    context = RetryContext(pods_alive=False) if lost is not None else None
    return report_on(make_job(*failures, roster=tuple(roster)), context=context)


_HOST = "w{}.gpunode0123456789.rack17.datacenter3.research.examplecompany.internal"
SCENES = {
    **SCOPE_SCENES,
    **CATEGORY_SCENES,
    **HARD_SCENES,
    "64x8": lambda: _many(307),
    "lost-node": lambda: _many(None, lost=37),
    "long-host": lambda: _many(307, name=_HOST),
    "longest-host": lambda: _many(307, name="w{}" + "x" * 250),
}


@cache
def report_of_scene(name: str) -> Report:
    """Return the report of an example attempt."""
    return SCENES[name]()


@cache
def page_of(name: str) -> str:
    """Return the page of an example attempt."""
    return page(report_of_scene(name))


def until(page: Page, condition: str) -> None:
    """Wait for a condition; the page's security policy forbids `wait_for_function`."""
    page.evaluate(
        f"""() => new Promise((done, fail) => {{
          const look = async () => ((await ({condition})) ? done() : requestAnimationFrame(look));
          setTimeout(fail, 60000);
          look();
        }})"""
    )
