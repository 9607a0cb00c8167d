"""Name the test modules that a change concerns: `./test --changed`, `just test --changed`.

Changed is every file that differs from the branch main (from HEAD where there is no such branch, or
where it is HEAD), untracked files included. A test module is concerned when it changed itself, when
it imports a changed module, directly or through others, or when it has the name of one: tests that
start a server as a process import none of it. Some changes concern more: a page concerns
tests/project, a query file concerns what its package concerns, and the project's settings, its
fixtures and its lock files concern everything.

This is for the minutes while one works. Before a push, `./test` without arguments decides.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.imports import ROOT, SRC, Graph, import_graph, importers, source_files

EVERYTHING = ("pyproject.toml", "requirements-dev.lock", "tests/conftest.py", "test", ".ci/")
PAGES = ("docs/", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "justfile")


def changed_files() -> list[str]:
    """Files that differ from main, or from HEAD, by their paths in the repository."""
    mains = (_git("merge-base", "HEAD", name).strip() for name in ("origin/main", "main"))
    base = next(filter(None, mains), "HEAD")
    differing = _git("diff", "--name-only", base).split()
    return sorted({*differing, *_git("ls-files", "--others", "--exclude-standard").split()})


def concerned(changed: Iterable[str], graph: Graph, files: Mapping[str, Path]) -> set[str]:
    """The paths of the tests that these changes concern, or of whole folders."""
    module_of = {str(file.relative_to(ROOT)): name for name, file in files.items()}
    start: set[str] = set()
    found: set[str] = set()
    for path in changed:
        if path.startswith(EVERYTHING):
            return {"tests"}
        if path.startswith(PAGES):
            found.add("tests/project")
        elif path in module_of:
            start.add(module_of[path])
        elif path.startswith("src/"):
            # Data that a package reads: its own modules are what depends on it.
            folder = str(Path(path).parent) + "/"
            start.update(name for file, name in module_of.items() if file.startswith(folder))
        elif path.startswith("tests/"):
            found.add(str(Path(path).parent))
    found.update(path for path in module_of if _is_named_after(Path(path), start))
    for name in reached(start, graph):
        file = files[name]
        if file.name == "conftest.py":
            found.add(str(file.parent.relative_to(ROOT)))
        elif file.name.startswith("test_"):
            found.add(str(file.relative_to(ROOT)))
    inside = {path for path in found if any(str(above) in found for above in Path(path).parents)}
    return {path for path in found - inside if (ROOT / path).exists()}


def reached(start: Iterable[str], graph: Graph) -> set[str]:
    """Modules that import one of these, directly or through others, and these themselves."""
    users = importers(graph)
    seen: set[str] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(users[name])
    return seen


def _is_named_after(test: Path, modules: Iterable[str]) -> bool:
    names = {name.rpartition(".")[2] for name in modules}
    return test.name.startswith("test_") and any(name in test.stem for name in names)


def all_files() -> dict[str, Path]:
    """Every module of the product, the tests, the tools and the benchmarks."""
    around = (ROOT / "tests", ROOT / "tools", ROOT / "benchmarks")
    return source_files(SRC / "fencepost", root=SRC) | source_files(*around, root=ROOT)


def _git(*arguments: str) -> str:
    done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def main() -> None:
    files = all_files()
    changed = changed_files()
    tests = sorted(concerned(changed, import_graph(files), files))
    print(f"{len(changed)} files changed, {len(tests)} test paths concerned", file=sys.stderr)
    print(*tests, sep="\n")


if __name__ == "__main__":
    main()
