"""Draws how something grows, on logarithmic axes."""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 200, 40, 50
_COLOURS = ("#767676", "#0b6e4f", "#1f5fbf", "#a15c00", "#b3261e", "#7b3fa0")
_DASHES = ("4 3", "", "", "8 3", "2 2", "6 2 2 2")


def svg(
    title: str,
    of: Mapping[str, Sequence[tuple[float, float]]],
    across: str,
    unit: str = "",
) -> str:
    """Return a drawing with one line for each name in `of`.

    `across` is what the first number of a point counts, `unit` that of the second; all numbers are
    above 0.
    """
    lines = {name: [(math.log10(x), math.log10(y)) for x, y in line] for name, line in of.items()}
    points = [point for line in lines.values() for point in line]
    lowest = math.floor(min(y for _, y in points))
    highest = math.ceil(max(y for _, y in points))
    widest = max(x for x, _ in points) or 1.0
    inner = (_WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + inner[0] * x / widest,
            _HEIGHT - _BOTTOM - inner[1] * (y - lowest) / max(highest - lowest, 1),
        )

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for power in range(lowest, highest + 1):
        _, y = at(0, power)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
            ' stroke="#dddddd"/>'
        )
        label = f"{10**power:,} {unit}" if power >= 0 else f"{10.0**power:g} {unit}"
        parts.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label.strip()}</text>'
        )
    for number in sorted({x for line in of.values() for x, _ in line}):
        x, y = at(math.log10(number), lowest)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{number:,}</text>')
    x, y = at(widest / 2, lowest)
    parts.append(f'<text x="{x:.1f}" y="{y + 38:.1f}" text-anchor="middle">{escape(across)}</text>')
    ends: list[float] = []
    for index, (way, line) in enumerate(sorted(lines.items(), key=lambda item: -item[1][-1][1])):
        colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in sorted(line)))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"'
            f' stroke-dasharray="{dash}"/>'
        )
        x, y = at(*max(line))
        while any(abs(y - other) < 14 for other in ends):
            y += 14
        ends.append(y)
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">{escape(way)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
