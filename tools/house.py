"""Count what shows whether the source is laid out well: `just house`.

Each figure has an aim. Figures are a reason to look, and the command ends with 0 whatever they are;
only a cycle of imports is an error, because import-linter's layers rest on there being none.
"""

import sys

from tools.imports import SRC, cycles, importers, product_graph
from tools.repeats import repeats


def main() -> None:
    graph = product_graph()
    store = [name for name in graph if (name + ".").startswith("fencepost.store.")]
    single = sorted(name for name, users in importers(graph).items() if len(users) == 1)
    pairs, generated = repeats()
    circles = cycles(graph)
    packages = sum(1 for _ in SRC.rglob("__init__.py"))
    in_store = sum(1 for _ in (SRC / "fencepost/store").rglob("__init__.py"))

    row("modules in store", len(store) - in_store, "55", f"and {in_store} __init__.py")
    row("modules in all", len(graph) - packages, "240", f"and {packages} __init__.py")
    row("modules with one importer", len(single), "45", "packages included")
    row("pairs of repeats", len(pairs), "89", f"{generated} generated files left out")
    row("import cycles", len(circles), "0", "")
    if "--list" in sys.argv:
        print("\nWith one importer:", *single, sep="\n  ")
    for circle in circles:
        print("cycle:", " ".join(circle))
    sys.exit(1 if circles else 0)


def row(what: str, count: int, aim: str, note: str) -> None:
    """Print one figure beside its aim."""
    print(f"{what:28}{count:5}   at most {aim:4} {note}".rstrip())


if __name__ == "__main__":
    main()
