"""List the pairs of files in src that share six or more lines: `just repeats`.

Two runs of lines repeat each other when they are the same, or when they have the same shape: equal
once every name, string and number is taken for any other. Blank lines, comments, docstrings,
imports and lines of punctuation do not count. A run by shape needs two lines that are more than a
declaration: fields of dataclasses all look alike. A run that stands in more than eight places is a
habit of the language and is not listed. Generated files are left out: their source is in the list.

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

_DECLARATION = re.compile(r"name( : [^()=]+)?( = (name|string|number))? ?,?$|[^\w]*$")
_SQL_TOKEN = re.compile(r"'[^']*'|--.*|\d+|\w+|[^\w\s]")
_SQL_WORD = re.compile(
    r"(?i)(select|from|where|and|or|not|null|is|in|on|join|left|insert|into|values|update|set|delete"
    r"|create|table|index|primary|key|unique|references|default|check|order|group|by|limit|as|with"
    r"|union|all|exists|case|when|then|else|end|returning|conflict|do|nothing|integer|bigint|text"
    r"|blob|bytea|boolean|strict|without|rowid|array|any|coalesce|max|min|sum|count)"
)


class Line(NamedTuple):
    """A line that counts: where it stands, its text, and its shape."""

    number: int
    text: str
    shape: str


class Pair(NamedTuple):
    """The longest run that two files share; `runs` says how many there are."""

    lines: int
    first: str
    second: str
    is_shape: bool
    runs: int


def lines_of(file: Path) -> list[Line]:
    """The lines of a file that count, without what every file has."""
    text = file.read_text()
    lines = _sql_lines(text) if file.suffix == ".sql" else _python_lines(text)
    return [line for line in lines if re.search(r"\w", line.text)]


def pairs_in(files: dict[str, list[Line]], lines_min: int = LINES_MIN) -> list[Pair]:
    """Every pair of files that share a run, longest run first."""
    runs: dict[tuple[str, str], list[tuple[int, int, int, bool]]] = defaultdict(list)
    for is_shape in (False, True):
        for (one, start), (other, begin) in _matches(files, lines_min, is_shape=is_shape):
            runs[one, other].append((start, begin, lines_min, is_shape))
    return sorted((_pair(files, *names, found) for names, found in runs.items()), reverse=True)


def _matches(
    files: dict[str, list[Line]], lines_min: int, *, is_shape: bool
) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, lines in files.items():
        keys = [line.shape if is_shape else line.text for line in lines]
        for start in range(len(keys) - lines_min + 1):
            places[tuple(keys[start : start + lines_min])].append((name, start))
    for key, found in places.items():
        if 1 < len(found) <= PLACES_MAX and len(set(key)) > 2:
            if is_shape and sum(not _DECLARATION.match(line) for line in key) < 2:
                continue
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
    left_out = _docstrings_and_imports(text)
    words: dict[int, list[str]] = defaultdict(list)
    shapes: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        number = token.start[0]
        if number in left_out or token.type in _SILENT:
            continue
        words[number].append(token.string)
        shapes[number].append(_shape(token))
    return [Line(number, " ".join(words[number]), " ".join(shapes[number])) for number in words]


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


def _docstrings_and_imports(text: str) -> set[int]:
    numbers: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


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


def repeats(folder: Path = ROOT / "src") -> tuple[list[Pair], int]:
    """The pairs below a folder, and how many generated files were left out."""
    files, generated = {}, 0
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.sql")]):
        text = file.read_text()
        if GENERATED.search(text.partition("\n")[0]):
            generated += 1
        else:
            files[str(file.relative_to(folder))] = lines_of(file)
    return pairs_in(files), generated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most", type=int, default=40, help="how many pairs to show")
    most = parser.parse_args().most
    pairs, generated = repeats()
    for pair in pairs[:most]:
        kind = " shape" if pair.is_shape else ""
        more = f" (+{pair.runs - 1} more)" if pair.runs > 1 else ""
        print(f"{pair.lines:4} {pair.first} ~ {pair.second}{kind}{more}")
    by_shape = sum(pair.is_shape for pair in pairs)
    counted = f"{len(pairs)} pairs, {by_shape} of them by shape alone"
    print(f"{counted}; {generated} generated files left out")


if __name__ == "__main__":
    main()
