"""``firstfault k8s``: prints a manifest for a controller, to be adapted by the user."""

from __future__ import annotations

from pathlib import Path

import click

_MANIFESTS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


@click.command()
@click.argument("kind", type=click.Choice(list(_MANIFESTS)))
def k8s(kind: str) -> None:
    """Print a manifest of this KIND, in which firstfault's exit codes decide on restarts.

    The pods exit with 75 (retry), 79 (the platform is at fault) or 93 (stop). A preempted pod ends
    its Job, so that all of its peers start again together.

    \b
    Example:
      firstfault k8s jobset >train.yaml
    """  # noqa: D301 - click's mark of lines to keep
    click.echo(_MANIFESTS[kind].read_text(encoding="utf-8").rstrip())
