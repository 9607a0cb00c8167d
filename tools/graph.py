"""Draw which package imports which, as docs/internals/imports.svg: `just graph`.

A box is a package with the number of its modules; a line leads from a package down to one that it
imports. Packages stand in rows, each above what its packages import. Two packages that import each
other have a line in red: it leads upward. The same source gives the same file.
"""

from collections import Counter
from html import escape
from pathlib import Path

from tools.imports import ROOT, SRC, Graph, product_graph

PICTURE = ROOT / "docs/internals/imports.svg"
BOX, GAP, ROW, MARGIN = 150, 16, 92, 20
HEIGHT = 36


def packages_of(graph: Graph) -> dict[str, str]:
    """For each module its package: at most two names below `fencepost`."""
    return {name: _package(name) for name in graph if name != "fencepost"}


def edges_of(graph: Graph) -> Counter[tuple[str, str]]:
    """How many imports lead from one package to another."""
    package = packages_of(graph)
    found: Counter[tuple[str, str]] = Counter()
    for name, imported in graph.items():
        for other in imported:
            if name in package and other in package and package[name] != package[other]:
                found[package[name], package[other]] += 1
    return found


def rows_of(packages: set[str], edges: Counter[tuple[str, str]]) -> list[list[str]]:
    """Packages from the top row to the lowest: each as low as those it imports allow."""
    below = {name: {other for one, other in edges if one == name} for name in packages}
    level: dict[str, int] = {}

    def place(name: str, path: tuple[str, ...]) -> int:
        if name not in level:
            lower = [
                place(other, (*path, name)) for other in sorted(below[name]) if other not in path
            ]
            level[name] = 1 + max(lower, default=-1)
        return level[name]

    for name in sorted(packages):
        place(name, ())
    top = max(level.values())
    return [sorted(name for name in level if level[name] == at) for at in range(top, -1, -1)]


def drawing(graph: Graph) -> str:
    """The whole picture as SVG."""
    modules = Counter(packages_of(graph).values())
    edges = edges_of(graph)
    rows = rows_of(set(modules), edges)
    width = max(len(row) for row in rows) * (BOX + GAP) + 2 * MARGIN
    at: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (BOX + GAP) + GAP) / 2
        for place, name in enumerate(row):
            at[name] = (left + place * (BOX + GAP), MARGIN + number * ROW)
    height = MARGIN * 2 + (len(rows) - 1) * ROW + HEIGHT
    lines = [_line(at[one], at[other], count) for (one, other), count in sorted(edges.items())]
    boxes = [_box(name, *at[name], modules[name]) for name in sorted(at)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            ' font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


def _package(module: str) -> str:
    parts = module.split(".")[1:]
    inner = SRC / "fencepost" / Path(*parts[:2])
    return "/".join(parts[:2] if len(parts) > 1 and inner.is_dir() else parts[:1])


def _line(above: tuple[float, float], below: tuple[float, float], count: int) -> str:
    x, y = above[0] + BOX / 2, above[1] + HEIGHT
    to_x, to_y = below[0] + BOX / 2, below[1]
    middle = (y + to_y) / 2
    colour = "#8a93a6" if to_y > y else "#c0392b"
    path = f"M{x:g} {y:g}C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"
    thick = min(3.0, 0.6 + count / 20)
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thick:.1f}"/>'


def _box(name: str, x: float, y: float, modules: int) -> str:
    text = f'text-anchor="middle" x="{x + BOX / 2:g}"'
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" rx="5" fill="#eef2f8"'
        f' stroke="#4a5568"/><text {text} y="{y + 15:g}">{escape(name)}</text>'
        f'<text {text} y="{y + 29:g}" fill="#667085" font-size="10">{modules}</text>'
    )


def main() -> None:
    PICTURE.write_text(drawing(product_graph()))
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
