"""Which module of this repository imports which, read from the source without running it.

An edge is a module, not a package: `from fencepost.store import contract` leads to
`fencepost.store.contract`, and `from fencepost.store.contract import Store` to the same place.
Imports inside functions and under `TYPE_CHECKING` count, as they do for import-linter.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"

Graph = Mapping[str, frozenset[str]]


def module_name(file: Path, root: Path) -> str:
    """The dotted name of a file below the folder that imports start from."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_files(*folders: Path, root: Path) -> dict[str, Path]:
    """Every Python file below these folders, by its dotted name."""
    found = (file for folder in folders for file in sorted(folder.rglob("*.py")))
    return {module_name(file, root): file for file in found}


def import_graph(files: Mapping[str, Path]) -> dict[str, frozenset[str]]:
    """What each module imports of the modules in `files`."""
    return {name: frozenset(_imports(file, files)) - {name} for name, file in files.items()}


def product_graph() -> dict[str, frozenset[str]]:
    """The imports between the modules of `fencepost`."""
    return import_graph(source_files(SRC / "fencepost", root=SRC))


def importers(graph: Graph) -> dict[str, set[str]]:
    """For each module, the modules that import it."""
    found: dict[str, set[str]] = {name: set() for name in graph}
    for name, imported in graph.items():
        for other in imported:
            found[other].add(name)
    return found


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, each group once (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found


def _imports(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in known:
                    yield submodule
                elif node.module in known:
                    yield node.module
