"""Generate the sync classes from the async ones, or check that they still fit.

The async modules are written by hand. This script reads their tokens, drops `async` and `await`,
renames what has another name on the sync side, and has ruff tidy the result. Run it with
`just twins` after a change of an async module; `python tools/twins.py --check` fails on drift, and
so does tests/project/test_twins.py.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/fencepost"
PACKAGES = {
    "client/aio": "client/sync",
    "coordination/aio": "coordination/sync",
    "events/aio": "events/sync",
    "outbox/aio": "outbox/sync",
}
MODULES = {"client/state/aio.py": "client/state/sync.py"}

NAMES = {
    "aio": "sync",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "asyncio": "threading",
    "connect_async": "connect",
    "aclosing": "closing",
    "group_tasks": "group_threads",
}
"""Names that differ by more than the prefixes `Async` and `async_`."""
WORDS = {"async": "sync", "An async": "A sync", "an async": "a sync"}
"""What docstrings and comments say differently."""
RULES = "C4,F401,I,PERF,RUF100,SIM,UP"
"""Rules of ruff whose repairs make the generated code read as if it were written by hand."""


def twins() -> dict[Path, Path]:
    """Every written file, and the file that is generated from it."""
    pairs = {SOURCE / written: SOURCE / made for written, made in MODULES.items()}
    for written, made in PACKAGES.items():
        for path in sorted((SOURCE / written).glob("*.py")):
            pairs[path] = SOURCE / made / path.name
    return pairs


def converted(source: str) -> str:
    """The sync module of an async one, not yet formatted."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    out: list[tuple[tokenize.TokenInfo, str]] = []
    for token in tokens:
        text = token.string
        if token.type == tokenize.NAME:
            text = "" if text in ("async", "await") else _name(text)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            text = _prose(text)
        out.append((token, text))
    return _joined(source, out)


def _name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    return re.sub(r"^(_?)(?:Async(?=[A-Z])|async_)", r"\1", name)


def _prose(text: str) -> str:
    for word in sorted(WORDS, key=len, reverse=True):
        text = re.sub(rf"\b{word}\b", WORDS[word], text)
    text = re.sub(r"\bconnect_sync\b|\bconnect_async\b", "connect", text)
    text = re.sub(r"\bfencepost\.(\w+)\.aio\b", r"fencepost.\1.sync", text)
    return re.sub(r"\bAsync(?=[A-Z])", "", text)


def _joined(source: str, tokens: list[tuple[tokenize.TokenInfo, str]]) -> str:
    """The text between tokens stays as it is, but for the space behind a dropped word."""
    lines = source.splitlines(keepends=True)
    text: list[str] = []
    row, column = 1, 0
    for token, replacement in tokens:
        start_row, start_column = token.start
        while row < start_row:
            text.append(lines[row - 1][column:])
            row, column = row + 1, 0
        text.append(lines[row - 1][column:start_column] if row <= len(lines) else "")
        text.append(replacement)
        row, column = token.end
        if token.type == tokenize.NAME and not replacement:
            column += 1
    return "".join(text)


def generated(pairs: dict[Path, Path]) -> dict[Path, str]:
    """What every generated file should hold."""
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        made = {}
        for written, target in pairs.items():
            draft = Path(folder) / target.relative_to(ROOT)
            draft.parent.mkdir(parents=True, exist_ok=True)
            note = (
                f"# Generated from {written.relative_to(ROOT)} by `just twins`: change that file.\n"
            )
            draft.write_text(note + converted(written.read_text()))
            made[target] = draft
        config = ["--config", str(ROOT / "pyproject.toml"), "--quiet", folder]
        _ruff("check", "--fix", "--unsafe-fixes", "--exit-zero", "--select", RULES, *config)
        _ruff("format", *config)
        return {target: draft.read_text() for target, draft in made.items()}


def _ruff(*arguments: str) -> None:
    ruff = Path(sys.executable).parent / "ruff"
    subprocess.run([ruff, *arguments], cwd=ROOT, check=True)


def stale(pairs: dict[Path, Path]) -> list[str]:
    """The generated files that are missing, left over, or differ from what would be generated."""
    wanted = generated(pairs)
    found = {path for made in PACKAGES.values() for path in (SOURCE / made).glob("*.py")}
    wrong = found - wanted.keys()
    wrong |= {p for p, text in wanted.items() if not p.exists() or p.read_text() != text}
    return sorted(str(path.relative_to(ROOT)) for path in wrong)


def main() -> int:
    """Write the generated files; with `--check`, only name those that are stale."""
    pairs = twins()
    if "--check" in sys.argv[1:]:
        wrong = stale(pairs)
        sys.stderr.write("".join(f"{path} is stale: run `just twins`\n" for path in wrong))
        return 1 if wrong else 0
    for path, text in generated(pairs).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
