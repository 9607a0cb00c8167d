"""List the pairs of files in src that share six or more lines: `just repeats`.

Two runs of lines repeat each other when they are the same, or when they have the same shape: equal
once every name, string and number is taken for any other. Blank lines, comments, docstrings,
imports and lines of punctuation do not count. A run that stands in more than eight places is a
habit of the language and is not listed. Generated files are left out: their source is in the list.

Declarations that look alike are not repeated logic, so a run by shape needs two lines that do
something. A line of Python does something when a statement begins on it, other than these: a field
or a constant, the head of a function or of a class, `self.x = x`. Parameters, arguments and the
entries of a literal stand on lines of their own where no statement begins. Equal lines count
whatever they are. Migrations are left out: one that has run is never edited, so two of them cannot
share a line. `--declarations` counts all of these as well.

A row is a place to look at, not a verdict. Pairs are counted by file: all that two files share is
one pair, shown by its longest run.
"""

import argparse
import ast
import io
import keyword
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from tools.imports import ROOT

LINES_MIN = 6
PLACES_MAX = 8
GENERATED = re.compile(r"generated", re.IGNORECASE)

ACTS_MIN = 2
"""How many lines of a run by shape have to do something."""
_SQL_TOKEN = re.compile(r"'[^']*'|--.*|\d+|\w+|[^\w\s]")
_SQL_WORD = re.compile(
    r"(?i)(select|from|where|and|or|not|null|is|in|on|join|left|insert|into|values|update|set|delete"
    r"|create|table|index|primary|key|unique|references|default|check|order|group|by|limit|as|with"
    r"|union|all|exists|case|when|then|else|end|returning|conflict|do|nothing|integer|bigint|text"
    r"|blob|bytea|boolean|strict|without|rowid|array|any|coalesce|max|min|sum|count)"
)


class Line(NamedTuple):
    """A line that counts: where it stands, its text, its shape, and whether it does something."""

    number: int
    text: str
    shape: str
    acts: bool = True


class Pair(NamedTuple):
    """The longest run that two files share; `runs` says how many there are."""

    lines: int
    first: str
    second: str
    is_shape: bool
    runs: int


def is_generated(file: Path) -> bool:
    """Whether a file says in its first line that it is made from another."""
    return GENERATED.search(file.read_text().partition("\n")[0]) is not None


def lines_of(file: Path) -> list[Line]:
    """The lines of a file that count, without what every file has."""
    text = file.read_text()
    lines = _sql_lines(text) if file.suffix == ".sql" else _python_lines(text)
    return [line for line in lines if re.search(r"\w", line.text)]


def pairs_in(
    files: dict[str, list[Line]], lines_min: int = LINES_MIN, *, declarations: bool = False
) -> list[Pair]:
    """Every pair of files that share a run, longest run first."""
    runs: dict[tuple[str, str], list[tuple[int, int, int, bool]]] = defaultdict(list)
    for is_shape in (False, True):
        acts_min = ACTS_MIN if is_shape and not declarations else 0
        found = _matches(files, lines_min, acts_min, is_shape=is_shape)
        for (one, start), (other, begin) in found:
            runs[one, other].append((start, begin, lines_min, is_shape))
    return sorted((_pair(files, *names, found) for names, found in runs.items()), reverse=True)


def _matches(
    files: dict[str, list[Line]], lines_min: int, acts_min: int, *, is_shape: bool
) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, lines in files.items():
        keys = [line.shape if is_shape else line.text for line in lines]
        for start in range(len(keys) - lines_min + 1):
            if sum(line.acts for line in lines[start : start + lines_min]) < acts_min:
                continue
            places[tuple(keys[start : start + lines_min])].append((name, start))
    for key, found in places.items():
        if 1 < len(found) <= PLACES_MAX and len(set(key)) > 2:
            for one, other in combinations(sorted(found), 2):
                if one[0] != other[0] or abs(one[1] - other[1]) >= lines_min:
                    yield one, other


def _pair(
    files: dict[str, list[Line]],
    one: str,
    other: str,
    found: list[tuple[int, int, int, bool]],
) -> Pair:
    """Join windows that follow each other on both sides into runs, and name the longest."""
    merged: list[list[int]] = []
    exact = {(start, begin) for start, begin, _, is_shape in found if not is_shape}
    for start, begin, lines, _ in sorted(set(found)):
        for run in merged:
            if start - run[0] == begin - run[1] and start <= run[0] + run[2]:
                run[2] = max(run[2], start - run[0] + lines)
                break
        else:
            merged.append([start, begin, lines])
    start, begin, lines = max(merged, key=lambda run: run[2])
    return Pair(
        lines,
        _place(one, files[one], start, lines),
        _place(other, files[other], begin, lines),
        not exact,
        len(merged),
    )


def _place(name: str, lines: list[Line], start: int, count: int) -> str:
    return f"{name}:{lines[start].number}-{lines[start + count - 1].number}"


def _python_lines(text: str) -> list[Line]:
    tree = ast.parse(text)
    left_out = _docstrings_and_imports(tree)
    acting = _acting(tree)
    words: dict[int, list[str]] = defaultdict(list)
    shapes: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        number = token.start[0]
        if number in left_out or token.type in _SILENT:
            continue
        words[number].append(token.string)
        shapes[number].append(_shape(token))
    return [
        Line(number, " ".join(words[number]), " ".join(shapes[number]), number in acting)
        for number in words
    ]


_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _shape(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        return token.string if keyword.iskeyword(token.string) else "name"
    if token.type == tokenize.STRING:
        return "string"
    if token.type == tokenize.NUMBER:
        return "number"
    return token.string


def _docstrings_and_imports(tree: ast.Module) -> set[int]:
    numbers: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


def _acting(tree: ast.Module) -> set[int]:
    """The lines on which a statement begins that does something."""
    return {
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt) and not _declares(node)
    }


def _declares(node: ast.stmt) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Pass():
            return True
        case ast.AnnAssign(value=value):
            return value is None or isinstance(value, ast.Constant | ast.Name)
        case ast.Assign(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Attribute(value=ast.Name("self"))], value=ast.Name()):
            return True
        case _:
            return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _sql_lines(text: str) -> list[Line]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        tokens = [token for token in _SQL_TOKEN.findall(line) if not token.startswith("--")]
        shape = " ".join(_sql_shape(token) for token in tokens)
        found.append(Line(number, " ".join(tokens), shape))
    return found


def _sql_shape(token: str) -> str:
    if token.startswith("'") or token.isdigit():
        return "value"
    if token[0].isalpha() and not _SQL_WORD.fullmatch(token):
        return "name"
    return token.lower()


def repeats(folder: Path = ROOT / "src", *, declarations: bool = False) -> tuple[list[Pair], int]:
    """The pairs below a folder, and how many generated files were left out."""
    files, generated = {}, 0
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.sql")]):
        if is_generated(file):
            generated += 1
        elif declarations or "migrations" not in file.parts:
            files[str(file.relative_to(folder))] = lines_of(file)
    return pairs_in(files, declarations=declarations), generated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most", type=int, default=40, help="how many pairs to show")
    parser.add_argument("--declarations", action="store_true", help="count declarations as well")
    options = parser.parse_args()
    pairs, generated = repeats(declarations=options.declarations)
    for pair in pairs[: options.most]:
        kind = " shape" if pair.is_shape else ""
        more = f" (+{pair.runs - 1} more)" if pair.runs > 1 else ""
        print(f"{pair.lines:4} {pair.first} ~ {pair.second}{kind}{more}")
    by_shape = sum(pair.is_shape for pair in pairs)
    counted = f"{len(pairs)} pairs, {by_shape} of them by shape alone"
    print(f"{counted}; {generated} generated files left out")


if __name__ == "__main__":
    main()
