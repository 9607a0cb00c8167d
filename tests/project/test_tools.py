"""The programs in tools see what is in the source: imports, repeats, what a change concerns."""

import os
import subprocess
import sys
from pathlib import Path

from tools.changed import concerned
from tools.graph import drawing
from tools.imports import cycles, import_graph, product_graph, source_files
from tools.repeats import Line, lines_of, pairs_in
from tools.walk import Call, listing


def write(folder: Path, **modules: str) -> dict[str, Path]:
    (folder / "p").mkdir()
    for name, text in modules.items():
        (folder / "p" / f"{name}.py").write_text(text)
    return source_files(folder / "p", root=folder)


def test_an_import_of_a_module_and_of_a_name_in_it_lead_to_the_module(tmp_path: Path) -> None:
    files = write(tmp_path, a="from p import b", b="from p.c import x", c="import os")

    assert import_graph(files) == {
        "p.a": frozenset({"p.b"}),
        "p.b": frozenset({"p.c"}),
        "p.c": frozenset(),
    }


def test_modules_that_import_each_other_are_a_cycle(tmp_path: Path) -> None:
    files = write(
        tmp_path, a="import p.b", b="import p.c", c="def f():\n    import p.a", d="import p.a"
    )

    assert cycles(import_graph(files)) == [["p.a", "p.b", "p.c"]]


def test_no_module_of_the_product_is_in_a_cycle_of_imports() -> None:
    assert cycles(product_graph()) == []


BODY = """
def {0}({1}):
    if {1} is None:
        return {1}.first({2})
    {1}.second()
    for it in {1}:
        it.third({2})
    return {1}
"""


DECLARATIONS = """
class {0}:
    def __init__(
        self,
        {1}: int,
        {2}: str = "x",
        *,
        {3}: bool = False,
    ) -> None:
        self.{1} = {1}
        self.{2} = {2}
        self.{3} = {3}
"""


def test_declarations_of_one_shape_do_not_repeat_each_other(tmp_path: Path) -> None:
    files = write(
        tmp_path, a=DECLARATIONS.format("A", "x", "y", "z"), b=DECLARATIONS.format(*"BUVW")
    )
    lines = {name: lines_of(file) for name, file in files.items()}

    assert pairs_in(lines) == []
    assert len(pairs_in(lines, declarations=True)) == 1


def test_lines_of_one_shape_with_other_names_repeat_each_other(tmp_path: Path) -> None:
    files = write(
        tmp_path, a=BODY.format("f", "x", 1), b='"""Text."""\n' + BODY.format("g", "y", 2)
    )

    (pair,) = pairs_in({name: lines_of(file) for name, file in files.items()})

    assert (pair.lines, pair.is_shape) == (7, True)
    assert (pair.first, pair.second) == ("p.a:2-8", "p.b:3-9")


def test_five_lines_are_no_repeat_and_a_list_of_fields_is_none_by_shape(tmp_path: Path) -> None:
    five = [Line(number, f"line {number}", f"shape {number}") for number in range(5)]
    fields = [[f"{letter}{number}: int\n" for number in range(9)] for letter in "ab"]
    files = write(tmp_path, a="".join(fields[0]), b="".join(fields[1]))

    assert pairs_in({"a": five, "b": five}) == []
    assert pairs_in({name: lines_of(file) for name, file in files.items()}) == []


def test_a_change_concerns_what_imports_it_through_others_and_what_has_its_name() -> None:
    root = Path(__file__).parents[2]
    files = {
        "p.lists": root / "src/p/lists.py",
        "p.user": root / "src/p/user.py",
        "tests.test_user": root / "tests/project/test_tools.py",
        "tests.other": root / "tests/integration/test_lists.py",
        "tests.nothing": root / "tests/project/test_docs.py",
    }
    graph = {name: frozenset[str]() for name in files} | {
        "p.user": frozenset({"p.lists"}),
        "tests.test_user": frozenset({"p.user"}),
    }

    assert concerned(["src/p/lists.py"], graph, files) == {
        "tests/project/test_tools.py",
        "tests/integration/test_lists.py",
    }
    assert concerned(["docs/start.md"], graph, files) == {"tests/project"}
    assert concerned(["src/p/lists.py", "pyproject.toml"], graph, files) == {"tests"}


def test_the_drawing_has_a_box_for_each_package() -> None:
    picture = drawing(product_graph())

    assert all(f">{name}<" in picture for name in ("cli", "store/write", "protocol", "clock"))


def test_the_same_source_gives_the_same_drawing() -> None:
    """Sets have another order in each process; packages that import each other showed it."""
    program = "from tools.graph import *; print(drawing(product_graph()))"

    drawings = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert len(drawings) == 1


def test_a_call_several_times_in_a_row_is_one_line_of_a_walk() -> None:
    calls = [Call(3, "fencepost.a", "f"), Call(4, "fencepost.b", "g"), Call(4, "fencepost.b", "g")]

    assert list(listing(calls)) == [
        "  1  a: f",
        "  2    b: g  x2",
        "3 calls of 2 functions in 2 modules",
        "3 steps through 2 modules",
    ]


def test_what_a_module_does_inside_and_the_types_of_values_are_no_steps() -> None:
    assert Call(3, "fencepost.a", "f", "fencepost.b").is_step
    assert not Call(3, "fencepost.a", "f", "fencepost.a").is_step
    assert not Call(3, "fencepost.clock", "now", "fencepost.a").is_step
    assert not Call(3, "fencepost.a", "A.__init__", "fencepost.b").is_step
