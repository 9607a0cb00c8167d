"""docs/reference/errors.md lists every problem code that the source can answer with, and no other.

The source is read as syntax: a function or class with a parameter called `code` makes a problem,
and whatever its callers give for it is a code. Its `status` comes the same way, or stands in the
function itself.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "src" / "fencepost" / package for package in ("http", "server")]
RULES = [
    ROOT / "src" / "fencepost" / "protocol" / f"{module}.py"
    for module in ("envelopes", "fingerprints", "paths", "sends")
]
"""Rules whose outcomes carry the code of the problem themselves."""
REFERENCE = ROOT / "docs" / "reference" / "errors.md"

_ROW = re.compile(r"^\| `([a-z0-9_]+)` \| ([0-9, ]+) \| (.+) \| (.+) \|$", re.MULTILINE)


Definition = ast.FunctionDef | ast.AsyncFunctionDef


class Maker(NamedTuple):
    """Something that makes problems: where its code and status come in a call."""

    names: list[str]
    node: Definition

    def argument(self, call: ast.Call, name: str) -> object:
        """What `call` gives for the parameter `name`, if that is a constant."""
        at = self.names.index(name) if name in self.names else len(call.args)
        if at < len(call.args):
            return _constant(call.args[at])
        given = [word.value for word in call.keywords if word.arg == name]
        return _constant(given[0]) if given else None


def trees() -> Iterator[ast.Module]:
    files = [file for source in SOURCES for file in sorted(source.rglob("*.py"))]
    for file in (*files, *RULES):
        yield ast.parse(file.read_text())


def makers() -> dict[str, Maker]:
    """By the name that callers use: functions, methods, and classes by their constructor."""
    found: dict[str, Maker] = {}
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                _note(found, node.name, node)
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, Definition) and method.name == "__init__":
                        _note(found, node.name, method)
    return found


def _note(found: dict[str, Maker], name: str, node: Definition) -> None:
    names = [word.arg for word in node.args.args if word.arg != "self"]
    if "code" in names:
        found[name] = Maker(names, node)


OUTCOMES = {
    "PathRefused": (["code", "detail"], 400),
    "SendAnswer": (["status", "code"], None),
    "Unsendable": (["code", "detail"], 400),
}
"""Outcomes of rules: the fields that a call gives, and the status if the outcome does not say."""


def codes_of_rules() -> dict[str, set[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node) in OUTCOMES:
                names, status = OUTCOMES[_name(node)]
                given = dict(zip(names, map(_constant, node.args), strict=False))
                code, told = given.get("code"), given.get("status", status)
                if isinstance(code, str) and isinstance(told, int):
                    found[code].add(told)
            elif isinstance(node, ast.AnnAssign) and _assigned(node) == "_META_CODES":
                assert isinstance(node.value, ast.Dict)
                for value in node.value.values:
                    found[str(_constant(value))].add(400)
    return found


def _assigned(node: ast.AnnAssign) -> str:
    return node.target.id if isinstance(node.target, ast.Name) else ""


def statuses(maker: Maker, known: dict[str, Maker]) -> set[int]:
    """The statuses in the maker itself, or in the one that it hands its code to."""
    own = {
        value
        for node in ast.walk(maker.node)
        if type(value := _constant(node)) is int and 400 <= value < 600
    }
    if own:
        return own
    called = {_name(node) for node in ast.walk(maker.node) if isinstance(node, ast.Call)}
    return set().union(*(statuses(known[name], known) for name in called & set(known)))


def codes_of_the_source() -> dict[str, set[int]]:
    known = makers()
    found: dict[str, set[int]] = defaultdict(set)
    for maker in known.values():
        for default in maker.node.args.defaults:
            if isinstance(code := _constant(default), str) and _looks_like_a_code(code):
                found[code] |= statuses(maker, known)
    for tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or _name(node) not in known:
                continue
            called = known[_name(node)]
            code, status = called.argument(node, "code"), called.argument(node, "status")
            if isinstance(code, str) and (isinstance(status, int) or _looks_like_a_code(code)):
                given = {status} if isinstance(status, int) else statuses(called, known)
                found[code.lower()] |= given
    for code, given in codes_of_rules().items():
        found[code] |= given
    return found


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def _constant(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _looks_like_a_code(text: str) -> bool:
    # Another function may share a maker's name; what is given to it is not a code.
    return re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", text) is not None or (
        re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", text) is not None
    )


def codes_of_the_reference() -> dict[str, set[int]]:
    rows = _ROW.findall(REFERENCE.read_text())
    names = [code for code, *_ in rows]
    assert len(set(names)) == len(names), "a code is listed twice"
    return {code: {int(part) for part in status.split(",")} for code, status, *_ in rows}


def test_the_reader_of_the_source_finds_the_makers_of_problems() -> None:
    assert {"problem", "refused", "bad", "Refusal", "RefusedError"} <= set(makers())
    found = codes_of_the_source()
    assert found["producer_sequence_gap"] == {409}
    assert found["body_too_large"] == {413}
    assert found["offset_invalid"] == {400}


def test_every_code_of_the_source_is_in_the_reference() -> None:
    missing = set(codes_of_the_source()) - set(codes_of_the_reference())

    assert not missing, f"add to docs/reference/errors.md: {', '.join(sorted(missing))}"


def test_the_reference_lists_no_code_that_cannot_come() -> None:
    gone = set(codes_of_the_reference()) - set(codes_of_the_source())

    assert not gone, f"take out of docs/reference/errors.md: {', '.join(sorted(gone))}"


def test_the_reference_gives_each_code_the_status_it_comes_with() -> None:
    listed = codes_of_the_reference()

    for code, statuses in codes_of_the_source().items():
        assert statuses <= listed.get(code, set()), (code, statuses)
