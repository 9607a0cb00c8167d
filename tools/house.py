"""Count what shows whether the source is laid out well: `just house`.

Each figure has an aim. Figures are a reason to look, and the command ends with 0 whatever they are;
only a cycle of imports is an error, because import-linter's layers rest on there being none.

The aims were set for the source as it was before groups, meshes, sessions, events and the outbox
moved in, so the modules that came with them (`NEW_PARTS`) are left out. `--without REGEX` leaves
others out instead, `--without ^$` none. Generated modules have their source's layout and do not
count as modules with one importer. `--list` names the modules that have one importer.
"""

import argparse
import re
import sys

from tools.imports import SRC, cycles, importers, product_graph, source_files
from tools.repeats import is_generated, repeats

NEW_PARTS = (
    r"fencepost\.(events|outbox|server\.(groups|mesh)"
    r"|cli\.(demo_shop|events|groups|log|meshes|outbox\w*|pipeline_apps|subscriptions|tokens)"
    r"|client\.(background|group_\w+|groups|handlers|meshes|proxies|sessions|signatures|subscriptions"
    r"|webhook_app|websocket|(aio|sync)\.(groups|meshes|sessions|subscriptions|webhooks))"
    r"|http\.(bodies|heads|request_ids|upgrade|websocket\w*)"
    r"|pipeline\.(audit\.(leases|sends|writers)|backlog|checkpoints|reactions|rebuilds|recovery)"
    r"|protocol\.(acks|automata|books|checksums|envelopes|features|fingerprints|group_operations|groups"
    r"|leases|log_filters|meshes|paths|sends|sessions|shares|strict_json|timing|told)"
    r"|server\.(asgi_websocket|handlers\.(tokens|waiting)|lease_tokens|origins|waiters)"
    r"|store\.(group_contract|mesh_contract|check\.(groups|meshes)|postgres\.(books|groups)"
    r"|read\.(chunk_cache|group_events|groups|log_events|meshes|scans|told_events)"
    r"|write\.(behind|books|group_\w+|groups|mesh_decider|sends|told|usage))"
    r"|testing\.events)\b"
)
"""Modules and packages that came after the aims were set."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--without", default=NEW_PARTS, metavar="REGEX")
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    left_out = re.compile(chosen.without)
    whole = product_graph()
    kept = frozenset(name for name in whole if not left_out.search(name))
    graph = {name: whole[name] & kept for name in kept}
    store = [name for name in graph if (name + ".").startswith("fencepost.store.")]
    made = {name for name, file in source_files(SRC, root=SRC).items() if is_generated(file)}
    users = importers(graph)
    single = sorted(name for name in graph.keys() - made if len(users[name]) == 1)
    every_pair, generated = repeats()
    pairs = [
        pair
        for pair in every_pair
        if not any(left_out.search(dotted(place)) for place in (pair.first, pair.second))
    ]
    circles = cycles(graph)
    packages = sum(1 for _ in SRC.rglob("__init__.py"))
    in_store = sum(1 for _ in (SRC / "fencepost/store").rglob("__init__.py"))

    row("modules in store", len(store) - in_store, "55", f"and {in_store} __init__.py")
    row("modules in all", len(graph) - packages, "240", f"and {packages} __init__.py")
    row("modules with one importer", len(single), "45", "packages included")
    row("pairs of repeats", len(pairs), "89", f"{generated} generated files left out")
    row("import cycles", len(circles), "0", "")
    if chosen.list:
        print("\nWith one importer:", *single, sep="\n  ")
    for circle in circles:
        print("cycle:", " ".join(circle))
    sys.exit(1 if circles else 0)


def dotted(place: str) -> str:
    """The module of a place such as `fencepost/cli/main.py:3-9`."""
    return place.partition(".")[0].replace("/", ".")


def row(what: str, count: int, aim: str, note: str) -> None:
    """Print one figure beside its aim."""
    print(f"{what:28}{count:5}   at most {aim:4} {note}".rstrip())


if __name__ == "__main__":
    main()
